"""Which of Keras' backends this process runs on, and the modules that are made for it."""

import importlib
import os
from types import ModuleType

NAMES = ("tensorflow", "jax")


def choose(name: str) -> None:
    """Makes `name` the backend of this process and of those it starts; before Keras is imported, which reads it."""
    os.environ["KERAS_BACKEND"] = name


def chosen() -> str:
    """The backend of this process."""
    return os.environ.get("KERAS_BACKEND", NAMES[0])


def always_compiles(name: str) -> bool:
    """Whether steps run compiled by XLA, on any hardware."""
    return name == "jax"


def part(name: str) -> ModuleType:
    """The module `name` of the backend of this process."""
    return importlib.import_module(f"trainer.backends.{chosen()}.{name}")
