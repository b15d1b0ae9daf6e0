"""With the real XLA:TPU, in the environment of the extra `preflight`."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from tests.preflight.conftest import BATCH, GUARD_SECS, INPUTS, OUTPUTS, lower
from trainer.errors import ConfigError
from trainer.preflight import compilation, slices
from trainer.preflight.compilation import Compiled, Refusal

ROOT = pathlib.Path(__file__).parents[2]
V5E_1, V5E_8 = slices.parse("v5e-1"), slices.parse("v5e-8")
LOCK = pathlib.Path("/tmp/libtpu_lockfile")


@pytest.fixture(scope="module")
def compiled(compiler, train_step) -> Compiled:
    had_lock = LOCK.exists()
    result = compiler.compile(train_step, V5E_8)
    assert isinstance(result, Compiled), result
    assert LOCK.exists() == had_lock  # a training run on this machine keeps its chips
    return result


def test_weights_are_padded_and_updated_in_place(compiled):
    features, labels, *variables = compiled.parameters
    unpadded = sorted(4 * size for size in (INPUTS * OUTPUTS, OUTPUTS, INPUTS * OUTPUTS, OUTPUTS))
    assert not features.aliased and not labels.aliased
    assert [variable.aliased for variable in variables] == [True] * 4
    sizes = sorted(variable.bytes for variable in variables)
    assert all(on_device > plain for on_device, plain in zip(sizes, unpadded, strict=True))
    # 20 x 1000 become 24 x 1024 in tiles of 8 x 128; 1000 become 1024.
    assert sizes == [4096, 4096, 24 * 4096, 24 * 4096]
    assert compiled.memory.aliased == sum(sizes)


def test_memory_adds_up_to_what_libtpu_says(compiled):
    memory = compiled.memory
    assert memory.arguments == sum(parameter.bytes for parameter in compiled.parameters)
    assert 0 < memory.outputs - memory.aliased <= 4096  # the loss
    assert memory.arguments < memory.peak < 2 * memory.arguments + memory.code
    assert memory.available == V5E_8.chip.hbm_bytes
    assert memory.reserved > 0


def test_all_reduce_carries_the_gradients_once(compiled):
    [all_reduce] = compiled.collectives
    assert (all_reduce.kind, all_reduce.dtype) == ("all-reduce", "f32")
    assert all_reduce.bytes == 4 * (INPUTS * OUTPUTS + OUTPUTS)


def test_flops_are_those_of_two_products(compiled):
    products = 2 * 2 * BATCH * INPUTS * OUTPUTS  # logits; gradient of the kernel
    assert products <= compiled.flops < 1.5 * products
    assert compiled.bytes_accessed > 2 * 4 * INPUTS * OUTPUTS


def test_same_program_is_compiled_once(compiled, train_step, without_python):
    assert without_python.compile(train_step, V5E_8) == compiled
    with pytest.raises(FileNotFoundError):  # for another slice it would be another result,
        without_python.compile(train_step, slices.parse("v6e-8"))
    with pytest.raises(FileNotFoundError):  # and of another compiler
        dataclasses.replace(without_python, versions={"libtpu": "1.0"}).compile(train_step, V5E_8)


def test_order_that_differs_between_processes_is_no_other_program(compiled, train_step, without_python):
    x, y = (b"\n\x0f\n\x06grad_" + which + b"\x12\x05false" for which in (b"x", b"y"))
    first, second = (x + y, y + x) if x + y in train_step else (y + x, x + y)
    assert first in train_step
    assert without_python.compile(train_step.replace(first, second), V5E_8) == compiled


def test_half_a_cache_entry_is_compiled_again(compiled, compiler, train_step, tmp_path):
    elsewhere = dataclasses.replace(compiler, cache_dir=tmp_path)
    [entry] = [path for path in compiler.cache_dir.iterdir() if path.read_text().startswith('{"memory"')]
    (tmp_path / entry.name).write_text(entry.read_text()[:100])
    again = elsewhere.compile(train_step, V5E_8)
    assert dataclasses.replace(again, seconds=compiled.seconds) == compiled
    assert (tmp_path / entry.name).read_text().startswith('{"memory"')


def test_flags_of_a_training_run_do_not_reach_the_compiler(compiler, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_no_such_flag=1")
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    result = compiler.compile(lower(lambda x: tf.reverse(x, [0]), tf.TensorSpec((8,))), V5E_1)
    assert isinstance(result, Compiled)
    assert result.flops == 0 and result.bytes_accessed > 0


def test_out_of_memory_says_how_much_and_of_what(compiler, without_python):
    gib = tf.TensorSpec((20, 1024, 1024, 256))
    program = lower(lambda x: tf.sort(2 * x, axis=0)[0], gib)
    result = compiler.compile(program, V5E_1)
    assert isinstance(result, Refusal) and result.kind == "oom"
    assert result.used_bytes > 20 * slices.GIB
    assert result.available_bytes == V5E_1.chip.hbm_bytes
    assert any("f32[20,1024,1024,256]" in piece for piece in result.largest)
    assert without_python.compile(program, V5E_1) == result


@pytest.mark.parametrize(
    "step, operation, op_name, says",
    [
        pytest.param(lambda x: tf.cast(x, tf.int64) @ tf.cast(x, tf.int64), "dot", "matmul", "s64[64,64]", id="int64"),
        # XLA lowers it, libtpu aborts the process.
        pytest.param(lambda x: tf.cast(x, tf.complex128), None, None, "c128[64,64]", id="complex128"),
    ],
)
def test_unsupported_operation_is_named(compiler, without_python, step, operation, op_name, says):
    program = lower(step, tf.TensorSpec((64, 64)))
    result = compiler.compile(program, V5E_1)
    assert isinstance(result, Refusal) and result.kind == "unsupported"
    assert (result.operation, result.op_name) == (operation, op_name)
    assert says in result.message and "metadata" not in result.message
    assert without_python.compile(program, V5E_1) == result


def test_private_name_that_moved_is_named_with_the_versions(compiler, train_step, tmp_path, monkeypatch):
    # A jax as a later one may be: it runs at the start of the compiler's Python.
    (tmp_path / "sitecustomize.py").write_text(
        "import jax._src.interpreters.mlir as mlir\ndel mlir.make_ir_context\n",
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    later = dataclasses.replace(compiler, versions={"jax": "0.11.0"}, cache_dir=tmp_path / "cache")
    result = later.compile(train_step, V5E_8)
    assert isinstance(result, Refusal) and result.kind == "moved"
    assert "jax._src.interpreters.mlir.make_ir_context" in result.message
    assert "Written for jax 0.10.2" in result.message and "got jax 0.11.0" in result.message
    assert not later.cache_dir.exists()


def test_slice_that_the_compiler_knows_otherwise_is_told(compiler, train_step):
    chip = dataclasses.replace(V5E_8.chip, replicas=2)
    result = compiler.compile(train_step, dataclasses.replace(V5E_8, chip=chip))
    assert isinstance(result, Refusal) and result.kind == "moved"
    assert "v5e:2x4 has 8 devices where 16 were expected" in result.message


# --- processes ---


def script(path: pathlib.Path, body: str) -> str:
    """An interpreter that does as `body` says."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def processes_about(path: pathlib.Path) -> list[int]:
    """Processes that name `path` on their command lines."""
    found = []
    for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path).encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def test_time_limit_leaves_no_process_and_no_cache_entry(compiler, tmp_path):
    body = f"touch {tmp_path}/started; tail -f {tmp_path}/started & wait"
    hanging = dataclasses.replace(
        compiler, python=script(tmp_path / "python", body), timeout_secs=2.0, cache_dir=tmp_path / "cache"
    )
    result = hanging.compile(b"", V5E_1)
    assert result == Refusal("timeout", "not compiled within --preflight_timeout_secs=2")
    assert (tmp_path / "started").exists()
    assert processes_about(tmp_path) == []
    assert not hanging.cache_dir.exists()


@pytest.mark.parametrize(
    "body, says",
    [("kill -9 $$", "want of memory"), ("echo no such thing >&2; exit 3", "exit code 3: no such thing")],
)
def test_death_of_the_compiler_is_a_crash(compiler, tmp_path, body, says):
    dying = dataclasses.replace(compiler, python=script(tmp_path / "python", body), cache_dir=tmp_path / "cache")
    result = dying.compile(b"", V5E_1)
    assert isinstance(result, Refusal) and result.kind == "crash" and says in result.message
    assert not dying.cache_dir.exists()


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGKILL])
def test_compiler_ends_with_the_process_that_started_it(tmp_path, signal_number):
    program = tmp_path / "sort.pb"  # takes XLA:TPU long to compile
    program.write_bytes(lower(lambda x: tf.sort(x), tf.TensorSpec((2**20,))))
    code = f"""
import pathlib, signal
from trainer.preflight import compilation, slices
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
compiler = compilation.find(None, {GUARD_SECS}, pathlib.Path("{tmp_path}/cache"))
compiler.compile(pathlib.Path("{program}").read_bytes(), slices.parse("v5e-1"))
"""
    environ = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE)
    # The first line of libtpu's log: the compiler is at work.
    wait_until(lambda: any(path.stat().st_size for path in tmp_path.glob("preflight-*/log.txt")))
    for process in processes_about(tmp_path / "preflight-"):  # where memory runs out, this one goes first
        assert pathlib.Path(f"/proc/{process}/oom_score_adj").read_text() == "1000\n"
    parent.send_signal(signal_number)
    parent.communicate(timeout=GUARD_SECS)
    wait_until(lambda: not processes_about(tmp_path))
    assert not list(tmp_path.glob("preflight-*/result.json")) and not (tmp_path / "cache").exists()


def wait_until(condition):
    deadline = time.monotonic() + GUARD_SECS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# --- the extra ---


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory) -> pathlib.Path:
    """A Python without any package."""
    directory = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    return directory / "bin" / "python"


def test_missing_extra_is_told_with_what_to_install(bare_python):
    with pytest.raises(ConfigError) as error:
        compilation.find(str(bare_python), GUARD_SECS)
    for part in ("pip install '.[preflight]'", "--preflight_python", f"{bare_python} with jax missing", "jax 0.10.2"):
        assert part in str(error.value)


def test_other_versions_are_refused(bare_python):
    [packages] = bare_python.parents[1].glob("lib/python*/site-packages")
    for name, version in {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.31"}.items():
        metadata = packages / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    with pytest.raises(ConfigError, match=r"libtpu 0\.0\.42\.1 exactly.* with jax 0\.10\.2, .*libtpu 0\.0\.31"):
        compilation.find(str(bare_python), GUARD_SECS)


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/ls"])
def test_what_is_no_python_is_refused(python):
    with pytest.raises(ConfigError, match=f"--preflight_python={python}"):
        compilation.find(python, GUARD_SECS)
