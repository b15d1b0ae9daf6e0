"""`scripts/launch k8s`: a Job, a CronJob or a JobSet, on GKE's TPU and GPU node pools or on any cluster's CPUs.

settings.py is what may be asked for, checks.py what may not, manifests.py writes it down, control.py calls kubectl.
"""

import argparse

from scripts.launchers.actions import Actions
from scripts.launchers.job import Job
from scripts.launchers.k8s import checks, control, manifests, settings

FILLED: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of Kubernetes."""
    settings.add_arguments(parser)


def launch(job: Job, options: argparse.Namespace, actions: Actions) -> None:
    """Starts a job, or does to one that was started what --action says.

    Raises:
        ConfigError: everything that Kubernetes, GKE or the trainer there would refuse, in one error.
    """
    wanted = settings.Settings.of(options)
    if wanted.action != "start":
        control.act(wanted, actions)
        return
    values = checks.checked(wanted, job)
    control.start(wanted, manifests.text(wanted, values), actions)
