"""Says when the devices wait for their input."""

from collections.abc import Callable

from trainer.callbacks import Callback, Loop

# A window long enough that a cold cache or one slow shard is no news.
WINDOW_SECS = 60.0
SLOW, FAST = 0.3, 0.15


class SlowInput(Callback):
    """Tells once when waiting for input takes a good part of the time, and again after it has been better.

    Args:
        tell: told of it in words, with the step.
    """

    def __init__(self, tell: Callable[[str, int], None]):
        self._tell = tell
        self._seconds = self._waited = 0.0
        self._is_slow = False

    def on_loop_end(self, loop: Loop) -> None:
        """Looks at the window that ends with `loop`, if one does."""
        if loop.first:
            return
        self._seconds += loop.seconds
        self._waited += loop.input_wait_secs
        if self._seconds < WINDOW_SECS:
            return
        share = self._waited / self._seconds
        self._seconds = self._waited = 0.0
        if share > SLOW and not self._is_slow:
            waited = f"the devices waited for input {share:.0%} of the last minute"
            self._tell(f"{waited}; --mode=profile_input says which stage is slow", loop.end)
        self._is_slow = share > (FAST if self._is_slow else SLOW)
