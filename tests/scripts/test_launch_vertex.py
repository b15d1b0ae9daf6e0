"""scripts/launch vertex: what it writes, what Google's own clients make of it, and what it refuses.

Nothing here reaches Google Cloud: google-cloud-aiplatform (in an environment of its own, since cloud-tpu-client's pins
exclude it), gcloud and curl talk to a server on loopback.
"""

import base64
import contextlib
import http.server
import json
import os
import pathlib
import shlex
import shutil
import ssl
import subprocess
import sys
import threading

import pytest

from scripts.launchers import command_line
from scripts.launchers.vertex import machines
from tests.scripts import walkthrough
from trainer import flags

ROOT = pathlib.Path(__file__).parents[2]
SDK = "google-cloud-aiplatform==2.7.0"  # of September 2026
RUN = """dataset = "digits"
data_dir = "gs://bucket/datasets"
train_epochs = 20
learning_rate = 0.01
global_batch_size = 256
model_options = {units = [64, 32], dropout = 0.1}
"""
STUDY = """[study]
metric = "accuracy"
goal = "max"
trials = 20
parallel = 2
[parameters.learning_rate]
type = "double"
min = 1e-4
max = 1e-1
scale = "log"
[parameters.learning_rate_batch_size]
type = "integer"
min = 10
max = 100
[parameters.optimizer]
type = "categorical"
values = ["sgd", "adamw"]
[parameters.global_batch_size]
type = "discrete"
values = [64, 32]
[parameters."model_options.dropout"]
type = "discrete"
values = [0.1, 0.5]
[parameters."model_options.width"]
type = "discrete"
values = [16, 32]
"""
HEAD = ["vertex", "--name=digits", "--config=run.toml", "--project=my-project", "--region=us-central1"]
OUTPUT = "--base_output=gs://bucket/runs/digits"
IMAGE = "--image=us-docker.pkg.dev/my-project/images/trainer:1"
CPU = "--machine_type=n1-standard-8"
V5E = ["--machine_type=ct5lp-hightpu-4t", "--topology=2x2"]
GPU = ["--machine_type=n1-standard-8", "--accelerator=NVIDIA_TESLA_T4:2"]
# What a job may be made of, together with HEAD, OUTPUT and IMAGE.
JOBS = {
    "cpu": [CPU],
    "gpu": [*GPU, "--disk_gb=200"],
    "built-in": ["--machine_type=a2-highgpu-4g", "--strategy=flex-start", "--max_wait_secs=7200"],
    "v3": ["--machine_type=cloud-tpu", "--accelerator=TPU_V3:8"],
    "v2-pod": ["--machine_type=cloud-tpu", "--accelerator=TPU_V2:64"],
    "v5e": V5E,
    "v5e-pod": ["--machine_type=ct5lp-hightpu-4t", "--topology=4x4"],
    "v6e": ["--machine_type=ct6e-standard-8t", "--topology=2x4"],
    "workers": [*GPU, "--workers=3"],
    "evaluator": [CPU, "--workers=2", "--evaluator"],
    "full": [
        *(*GPU, "--workers=1", "--strategy=spot", "--timeout_secs=3600", "--env=A=b=c", "--label=team=vision"),
        *("--service_account=trainer@my-project.iam.gserviceaccount.com", "--network=projects/1/global/networks/n"),
        "--tensorboard=projects/my-project/locations/us-central1/tensorboards/5",
    ],
    "study": [*V5E, "--study=study.toml"],
    "grid": [CPU, "--study=grid.toml", "--workers=1", "--evaluator"],
}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)


def write_files(directory: pathlib.Path) -> None:
    (directory / "run.toml").write_text(RUN)
    (directory / "study.toml").write_text(STUDY)
    (directory / "grid.toml").write_text(
        '[study]\nmetric="loss"\ngoal="min"\ntrials=9\nalgorithm="grid"\n'
        '[parameters.seed]\ntype="integer"\nmin=1\nmax=9'
    )


def launch(*arguments, out="out"):
    """Exit code of a launch; its file is out/digits.json."""
    return command_line.main([*HEAD, f"--out={out}", *arguments])


def written(*arguments):
    assert launch(OUTPUT, IMAGE, *arguments) == 0
    return json.loads(pathlib.Path("out/digits.json").read_text())


def spec_of(*arguments):
    """The CustomJobSpec, wherever it stands."""
    content = written(*arguments)
    return content.get("trialJobSpec", content.get("jobSpec", content))


def refused(capsys, *arguments):
    """What a refused launch says."""
    assert command_line.main([*HEAD, *arguments]) == 78
    output, told = capsys.readouterr()
    assert output == ""  # nothing to copy
    return told


def body(arguments):
    """What the API is to be sent for such a job. Name and labels are not in the file that gcloud takes."""
    content = written(*arguments)
    if "displayName" in content:
        return content
    labels = {"labels": {"team": "vision"}} if "--label=team=vision" in arguments else {}
    return {"displayName": "digits", **labels, **(content if "studySpec" in content else {"jobSpec": content})}


# --- what is written


def test_container_of_a_tpu_vm():
    [pool] = spec_of(*V5E)["workerPoolSpecs"]
    assert pool["machineSpec"] == {"machineType": "ct5lp-hightpu-4t", "tpuTopology": "2x2"}
    assert pool["replicaCount"] == 1
    container = pool["containerSpec"]
    assert container["command"] == ["python", "scripts/supervise", "--", "python", "-m", "trainer.main"]
    assert "env" not in container  # the image says where its libtpu.so is
    # What the trainer will make of them: the config file, and the chips of this VM.
    values = flags.parse(["main", *container["args"]]).values
    assert values == {
        **{"dataset": "digits", "data_dir": "gs://bucket/datasets", "train_epochs": 20.0, "learning_rate": 0.01},
        **{"global_batch_size": 256, "model_options": {"units": [64, 32], "dropout": 0.1}, "tpu": "local"},
    }


def test_pod_keeps_the_entrypoint_of_its_base_image():
    container = spec_of(*JOBS["v5e-pod"])["workerPoolSpecs"][0]["containerSpec"]
    assert "command" not in container
    assert container["args"][:6] == ["python", "scripts/supervise", "--", "python", "-m", "trainer.main"]
    assert container["args"][-1] == "--tpu=auto"


def test_single_option_of_the_model_arrives():
    args = spec_of(CPU, "--", "--model_options.dropout=0.5")["workerPoolSpecs"][0]["containerSpec"]["args"]
    assert flags.parse(["main", *args]).values["model_options"] == {"units": [64, 32], "dropout": 0.5}


def test_bare_tpu_of_the_config_becomes_the_one_of_the_machine():
    pathlib.Path("run.toml").write_text(RUN + 'tpu = "auto"\n')
    args = spec_of(*V5E)["workerPoolSpecs"][0]["containerSpec"]["args"]
    assert [arg for arg in args if arg.startswith("--tpu")] == ["--tpu=local"]


@pytest.mark.parametrize(("workers", "pools"), [(["--workers=2"], [1, 2, None, 1]), ([], [1, None, None, 1])])
def test_pools_stand_where_tf_config_takes_them_from(workers, pools):
    spec = spec_of(CPU, "--evaluator", *workers)
    assert [pool.get("replicaCount") for pool in spec["workerPoolSpecs"]] == pools
    assert spec.get("scheduling", {}).get("restartJobOnWorkerRestart", False) == bool(workers)


def test_trials_get_their_parameters_only_from_the_study():
    tuning = written(*JOBS["study"])
    assert tuning["studySpec"] == {
        "metrics": [{"metricId": "accuracy", "goal": "MAXIMIZE"}],
        "parameters": [
            {
                "parameterId": "learning_rate",
                "doubleValueSpec": {"minValue": 1e-4, "maxValue": 0.1},
                "scaleType": "UNIT_LOG_SCALE",
            },
            {
                "parameterId": "learning_rate_batch_size",
                "integerValueSpec": {"minValue": 10, "maxValue": 100},
                "scaleType": "UNIT_LINEAR_SCALE",
            },
            {"parameterId": "optimizer", "categoricalValueSpec": {"values": ["sgd", "adamw"]}},
            {"parameterId": "global_batch_size", "discreteValueSpec": {"values": [32.0, 64.0]}},
            {"parameterId": "model_options.dropout", "discreteValueSpec": {"values": [0.1, 0.5]}},
            {"parameterId": "model_options.width", "categoricalValueSpec": {"values": ["16", "32"]}},
        ],
    }
    assert (tuning["maxTrialCount"], tuning["parallelTrialCount"]) == (20, 2)
    container = tuning["trialJobSpec"]["workerPoolSpecs"][0]["containerSpec"]
    # Vertex AI appends --learning_rate=... to args: they are flags only, and none of those.
    values = flags.parse(["main", *container["args"]]).values
    assert values.keys().isdisjoint({"learning_rate", "learning_rate_batch_size", "optimizer", "global_batch_size"})
    assert "model_dir" not in values
    assert values["model_options"] == {"units": [64, 32]}


def test_package_runs_in_a_prebuilt_container(capsys):
    package = ["--package=gs://bucket/keras_tpu_trainer-0.1.0.tar.gz", "--build"]
    executor = "us-docker.pkg.dev/vertex-ai/training/tf-cpu.2-20.py312:latest"
    assert launch(OUTPUT, CPU, *package, f"--executor_image={executor}", "--env=A=b") == 0
    [pool] = json.loads(pathlib.Path("out/digits.json").read_text())["workerPoolSpecs"]
    assert pool["pythonPackageSpec"]["executorImageUri"] == executor
    assert pool["pythonPackageSpec"]["packageUris"] == ["gs://bucket/keras_tpu_trainer-0.1.0.tar.gz"]
    assert pool["pythonPackageSpec"]["pythonModule"] == "trainer.main"
    assert pool["pythonPackageSpec"]["env"] == [{"name": "A", "value": "b"}]
    lines = capsys.readouterr().out.splitlines()
    build = lines.index("python -m build --sdist --outdir=dist .")
    target = "gs://bucket/keras_tpu_trainer-0.1.0.tar.gz"
    assert lines[build + 1] == f"gcloud storage cp dist/keras_tpu_trainer-0.1.0.tar.gz {target}"


def test_image_is_built_before_the_job(capsys):
    assert launch(OUTPUT, IMAGE, *GPU, "--build") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    name = IMAGE.removeprefix("--image=")
    assert lines[:2] == [f"docker build --build-arg=HARDWARE=gpu --tag={name} .", f"docker push {name}"]
    assert lines[2].startswith("gcloud ai custom-jobs create ")


def test_two_dry_runs_print_the_same_and_change_nothing(capsys, tmp_path):
    before = sorted(tmp_path.iterdir())
    printed = []
    for _ in range(2):
        assert command_line.main([*HEAD, OUTPUT, IMAGE, *JOBS["full"]]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and sorted(tmp_path.iterdir()) == before


# --- what is refused


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--machine_type=tpu7x-standard-4t", "--topology=2x2x1"], "TPU7x has no TensorFlow"),
        ([*JOBS["v5e-pod"], "--", "--backend=jax"], "how Vertex AI starts JAX on each of them has not been tried"),
        (["--machine_type=ct5p-hightpu-4t"], "offers no v5p for training"),
        (["--machine_type=n1-standard-5"], "no machine type 'n1-standard-5'; did you mean"),
        (["--machine_type=ct5lp-hightpu-4t"], "topologies 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16. Received: None"),
        (["--machine_type=ct5lp-hightpu-8t", "--topology=2x2"], "topologies 2x4. Received: 2x2"),
        ([*V5E, "--accelerator=TPU_V5_LITEPOD:4"], "takes a topology, no accelerator"),
        ([CPU, "--topology=2x2"], "leave it out of n1-standard-8"),
        (["--machine_type=cloud-tpu"], "takes TPU_V2 or TPU_V3"),
        (["--machine_type=cloud-tpu", "--accelerator=TPU_V3:16"], "8 cores or a multiple of 32. Received: 16"),
        ([*V5E, "--workers=1"], "one pool of one replica for TPUs"),
        ([*V5E, "--evaluator"], "one pool of one replica for TPUs"),
        ([*JOBS["v5e-pod"], "--strategy=spot"], "Spot is not supported on TPU slices of several VMs"),
        ([*V5E, "--strategy=flex-start"], "flex-start is for L4, A100, H100, H200 and B200 GPUs"),
        ([*GPU, "--strategy=flex-start"], "flex-start is for L4"),
        ([CPU, "--accelerator=NVIDIA_TESLA_T4:3"], "takes 1, 2, 4 NVIDIA_TESLA_T4. Received: 3"),
        (["--machine_type=n1-standard-32", "--accelerator=NVIDIA_TESLA_V100:2"], "takes 4, 8 NVIDIA_TESLA_V100"),
        ([CPU, "--accelerator=NVIDIA_TESLA_P100:1"], "end of support on 15 September 2026"),
        ([CPU, "--accelerator=NVIDIA_L4:1"], "NVIDIA_L4 comes with the machine types g2-standard-12"),
        ([CPU, "--accelerator=NVIDIA_TESLA_T4"], "accelerator is TYPE:COUNT"),
        (["--machine_type=e2-standard-4", "--accelerator=NVIDIA_TESLA_T4:1"], "attached to n1-* only"),
        (["--machine_type=a2-highgpu-4g", "--accelerator=NVIDIA_TESLA_A100:2"], "NVIDIA_TESLA_A100:4 built in"),
        ([*GPU, "--", "--replicas=4"], "has 2 GPUs here; leave out replicas. Received: 4"),
        ([CPU, "--", "--tpu"], "n1-standard-8 has no TPU"),
        ([*V5E, "--", "--tpu=my-tpu"], "the TPU of a job on Vertex AI is its own"),
        ([*JOBS["v5e-pod"], "--", "--tpu=local"], "the chips of one VM, and this slice has 4"),
        ([*V5E, "--", "--xla=on"], "a TPU always compiles"),
        ([CPU, "--env=TF_CONFIG={}"], "TF_CONFIG is set by Vertex AI itself"),
        ([CPU, "--env=TRAINER_ALERT_URL=https://x"], "would stand readable in the job"),
        ([CPU, "--", "--alert_url=https://x"], "alert_url would stand readable"),
        ([CPU, "--env=a-b=c"], "a name of letters, digits and _"),
        ([CPU, "--label=Team=x"], "labels are lower-case letters"),
        ([CPU, "--network=default"], "projects/NUMBER/global/networks/NAME"),
        ([CPU, "--tensorboard=projects/p/locations/europe-west4/tensorboards/1"], "in the region of the job"),
        ([CPU, "--tensorboard=projects/p/locations/us-central1/tensorboards/1"], "tensorboard needs --service_account"),
        ([CPU, "--max_wait_secs=5"], "max_wait_secs has no effect"),
        ([CPU, "--timeout_secs=0"], "timeout_secs is at least 1"),
        ([CPU, "--disk_gb=50"], "disk_gb is from 100 to 64000. Received: 50"),
        ([CPU, "--workers=-1"], "workers is at least 0"),
        ([CPU, "--schedule=daily"], "five fields"),
        ([CPU, "--schedule=0 3 * * *"], "give --scheduler_account"),
        ([CPU, "--time_zone=Europe/Berlin"], "no effect without --schedule"),
        ([CPU, "--executor_image=x"], "executor_image is for --package"),
        ([CPU, "--study=study.toml", "--", "--model_dir=gs://b/r"], "all trials would write into one model_dir"),
        ([CPU, "--study=study.toml", "--", "--mode=train"], "a study needs evaluations"),
        ([CPU, "--", "--data_dir=/data"], "data_dir is on this machine only"),
        ([CPU, "--", "--dataset=/data/digits"], "dataset is on this machine only"),
        ([CPU, "--", "--model_dir=runs/1"], "model_dir is on this machine only"),
        ([CPU, "--", "--data_dir=none"], "would be looked for on the machine; give data_dir"),
    ],
)
def test_what_vertex_cannot_do_is_refused(capsys, arguments, told):
    assert told in refused(capsys, OUTPUT, IMAGE, *arguments)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "a package needs the prebuilt container"),
        (["--executor_image=us-docker.pkg.dev/vertex-ai/training/tf-gpu.2-17.py310:latest"], "2.19 and Python 3.11"),
        (["--executor_image=us-docker.pkg.dev/vertex-ai/training/tf-tpu.2-20.cp310:latest"], "2.19 and Python 3.11"),
        (["--executor_image=us-docker.pkg.dev/vertex-ai/training/tf-cpu.2-11:latest"], "2.19 and Python 3.11"),
        (["--executor_image=x", "--retry=supervise"], "scripts/supervise, which is in no package"),
        (["--executor_image=x", *V5E], "no prebuilt container for ct5lp-hightpu-4t"),
    ],
)
def test_packages_that_would_not_start(capsys, arguments, told):
    assert told in refused(capsys, OUTPUT, "--package=gs://b/p-1.tar.gz", CPU, *arguments)


def test_schedule_says_when_every_run_would_be_the_same(capsys):
    when = ["--schedule=0 3 * * *", "--scheduler_account=cron@my-project.iam.gserviceaccount.com"]
    for series, told in (["--", "--run_id={date}"], False), ([], True):
        assert command_line.main([*HEAD, OUTPUT, IMAGE, CPU, *when, *series]) == 0
        assert ("A finished model_dir stays finished" in capsys.readouterr().out) is told


def test_all_problems_are_told_at_once(capsys):
    told = refused(
        capsys, IMAGE, "--machine_type=ct5p", "--disk_gb=1", "--label=A=b", "--schedule=x", "--", "--data_dir=d"
    )
    for part in (
        "no v5p",
        "no place to write",
        "disk_gb",
        "labels are",
        "five fields",
        "scheduler_account",
        "data_dir is",
    ):
        assert part in told


def test_mounted_buckets_are_no_local_paths():
    pathlib.Path("run.toml").write_text('dataset = "/gcs/bucket/datasets/digits"\nmodel_dir = "/gcs/bucket/runs/1"\n')
    assert launch(IMAGE, CPU) == 0
    assert "baseOutputDirectory" not in json.loads(pathlib.Path("out/digits.json").read_text())


def test_every_machine_of_the_tables_is_found():
    for machine in machines.CPU_MACHINES:
        assert machines.find(machine, None, None).kind == "cpu"
    for machine in ("g2-standard-24", "g4-standard-384", "a4x-highgpu-4g", "a2-ultragpu-8g"):
        assert machines.find(machine, None, None).kind == "gpu"
    assert [machines.find("ct5lp-hightpu-4t", None, slice).hosts for slice in ("2x2", "2x4", "16x16")] == [1, 2, 64]
    assert [machines.find("cloud-tpu", f"TPU_V3:{cores}", None).hosts for cores in (8, 32, 96)] == [1, 4, 12]


# --- what Google's clients make of it


class Endpoint:
    """An HTTP server on loopback that takes whatever is created, and remembers it."""

    def __init__(self, tls: ssl.SSLContext | None = None):
        self.posted: list[tuple[str, dict]] = []
        posted = self.posted

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                path = self.path.partition("?")[0]
                posted.append((path, body))
                answer = json.dumps({**body, "name": f"{path.removeprefix('/v1/')}/1"}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_port

    @contextlib.contextmanager
    def serving(self):
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@pytest.fixture
def endpoint():
    with Endpoint().serving() as serving:
        yield serving


@pytest.fixture(scope="module")
def sdk_python(tmp_path_factory):
    """Python of an environment with google-cloud-aiplatform; $VERTEX_PYTHON names one that is there already."""
    if "VERTEX_PYTHON" in os.environ:
        yield os.environ["VERTEX_PYTHON"]
        return
    directory = tmp_path_factory.mktemp("vertex")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    python = directory / "bin" / "python"
    # Not compiled: most of its 160 MB are never imported.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        "-q",
        "--no-compile",
    ]
    subprocess.run([*pip, SDK], check=True)
    yield python
    shutil.rmtree(directory)  # which pytest would keep for its last three runs


def plain(value, enums):
    """JSON with numbers for enums, and numbers of one kind: the API's has 64-bit ones as texts."""
    if isinstance(value, dict):
        return {key: plain(entry, enums) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain(entry, enums) for entry in value]
    if isinstance(value, str) and value in enums:
        return float(enums[value])
    with contextlib.suppress(ValueError):
        return value if isinstance(value, bool) else float(value)
    return value


@pytest.mark.slow
def test_google_cloud_aiplatform_takes_every_kind_of_job(sdk_python, endpoint, tmp_path):
    bodies = tmp_path / "bodies"
    bodies.mkdir()
    ours = {name: body(arguments) for name, arguments in sorted(JOBS.items())}
    for name, content in ours.items():
        (bodies / f"{name}.json").write_text(json.dumps(content))
    program = [sdk_python, ROOT / "tests" / "scripts" / "vertex_sdk.py"]
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GOOGLE_", "CLOUDSDK_"))
    }
    done = subprocess.run(
        [*program, f"http://127.0.0.1:{endpoint.port}", bodies], capture_output=True, text=True, env=clean
    )
    assert done.returncode == 0, done.stderr
    enums = json.loads(done.stdout.splitlines()[-1])
    place = "/v1/projects/my-project/locations/us-central1/"
    expected = []
    for name, content in ours.items():
        path = place + ("hyperparameterTuningJobs" if "studySpec" in content else "customJobs")
        # The SDK's own CustomJob is given the full one, and makes the same of it.
        expected += [(path, plain(content, enums))] * (2 if name == "full" else 1)
    assert [(path, plain(content, enums)) for path, content in endpoint.posted] == expected


@pytest.fixture(scope="module")
def gcloud(tmp_path_factory):
    """Environment in which gcloud has nobody's account and asks nobody; making its directory takes it a second."""
    directory = tmp_path_factory.mktemp("gcloud")
    (directory / "token").write_text("loopback")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLOUDSDK_CONFIG", str(directory))
        patch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN_FILE", str(directory / "token"))
        patch.setenv("CLOUDSDK_CORE_DISABLE_PROMPTS", "1")
        patch.setenv("CLOUDSDK_CORE_DISABLE_USAGE_REPORTING", "1")
        patch.setenv("CLOUDSDK_CORE_CHECK_GCE_METADATA", "0")
        yield


@pytest.fixture
def services(gcloud, endpoint, monkeypatch):
    """The endpoint, taken by gcloud for Google's."""
    for service in ("AIPLATFORM", "CLOUDSCHEDULER"):
        monkeypatch.setenv(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{service}", f"http://127.0.0.1:{endpoint.port}/")
    return endpoint


needs_gcloud = pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed here")


@needs_gcloud
@pytest.mark.parametrize("name", ["full", "v5e", "grid"])
def test_submitting_runs_gcloud(services, name):
    assert launch(OUTPUT, IMAGE, "--submit", *JOBS[name]) == 0
    [(path, posted)] = services.posted
    kind = "hyperparameterTuningJobs" if "studySpec" in posted else "customJobs"
    assert path == f"/v1/projects/my-project/locations/us-central1/{kind}"
    assert plain(posted, {}) == plain(body(JOBS[name]), {})


@needs_gcloud
@pytest.mark.parametrize("name", ["full", "study"])
def test_schedule_posts_the_same_job(services, name):
    when = ["--schedule=30 3 * * 1-5", "--time_zone=Europe/Berlin", "--scheduler_account=cron@my-project.iam.com"]
    assert launch(OUTPUT, IMAGE, "--submit", *JOBS[name], *when) == 0
    [(path, job)] = services.posted
    assert path == "/v1/projects/my-project/locations/us-central1/jobs"
    assert (job["schedule"], job["timeZone"]) == ("30 3 * * 1-5", "Europe/Berlin")
    target = job["httpTarget"]
    kind = "hyperparameterTuningJobs" if name == "study" else "customJobs"
    parent = "projects/my-project/locations/us-central1"
    assert target["uri"] == f"https://us-central1-aiplatform.googleapis.com/v1/{parent}/{kind}"
    assert target["oauthToken"] == {"serviceAccountEmail": "cron@my-project.iam.com"}
    assert (target["httpMethod"], target["headers"]) == ("POST", {"Content-Type": "application/json"})
    scheduled = json.loads(base64.b64decode(target["body"]))
    assert scheduled == body(JOBS[name])


@needs_gcloud
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed here")
def test_job_with_an_evaluator_is_posted_by_curl(gcloud, tmp_path, monkeypatch):
    host = "us-central1-aiplatform.googleapis.com"
    pem = tmp_path / "pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=loopback", "-days", "1"]
    names = ["-addext", f"subjectAltName=DNS:{host}"]
    subprocess.run([*make, *names, "-keyout", pem, "-out", tmp_path / "cert"], check=True, capture_output=True)
    pem.write_bytes(pem.read_bytes() + (tmp_path / "cert").read_bytes())
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem)
    with Endpoint(tls).serving() as endpoint:
        curlrc = f'connect-to = "{host}:443:127.0.0.1:{endpoint.port}"\ncacert = "{tmp_path / "cert"}"\nnoproxy = "*"\n'
        (tmp_path / ".curlrc").write_text(curlrc)
        monkeypatch.setenv("CURL_HOME", str(tmp_path))
        assert launch(OUTPUT, IMAGE, "--submit", *JOBS["evaluator"]) == 0
    parent = "projects/my-project/locations/us-central1"
    assert endpoint.posted == [(f"/v1/{parent}/customJobs", body(JOBS["evaluator"]))]


def test_submitting_says_when_gcloud_refuses(tmp_path, monkeypatch, capsys):
    (tmp_path / "gcloud").write_text("#!/bin/sh\necho 'quota exceeded' >&2\nexit 1\n")
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert launch(OUTPUT, IMAGE, CPU, "--submit") == 75
    assert "`gcloud` ended with exit code 1" in capsys.readouterr().err


def test_nothing_is_built_where_the_job_could_not_be_submitted(tmp_path, monkeypatch, capsys):
    (tmp_path / "docker").write_text(f"#!/bin/sh\ntouch {tmp_path}/built\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert command_line.main([*HEAD, OUTPUT, IMAGE, CPU, "--build", "--submit"]) == 78
    assert "--submit needs a directory" in capsys.readouterr().err and not (tmp_path / "built").exists()


# --- the walk-through


@pytest.mark.parametrize("command", walkthrough.commands("scripts/launch vertex"))
def test_commands_of_the_walk_through_work(command, capsys):
    words = [word for word in shlex.split(command)[1:] if word != "--submit"]
    assert command_line.main(words) == 0, capsys.readouterr().err


def test_walk_through_is_there_and_the_tool_runs(tmp_path):
    commands = walkthrough.commands("scripts/launch vertex")
    assert len(commands) >= 5
    words = shlex.split(commands[0])
    done = subprocess.run([sys.executable, ROOT / words[0], *words[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "gcloud ai custom-jobs create " in done.stdout


@pytest.mark.parametrize(("machine", "hardware"), [([CPU], "jax"), (GPU, "jax-gpu"), (V5E, "jax-tpu")])
def test_a_job_for_jax_takes_an_image_for_jax(capsys, machine, hardware):
    assert launch(OUTPUT, IMAGE, "--build", *machine, "--", "--backend=jax") == 0
    told = capsys.readouterr().out
    assert f"docker build --build-arg=HARDWARE={hardware} " in told
    assert "PLUGGABLE" not in told, "TensorFlow would take the chips"
    [pool] = json.loads(pathlib.Path("out/digits.json").read_text())["workerPoolSpecs"]
    assert "--backend=jax" in pool["containerSpec"]["args"]
    assert ("--tpu=local" in pool["containerSpec"]["args"]) == (hardware == "jax-tpu")
