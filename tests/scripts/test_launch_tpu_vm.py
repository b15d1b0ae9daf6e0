"""`scripts/launch tpu-vm`: what it prints and refuses; and the real gcloud against a loopback Cloud TPU API."""

import json
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator

import pytest

from tests.conftest import GUARD_SECS, ROOT, clean_environ
from tests.scripts import walkthrough
from tests.scripts.tpu_cloud import PROJECT, ZONE, TpuCloud

CONFIG = {"model_dir": "gs://bucket/runs/digits", "data_dir": "gs://bucket/datasets", "dataset": "digits"}
SYNTHETIC = ("--dataset=synthetic", "--model_dir=gs://bucket/runs/1")
PLACE = ("--name=digits", f"--zone={ZONE}")
V5E = (*PLACE, "--accelerator_type=v5e-8")
POD = (*PLACE, "--accelerator_type=v4-32")


@pytest.fixture
def config(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(CONFIG))
    return f"--config={path}"


def launch(*words: str, environ: dict[str, str] | None = None, cwd: pathlib.Path = ROOT) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, ROOT / "scripts/launch", "tpu-vm", *words],
        env=clean_environ() | (environ or {}),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def words_of(process: subprocess.Popen, code: int = 0) -> str:
    out, _ = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == code, out
    return out


def commands(out: str) -> list[list[str]]:
    """Words of every command that a dry run prints, as a shell reads them."""
    return [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]


# --- what it prints ---


def test_create() -> None:
    queued = (*V5E, "--queued", "--valid_until=6h", "--spot", "--service_account=a@b", "--network=n")
    [command] = commands(words_of(launch("create", *queued)))
    assert command[:6] == ["gcloud", "compute", "tpus", "queued-resources", "create", "digits"]
    assert {"--accelerator-type=v5litepod-8", "--runtime-version=v2-alpha-tpuv5-lite", "--spot"} < set(command)
    assert {"--valid-until-duration=6h", "--service-account=a@b", "--network=n", "--node-id=digits"} < set(command)
    [command] = commands(words_of(launch("create", *POD, "--project=p", "--subnetwork=s", "--internal_ips")))
    assert command[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "create", "digits"]
    assert {"--accelerator-type=v4-32", "--version=tpu-vm-tf-2.19.0-pod-pjrt", "--project=p"} < set(command)
    assert {"--subnetwork=s", "--internal-ips", f"--zone={ZONE}"} < set(command) and "--spot" not in command


def test_run_names_the_tpu(config: str) -> None:
    [vm] = commands(words_of(launch("run", *V5E, config, "--", "--train_epochs=5")))
    [line] = [word.removeprefix("--command=") for word in vm if word.startswith("--command=")]
    assert shlex.split(line)[:2] == ["digits/scripts/on_tpu_vm", "start"]
    assert {"--tpu=local", "--train_epochs=5.0", f"--model_dir={CONFIG['model_dir']}"} < set(shlex.split(line))
    [pod] = commands(words_of(launch("run", *POD, config)))
    [line] = [word.removeprefix("--command=") for word in pod if word.startswith("--command=")]
    assert shlex.split(line)[:3] == ["env", "TPU_NAME=digits", "TPU_LOAD_LIBRARY=0"]
    assert {"--tpu=digits", f"--tpu_zone={ZONE}"} < set(shlex.split(line)) and "--worker=0" in pod


@pytest.mark.parametrize(
    ("words", "messages"),
    [
        (("create", *PLACE), ["accelerator_type is missing"]),
        (("create", *PLACE, "--accelerator_type=v5e-9"), ["--accelerator_type=v5e-9; did you mean 'v5e-8'"]),
        (("create", *PLACE, "--accelerator_type=tpu7x-8"), ["TensorFlow does not run on tpu7x"]),
        (("create", *PLACE, "--accelerator_type=v5e:2x4"), ["not a topology"]),
        (("create", *POD, "--runtime_version=v2-alpha-tpuv5"), ["workers of a pod run the TensorFlow of its image"]),
        (("create", *POD, "--runtime_version=tpu-vm-tf-2.16.1-pod-pjrt"), ["of 2.19, 2.20, 2.21"]),
        (("create", *V5E, "--runtime_version=tpu-vm-tf-2.19.0-pod-pjrt"), ["for pods, and v5litepod-8 is one VM"]),
        (
            ("run", *V5E, "--valid_until=6h", "--poll_secs=5", "--", "--dataset=digits", "--tpu=other"),
            ["add --queued", "poll_secs is for supervise", "model_dir is missing", "data_dir is missing", "tpu is"],
        ),
        (
            ("supervise", *V5E, "--env_file=no", "--code=x", "--", "--dataset=d/x", "--model_dir=runs", "--xla=on"),
            ["env_file is no", "code is a .tar.gz", "dataset must be on gs://", "model_dir must be on gs://", "xla is"],
        ),
        (
            ("supervise", *POD, "--max_failures=0", "--", *SYNTHETIC, "--cache=memory"),
            ["max_failures must be at least 1", "cache is for hosts that run the trainer"],
        ),
        (("run", *V5E, "--env_file=x", "--", *SYNTHETIC), ["env_file is for install and supervise; leave it out"]),
        (("run", *V5E, "--", *SYNTHETIC, "--backend=jax"), ["is TensorFlow's", "'.[jax-tpu]'", "--worker=all"]),
        (("logs", *V5E, "--spot"), ["accelerator_type is for", "spot is for create and supervise"]),
        (("logs", "--name=Digits", f"--zone={ZONE}"), ["lower-case letters"]),
    ],
)  # fmt: skip
def test_refuses_all_at_once(words: tuple[str, ...], messages: list[str]) -> None:
    out = words_of(launch(*words), 78)
    assert not [message for message in messages if message not in out], out
    assert "gcloud compute" not in out


# --- what it does, against a loopback API; ssh and scp run here ---

needs_gcloud = pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")


@pytest.fixture(params=["stand-in", pytest.param("real gcloud", marks=[needs_gcloud, pytest.mark.nightly])])
def cloud(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> Iterator[TpuCloud]:
    with TpuCloud(tmp_path, real_gcloud=request.param == "real gcloud") as server:
        yield server


@pytest.fixture
def submit(cloud: TpuCloud, config: str) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a launch that submits, and ends it with the test."""
    processes = []

    def start(action: str, *words: str) -> subprocess.Popen:
        line = (action, *words, "--submit", *([] if action == "delete" else [config]))
        processes.append(launch(*line, environ=cloud.environ()))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        if not process.stdout.closed:
            process.communicate()


def until(true: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    """Waits for something, which `process` leads to while it runs."""
    ends_at = time.monotonic() + GUARD_SECS
    while not true():
        assert time.monotonic() < ends_at
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def pack(path: pathlib.Path) -> None:
    """The checkout, as far as the VM needs it, as this test finds it."""
    with tarfile.open(path, "w:gz") as archive:
        for name in ("scripts/on_tpu_vm", "scripts/supervise"):
            archive.add(ROOT / name, name)


@pytest.mark.slow
def test_supervise_begins_again_when_preempted(
    cloud: TpuCloud, submit: Callable[..., subprocess.Popen], tmp_path: pathlib.Path
) -> None:
    pack(cloud.root / "bucket/code/trainer.tar.gz")
    (tmp_path / "secrets.env").write_text("TRAINER_ALERT_URL=https://alerts.invalid/hook\n")
    cloud.plan(None, 0)
    words = ("--queued", "--spot", "--delete_when_done", "--poll_secs=0.1")
    code = ("--code=gs://code/trainer.tar.gz", f"--env_file={tmp_path / 'secrets.env'}")
    process = submit("supervise", *V5E, *words, *code)
    until(lambda: cloud.written("starts"), process)
    [node] = cloud.nodes.values()
    assert node["acceleratorType"] == "v5litepod-8" and cloud.requests["digits"]["spot"] == {}
    cloud.preempt("digits")

    out = words_of(process)
    first, second = cloud.written("starts")
    assert first["flags"] == second["flags"] and f"--model_dir={CONFIG['model_dir']}" in first["flags"]
    assert second["environ"]["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"] == "/wheels/libtpu.so"
    assert second["environ"]["NEXT_PLUGGABLE_DEVICE_USE_C_API"] == "true"
    assert second["environ"]["TRAINER_ALERT_URL"] == "https://alerts.invalid/hook"
    assert cloud.written("pip") == [["install", "--quiet", "--constraint=constraints.txt", ".[tpu]"]] * 2
    assert cloud.calls == [("POST", "queuedResources"), ("DELETE", "queuedResources")] * 2
    assert not cloud.nodes and not cloud.requests
    # Of the last start only, since the first VM is gone with its disk.
    assert out.count("trainer: step 7") == 1
    assert "lost: TPU VM (PREEMPTED) and queued resource (SUSPENDED)" in out
    assert "nothing of digits exists any more" in out and "ended with exit code 0" in out


@pytest.mark.slow
def test_supervise_a_pod_again_and_leave_it(cloud: TpuCloud, submit: Callable[..., subprocess.Popen]) -> None:
    """Ended and started again it takes over the run it finds; what is left is told, and `delete` deletes it."""
    cloud.plan(None, None)
    supervise = ("supervise", *POD, "--poll_secs=0.1")
    process = submit(*supervise)
    until(lambda: cloud.written("starts"), process)
    process.send_signal(signal.SIGTERM)
    out = words_of(process, 130)
    stays = "there is still, and is billed: TPU VM (READY) of digits. To delete it: "
    assert stays in out

    assert cloud.on_vm("digits", "status") == "running\n" and "step 7" in cloud.on_vm("digits", "logs")
    cloud.on_vm("digits", "stop")
    until(lambda: cloud.on_vm("digits", "status") == "exit 75\n")  # to be run again

    process = submit(*supervise)
    until(lambda: len(cloud.written("starts")) == 2, process)
    process.send_signal(signal.SIGTERM)
    words_of(process, 130)
    process, looks = submit(*supervise), cloud.looks
    until(lambda: cloud.looks > looks + 2, process)
    assert len(cloud.written("starts")) == 2 and len(cloud.written("pip")) == 2
    cloud.end(78)
    out = words_of(process, 78)
    start = cloud.written("starts")[-1]
    assert (start["environ"]["TPU_NAME"], start["environ"]["TPU_LOAD_LIBRARY"]) == ("digits", "0")
    assert "TF_PLUGGABLE_DEVICE_LIBRARY_PATH" not in start["environ"]
    assert cloud.written("pip") == [["install", "--quiet", ".[tpu]", "tensorflow-tpu==2.19.*"]] * 2
    assert "trainer: step 7" in out and "the run ended with exit code 78" in out and stays in out

    [words] = re.findall(r"scripts/launch tpu-vm (delete .*) --submit", out)
    out = words_of(submit(*words.split()))
    assert "nothing of digits exists any more" in out and not cloud.nodes


@pytest.mark.slow
def test_supervise_gives_up(cloud: TpuCloud, submit: Callable[..., subprocess.Popen]) -> None:
    words = (*V5E, "--poll_secs=0.1", "--max_failures=2")
    cloud.refusal = 403
    out = words_of(submit("supervise", *words), 75)
    assert cloud.calls == [("POST", "nodes")] * 2
    assert "2 failures in a row" in out and "refused, as asked for" in out and "nothing of digits exists" in out

    cloud.refusal, cloud.request_state = None, "FAILED"
    cloud.calls.clear()
    out = words_of(submit("supervise", *words, "--queued"), 75)
    assert cloud.calls == [("POST", "queuedResources"), ("DELETE", "queuedResources")] * 2
    assert "no quota, as asked for" in out and "was refused" in out and "nothing of digits exists" in out


@needs_gcloud
@pytest.mark.slow
def test_the_real_gcloud_takes_the_commands(tmp_path: pathlib.Path) -> None:
    with TpuCloud(tmp_path, real_gcloud=True) as cloud:
        queued = (*V5E, "--queued", "--valid_until=6h", "--spot", "--service_account=a@b.c", "--network=n", "--submit")
        direct = ("--name=pod", *POD[1:], "--subnetwork=s", "--internal_ips", f"--project={PROJECT}", "--submit")
        for process in [launch("create", *words, environ=cloud.environ()) for words in (queued, direct)]:
            words_of(process)
        assert cloud.requests["digits"]["queueingPolicy"] == {"validUntilDuration": "21600s"}
        node, pod = cloud.nodes["digits"], cloud.nodes["pod"]
        assert (node["acceleratorType"], node["runtimeVersion"]) == ("v5litepod-8", "v2-alpha-tpuv5-lite")
        assert (pod["acceleratorType"], pod["runtimeVersion"]) == ("v4-32", "tpu-vm-tf-2.19.0-pod-pjrt")
        assert node["serviceAccount"] == {"email": "a@b.c"} and node["networkConfig"]["network"] == "n"
        assert pod["networkConfig"]["subnetwork"] == "s" and not pod["networkConfig"]["enableExternalIps"]
        assert "nothing of digits exists any more" in words_of(
            launch("delete", *PLACE, "--submit", environ=cloud.environ())
        )
        [command] = commands(words_of(launch("delete", *direct[:2])))
        subprocess.run(command, env=clean_environ() | cloud.environ(), check=True, timeout=GUARD_SECS)
        assert not cloud.nodes and not cloud.requests


# --- the walk-throughs ---


def test_every_command_of_the_walk_through(tmp_path: pathlib.Path) -> None:
    """In the order in which a reader types them, with the files that the text tells to write; none is submitted."""
    (tmp_path / "digits.json").write_text(json.dumps(CONFIG))
    (tmp_path / "secrets.env").write_text("TRAINER_ALERT_URL=https://alerts.invalid/hook\n")
    lines = walkthrough.commands("scripts/launch tpu-vm")
    assert lines
    for line in lines:
        words = [word for word in shlex.split(line, comments=True)[2:] if word != "--submit"]
        assert commands(words_of(launch(*words, cwd=tmp_path))), line


def test_every_command_of_the_notebook() -> None:
    """The trainer takes its command lines; the rest needs a notebook."""
    lines = walkthrough.commands("!python -m trainer.main ") + walkthrough.commands("!scripts/on_tpu_vm start ")
    flags = [line.partition("--")[1] + line.partition("--")[2] for line in lines]
    assert len(flags) == 4
    for line in flags:
        command = [sys.executable, "-m", "trainer.main", *shlex.split(line), "--print_config"]
        done = subprocess.run(command, env=clean_environ(), cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0 and json.loads(done.stdout)["tpu"] in ("auto", "local"), done.stderr
