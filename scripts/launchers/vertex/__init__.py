"""`scripts/launch vertex`: a CustomJob, a HyperparameterTuningJob, or either of them on a schedule.

Nothing here has run on Google Cloud. The specs parse into the types of google-cloud-aiplatform, and its client and
gcloud send them to a loopback endpoint (tests/scripts/test_launch_vertex.py).
"""

import argparse
import json
import pathlib
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence

from scripts.launchers import study as study_lib
from scripts.launchers.actions import Actions
from scripts.launchers.job import Job
from scripts.launchers.vertex import checks, specs
from scripts.launchers.vertex.machines import Machine

FILLED = ("model_dir",)  # AIP_CHECKPOINT_DIR, which the trainer reads

_WIDTH = 118
_KEY_VALUE = re.compile(r"([^=]+)=(.*)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of Vertex AI."""
    where = parser.add_argument_group("where")
    where.add_argument("--project", required=True, help="Google Cloud project")
    where.add_argument("--region", required=True, help="such as us-central1; TPUs and GPUs are in some only")
    where.add_argument("--base_output", metavar="gs://DIR", help="what the job writes goes below; fills model_dir")
    where.add_argument("--service_account", metavar="EMAIL", help="whom the job runs as; needs access to its buckets")
    where.add_argument("--network", help="peered network: projects/NUMBER/global/networks/NAME")
    where.add_argument("--tensorboard", help="projects/PROJECT/locations/REGION/tensorboards/ID: logs are shown there")
    where.add_argument(
        "--label", type=_key_value, action="append", default=[], metavar="KEY=VALUE", help="may be repeated"
    )
    program = parser.add_argument_group("program")
    kind = program.add_mutually_exclusive_group(required=True)
    kind.add_argument("--image", help="container image with the trainer (see Dockerfile)")
    kind.add_argument("--package", metavar="gs://FILE.tar.gz", help="source distribution of the trainer")
    program.add_argument("--executor_image", help="of --package: prebuilt container that installs and runs it")
    program.add_argument("--build", action="store_true", help="build and push the image, or the package, first")
    program.add_argument(
        "--env", type=_key_value, action="append", default=[], metavar="NAME=VALUE", help="may be repeated"
    )
    machine = parser.add_argument_group("machines")
    machine.add_argument("--machine_type", required=True, help="such as ct5lp-hightpu-4t, cloud-tpu, n1-standard-8")
    machine.add_argument("--accelerator", metavar="TYPE:COUNT", help="TPU_V3:8, NVIDIA_TESLA_T4:2, where not built in")
    machine.add_argument("--topology", help="of ct5lp-* and ct6e-*: 1x1, 2x2, 2x4, ...")
    machine.add_argument(
        "--workers", type=int, default=0, metavar="N", help="machines besides the chief's [default: 0]"
    )
    machine.add_argument("--evaluator", action="store_true", help="one more machine, that only evaluates")
    machine.add_argument("--disk_gb", type=int, help="boot disk of each machine, in GB [default: 100]")
    _add_scheduling(parser)


_JAX_IMAGES = {"cpu": "jax", "gpu": "jax-gpu", "tpu": "jax-tpu"}  # by the kind of machine, see ./Dockerfile


def _add_scheduling(parser: argparse.ArgumentParser) -> None:
    when = parser.add_argument_group("when")
    when.add_argument(
        "--strategy",
        choices=("standard", "spot", "flex-start"),
        default="standard",
        help="spot: cheap and preemptible; flex-start: wait in a queue for GPUs [default: standard]",
    )
    when.add_argument("--max_wait_secs", type=int, help="of flex-start: seconds to queue; 0: for ever [default: a day]")
    when.add_argument("--timeout_secs", type=int, help="seconds after which the job is ended [default: 7 days]")
    when.add_argument(
        "--retry",
        choices=("supervise", "vertex"),
        help="who runs the trainer again after exit code 75: scripts/supervise in the container, or Vertex AI, whose "
        "pages disagree whether it does [default: supervise with --image]",
    )
    when.add_argument("--study", metavar="FILE", help="tune hyperparameters as this TOML file says")
    when.add_argument("--schedule", metavar="CRON", help="start the job at these times: '0 3 * * *'")
    when.add_argument("--time_zone", default="Etc/UTC", help="of --schedule [default: Etc/UTC]")
    when.add_argument(
        "--scheduler_account", metavar="EMAIL", help="of --schedule: service account that creates the job"
    )


def launch(job: Job, options: argparse.Namespace, actions: Actions) -> None:
    """Writes the spec and runs what submits it.

    Raises:
        ConfigError: one error with all that Vertex AI or the trainer would refuse.
    """
    if options.retry is None:
        options.retry = "vertex" if options.package else "supervise"
    machine = checks.check(job, options)
    study = study_lib.load(options.study, {**dict.fromkeys(FILLED, "<given>"), **job.values}) if options.study else None
    if study is not None:
        job = specs.without(job, [parameter.name for parameter in study.parameters])
    spec = specs.custom_job_spec(job, options, machine)
    # `gcloud ai custom-jobs create` refuses the empty pool that an evaluator's place needs; hp-tuning-jobs takes it.
    by_gcloud = not options.schedule and (study is not None or not options.evaluator)
    content = spec if study is None else specs.tuning_job(study, spec)
    for note in _notes(job, options, machine, study):
        actions.note(textwrap.fill(note, _WIDTH))
    path = actions.write(f"{job.name}.json", _json(content if by_gcloud else specs.body(job, options, content)))
    if options.build:
        _build(job, options, machine, actions)
    if options.schedule:
        _schedule(job, options, path, actions)
    elif by_gcloud:
        _create(job, options, path, actions)
    else:
        _post(options, path, actions)
    actions.note(f"Its log and its end, by the number that was printed; all jobs: {_console(options)}")
    group = "hp-tuning-jobs" if options.study else "custom-jobs"
    for verb in ("stream-logs", "describe", "cancel"):
        actions.note(f"  gcloud ai {group} {verb} NUMBER --project={options.project} --region={options.region}")


def _notes(job: Job, options: argparse.Namespace, machine: Machine, study: study_lib.Study | None) -> Iterator[str]:
    """What to know about the job."""
    # "Understand the training service": its table of common errors says the first, the text above it the second.
    restarts = (
        "Google's page says both that they end the job and that it restarts a worker 5 times, then the job 3 times."
    )
    yield "Exit code 0 is success. A machine that is lost is replaced; the trainer goes on from its last checkpoint."
    if options.retry == "supervise":
        yield f"Exit code 75 is tried again by scripts/supervise in the container. Of 2 and 78 {restarts}"
    else:
        yield f"Of exit codes other than 0, 75 too, {restarts}"
    if options.strategy == "spot":
        yield "Spot: the job of a preempted machine is restarted up to six times."
    if machine.hosts > 1:
        yield (
            "Several VMs: the image must be made from Vertex AI's tf-tpu-pod-base and keep its ENTRYPOINT. The newest "
            "Python there is 3.10; install 3.11 into it. This has not been run."
        )
    if machine.v6e and job.config.backend != "jax":
        yield (
            "v6e: one of Google's pages wants tf-nightly 2.18 or later there, another says that TensorFlow is not "
            "supported from v6e on. This has not been run."
        )
    if machine.pjrt and job.config.backend == "jax":
        yield "The image must be one for JAX, HARDWARE=jax-tpu of ./Dockerfile: in it TensorFlow knows of no chips."
    elif machine.pjrt:
        # "TensorFlow training on TPU v5e requires the PJRT runtime": "Training with TPU accelerators".
        yield (
            "The image must set NEXT_PLUGGABLE_DEVICE_USE_C_API and TF_PLUGGABLE_DEVICE_LIBRARY_PATH, as that of "
            "./Dockerfile does, which knows where its libtpu.so is."
        )
    if study is not None:
        yield f"Each trial writes below {options.base_output}/TRIAL and reports {study.metric} after each evaluation."
    if options.schedule:
        yield (
            "Schedules of Vertex AI itself start pipelines and notebooks only, so Cloud Scheduler posts the job. Its "
            "account needs roles/aiplatform.user, and roles/iam.serviceAccountUser on the account of the job."
        )
        yield (
            "It starts a job even while another runs, which then waits for the lease of model_dir, paid for; a "
            "--timeout_secs below the period ends the older one first."
        )
        if job.config.run_id is None:
            yield "A finished model_dir stays finished: for a new run each time, make it a series, --run_id='{date}'."


def _build(job: Job, options: argparse.Namespace, machine: Machine, actions: Actions) -> None:
    if options.image:
        actions.note("The image, from this checkout; docker must be allowed to push: gcloud auth configure-docker HOST")
        hardware = _JAX_IMAGES[machine.kind] if job.config.backend == "jax" else machine.kind
        actions.run(["docker", "build", f"--build-arg=HARDWARE={hardware}", f"--tag={options.image}", "."])
        actions.run(["docker", "push", options.image])
    else:
        actions.note("The package, from this checkout; pip install build")
        actions.run(["python", "-m", "build", "--sdist", "--outdir=dist", "."])
        actions.run(["gcloud", "storage", "cp", f"dist/{pathlib.PurePosixPath(options.package).name}", options.package])


def _create(job: Job, options: argparse.Namespace, path: str, actions: Actions) -> None:
    labels = ",".join(f"{key}={value}" for key, value in options.label)
    actions.run(
        [
            *("gcloud", "ai", "hp-tuning-jobs" if options.study else "custom-jobs", "create"),
            *(f"--project={options.project}", f"--region={options.region}", f"--display-name={job.name}"),
            *([f"--labels={labels}"] if labels else []),
            f"--config={path}",
        ]
    )


def _post(options: argparse.Namespace, path: str, actions: Actions) -> None:
    actions.note("By curl, because gcloud refuses the empty pool of parameter servers before the evaluator's")
    headers = (
        '--header "Authorization: Bearer $(gcloud auth print-access-token)" --header "Content-Type: application/json"'
    )
    target = shlex.join(["--data", f"@{path}", _uri(options)])
    actions.run(["sh", "-c", f"curl --fail-with-body --silent --show-error {headers} {target}"])


def _schedule(job: Job, options: argparse.Namespace, path: str, actions: Actions) -> None:
    actions.run(
        [
            *("gcloud", "scheduler", "jobs", "create", "http", job.name),
            *(f"--project={options.project}", f"--location={options.region}"),
            *(f"--schedule={options.schedule}", f"--time-zone={options.time_zone}"),
            *(f"--uri={_uri(options)}", "--http-method=post", "--headers=Content-Type=application/json"),
            f"--message-body-from-file={path}",
            f"--oauth-service-account-email={options.scheduler_account}",
        ]
    )
    at = f"{job.name} --project={options.project} --location={options.region}"
    actions.note(f"Now, or no more:\n  gcloud scheduler jobs run {at}\n  gcloud scheduler jobs pause {at}")


def _uri(options: argparse.Namespace) -> str:
    kind = "hyperparameterTuningJobs" if options.study else "customJobs"
    place = f"projects/{options.project}/locations/{options.region}"
    return f"https://{options.region}-aiplatform.googleapis.com/v1/{place}/{kind}"


def _console(options: argparse.Namespace) -> str:
    return f"https://console.cloud.google.com/vertex-ai/training/custom-jobs?project={options.project}"


def _json(content: specs.Spec) -> str:
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _key_value(text: str) -> Sequence[str]:
    match = _KEY_VALUE.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"it is NAME=VALUE. Received: {text!r}")
    return match.groups()
