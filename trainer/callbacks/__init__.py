"""Keras callbacks that watch a run. `on_train_batch_end` comes once a loop; `Progress` says how far the run is."""

from typing import Protocol


class Progress(Protocol):
    """How far a run is: steps done, and the seconds its last loop waited for input."""

    step: int
    input_wait_secs: float
