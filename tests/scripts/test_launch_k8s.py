"""`scripts/launch k8s`: what it writes is what Kubernetes' schemas, the trainer and kubectl itself take."""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from scripts.launchers import command_line
from tests.scripts import kubernetes_api, walkthrough
from trainer import config, errors, hardware

ROOT = pathlib.Path(__file__).parents[2]
RUN = """
dataset = "digits"
data_dir = "gs://bucket/datasets"
model = "cnn"
model_dir = "gs://bucket/runs/digits"
global_batch_size = 64
"""
IMAGE = "registry.example:5000/team/trainer:1.0"
WITH_ALL = ["--namespace=ml", "--spot", "--service_account=trainer", "--alert_secret=alerts", "--queue=research"]
KINDS = {
    "job": ["--slice=v5e-8"],
    "cronjob": ["--gpus=1", "--gpu_type=nvidia-l4", "--schedule=30 3 * * *", "--time_zone=Europe/Zurich"],
    "jobset": ["--workers=2", "--evaluator"],
}

Launch = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run_toml(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


@pytest.fixture
def launch(run_toml: pathlib.Path) -> Launch:
    """Writes a manifest and returns its objects."""

    def _launch(*options: str) -> list[dict[str, Any]]:
        arguments = ["k8s", "--name=digits", "--config=run.toml", f"--image={IMAGE}", "--out=out", *options]
        assert command_line.main(arguments) == errors.EXIT_OK
        return list(yaml.safe_load_all(pathlib.Path("out/digits.yaml").read_text()))

    return _launch


@pytest.fixture
def refusal(run_toml: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Launches what cannot be, and returns the one error."""

    def _refusal(*options: str) -> str:
        arguments = ["k8s", "--name=digits", "--config=run.toml", f"--image={IMAGE}", *options]
        capsys.readouterr()  # what earlier launches printed
        assert command_line.main(arguments) == errors.EXIT_CONFIG
        printed = capsys.readouterr()
        assert "kubectl apply" not in printed.out
        return printed.err

    return _refusal


def job_specs(item: dict[str, Any]) -> list[dict[str, Any]]:
    if item["kind"] == "CronJob":
        return [item["spec"]["jobTemplate"]["spec"]]
    return [job["template"]["spec"] for job in item["spec"].get("replicatedJobs", [])] or [item["spec"]]


def pod_of(item: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return job_specs(item)[index]["template"]["spec"]


def options_there(items: list[dict[str, Any]]) -> dict[str, Any]:
    return json.loads(items[0]["data"]["run.json"])


def variables(pod: dict[str, Any], *, task_index: int) -> dict[str, str]:
    """The environment of a pod as the kubelet makes it: in order, $(NAME) of an earlier variable replaced."""
    found: dict[str, str] = {}
    for variable in pod["containers"][0]["env"]:
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            found[variable["name"]] = str(task_index)
            continue
        found[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], variable["value"])
    return found


@pytest.mark.parametrize("more", [[], WITH_ALL, ["--suspend"]], ids=["plain", "all", "suspended"])
@pytest.mark.parametrize("kind", KINDS)
def test_published_schemas_take_it(launch: Launch, kind: str, more: list[str]):
    items = launch(*KINDS[kind], *more)
    for item in items:
        kubernetes_api.check(item)
    assert [item["kind"].lower() for item in items] == ["configmap", kind]
    assert items[1]["spec"].get("suspend") == (True if "--suspend" in more else None)


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_would_refuse_a_typo(launch: Launch, kind: str):
    def deepest(item: dict[str, Any]) -> dict[str, Any]:
        return pod_of(item)["containers"][0]

    for place in (lambda item: item["spec"], deepest):
        item = launch(*KINDS[kind])[1]
        place(item)["sepc"] = 1
        with pytest.raises(jsonschema.ValidationError, match="sepc"):
            kubernetes_api.check(item)


def test_same_command_writes_same_bytes(launch: Launch):
    launch(*KINDS["jobset"])
    first = pathlib.Path("out/digits.yaml").read_bytes()
    launch(*KINDS["jobset"])
    assert pathlib.Path("out/digits.yaml").read_bytes() == first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "code, disrupted, action",
    [
        (errors.EXIT_DEFECT, False, "FailJob"),
        (errors.EXIT_USAGE, False, "FailJob"),
        (errors.EXIT_CONFIG, False, "FailJob"),
        (errors.EXIT_RETRY, False, "Ignore"),
        (errors.EXIT_RETRY, True, "Ignore"),
        (137, True, "Ignore"),
        (errors.EXIT_DEFECT, True, "Ignore"),  # what breaks while its node goes away says nothing about the run
        (137, False, "counts"),
    ],
)
def test_exit_codes_decide(launch: Launch, kind: str, code: int, disrupted: bool, action: str):
    def matches(rule: dict[str, Any]) -> bool:
        if "onPodConditions" in rule:
            return disrupted and rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        codes = rule["onExitCodes"]
        assert codes["containerName"] == "trainer" and codes["operator"] == "In"
        return code in codes["values"]

    for spec in job_specs(launch(*KINDS[kind], "--max_failures=3", "--deadline_hours=1.5")[1]):
        assert spec["template"]["spec"]["restartPolicy"] == "Never"
        rules = spec["podFailurePolicy"]["rules"]
        assert next((rule["action"] for rule in rules if matches(rule)), "counts") == action
        assert spec["backoffLimit"] == 2  # the third failure is one too many
        assert spec["activeDeadlineSeconds"] == 5400


def test_trainer_takes_what_the_pod_gives_it(launch: Launch, tmp_path: pathlib.Path):
    items = launch("--slice=v5e-8", "--", "--train_epochs=5")
    kubernetes_api.check(items[0])
    container = pod_of(items[1])["containers"][0]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["command"][1:] == ["-m", "trainer.main", f"--config={mounts['config']}/run.json"]
    assert pod_of(items[1])["volumes"][0] == {"name": "config", "configMap": {"name": items[0]["metadata"]["name"]}}
    assert {"name": "TMPDIR", "value": mounts["scratch"]} in container["env"]

    (tmp_path / "run.json").write_text(items[0]["data"]["run.json"])
    command = [sys.executable, *container["command"][1:-1], f"--config={tmp_path}/run.json", "--print_config"]
    printed = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    expected = config.merge(config.load("run.toml"), {"train_epochs": 5.0, "tpu": "local"})
    assert json.loads(printed) == json.loads(config.to_json(expected))


@pytest.mark.parametrize(
    "slice, accelerator, topology, chips",
    [
        ("v3-8", "tpu-v3-device", "2x2", 4),
        ("v4-8", "tpu-v4-podslice", "2x2x1", 4),
        ("v5e-1", "tpu-v5-lite-podslice", "1x1", 1),
        ("v5litepod-4", "tpu-v5-lite-podslice", "2x2", 4),
        ("v5e-8", "tpu-v5-lite-podslice", "2x4", 8),
        ("v5p-8", "tpu-v5p-slice", "2x2x1", 4),
        ("v6e:2x4", "tpu-v6e-slice", "2x4", 8),
    ],
)
def test_slice_is_a_node_of_gke(launch: Launch, slice: str, accelerator: str, topology: str, chips: int):
    pod = pod_of(launch(f"--slice={slice}")[1])
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["google.com/tpu"] == resources["limits"]["google.com/tpu"] == chips
    assert "runAsNonRoot" not in pod["securityContext"]  # the chips' device files are root's


def test_gpus_and_disk(launch: Launch):
    pod = pod_of(launch("--gpus=2", "--gpu_type=nvidia-l4", "--disk=50Gi")[1])
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-l4"}
    resources = pod["containers"][0]["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == 2
    assert resources["requests"]["ephemeral-storage"] == "50Gi"
    assert {"name": "scratch", "emptyDir": {"sizeLimit": "50Gi"}} in pod["volumes"]
    assert pod["securityContext"]["runAsNonRoot"]


@pytest.mark.parametrize(
    "options, grace_secs",
    [([], 25.0), (["--", "--grace_secs=99.5"], 99.5), (["--spot"], 12.0), (["--spot", "--", "--grace_secs=5"], 5.0)],
)
def test_pod_has_the_time_that_the_trainer_takes(launch: Launch, options: list[str], grace_secs: float):
    items = launch(*options)
    assert config.merge(options_there(items)).grace_secs == grace_secs
    allowed = pod_of(items[1])["terminationGracePeriodSeconds"]
    assert grace_secs < allowed <= (15 if "--spot" in options else grace_secs + 5)


def test_spot_nodes_are_asked_for_and_tolerated(launch: Launch):
    pod = pod_of(launch("--slice=v5e-8", "--spot")[1])
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert [taint["key"] for taint in pod["tolerations"]] == ["cloud.google.com/gke-spot"]


def test_schedule(launch: Launch):
    spec = launch(*KINDS["cronjob"])[1]["spec"]
    assert (spec["schedule"], spec["timeZone"]) == ("30 3 * * *", "Europe/Zurich")
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] > 0  # without one, 100 missed ticks are the end


def test_workers_find_each_other(launch: Launch):
    items = launch("--workers=3", "--gpus=2", "--", "--global_batch_size=96")
    item, pod = items[1], pod_of(items[1])
    [job] = item["spec"]["replicatedJobs"]
    assert (job["name"], job["replicas"]) == ("worker", 1)
    spec = job["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    # <jobSet.name>-<replicatedJob.name>-<job-index>-<pod-index>.<subdomain>, says JobSet's reference.
    expected = tuple(f"digits-worker-0-{index}.{item['spec']['network']['subdomain']}:2222" for index in range(3))
    for index in range(3):
        target = hardware.resolve(tpu=None, environ=variables(pod, task_index=index))
        assert target.workers is not None
        assert (target.workers.addresses, target.workers.index) == (expected, index)
    assert options_there(items)["connect_timeout_secs"] == 1800.0


def test_evaluator_is_a_job_of_its_own(launch: Launch):
    item = launch("--workers=2", "--evaluator")[1]
    assert [job["name"] for job in item["spec"]["replicatedJobs"]] == ["worker", "evaluator"]
    assert job_specs(item)[1]["completions"] == 1
    evaluator = hardware.resolve(tpu=None, environ=variables(pod_of(item, 1), task_index=0))
    assert (evaluator.evaluation, evaluator.workers) == ("only", None)
    worker = hardware.resolve(tpu=None, environ=variables(pod_of(item, 0), task_index=1))
    assert worker.evaluation == "elsewhere" and worker.workers is not None
    assert (len(worker.workers.addresses), worker.workers.index) == (2, 1)


def test_a_slice_of_several_hosts_has_a_pod_on_each(launch: Launch):
    items = launch("--slice=tpu7x-64", "--", "--backend=jax")
    assert options_there(items)["tpu"] == "local" and options_there(items)["connect_timeout_secs"] == 1800
    item = items[1]
    assert item["kind"] == "JobSet" and item["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    [spec] = job_specs(item)
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (8, 8, "Indexed")
    pod = pod_of(item)
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu7x",
        "cloud.google.com/gke-tpu-topology": "2x4x4",
    }


def test_the_pods_of_a_slice_find_each_other(launch: Launch, tmp_path: pathlib.Path):
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/0").touch()
    item = launch("--slice=v5e-16", "--", "--backend=jax")[1]
    for index in range(4):
        environ = variables(pod_of(item), task_index=index)
        found = hardware.resolve(tpu="local", backend="jax", environ=environ, root=f"{tmp_path}/")
        assert found.workers is not None and found.workers.index == index
        assert found.workers.addresses[0] == "digits-worker-0-0.digits:2222" and len(found.workers.addresses) == 4


def test_a_slice_of_one_host_is_a_job_on_jax_too(launch: Launch):
    item = launch("--slice=tpu7x-8", "--", "--backend=jax")[1]
    assert item["kind"] == "Job"
    assert pod_of(item)["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}


def test_queue_is_told_where_kueue_looks(launch: Launch):
    label = {"kueue.x-k8s.io/queue-name": "research"}
    for kind, options in KINDS.items():
        item = launch(*options, "--queue=research")[1]
        labelled = item["spec"]["jobTemplate"] if kind == "cronjob" else item
        assert label.items() <= labelled["metadata"]["labels"].items()


def test_alert_url_comes_from_a_secret(launch: Launch, refusal: Callable[..., str]):
    environment = pod_of(launch("--alert_secret=alerts")[1])["containers"][0]["env"]
    secret = {"secretKeyRef": {"name": "alerts", "key": "url"}}
    assert {"name": "TRAINER_ALERT_URL", "valueFrom": secret} in environment
    error = refusal("--", "--alert_url=https://hooks.example/s3cret")
    assert "TRAINER_ALERT_URL" in error and "s3cret" not in error


@pytest.mark.parametrize(
    "options, reason",
    [
        (["--slice=v5e-16"], "--slice=v5e-16 has 4 hosts"),
        (["--slice=v2-8"], "GKE has no nodes with v2"),
        (["--slice=tpu7x-8"], "TensorFlow does not run on tpu7x"),
        (["--slice=tpu7x-8"], "or --backend=jax"),
        (["--slice=v5e-16"], "Use --backend=jax"),
        (["--slice=v5e-16", "--workers=2", "--", "--backend=jax"], "a pod on each of its hosts"),
        (["--slice=v5e-16", "--schedule=@daily", "--", "--backend=jax"], "one of --slice and --schedule"),
        (["--slice=v5e-16", "--evaluator", "--", "--backend=jax"], "Add --workers=2"),
        (["--slice=v3-32", "--", "--backend=jax"], "use v4 or later"),
        (["--slice=v5e-7"], "did you mean 'v5e-8'"),
        (["--slice=v5e-8", "--gpus=1"], "--gpus has no effect with --slice"),
        (["--slice=v5e-8", "--workers=2"], "one process drives a whole slice"),
        (["--slice=v5e-8", "--", "--replicas=8"], "leave out replicas"),
        (["--slice=v5e-8", "--", "--tpu=my-tpu"], "chips of its own node"),
        (["--slice=v5e-8", "--", "--global_batch_size=60"], "must divide by the 8 replicas"),
        (["--workers=3", "--gpus=2", "--", "--global_batch_size=64"], "must divide by the 6 replicas"),
        (["--", "--tpu"], "give --slice"),
        (["--gpus=-1"], "--gpus must be at least 0"),
        (["--gpu_type=nvidia-l4"], "--gpu_type has no effect without --gpus"),
        (["--gpus=1", "--", "--replicas=2"], "raise --gpus"),
        (["--workers=0"], "--workers must be at least 1"),
        (["--workers=2", "--schedule=@daily"], "a JobSet, which has no schedule"),
        (["--workers=2", "--", "--replicas=2"], "a worker without GPUs is one replica"),
        (["--evaluator"], "Add --workers=2"),
        (["--evaluator", "--workers=2", "--", "--mode=train"], "nothing to do with mode=train"),
        (["--", "--model_dir=/tmp/run"], "model_dir is a path of this machine"),
        (["--", "--dataset=/data/digits"], "dataset is a path of this machine"),
        (["--", "--data_dir=none"], "give --data_dir=gs://"),
        (["--", "--cache=disk", "--cache_dir=/ssd"], "below /scratch only"),
        ([f"--image={IMAGE.replace('1.0', 'latest')}"], "by a tag other than latest"),
        (["--image=registry.example:5000/team/trainer"], "by a tag other than latest"),
        (["--memory=16GB"], "--memory must be a quantity"),
        (["--schedule=30 3 * *"], "--schedule: a schedule has five fields"),
        (["--schedule=61 3 * * *"], "is not a number from 0 to 59"),
        (["--time_zone=UTC"], "--time_zone has no effect without --schedule"),
        (["--queue=research", "--suspend"], "Kueue itself suspends"),
        (["--spot", "--", "--grace_secs=25"], "grace_secs must be at most 12"),
        (["--max_failures=0"], "--max_failures must be at least 1"),
        (["--deadline_hours=0"], "--deadline_hours must be above 0"),
        (["--submit"], "give --out=DIR"),
    ],
)
def test_refusals(refusal: Callable[..., str], options: list[str], reason: str):
    assert reason in refusal(*options)


def test_all_problems_are_one_error(refusal: Callable[..., str]):
    error = refusal("--slice=v5e-16", "--gpus=1", "--cpu=many", "--", "--model_dir=here", "--tpu=my-tpu")
    for reason in ("4 hosts", "--gpus", "--cpu", "model_dir", "--tpu=my-tpu"):
        assert reason in error


def test_names_of_pods_fit(launch: Launch, refusal: Callable[..., str]):
    name = "a" * 44  # and -evaluator-0-0 and -abcde behind it: 64
    assert "1 characters too long" in refusal(f"--name={name}", *KINDS["jobset"])
    arguments = ["k8s", f"--name={name[1:]}", "--config=run.toml", f"--image={IMAGE}", *KINDS["jobset"]]
    assert command_line.main(arguments) == errors.EXIT_OK


def test_without_kubectl_it_says_so(monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str]):
    monkeypatch.setenv("PATH", "")
    assert "`kubectl` is not installed" in refusal("--action=status", "--submit")


@dataclasses.dataclass
class Cluster:
    """The loopback API, and scripts/launch with the real kubectl turned to it."""

    server: kubernetes_api.Server
    environ: dict[str, str]

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts" / "launch"), "k8s", "--name=digits", "--config=run.toml"]
        options = (*options, f"--image={IMAGE}", "--out=out", "--submit")
        return subprocess.run([*command, *options], env=self.environ, text=True, capture_output=True, timeout=60)

    @property
    def kinds(self) -> list[str]:
        return [item["kind"] for item in self.server.objects.values()]


@pytest.fixture
def cluster(run_toml: pathlib.Path) -> Iterator[Cluster]:
    if not shutil.which("kubectl"):
        pytest.skip("kubectl is not installed here")
    with kubernetes_api.serving() as server:
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "loopback", "cluster": {"server": server.url}}],
            "users": [{"name": "nobody", "user": {}}],
            "contexts": [{"name": "test", "context": {"cluster": "loopback", "user": "nobody"}}],
            "current-context": "test",
        }
        path = run_toml.with_name("kubeconfig")
        path.write_text(json.dumps(kubeconfig))
        yield Cluster(server, {**os.environ, "KUBECONFIG": str(path), "HOME": str(run_toml.parent)})


@pytest.mark.parametrize("kind", KINDS)
def test_kubectl_starts_suspends_resumes_and_deletes(cluster: Cluster, kind: str):
    def act(action: str) -> None:
        done = cluster.run(*KINDS[kind], f"--action={action}")
        assert done.returncode == errors.EXIT_OK, done.stderr

    def suspended() -> bool | None:
        [job] = [item for item in cluster.server.objects.values() if item["kind"].lower() == kind]
        return job["spec"].get("suspend")

    act("start")
    assert [name.lower() for name in cluster.kinds] == ["configmap", kind]
    assert suspended() is None
    act("suspend")
    assert suspended() is True
    act("resume")
    assert suspended() is False
    act("status")
    act("logs")
    act("delete")
    assert cluster.kinds == []


def test_what_kubectl_cannot_do_is_worth_another_try(cluster: Cluster):
    done = cluster.run("--action=suspend")
    assert done.returncode == errors.EXIT_RETRY
    assert "NotFound" in done.stderr and "`kubectl` ended with exit code 1" in done.stderr


@pytest.mark.parametrize("command", walkthrough.commands("scripts/launch k8s"))
def test_walk_through(run_toml: pathlib.Path, command: str):
    words = [word for word in shlex.split(command) if word != "--submit"]
    done = subprocess.run([sys.executable, str(ROOT / words[0]), *words[1:]], text=True, capture_output=True)
    assert done.returncode == errors.EXIT_OK, done.stderr
    assert "\nkubectl " in done.stdout
