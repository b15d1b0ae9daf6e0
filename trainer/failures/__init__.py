"""Failures that are known: the text they show, what it means, what to do. Data only; `trainer/diagnose.py` reads it."""

from trainer.failures import devices, files, jax, models
from trainer.failures.row import Failure

__all__ = ["KNOWN", "Failure"]

# The first that matches counts. What fits any error of its type stands last.
KNOWN: tuple[Failure, ...] = (*devices.FAILURES, *jax.FAILURES, *models.FAILURES, *files.FAILURES, *devices.LOST)
