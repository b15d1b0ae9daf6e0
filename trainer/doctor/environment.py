"""Environment variables that the trainer, TensorFlow, libtpu, gRPC and Keras read, and what they lead to."""

import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping

from trainer.doctor import machine
from trainer.doctor.findings import NAMES_OF_TPU, Case, Finding, failed, passed, skipped, warned

# What a variable that is set leads to. Where nothing else is named: seen, or read in TensorFlow's or Keras' source.
_LEADS_TO = {
    "TPU_CONFIG": "names the TPU, before all others",
    "TPU_NAME": "names the TPU, where TPU_CONFIG is unset",
    "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS": "addresses of the TPU, where TPU_CONFIG and TPU_NAME are unset",
    "TPU_LOAD_LIBRARY": "0: TensorFlow loads no libtpu; 1: it loads it whoever holds the chips",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "libtpu is loaded whoever holds the chips",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "this process takes some of the chips; libtpu's lock is not asked",
    "TPU_LIBRARY_PATH": "tensorflow-tpu loads this libtpu",
    "TPU_SKIP_MDS_QUERY": "libtpu does not ask the metadata server",
    "LIBTPU_INIT_ARGS": "flags of libtpu",
    "NEXT_PLUGGABLE_DEVICE_USE_C_API": "TensorFlow drives the TPU through PJRT",
    "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "TensorFlow loads this device library when it is imported",
    "TF_CONFIG": "the workers that train together, and who evaluates",
    "CLUSTER_SPEC": "the same, as Vertex AI writes it, where TF_CONFIG is unset",
    "AIP_CHECKPOINT_DIR": "of Vertex AI: model_dir, where neither flag nor file gives one",
    "AIP_TENSORBOARD_LOG_DIR": "of Vertex AI: tensorboard_dir, where neither flag nor file gives one",
    "AIP_MODEL_DIR": "of Vertex AI: export_dir, where neither flag nor file gives one",
    "AIP_DATA_FORMAT": "of Vertex AI: what it has written for this job",
    "AIP_TRAINING_DATA_URI": "of Vertex AI: dataset and train_split, where neither flag nor file names a dataset",
    "AIP_VALIDATION_DATA_URI": "of Vertex AI: dataset and eval_split of training",
    "AIP_TEST_DATA_URI": "of Vertex AI: dataset and eval_split of mode=eval",
    "CLOUD_ML_JOB_ID": "of Vertex AI: {job} of run_id; /gcs/... is read as gs://...",
    "CLOUD_ML_TRIAL_ID": "of Vertex AI: {trial} of run_id; without AIP_CHECKPOINT_DIR each trial is a run of a series",
    "TRAINER_ALERT_URL": "alert_url, where neither flag nor file gives one",
    "XLA_FLAGS": "flags of XLA; one that it does not know aborts the process at the first compilation",
    "TF_XLA_FLAGS": "flags of TensorFlow's XLA bridge; one that it does not know aborts the process",
    "JAX_PLATFORMS": "what --backend=jax may compute on; TensorFlow does not read it",
    "TPU_WORKER_HOSTNAMES": "of GKE: the hosts of this TPU slice, on each of which --backend=jax runs a process",
    "TPU_WORKER_ID": "of GKE: which of them this one is",
    "MEGASCALE_NUM_SLICES": "TPU slices that work together; the trainer uses one",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false: JAX takes GPU memory as it needs it; else most of it at once",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "how much of a GPU's memory JAX takes at once",
    "KERAS_BACKEND": "--backend replaces it",
    "KERAS_HOME": "where Keras reads keras.json",
    "TF_USE_LEGACY_KERAS": "tf.keras is Keras 2",
    "GOOGLE_APPLICATION_CREDENTIALS": "credentials for gs:// and the Cloud TPU API",
    "GOOGLE_AUTH_TOKEN_FOR_TESTING": "TensorFlow shows this to gs:// in place of credentials",
    "NO_GCE_CHECK": "TensorFlow does not ask the metadata server for credentials",
    "GCE_METADATA_HOST": "where TensorFlow asks for metadata; cloud-tpu-client does not follow it",
    "GCE_METADATA_IP": "where TensorFlow asks for metadata; cloud-tpu-client does not follow it",
    "CURL_CA_BUNDLE": "certificates that TensorFlow trusts for gs://",
    "http_proxy": "gRPC and cloud-tpu-client go through it; the trainer exempts TPU workers and peers",
    "https_proxy": "gs:// goes through it, gRPC too; the trainer exempts TPU workers and peers",
    "no_proxy": "exempt from the proxy",
    "no_grpc_proxy": "exempt from the proxy, for gRPC, in place of no_proxy",
    "TF_CPP_MIN_LOG_LEVEL": "how much TensorFlow says; the trainer would set 2",
    "CUDA_VISIBLE_DEVICES": "the GPUs that TensorFlow sees",
    "TMPDIR": "where what goes to gs:// is staged",
    "TFDS_DATA_DIR": "where datasets are, without --data_dir",
}
_IS_SET = ("true", "True", "1")
# Files that are read at these variables: one that is not there ends the run.
_FILES = ("TPU_LIBRARY_PATH", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH", "CURL_CA_BUNDLE")
_SHOWN_CHARS = 60


def variables(case: Case) -> Iterator[Finding]:
    """A line for each variable that is set: what it leads to, or what is wrong with it."""
    there = {name: case.environ[name] for name in _LEADS_TO if case.environ.get(name)}
    if not there:
        yield passed("variables", "none is set that would change a run")
    problems = dict(_problems(case, there))
    for name, value in there.items():
        shown = value if len(value) <= _SHOWN_CHARS else f"{value[:_SHOWN_CHARS]}..."
        yield problems.get(name) or passed(name, f"{shown} - {_LEADS_TO[name]}")


def _problems(case: Case, there: Mapping[str, str]) -> Iterator[tuple[str, Finding]]:
    """Variable -> what is wrong with it."""
    config = case.config
    names_tpu = [name for name in NAMES_OF_TPU if name in there]
    if names_tpu and config.tpu is None:
        what = f"{names_tpu[0]} names a TPU, and the run is told to take GPUs or the CPU"
        yield names_tpu[0], warned(names_tpu[0], what, "Leave out --notpu or --replicas, or unset it")
    if there.get("TPU_LOAD_LIBRARY") == "0" and case.wants_own_chips:
        what = "with 0 TensorFlow loads no libtpu, and finds none of this machine's chips"
        yield "TPU_LOAD_LIBRARY", failed("TPU_LOAD_LIBRARY", what, "Unset it; 0 is for worker 0 of a pod slice")
    for name in _FILES:
        if name in there and not os.path.exists(there[name]):
            yield name, failed(name, f"there is no file {there[name]}", "Unset it, or name one that is there")
    if "TMPDIR" in there and not os.path.isdir(there["TMPDIR"]):
        what = f"there is no directory {there['TMPDIR']}: {machine.staging_directory(case.environ)} is taken instead"
        yield "TMPDIR", warned("TMPDIR", what, "Make it, or unset TMPDIR")
    if there.get("KERAS_BACKEND", config.backend) != config.backend:
        what = f"{there['KERAS_BACKEND']} has no effect: --backend says what Keras computes with, {config.backend} here"
        yield "KERAS_BACKEND", warned("KERAS_BACKEND", what, "Unset it, or give --backend")
    if case.is_jax:
        yield from _problems_of_jax(case, there)
    if there.get("TF_USE_LEGACY_KERAS") in _IS_SET:
        what = "tf.keras is Keras 2 then, and its layers do not fit into the models of the trainer"
        yield "TF_USE_LEGACY_KERAS", warned("TF_USE_LEGACY_KERAS", what, "Unset it")
    if "GOOGLE_AUTH_TOKEN_FOR_TESTING" in there:
        what = "TensorFlow shows it to gs:// in place of any real credentials"
        yield "GOOGLE_AUTH_TOKEN_FOR_TESTING", warned("GOOGLE_AUTH_TOKEN_FOR_TESTING", what, "Unset it")
    if config.data_dir and there.get("TFDS_DATA_DIR", config.data_dir) != config.data_dir:
        yield "TFDS_DATA_DIR", passed("TFDS_DATA_DIR", f"{there['TFDS_DATA_DIR']} - not read, --data_dir wins")


def _problems_of_jax(case: Case, there: Mapping[str, str]) -> Iterator[tuple[str, Finding]]:
    platforms = {name.strip() for name in there.get("JAX_PLATFORMS", "").split(",") if name.strip()}
    remedy = "Unset it: --tpu and --replicas say what to compute on"
    if platforms and case.config.tpu is not None and "tpu" not in platforms:
        what = f"{there['JAX_PLATFORMS']} keeps JAX from the TPU that --tpu asks for"
        yield "JAX_PLATFORMS", failed("JAX_PLATFORMS", what, remedy)
    if platforms and case.config.tpu is None and not platforms & {"cpu", "cuda", "gpu"}:
        what = f"{there['JAX_PLATFORMS']} leaves nothing to train on without --tpu"
        yield "JAX_PLATFORMS", failed("JAX_PLATFORMS", what, remedy)
    forced = re.search(r"--xla_force_host_platform_device_count=(\d+)", there.get("XLA_FLAGS", ""))
    if forced and int(forced[1]) != (case.config.replicas or 1):
        what = f"its {forced[1]} CPU devices have no effect: --replicas says how many, {case.config.replicas or 1} here"
        yield "XLA_FLAGS", warned("XLA_FLAGS", what, "Take --xla_force_host_platform_device_count out, give --replicas")
    if case.config.tpu is None and there.get("TPU_WORKER_HOSTNAMES"):
        what = "this is a host of a TPU slice, and the run is told to take GPUs or the CPU"
        yield "TPU_WORKER_HOSTNAMES", warned("TPU_WORKER_HOSTNAMES", what, "Add --tpu")


def keras_json(case: Case) -> Iterator[Finding]:
    """What Keras reads at its import. Format: https://keras.io/api/utils/config_utils/"""
    home = case.environ.get("KERAS_HOME") or os.path.join(case.environ.get("HOME", "/root"), ".keras")
    path = pathlib.Path(home, "keras.json")
    if not path.exists():
        yield skipped("keras.json", f"{path} is not there: Keras has its defaults")
        return
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        yield warned("keras.json", f"{path} cannot be read, and Keras passes over it: {error}", "Mend or remove it")
        return
    if not isinstance(content, dict):
        yield failed("keras.json", f"{path} holds no JSON object, and importing Keras fails", "Mend or remove it")
        return
    odd = [
        f"{name}={content[name]}"
        for name, usual in (("floatx", "float32"), ("image_data_format", "channels_last"))
        if content.get(name, usual) != usual
    ]
    if odd:
        what = f"{path} says {', '.join(odd)}: layers without a dtype or data_format of their own follow it"
        yield warned("keras.json", what, "Remove these lines: models and datasets here are float32, channels last")
        return
    yield passed("keras.json", f"{path} says what is usual")
