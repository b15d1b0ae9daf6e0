"""Placeholder, replaced by its author."""

import argparse

from scripts.launchers.actions import Actions
from scripts.launchers.job import Job

FILLED: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this platform."""


def launch(job: Job, options: argparse.Namespace, actions: Actions) -> None:
    """Prints the command."""
    actions.run(job.command())
