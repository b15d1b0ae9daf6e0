"""What the API takes, as plain dicts in its own JSON: CustomJobSpec, HyperparameterTuningJob, and what creates them."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.launchers.job import Job
from scripts.launchers.study import Parameter, Study
from scripts.launchers.vertex.machines import Machine
from trainer import config as config_lib

Spec = dict[str, Any]
TPU_OF_THIS_VM = "local"
SUPERVISE = "scripts/supervise"  # in the image, from its working directory
MODULE = "trainer.main"
_STRATEGIES = {"spot": "SPOT", "flex-start": "FLEX_START"}
_ALGORITHMS = {"random": "RANDOM_SEARCH", "grid": "GRID_SEARCH"}  # unspecified: the service's own, Bayesian
_GOALS = {"max": "MAXIMIZE", "min": "MINIMIZE"}
_SCALES = {"linear": "UNIT_LINEAR_SCALE", "log": "UNIT_LOG_SCALE"}
# The position of a pool says what it is: chief, workers, parameter servers, evaluator. An empty one is skipped.
_EMPTY: Spec = {}


def custom_job_spec(job: Job, options: argparse.Namespace, machine: Machine) -> Spec:
    """The API's CustomJobSpec: one pool, or chief and workers and an evaluator."""
    pools = [_pool(job, options, machine, replicas=1)]
    if options.workers or options.evaluator:
        pools.append(_pool(job, options, machine, replicas=options.workers) if options.workers else _EMPTY)
    if options.evaluator:
        pools += [_EMPTY, _pool(job, options, machine, replicas=1)]
    spec: Spec = {"workerPoolSpecs": pools}
    if scheduling := _scheduling(options):
        spec["scheduling"] = scheduling
    fields = {"serviceAccount": "service_account", "network": "network", "tensorboard": "tensorboard"}
    spec |= {field: getattr(options, option) for field, option in fields.items() if getattr(options, option)}
    if options.base_output:
        spec["baseOutputDirectory"] = {"outputUriPrefix": options.base_output}
    return spec


def tuning_job(study: Study, spec: Spec) -> Spec:
    """The API's HyperparameterTuningJob but for its name; its trials are custom jobs of `spec`."""
    study_spec: Spec = {
        "metrics": [{"metricId": study.metric, "goal": _GOALS[study.goal]}],
        "parameters": [_parameter(parameter) for parameter in study.parameters],
    }
    if study.algorithm in _ALGORITHMS:
        study_spec["algorithm"] = _ALGORITHMS[study.algorithm]
    return {
        "studySpec": study_spec,
        "maxTrialCount": study.trials,
        "parallelTrialCount": study.parallel,
        "trialJobSpec": spec,
    }


def body(job: Job, options: argparse.Namespace, content: Spec) -> Spec:
    """What customJobs.create or hyperparameterTuningJobs.create is sent: `content` with name and labels."""
    named = {"displayName": job.name, **({"labels": dict(options.label)} if options.label else {})}
    return {**named, **(content if "studySpec" in content else {"jobSpec": content})}


def without(job: Job, names: Sequence[str]) -> Job:
    """The job without the options that its trials are given, `model_options.NAME` among them."""
    values = {name: value for name, value in job.values.items() if name not in names}
    for table in values.keys() & set(config_lib.TABLES):
        values[table] = {key: entry for key, entry in values[table].items() if f"{table}.{key}" not in names}
    return dataclasses.replace(job, values=values)


def _pool(job: Job, options: argparse.Namespace, machine: Machine, *, replicas: int) -> Spec:
    pool: Spec = {"machineSpec": dict(machine.spec), "replicaCount": replicas}
    if options.disk_gb is not None:
        pool["diskSpec"] = {"bootDiskSizeGb": options.disk_gb}
    task = _python_package(job, options, machine) if options.package else _container(job, options, machine)
    [content] = task.values()
    if options.env:
        content["env"] = [{"name": name, "value": value} for name, value in dict(options.env).items()]
    return {**pool, **task}


def _flags(job: Job, machine: Machine) -> list[str]:
    if machine.kind != "tpu":
        return job.flags()
    # A slice of one VM has its chips in it; those of several are reached by TPU_CONFIG, which Vertex AI sets.
    return job.flags(tpu=TPU_OF_THIS_VM if machine.hosts == 1 else config_lib.TPU_OF_THIS_ENVIRONMENT)


def _container(job: Job, options: argparse.Namespace, machine: Machine) -> Spec:
    supervise = ["python", SUPERVISE, "--"] if options.retry == "supervise" else []
    command, flags = [*supervise, "python", "-m", MODULE], _flags(job, machine)
    image = {"imageUri": options.image}
    if machine.hosts > 1:
        # The ENTRYPOINT of the image for pods sets the slice up and then runs its arguments: do not replace it.
        return {"containerSpec": {**image, "args": [*command, *flags]}}
    # A trial gets its parameters appended to args, so nothing but flags may be there.
    return {"containerSpec": {**image, "command": command, "args": flags}}


def _python_package(job: Job, options: argparse.Namespace, machine: Machine) -> Spec:
    return {
        "pythonPackageSpec": {
            "executorImageUri": options.executor_image,
            "packageUris": [options.package],
            "pythonModule": MODULE,
            "args": _flags(job, machine),
        }
    }


def _scheduling(options: argparse.Namespace) -> Spec:
    scheduling: Spec = {}
    if options.timeout_secs is not None:
        scheduling["timeout"] = f"{options.timeout_secs}s"
    if options.workers:
        # A worker that comes back alone finds its peers in the middle of an all-reduce: all start from the checkpoint.
        scheduling["restartJobOnWorkerRestart"] = True
    if options.strategy in _STRATEGIES:
        scheduling["strategy"] = _STRATEGIES[options.strategy]
    if options.max_wait_secs is not None:
        scheduling["maxWaitDuration"] = f"{options.max_wait_secs}s"
    return scheduling


def _parameter(parameter: Parameter) -> Spec:
    return {"parameterId": parameter.name, **_domain(parameter)}


def _domain(parameter: Parameter) -> Mapping[str, Any]:
    if parameter.type in ("double", "integer"):
        limits = {"minValue": parameter.min, "maxValue": parameter.max}
        return {f"{parameter.type}ValueSpec": limits, "scaleType": _SCALES[parameter.scale]}
    # DISCRETE values are doubles in the API, and trials have been seen to get 64 as "64.0"
    # (github.com/kuds/mesozoic-labs/pull/197): the trainer's options take that for a whole number, a model's may not. A
    # category arrives as the text that it is.
    _, of_table = config_lib.split(parameter.name)
    if parameter.type == "discrete" and not (of_table and all(isinstance(n, int) for n in parameter.values)):
        return {"discreteValueSpec": {"values": [float(value) for value in parameter.values]}}
    return {"categoricalValueSpec": {"values": [config_lib.to_flag(value) for value in parameter.values]}}
