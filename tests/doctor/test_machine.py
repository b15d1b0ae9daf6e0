"""Faults of machine, packages and environment, planted for real and found by the checks themselves."""

import contextlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

from tests.doctor.looks import case
from trainer.doctor import accelerator, credentials, environment, locations, machine, packages, report
from trainer.doctor.findings import Case, Finding
from trainer.errors import EXIT_CONFIG, EXIT_OK, EXIT_RETRY

NOBODY = 65534
HOLD = """
import fcntl, sys
held = [open(path, "r+") for path in sys.argv[2:]]
if sys.argv[1] == "lock":
    fcntl.lockf(held[0], fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def look(probe: Callable[[Case], Iterator[Finding]], examined: Case) -> dict[str, Finding]:
    return {finding.name: finding for finding in probe(examined)}


@pytest.fixture
def tpu_vm() -> Iterator[pathlib.Path]:
    """The root of a machine with one chip and the lock file of a libtpu that was there before."""
    with tempfile.TemporaryDirectory() as directory:
        root = pathlib.Path(directory)
        root.chmod(0o755)  # every user sees /dev and /tmp
        for name in ("dev/accel0", "tmp/libtpu_lockfile"):
            (root / name).parent.mkdir()
            (root / name).touch()
        yield root


@contextlib.contextmanager
def holding(how: str, *paths: pathlib.Path) -> Iterator[int]:
    """A process that holds files open, or their lock; its PID."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, how, *map(str, paths)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's rights, where this process has them."""
    if os.geteuid():
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def install(monkeypatch: pytest.MonkeyPatch, directory: pathlib.Path, **packages: str) -> None:
    """Makes pip believe that versions are installed, before those that are."""
    for name, version in packages.items():
        folder = directory / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(directory))


# --- packages ---


def test_a_libtpu_that_would_abort_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    install(monkeypatch, tmp_path, tensorflow_tpu="2.20.0", libtpu="0.0.52")
    found = list(packages.tensorflow_build(case()))
    assert [finding.status for finding in found] == ["fail", "fail"]
    assert "aborts with libtpu 0.0.52" in found[0].what and found[0].remedy == "pip install 'libtpu>=0.0.14,<0.0.32'"
    assert "2 builds are installed over one another" in found[1].what and "tensorflow-tpu" in found[1].remedy
    assert report.exit_code(found) == EXIT_CONFIG


def test_a_build_without_tpu_support(tpu_vm: pathlib.Path) -> None:
    found = look(packages.tensorflow_build, case(tpu="local", root=str(tpu_vm)))["TensorFlow build"]
    assert (found.status, found.retryable) == ("fail", False)
    assert "has no TPU support" in found.what and found.remedy.endswith("pip install '.[tpu]'")
    named = case(tpu="auto", environ={"TPU_NAME": "my-tpu"})
    assert look(packages.tensorflow_build, named)["TensorFlow build"].status == "pass", "a client needs no TPU support"


def test_versions_out_of_range(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    assert look(packages.requirements, case())["requirements"].status == "pass"
    install(monkeypatch, tmp_path, keras="3.12.0", cloud_tpu_client="0.11", tensorflow_cpu="2.17.0")
    found = list(packages.requirements(case()))
    assert {finding.status for finding in found} == {"fail"} and len(found) == 2
    assert "keras 3.12.0; needed: keras<3.16,>=3.15" in found[0].what
    assert "cloud-tpu-client 0.11; needed: cloud-tpu-client==0.10" in found[1].what
    [build] = packages.tensorflow_build(case())
    assert build.status == "fail" and "tensorflow-cpu 2.17.0" in build.what


# --- chips ---


def test_chips_that_another_process_holds(tpu_vm: pathlib.Path) -> None:
    chip, lock = tpu_vm / "dev/accel0", tpu_vm / "tmp/libtpu_lockfile"
    examined = case(tpu="local", root=str(tpu_vm))
    assert look(machine.chips, examined)["TPU holder"].status == "pass"
    for how, path in (("lock", lock), ("open", chip)):
        with holding(how, path) as pid:
            found = look(machine.chips, examined)
        assert found["TPU chips"].status == "pass"
        assert found["TPU holder"].status == "fail" and f"PID {pid}, {sys.executable}" in found["TPU holder"].what
        assert report.exit_code(list(found.values())) == EXIT_RETRY


def test_the_holder_of_a_lock_is_known_without_a_look_at_its_files(tpu_vm: pathlib.Path) -> None:
    lock = tpu_vm / "tmp/libtpu_lockfile"
    with holding("lock", lock) as pid, as_nobody():
        assert machine._lockers(str(lock)) == {pid}


def test_chips_that_may_not_be_opened(tpu_vm: pathlib.Path) -> None:
    for name in ("dev/accel0", "tmp/libtpu_lockfile"):
        (tpu_vm / name).chmod(0)
    with as_nobody():
        found = look(machine.chips, case(tpu="local", root=str(tpu_vm)))
    assert found["TPU chips"].status == "fail" and "accel0" in found["TPU chips"].what
    assert "pass the devices on" in found["TPU chips"].remedy
    assert found["TPU holder"].status == "fail" and found["TPU holder"].remedy.startswith("sudo rm ")
    assert report.exit_code(list(found.values())) == EXIT_CONFIG


def test_pages_too_large_for_condas_pyarrow() -> None:
    assert [machine.judged_page(size).status for size in (4 << 10, 16 << 10, 64 << 10)] == ["pass", "pass", "warn"]


# --- room ---


@contextlib.contextmanager
def full_disk(path: pathlib.Path) -> Iterator[None]:
    """A file system that is full at `path`; where none may be mounted, a limit on the size of a file."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, check=False).returncode == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if not mounted:
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        if mounted:
            subprocess.run(["umount", str(path)], check=True)


def test_a_full_tmpdir(tmp_path: pathlib.Path) -> None:
    full = tmp_path / "full"
    environ = {"TMPDIR": str(full)}
    with full_disk(full):
        found = look(machine.temporary, case(environ=environ, model_dir="gs://bucket/run"))["TMPDIR"]
        idle = look(machine.temporary, case(environ=environ, model_dir=str(tmp_path)))["TMPDIR"]
    assert (found.status, found.retryable) == ("fail", True) and "is full" in found.what
    assert "another TMPDIR" in found.remedy
    assert idle.status == "warn", "nothing of this run would be staged there"


def test_a_tmpdir_that_is_not_there_is_not_what_is_looked_at(tmp_path: pathlib.Path) -> None:
    environ = {"TMPDIR": str(tmp_path / "gone"), "TMP": str(tmp_path)}
    named = look(environment.variables, case(environ=environ))["TMPDIR"]
    assert named.status == "warn" and f"{tmp_path} is taken instead" in named.what
    assert look(machine.temporary, case(environ=environ))["TMPDIR"].what.startswith(f"{tmp_path}: ")


def test_directories_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "file"
    file.touch()
    options = {"model_dir": str(file / "run"), "init_from": str(tmp_path / "gone"), "cache_dir": str(tmp_path / "new")}
    found = look(locations.local, case(**options, cache="disk"))
    assert {name: finding.status for name, finding in found.items()} == {
        "model_dir": "fail",
        "init_from": "fail",
        "cache_dir": "pass",
    }
    assert "Not a directory" in found["model_dir"].what and "there is no directory" in found["init_from"].what
    assert not (tmp_path / "new").exists(), "a look leaves nothing behind"
    remote = look(locations.local, case(model_dir=str(tmp_path), tpu="my-tpu"))["model_dir"]
    assert remote.status == "fail" and remote.remedy == "Give --model_dir=gs://..."


# --- environment ---


@pytest.mark.parametrize(
    ("environ", "options", "status", "what"),
    [
        ({"TPU_NAME": "mine"}, {}, "warn", "the run is told to take GPUs or the CPU"),
        ({"TPU_NAME": "mine"}, {"tpu": "auto"}, "pass", "names the TPU"),
        ({"TPU_LOAD_LIBRARY": "0"}, {"tpu": "local"}, "fail", "loads no libtpu"),
        ({"TPU_LOAD_LIBRARY": "0", "TPU_NAME": "mine"}, {"tpu": "auto"}, "pass", "loads no libtpu"),
        ({"TPU_LIBRARY_PATH": "/nowhere/libtpu.so"}, {}, "fail", "there is no file /nowhere/libtpu.so"),
        ({"KERAS_BACKEND": "jax"}, {}, "warn", "jax has no effect"),
        ({"TF_USE_LEGACY_KERAS": "1"}, {}, "warn", "tf.keras is Keras 2"),
        ({"GOOGLE_AUTH_TOKEN_FOR_TESTING": "x"}, {}, "warn", "in place of any real credentials"),
        ({"TFDS_DATA_DIR": "/a"}, {"data_dir": "/b"}, "pass", "--data_dir wins"),
    ],
)
def test_variables(environ: dict, options: dict, status: str, what: str) -> None:
    found = look(environment.variables, case(environ=environ, **options))
    name = next(iter(environ))
    assert list(found) == [variable for variable in environment._LEADS_TO if variable in environ]
    assert found[name].status == status and what in found[name].what
    assert found[name].remedy or status == "pass"


def test_a_keras_json_that_changes_layers(tmp_path: pathlib.Path) -> None:
    environ = {"KERAS_HOME": str(tmp_path)}
    for content, status in ({"floatx": "float16"}, "warn"), ({"floatx": "float32", "backend": "jax"}, "pass"):
        (tmp_path / "keras.json").write_text(json.dumps(content))
        assert look(environment.keras_json, case(environ=environ))["keras.json"].status == status
    (tmp_path / "keras.json").write_text("[]")
    assert "importing Keras fails" in look(environment.keras_json, case(environ=environ))["keras.json"].what


@pytest.mark.parametrize(
    ("content", "status", "what"),
    [
        (None, "fail", "names no file"),
        ("{", "fail", "cannot be read"),
        ('{"type": "external_account"}', "fail", "of type external_account"),
        ("5", "fail", "of type unknown"),
        ('{"type": "authorized_user", "refresh_token": "x"}', "pass", "of a user"),
    ],
)
def test_credentials(tmp_path: pathlib.Path, content: str | None, status: str, what: str) -> None:
    file = tmp_path / "key.json"
    if content is not None:
        file.write_text(content)
    environ = {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    found = look(credentials.credentials, case(environ=environ, model_dir="gs://bucket/run"))["credentials"]
    assert found.status == status and what in found.what
    assert ("gcloud auth" in found.remedy) == (status == "fail")
    assert look(credentials.credentials, case(environ=environ))["credentials"].status == "skipped"


def test_exit_codes() -> None:
    fine, later, never = (Finding("pass", "", ""), Finding("fail", "", "", retryable=True), Finding("fail", "", ""))
    assert report.exit_code([fine, Finding("warn", "", ""), Finding("skipped", "", "")]) == EXIT_OK
    assert report.exit_code([fine, later, later]) == EXIT_RETRY
    assert report.exit_code([later, never]) == EXIT_CONFIG


# --- what flags and TF_CONFIG mean ---


def tf_config(*addresses: str) -> dict[str, str]:
    config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": 0}}
    return {"TF_CONFIG": json.dumps(config)}


def test_batches_that_replicas_cannot_share() -> None:
    examined = [
        case(replicas=3),
        case(tpu="my-tpu", global_batch_size=100, facts={"node_type": "v3-8"}),
        case(environ=tf_config("a:1", "b:1", "c:1")),
    ]
    for each in examined:
        found = look(accelerator.batch, each)["batch"]
        assert found.status == "fail" and "Nearest sizes" in found.what
    assert "96 or 104" in look(accelerator.batch, examined[1])["batch"].what
    known = case(tpu="my-tpu", facts={"node_type": "v5litepod-16"})
    assert "16 x 8 a replica" in look(accelerator.batch, known)["batch"].what
    assert look(accelerator.batch, case(tpu="grpc://10.0.0.2"))["batch"].status == "skipped"
    assert accelerator.replicas_of("v4-16") == (8,), "two cores of a chip are one replica"
