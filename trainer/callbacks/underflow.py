"""Says when gradients are too small for the half precision that they are computed in."""

from collections.abc import Callable

from trainer.callbacks import Callback, Loop
from trainer.precision import UNDERFLOW

# A warning in time: a dense network on digits, its loss scale lowered by hand, passed a half at a scale of 2^-6,
# learned a little worse at 2^-15 and nothing at 2^-18.
MANY, FEW = 0.5, 0.25


class Underflow(Callback):
    """Tells once when most gradients lose digits, and again after it has been better.

    Args:
        tell: told of it in words, with the step.
    """

    def __init__(self, tell: Callable[[str, int], None]):
        self._tell = tell
        self._many = False

    def on_loop_end(self, loop: Loop) -> None:
        """Looks at the newest count."""
        if UNDERFLOW not in loop.logs:
            return
        share = loop.logs[UNDERFLOW]
        if share > MANY and not self._many:
            self._tell(
                f"{share:.0%} of the gradients are too small for the precision they are computed in, and smaller ones "
                "have become 0. Where the loss scale still grows this passes; else use mixed_bfloat16, which has the "
                "range of float32, or find the layer whose large gradients keep the loss scale down",
                loop.end,
            )
        self._many = share > (FEW if self._many else MANY)
