"""The Dockerfile, as far as it can be tried without Docker: linted, and what it copies and runs tried here."""

import configparser
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest

from trainer import errors

ROOT = pathlib.Path(__file__).parents[2]
DOCKERFILE = ROOT / "Dockerfile"
HARDWARE = ("cpu", "gpu", "tpu", "jax", "jax-gpu", "jax-tpu")
STEPS = 1_000_000  # more than the test waits for


def instructions(name: str) -> list[str]:
    """What stands behind each instruction of this name, lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    return [line.split(maxsplit=1)[1] for line in text.splitlines() if line.split(maxsplit=1)[:1] == [name]]


def stages() -> dict[str, str]:
    """Name -> instructions of the stages that have a name."""
    parts = re.split(r"^FROM \S+ AS ([\w-]+)\n", DOCKERFILE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def pip_install(stage: str) -> list[str]:
    [line] = re.findall(r"^RUN (pip install .*?)(?: && .*)?$", stages()[stage], re.MULTILINE)
    return shlex.split(line)


def copy_into(directory: pathlib.Path, sources: list[str]) -> None:
    for source in sources:
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, directory / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (directory / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, directory / source)


def copied() -> list[str]:
    return [source for line in instructions("COPY") for source in line.split()[:-1]]


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """/app of the image: what is copied, and nothing else."""
    directory = tmp_path_factory.mktemp("app")
    copy_into(directory, copied())
    return directory


def test_hadolint_has_nothing_to_say():
    hadolint = pathlib.Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, "--no-color", DOCKERFILE], text=True, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_an_image_for_every_kind_of_hardware():
    assert tuple(name for name in stages() if name != "base") == HARDWARE
    assert instructions("ARG") == ["HARDWARE=cpu"] and instructions("FROM")[-1] == "${HARDWARE}"
    extras = configparser.ConfigParser(interpolation=None)
    extras.read(ROOT / "setup.cfg")
    for hardware in HARDWARE:
        assert pip_install(hardware) == ["pip", "install", "--constraint=constraints.txt", f".[{hardware}]"]
        assert hardware in extras["options.extras_require"]


def test_only_the_image_with_chips_runs_as_root():
    users = {name: re.findall(r"^USER (.+)$", stages()[name], re.MULTILINE) for name in HARDWARE}
    # By number: Kubernetes' runAsNonRoot cannot look a name up.
    assert users == {name: [] if "tpu" in name else ["1000"] for name in HARDWARE}


def test_dockerignore_lets_through_what_is_copied_only():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*" and rules[-1] == "**/__pycache__"
    assert sorted(rules[1:-1]) == sorted(f"!{source}" for source in copied())


@pytest.mark.slow
def test_command_as_process_1_stops_on_sigterm(app: pathlib.Path, tmp_path: pathlib.Path):
    assert instructions("ENTRYPOINT") == []
    [command] = map(json.loads, instructions("CMD"))  # JSON is the form without a shell
    assert command == ["python", "-m", "trainer.main", "--help"]
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        pytest.skip("no rights here for a process namespace")
    options = ["--dataset=synthetic", "--image_size=32", "--num_classes=10", "--model=cnn", "--mode=train"]
    options += [f"--model_dir={tmp_path}/run", f"--train_steps={STEPS}", "--global_batch_size=16"]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outer = subprocess.Popen(
        [*namespace, sys.executable, *command[1:-1], *options],
        cwd=app,
        env=environ,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(tmp_path / "run" / "metrics.jsonl", outer)
        children = pathlib.Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        printed, _ = outer.communicate(timeout=120)
    finally:
        outer.kill()
    assert outer.returncode == errors.EXIT_RETRY, printed
    assert "stopped by SIGTERM" in printed


def wait_for(path: pathlib.Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


@pytest.mark.nightly
def test_packages_install_from_what_is_copied_before_the_code(tmp_path: pathlib.Path):
    metadata, app = tmp_path / "metadata", tmp_path / "app"
    copy_into(metadata, instructions("COPY")[0].split()[:-1])
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", *pip_install("cpu")], cwd=metadata, check=True)
    copy_into(app, copied())
    [command] = map(json.loads, instructions("CMD"))
    done = subprocess.run([python, *command[1:]], cwd=app, text=True, capture_output=True, check=True)
    assert "--global_batch_size" in done.stdout
    options = ["--dataset=synthetic", "--image_size=32", "--num_classes=10", "--model=cnn", "--train_steps=2"]
    trained = [python, *command[1:-1], *options, f"--model_dir={tmp_path}/run", "--global_batch_size=16"]
    subprocess.run(trained, cwd=app, check=True)
