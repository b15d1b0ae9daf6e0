"""Evaluations, told to a hyperparameter tuning job of Vertex AI through its own library, cloudml-hypertune.

The library writes a file, CLOUD_ML_HP_METRIC_FILE or /tmp/hypertune/output.metrics, one JSON object a line, which
Vertex AI reads while the trial runs: https://github.com/GoogleCloudPlatform/cloudml-hypertune.
"""

import logging
import math
import os
from collections.abc import Mapping

import hypertune

from trainer.callbacks import Callback

# Either says that somebody reads the file: Vertex AI sets the first in every trial of a tuning job.
_VARIABLES = ("CLOUD_ML_TRIAL_ID", "CLOUD_ML_HP_METRIC_FILE")

_log = logging.getLogger(__name__)


def is_wanted() -> bool:
    """Whether this process is a trial of a tuning job."""
    return any(name in os.environ for name in _VARIABLES)


class Hypertune(Callback):
    """Reports every metric of every evaluation by its name, `accuracy`, `loss`, ..., with the step. Only for the chief.

    A report that cannot be written is a warning; the next one writes it too.
    """

    def __init__(self) -> None:
        self._reporter: hypertune.HyperTune | None = None

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reports one evaluation; a value that is no number says nothing about a trial and is left out."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                _log.warning("%s is %s at step %s, which is not reported to the tuning job", name, value, f"{step:,}")
                continue
            try:
                self._reporter = self._reporter or hypertune.HyperTune()
                self._reporter.report_hyperparameter_tuning_metric(name, value, global_step=step)
            except OSError as error:
                _log.warning("the tuning job is not told of %s at step %s: %s", name, f"{step:,}", error)
