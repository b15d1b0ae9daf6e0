"""What watches a run. The train loop calls every `Callback` in order, between two loops of the devices."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Loop:
    """One call of the train loop: steps `begin`, ..., `end` - 1.

    Attributes:
        seconds: of the whole call, by the monotonic clock.
        input_wait_secs: seconds of these that were spent waiting for the next batch.
        logs: metrics since their last reset: `loss`, `accuracy`, ..., `gradient_norm`.
        learning_rate: once `end` steps are done.
        first: whether it is this process' first, which holds the compilation.
    """

    begin: int
    end: int
    seconds: float
    input_wait_secs: float
    logs: Mapping[str, float]
    learning_rate: float
    first: bool


class Callback:
    """Does nothing; a callback overrides what it wants to hear of."""

    def on_loop_begin(self, step: int) -> None:
        """The devices are about to do step `step`."""

    def on_loop_end(self, loop: Loop) -> None:
        """They are done with `loop`."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The model of `step` was evaluated."""

    def on_rollback(self, begin: int, end: int) -> None:
        """What steps `begin`, ..., `end` - 1 had done was undone. They are not done again; the run goes on at `end`."""

    def on_end(self) -> None:
        """Nothing more will be called, be the run finished, stopped or failed."""
