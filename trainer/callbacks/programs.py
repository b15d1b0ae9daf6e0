"""Keeps what the first call has compiled, for a start that comes after a process that was killed."""

from collections.abc import Callable

from trainer.callbacks import Callback, Loop


class KeepPrograms(Callback):
    """Calls `publish` once the first loop, which compiles, is over."""

    def __init__(self, publish: Callable[[], None]):
        self._publish = publish

    def on_loop_end(self, loop: Loop) -> None:
        if loop.first:
            self._publish()
