"""A TensorBoard profile of the steps that were asked for: beforehand, or by a signal to a running job."""

import contextlib
import logging
import time
from collections.abc import Callable

from trainer import backend
from trainer.callbacks import Callback, Loop

# A profile asked for by a signal covers whole loops and ends with the first that ends after this. Seconds enough to see
# many steps; a trace of more is hundreds of megabytes.
ON_REQUEST_SECS = 5.0

_log = logging.getLogger(__name__)


class Profile(Callback):
    """Profiles whole loops; the trainer ends loops at both ends of `steps`.

    Nothing that goes wrong with a profile ends a run: it is a warning.

    Args:
        directory: TensorBoard's; the profile goes below it, to plugins/profile/.
        steps: (first, end) of `--profile_steps`, or None.
        requested: whether a profile was asked for since the last call.
        start_step: step that this process goes on from.
    """

    def __init__(
        self,
        directory: str,
        *,
        steps: tuple[int, int] | None,
        requested: Callable[[], bool],
        start_step: int,
    ):
        self._directory, self._steps, self._requested = directory, steps, requested
        self._active = False
        self._begun, self._first_step, self._last_step = 0.0, 0, 0
        self._until: int | None = None  # step at which it ends; None: after ON_REQUEST_SECS
        self._trace: contextlib.AbstractContextManager | None = None
        self._profiler = backend.part("profiler").Profiler(directory)
        if steps and start_step >= steps[1]:
            _log.info("profile_steps=%d,%d: the run goes on from step %d, so nothing is profiled", *steps, start_step)
            self._steps = None

    def on_loop_begin(self, step: int) -> None:
        """Starts a profile where one is due or was asked for."""
        asked = self._requested()
        if not self._active:
            due = self._steps is not None and self._steps[0] <= step < self._steps[1]
            if due and self._steps:
                self._start(step, self._steps[1])
                self._steps = None  # once, whether it could be started or not
            elif asked:
                self._start(step, None)
        if self._active:
            # Named by its first step, the loop holds `steps_per_loop` steps.
            self._trace = self._profiler.step(step)
            self._trace.__enter__()

    def on_loop_end(self, loop: Loop) -> None:
        """Ends the profile where it is due."""
        self._leave_trace()
        if not self._active:
            return
        self._last_step = loop.end
        enough = time.monotonic() - self._begun >= ON_REQUEST_SECS if self._until is None else loop.end >= self._until
        if enough:
            self._stop()

    def on_end(self) -> None:
        """Ends a profile that the end of the run cuts short."""
        self._leave_trace()
        if self._active:
            self._stop()

    def _start(self, step: int, until: int | None) -> None:
        try:
            self._profiler.start()
        except self._profiler.ERRORS as error:
            _log.warning("the profiler does not start, so nothing is profiled: %s", error)
            return
        self._active, self._until, self._begun = True, until, time.monotonic()
        self._first_step = self._last_step = step
        _log.info("profiling from step %d", step, extra={"fields": {"step": step}})

    def _stop(self) -> None:
        self._active = False
        try:
            self._profiler.stop()
        except self._profiler.ERRORS as error:
            _log.warning("the profile of steps %d to %d is lost: %s", self._first_step, self._last_step - 1, error)
            return
        _log.info(
            "profile of steps %d to %d: %s/plugins/profile. Open it: pip install tensorboard-plugin-profile, then "
            "tensorboard --logdir=%s",
            self._first_step,
            self._last_step - 1,
            self._directory,
            self._directory,
        )

    def _leave_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is not None:
            trace.__exit__(None, None, None)
