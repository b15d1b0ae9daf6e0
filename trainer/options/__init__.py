"""Every option of a run, once: type, default, help with its unit, limits, and whether it changes the numbers.

One file a subject. Flags (`flags.py`) and files (`config.py`) are generated from and read against these fields.
"""

import dataclasses
import types
from collections.abc import Mapping

from trainer.options.augmentation import AugmentationOptions
from trainer.options.checkpoints import CheckpointOptions
from trainer.options.data import DataOptions
from trainer.options.finetuning import FineTuningOptions
from trainer.options.hardware import HardwareOptions
from trainer.options.knowing import KnowingOptions
from trainer.options.model import ModelOptions
from trainer.options.optimizer import OptimizerOptions
from trainer.options.run import RunOptions
from trainer.options.training import TrainingOptions
from trainer.options.watching import WatchingOptions

TPU_OF_THIS_ENVIRONMENT = "auto"
LAST_RUN = "last"  # of init_from


@dataclasses.dataclass(frozen=True)
class Config(
    # Fields come in the opposite order: the last one's first.
    WatchingOptions,
    KnowingOptions,
    HardwareOptions,
    FineTuningOptions,
    OptimizerOptions,
    CheckpointOptions,
    TrainingOptions,
    ModelOptions,
    AugmentationOptions,
    DataOptions,
    RunOptions,
):
    """All options of a run; `None` means "worked out from the data or the hardware", as the help says."""


FIELDS: Mapping[str, dataclasses.Field] = types.MappingProxyType({f.name: f for f in dataclasses.fields(Config)})
