"""All checks in two rounds: the second knows what the first has found out."""

import dataclasses
import os

from trainer.config import Config
from trainer.doctor import (
    accelerator,
    computes,
    credentials,
    dataset,
    environment,
    locations,
    machine,
    packages,
    report,
    runner,
)
from trainer.doctor.findings import Case, Check

# Limits in seconds. Checks of a round run side by side, so the longest of each round add up to the longest check-up.
QUICK_SECS = 10.0
NETWORK_SECS = 20.0
IMPORT_SECS = 25.0  # TensorFlow takes 2 to 5 s from a warm disk, several times that from a cold one
USE_SECS = 28.0  # the same from a disk that is warm by now, and what is done with it


def run(config: Config) -> int:
    """Looks at everything around the run that `config` describes, says what it finds, and returns the exit code."""
    case = Case(config, dict(os.environ))
    packages.quieten_libraries()
    results = []
    for checks_of in (first_round, second_round):
        found = runner.run(checks_of(), case)
        results += found
        facts = {name: value for _, finding in found for name, value in finding.facts.items()}
        case = dataclasses.replace(case, facts={**case.facts, **facts})
    report.say(results, config.log_format)
    return report.exit_code([finding for _, finding in results])


def first_round() -> list[Check]:
    """What needs to know nothing beforehand."""
    return [
        Check("packages", "Python", packages.python, QUICK_SECS),
        Check("packages", "TensorFlow build", packages.tensorflow_build, QUICK_SECS),
        Check("packages", "requirements", packages.requirements, QUICK_SECS),
        Check("packages", "TensorFlow", computes.computes, IMPORT_SECS, computes.computes_unfinished),
        Check("packages", "JAX versions", packages.jax_versions, QUICK_SECS),
        Check("packages", "JAX", computes.computes_jax, IMPORT_SECS, computes.computes_jax_unfinished),
        Check("machine", "TPU chips", machine.chips, QUICK_SECS),
        Check("machine", "page size", machine.page_size, QUICK_SECS),
        Check("machine", "memory", machine.memory, QUICK_SECS),
        Check("machine", "TMPDIR", machine.temporary, QUICK_SECS),
        Check("environment", "variables", environment.variables, QUICK_SECS),
        Check("environment", "keras.json", environment.keras_json, QUICK_SECS),
        Check("credentials", "credentials", credentials.credentials, QUICK_SECS),
        Check("credentials", "metadata", credentials.metadata_server, QUICK_SECS, credentials.metadata_unfinished),
        Check("hardware", "target", accelerator.target, QUICK_SECS),
        Check("hardware", "TPU node", accelerator.node, NETWORK_SECS, accelerator.node_unfinished),
    ]


def second_round() -> list[Check]:
    """What needs TensorFlow to be usable, or to know the TPU."""
    return [
        Check("hardware", "workers", accelerator.workers, NETWORK_SECS),
        Check("hardware", "TPU version", accelerator.versions, NETWORK_SECS, accelerator.versions_unfinished),
        Check("hardware", "batch", accelerator.batch, QUICK_SECS),
        Check("storage", "local", locations.local, QUICK_SECS),
        Check("storage", "buckets", locations.buckets, USE_SECS, locations.buckets_unfinished),
        Check("storage", "region", locations.regions, USE_SECS, locations.regions_unfinished),
        Check("data", "dataset", dataset.dataset, USE_SECS, dataset.dataset_unfinished),
        Check("data", "checkpoint room", dataset.room, USE_SECS, dataset.room_unfinished),
    ]
