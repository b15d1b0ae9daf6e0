"""What the platform that starts a run says in environment variables, as values of options. No TensorFlow.

Where they are from: Vertex AI (https://cloud.google.com/vertex-ai/docs/training/code-requirements), Cloud TPU VMs, GKE,
Colab and Kaggle. TF_CONFIG, CLUSTER_SPEC and how the variables name a TPU are for `hardware.py`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.errors import ConfigError
from trainer.options import FIELDS, TPU_OF_THIS_ENVIRONMENT, Config

# The first that is set names a TPU, see `hardware`.
TPU_VARIABLES = ("TPU_CONFIG", "TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")
JOB_ID, TRIAL_ID = "CLOUD_ML_JOB_ID", "CLOUD_ML_TRIAL_ID"

# Directories, in the order in which a run of mode `train_and_eval` fills them.
_DIRECTORIES = {
    "AIP_CHECKPOINT_DIR": "model_dir",
    "AIP_TENSORBOARD_LOG_DIR": "tensorboard_dir",
    "AIP_MODEL_DIR": "export_dir",
}
_DATA_FORMAT = "AIP_DATA_FORMAT"
_TRAINING_DATA, _VALIDATION_DATA, _TEST_DATA = (f"AIP_{name}_DATA_URI" for name in ("TRAINING", "VALIDATION", "TEST"))
# Of what Vertex AI writes when it hands a managed dataset to a job; none of it is records.
_MANAGED_FORMATS = ("jsonl", "csv", "bigquery")
# As TensorFlow Datasets names its shards: digits-train.tfrecord-00000-of-00001; from the split on, a wildcard will do.
_SHARDS = re.compile(r"(?P<directory>.+)/(?P<dataset>[^/*]+?)-(?P<split>[A-Za-z0-9_]+)(\.[^/]*|-?\*)")
_GCS_MOUNT = "/gcs/"
_ALERT_URL = "TRAINER_ALERT_URL"  # ours: what is secret stands in no command line
# Options that hold a path.
_PATHS = ("model_dir", "data_dir", "dataset", "init_from", "export_dir", "tensorboard_dir")


class Layer(NamedTuple):
    """Values of options, and who says so."""

    source: str
    values: Mapping[str, Any]


def layers(given: Mapping[str, Any], environ: Mapping[str, str]) -> list[Layer]:
    """What the environment adds to what a config file and flags have `given`, which win over it.

    Raises:
        ConfigError: a variable that is needed and says nothing that this program can use.
    """
    mode = given["mode"] if "mode" in given else Config.mode
    found = [*_directories(given, mode, environ), *_dataset(given, mode, environ)]
    trial = environ.get(TRIAL_ID)
    directory_is_of_trial = any("model_dir" in layer.values for layer in found)
    if trial and mode in FIELDS["run_id"].metadata["modes"] and not directory_is_of_trial:
        # Every trial gets the same flags but for what is tuned: each needs a directory of its own.
        found.append(Layer(TRIAL_ID, {"run_id": f"trial-{trial}"}))
    variable = next((name for name in TPU_VARIABLES if environ.get(name)), None)
    if variable and given.get("replicas") is None:
        found.append(Layer(variable, {"tpu": TPU_OF_THIS_ENVIRONMENT}))
    if environ.get(_ALERT_URL):
        found.append(Layer(_ALERT_URL, {"alert_url": environ[_ALERT_URL]}))
    return found


def on_vertex(environ: Mapping[str, str]) -> bool:
    """Whether this is a custom training job of Vertex AI."""
    return JOB_ID in environ


def without_mount(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with gs://BUCKET/... for /gcs/BUCKET/..., where Vertex AI mounts buckets.

    The mount is slower, cannot lock, and replaces nothing at once.
    """

    def real(name: str, value: Any) -> Any:
        if name in _PATHS and isinstance(value, str) and value.startswith(_GCS_MOUNT):
            return "gs://" + value.removeprefix(_GCS_MOUNT)
        return value

    return {name: real(name, value) for name, value in values.items()}


def identity(environ: Mapping[str, str]) -> dict[str, str]:
    """The names that the platform has for this run, for its provenance."""
    return {name: environ[name] for name in (JOB_ID, TRIAL_ID) if environ.get(name)}


def _directories(given: Mapping[str, Any], mode: str, environ: Mapping[str, str]) -> list[Layer]:
    wanted = {name: option for name, option in _DIRECTORIES.items() if environ.get(name) and option not in given}
    if mode not in FIELDS["export_dir"].metadata["modes"] or given.get("promote_margin") is not None:
        wanted.pop("AIP_MODEL_DIR", None)  # what is promoted stays with its run
    if mode not in FIELDS["tensorboard_dir"].metadata["modes"]:
        wanted.pop("AIP_TENSORBOARD_LOG_DIR", None)
    return [Layer(name, {option: environ[name].rstrip("/")}) for name, option in wanted.items()]


def _dataset(given: Mapping[str, Any], mode: str, environ: Mapping[str, str]) -> list[Layer]:
    """Dataset and splits, from the shards that Vertex AI names."""
    evaluated = _TEST_DATA if mode in ("eval", "export") and environ.get(_TEST_DATA) else _VALIDATION_DATA
    splits = {_TRAINING_DATA: "train_split", evaluated: "eval_split"}
    splits = {name: option for name, option in splits.items() if environ.get(name)}
    if not splits or given.get("dataset"):
        return []
    if environ.get(_DATA_FORMAT) in _MANAGED_FORMATS:
        raise ConfigError(
            f"Vertex AI hands over a managed dataset as {environ[_DATA_FORMAT]}, and this program reads TFRecords. "
            "Build them from it once (python -m data.build) and name them with --dataset=gs://... "
            f"Received: {_DATA_FORMAT}={environ[_DATA_FORMAT]}, {', '.join(f'{n}={environ[n]}' for n in splits)}"
        )
    found, directories = [], {}
    for name, option in splits.items():
        shards = _SHARDS.fullmatch(environ[name])
        if not shards:
            raise ConfigError(
                f"{name} must name shards as TensorFlow Datasets does, such as "
                f"gs://bucket/digits/1.0.0/digits-train.tfrecord*; or give --dataset. Received: {environ[name]!r}"
            )
        directories[name] = shards["directory"]
        values = {} if option in given else {option: shards["split"]}
        found.append(Layer(name, {"dataset": shards["directory"], **values}))
    if len(set(directories.values())) > 1:
        raise ConfigError(
            "training and evaluation read two splits of one dataset, and these are of two directories; give --dataset. "
            f"Received: {json.dumps(directories)}"
        )
    return found
