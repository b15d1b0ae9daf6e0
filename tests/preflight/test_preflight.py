"""--mode=preflight as its user runs it: what it compiles, finds, leaves behind and ends with."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.conftest import GUARD_SECS, ROOT, Trainer
from tests.preflight import odd_layers

pytestmark = pytest.mark.slow

USERS_MODEL = """
import dataclasses, keras
from tests.preflight import odd_layers

@dataclasses.dataclass(frozen=True)
class Options:
    does: str = "plain"

class Twice(keras.layers.Layer):
    def call(self, x):
        return odd_layers.py_function(x)

def build(options, spec):
    image = keras.Input(spec.inputs.shape, dtype=spec.inputs.dtype)
    x = keras.layers.Dense(16)(keras.layers.Flatten()(keras.layers.Rescaling(1 / 16)(image)))
    x = Twice(name="twice")(x) if options.does == "twice" else odd_layers.Odd(getattr(odd_layers, options.does))(x)
    return keras.Model(image, keras.layers.Dense(10)(x))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Nothing compiled before counts."""
    return {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def of_cnn(digits_dir: pathlib.Path, model_dir: pathlib.Path, cache: dict[str, str], *flags: str) -> str:
    """The console of a preflight of the cnn."""
    flags += ("--mode=preflight", "--model=cnn", "--global_batch_size=256", "--model_options=filters=[16]")
    return Trainer(digits_dir).run(*flags, "--preflight_probes=0", f"--model_dir={model_dir}", environ=cache).stdout


@pytest.fixture(scope="module")
def on_tensorflow(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, cache):
    """(model_dir, console) for two slices."""
    model_dir = tmp_path_factory.mktemp("preflight") / "run"
    flags = ("--slice=v5e-8, v3-8,,v5e-8", "--tpu=my-tpu", "--tpu_zone=z", "--tpu_project=p")
    return model_dir, of_cnn(digits_dir, model_dir, cache, *flags)


@pytest.fixture(scope="module")
def on_jax(digits_dir: pathlib.Path, tmp_path_factory: pytest.TempPathFactory, cache):
    """(model_dir, console) for the slice that TensorFlow does not run on."""
    model_dir = tmp_path_factory.mktemp("preflight") / "run"
    return model_dir, of_cnn(digits_dir, model_dir, cache, "--slice=tpu7x-8", "--backend=jax")


@pytest.fixture(params=["on_tensorflow", "on_jax"])
def preflight(request: pytest.FixtureRequest):
    """(model_dir, console) on each backend."""
    return request.getfixturevalue(request.param)


def found(model_dir: pathlib.Path) -> dict:
    """preflight.json."""
    return json.loads((model_dir / "preflight.json").read_text())


def test_it_leaves_its_report_and_nothing_else(preflight) -> None:
    model_dir, _ = preflight
    assert [path.name for path in model_dir.iterdir()] == ["preflight.json"]


def test_every_trained_parameter_crosses_once(preflight) -> None:
    model_dir, console = preflight
    trained = int(console.split(" trained,")[0].split()[-1].replace(",", ""))
    for of_slice in found(model_dir)["slices"]:
        reduced = [c for c in of_slice["compiled"]["collectives"] if c["kind"] == "all-reduce"]
        assert sum(c["bytes"] for c in reduced) == pytest.approx(4 * trained, rel=0.01)
        assert {c["dtype"] for c in reduced} == {"f32"}


def test_memory_is_split_without_rest(preflight) -> None:
    model_dir, console = preflight
    parameters = int(console.split(" parameters,")[0].split()[-1].replace(",", ""))
    for of_slice in found(model_dir)["slices"]:
        memory = of_slice["memory_bytes"]
        assert sum(memory.values()) == of_slice["used_bytes"] < of_slice["hbm_bytes"]
        assert memory["weights"] >= 4 * parameters
        assert memory["optimizer"] >= 2 * memory["weights"] * 0.9  # adamw: two moments
        assert memory["input"] >= 32 * 8 * 8
    # Those of a model as small as this may all live in a newer chip's VMEM.
    assert any(of_slice["memory_bytes"]["activations"] > 0 for of_slice in found(model_dir)["slices"])


def test_the_step_is_bounded_by_its_peaks(preflight) -> None:
    for of_slice in found(preflight[0])["slices"]:
        estimate, peaks = of_slice["estimate"], of_slice["peaks"]
        assert peaks["source"].startswith("https://")
        assert estimate["step_secs"] >= estimate["least_step_secs"] > 0
        assert estimate["examples_per_sec"] == pytest.approx(256 / estimate["step_secs"])


def test_the_table_is_complete(preflight) -> None:
    model_dir, console = preflight
    for name in (of_slice["slice"] for of_slice in found(model_dir)["slices"]):
        rows = [line.split() for line in console.splitlines() if line.startswith(f"{name} ")]
        assert len(rows) == 2
        assert rows[0][:4] == [name, "8", "32", "fits"]
        assert " x f32" in " ".join(rows[1])
    for line in ("evaluation", "export", "input", "note"):
        assert f"\n{line} " in console


def test_a_slice_that_is_named_twice_is_looked_at_once(on_tensorflow) -> None:
    assert [of_slice["slice"] for of_slice in found(on_tensorflow[0])["slices"]] == ["v5e-8", "v3-8"]


def test_the_same_again_compiles_nothing(on_tensorflow, digits_dir, cache, tmp_path) -> None:
    """And with another Python that has no compiler it would fail: the answers come from the cache."""
    again = of_cnn(digits_dir, tmp_path, cache, "--slice=v5e-8", "--preflight_timeout_secs=0.01")
    assert found(tmp_path)["slices"][0]["compiled"] == found(on_tensorflow[0])["slices"][0]["compiled"]
    assert "fits" in again


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A directory with a model of the user's own."""
    folder = tmp_path_factory.mktemp("users")
    (folder / "mine.py").write_text(USERS_MODEL)
    (folder / "package").mkdir()
    (folder / "package" / "mine.py").write_text(USERS_MODEL)
    return folder


@pytest.mark.parametrize(
    ("backend", "does", "says", "text"),
    [
        ("tensorflow", "complex128", "FFT of ", "tf.signal.fft"),  # XLA has it, XLA:TPU has not
        ("tensorflow", "twice", "EagerPyFunc of ", "tf.py_function"),
        ("jax", "python_if", "the step cannot be traced: TracerBoolConversionError", "if x[0, 0] > 0"),
    ],
)
def test_what_cannot_be_compiled_is_named_by_line(
    trainer: Trainer, users, tmp_path, cache, backend: str, does: str, says: str, text: str
) -> None:
    flags = ["--mode=preflight", "--model=package.mine", f"--model_options=does='{does}'", "--slice=v5e-8"]
    flags += [f"--backend={backend}"]
    file = odd_layers.__file__
    environ = cache | {"PYTHONPATH": f"{ROOT}:{users}"}
    done = trainer.run(*flags, f"--model_dir={tmp_path}", code=78, environ=environ, cwd=users)
    line = next(n for n, line in enumerate(pathlib.Path(file).read_text().splitlines(), 1) if text in line)
    assert f"v5e-8: {says}" in done.stderr
    assert f"{file}:{line}" in done.stderr
    assert "Traceback" not in done.stderr
    assert found(tmp_path)["slices"][0]["verdict"] == "cannot be compiled"


def test_out_of_memory_names_the_largest_batch(trainer: Trainer, tmp_path, cache) -> None:
    """A batch that needs several times what a core has, of a model so small that it compiles in seconds."""
    flags = ["--mode=preflight", "--model=mlp", "--model_options=units=[8192]", "--slice=v5e-1", "--train_steps=1"]
    flags += ["--dataset=synthetic", "--data_dir=none", "--image_size=8", "--num_classes=10"]
    flags += ["--global_batch_size=2000000", "--optimizer=sgd", "--preflight_probes=2"]
    done = trainer.run(*flags, f"--model_dir={tmp_path}", code=78, environ=cache)
    [of_slice] = found(tmp_path)["slices"]
    assert of_slice["verdict"] == "out of memory"
    assert of_slice["used_bytes"] > of_slice["hbm_bytes"]
    fits = of_slice["largest"]["fits"]
    assert 0 < fits < 2_000_000
    assert f"--global_batch_size={fits}" in done.stderr
    assert "; --precision=mixed_bfloat16; --microbatches=2" in done.stdout
    assert fits * of_slice["used_bytes"] / 2_000_000 == pytest.approx(of_slice["hbm_bytes"], rel=0.25)


def test_a_batch_that_does_not_divide(trainer: Trainer, tmp_path) -> None:
    done = trainer.run(
        "--mode=preflight", "--slice=v5e-8", "--global_batch_size=100", f"--model_dir={tmp_path}", code=78
    )
    assert "Nearest sizes: 96 or 104" in done.stderr


def test_slices_that_are_none_or_not_for_tensorflow(trainer: Trainer, tmp_path) -> None:
    flags = ["--mode=preflight", f"--model_dir={tmp_path}"]
    assert "did you mean" in trainer.run(*flags, "--slice=v5e-9", code=78).stderr
    assert "no TPU slice has this name" in trainer.run(*flags, "--slice=", code=78).stderr
    assert "does not run on tpu7x, JAX does: --backend=jax" in trainer.run(*flags, "--slice=tpu7x-8", code=78).stderr


def test_without_the_compiler_it_says_so_at_once(trainer: Trainer, tmp_path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    flags = ["--mode=preflight", "--slice=v5e-8", f"--preflight_python={bare / 'bin/python'}"]
    done = trainer.run(*flags, f"--model_dir={tmp_path / 'run'}", code=78)
    assert "pip install '.[preflight]'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_stop_in_the_middle_leaves_nothing_behind(trainer: Trainer, tmp_path) -> None:
    """The compiler here is one that never ends; its versions are the real one's."""
    script, temporary, started = tmp_path / "python", tmp_path / "temporary", tmp_path / "started"
    os.mkfifo(started)
    compiler = f"echo compiles > {started}; exec sleep 1000"
    script.write_text(f'#!/bin/sh\ncase "$*" in *--versions) exec {sys.executable} "$@";; esac\n{compiler}\n')
    script.chmod(0o755)
    temporary.mkdir()
    flags = ["--mode=preflight", "--model=mlp", "--slice=v5e-8", f"--preflight_python={script}"]
    environ = {"TMPDIR": str(temporary), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = trainer.start(*flags, f"--model_dir={tmp_path / 'run'}", environ=environ)
    assert started.read_text() == "compiles\n"
    run.terminate()
    _, said = run.communicate(timeout=GUARD_SECS)
    assert run.returncode == 75, said
    assert "stopped by SIGTERM during preflight" in said
    left = [path.name for path in temporary.iterdir()]
    assert [name for name in left if not name.startswith("__autograph")] == []  # TensorFlow's own, a few kB


def of_real_size(model: str, batch: int, model_dir: pathlib.Path, cache: dict[str, str], *flags: str) -> list[dict]:
    """Findings of the slices; what crosses is each trained parameter once, and a hundredth more."""
    flags += ("--mode=preflight", "--dataset=synthetic", f"--model={model}", f"--global_batch_size={batch}")
    flags += ("--preflight_probes=0", "--precision=mixed_bfloat16", f"--model_dir={model_dir}")
    command = [sys.executable, "-m", "trainer.main", *flags]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | cache, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    trained = int(done.stdout.split(" trained,")[0].split()[-1].replace(",", ""))
    for of_slice in found(model_dir)["slices"]:
        assert of_slice["verdict"] == "fits"
        reduced = sum(c["bytes"] for c in of_slice["compiled"]["collectives"])
        assert reduced == pytest.approx(4 * trained, rel=0.01)
    return found(model_dir)["slices"]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "batch"), [("applications/ResNet50", 1024), ("tests.preflight.transformer", 512)], ids=["resnet", "vit"]
)
def test_models_of_a_real_size(model: str, batch: int, tmp_path, cache) -> None:
    """On JAX the same is computed, and needs as much memory but for how libtpu packs it; TPU7x is there only."""
    on_tensorflow = of_real_size(model, batch, tmp_path / "tensorflow", cache, "--slice=v6e-8,v5e-8,v3-8")
    on_jax = of_real_size(model, batch, tmp_path / "jax", cache, "--slice=v6e-8,tpu7x-8", "--backend=jax")
    of_v6e, also_of_v6e = on_tensorflow[0], on_jax[0]
    assert also_of_v6e["compiled"]["flops"] == pytest.approx(of_v6e["compiled"]["flops"], rel=0.03)
    assert also_of_v6e["used_bytes"] == pytest.approx(of_v6e["used_bytes"], rel=0.25)
    assert on_jax[1]["compiled"]["flops"] == pytest.approx(also_of_v6e["compiled"]["flops"], rel=0.03)
