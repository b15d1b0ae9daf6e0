"""A model whose code fails as told: `--model=tests.models_that_fail --model_options='how="sys.exit(0)"'`."""

import dataclasses
import sys
from typing import Any

import keras


@dataclasses.dataclass(frozen=True)
class Options:
    """how: Python that build evaluates."""

    how: str = "None"


def build(options: Options, spec: Any) -> keras.Model:
    """Does not come to its end."""
    eval(options.how, {"sys": sys})
    raise AssertionError
