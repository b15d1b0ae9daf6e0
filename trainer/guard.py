"""What watches over a training run from outside of its loop, and the account of how it ended.

Lease, stop requests, notices of preemption, stall watch, alerts and receipt begin together and end together, whatever
ends the run. Only the chief holds the lease and writes the receipt.
"""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator

from trainer import diagnose, run_dir, storage
from trainer.callbacks.clock import Clock
from trainer.config import Config
from trainer.errors import EXIT_OK, EXIT_RETRY
from trainer.receipt import Receipt
from trainer.redact import redact
from trainer.watch import lease, notices, status
from trainer.watch.alerts import Alerts, Payload, added
from trainer.watch.stall import StallWatch
from trainer.watch.stopping import Stops

# While nothing is heard of a process that is about to end: for alerts that are still on their way.
_CLOSING_SECS = 5.0
_STATES: dict[int, status.State] = {EXIT_OK: "finished", EXIT_RETRY: "stopped"}

_log = logging.getLogger(__name__)


class Guard:
    """Made by `watching`."""

    def __init__(self, config: Config, folder: run_dir.RunDir, clock: Clock, stops: Stops, *, is_chief: bool):
        self._config, self._folder, self._clock, self._stops = config, folder, clock, stops
        self.alerts = Alerts(config.alert_url, folder.path, self._keep_alert if is_chief else None)
        self._lease: lease.Lease | None = None
        self.receipt: Receipt | None = None
        self.step_before = 0  # that an earlier start is known to have reached
        self.outcome = ""  # of a run that has finished, in a line
        self._over = threading.Event()
        self._ending = threading.Lock()
        if is_chief:
            with clock.measure("waiting"), storage.explained(folder.path):
                lease.wait_until_free(folder.path, config.lease_secs)
        self._stall = StallWatch(config.stall_secs, self._stalled, folder.path if is_chief else None)
        self._stall_is_watched = False
        stops.on_exit(lambda reason: self.end(EXIT_RETRY, reason))

    def take_over(self, *, num_devices: int) -> None:
        """Takes the lease of the directory, for a chief with nothing left that could be refused.

        Raises:
            RetryError: another run was faster.
        """
        folder, seconds = self._folder, self._config.lease_secs
        with self._clock.measure("waiting"):
            self._lease = lease.acquire(folder.path, seconds, on_trouble=self.tell_of_trouble)
        self._lease.confirm()
        replace = functools.partial(folder.replace, run_dir.RECEIPT)
        self.receipt = Receipt(folder.read(run_dir.RECEIPT), seconds=self._clock.seconds, write=replace)
        self.receipt.num_devices = num_devices
        self.step_before = max(self.receipt.reached_before, self._lease.last_step or 0)
        self.receipt.write()  # at once: of a process killed within the next seconds it would know nothing
        threading.Thread(target=self._keep_accounts, name="receipt", daemon=True).start()

    def tell_of_trouble(self, message: str) -> None:
        """Alerts of what could not be written, which the log tells already."""
        self.alerts.send("failing_saves", message, is_in_log=True, step=self.step)

    def confirm(self) -> None:
        """Raises what makes it wrong to write now: another run has taken over, or the directory is gone."""
        if self._lease is not None:
            self._lease.confirm()

    def check(self) -> None:
        """The same, without asking the storage: as far as the heartbeat knows."""
        if self._lease is not None and self._lease.lost is not None:
            raise self._lease.lost

    @property
    def may_write(self) -> bool:
        """Whether nobody else is known to write here."""
        return self._lease is not None and self._lease.lost is None

    def progress(self, step: int, phase: str) -> None:
        """Says that the run has come to `step` and what it does now."""
        if not self._stall_is_watched:  # not from the start: what connects has a time-out of its own
            self._stall_is_watched = True
            self._stall.start()
        self._stall.beat()
        if self._lease is not None:
            self._lease.update(step, phase)
        if self.receipt is not None:
            if self.receipt.from_step is None:
                self.receipt.from_step = step
            self.receipt.reached_step = step

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """While this lasts, no progress is no stall for much longer: a compilation says nothing of how far it is."""
        return self._stall.patient()

    def saved(self, step: int) -> None:
        """Says that the checkpoint of `step` is complete."""
        self._stops.saved_step = step

    def end(self, exit_code: int, reason: str | None = None) -> None:
        """The last words of the run; the first call counts. Also called when the process is ended from a thread."""
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
        self._stall.stop()
        if self.receipt is not None and self.may_write:
            self.receipt.finish(exit_code)
        if self._lease is not None:
            self._lease.release(_STATES.get(exit_code, "failed"), exit_code, redact(reason) if reason else None)
        if exit_code == EXIT_OK:
            self.alerts.send("finished", self.outcome, severity="INFO", step=self.step)
        elif self._stops.reason is None:
            event = "stopped" if exit_code == EXIT_RETRY else "failed"
            self.alerts.send(event, reason or "", severity="ERROR", is_in_log=True, step=self.step)  # as the last word
        self.alerts.close(_CLOSING_SECS)

    @property
    def step(self) -> int | None:
        """As far as the receipt knows; None before there is one."""
        return self.receipt.reached_step if self.receipt is not None else None

    def _keep_alert(self, alert: Payload) -> None:
        """For the report. Nobody else writes the file, and before the lease is ours nothing is written."""
        if self.may_write:
            self._folder.replace(run_dir.ALERTS, added(self._folder.read(run_dir.ALERTS), alert))

    def _stalled(self, message: str) -> None:
        self.alerts.send("stall", message, severity="ERROR", is_in_log=True, step=self.step)
        self.end(EXIT_RETRY, message)

    def _keep_accounts(self) -> None:
        """Of a process that is killed the receipt holds what it knew here last."""
        while not self._over.wait(self._config.lease_secs / 6):
            if self.receipt is not None and self.may_write:
                self.receipt.write()


@contextlib.contextmanager
def watching(
    config: Config,
    folder: run_dir.RunDir,
    clock: Clock,
    stops: Stops,
    *,
    is_chief: bool,
    afterwards: Callable[[], None] = lambda: None,
) -> Iterator[Guard]:
    """Watches over what is done inside, and writes down how it ends.

    Args:
        afterwards: called once that is written, by who has written it; must not raise.

    Raises:
        RetryError: another run writes in the directory.
    """
    guard = Guard(config, folder, clock, stops, is_chief=is_chief)
    try:
        notices.start(stops.request)
        yield guard
    except BaseException as error:
        told = diagnose.explain(error)
        guard.end(told.exit_code, str(told))
        stops.over(told.exit_code)
        raise
    else:
        guard.end(EXIT_OK)
        stops.over(EXIT_OK)  # not before: a worker whose peers are lost on the last steps is to be started again
    finally:
        if guard.may_write:
            afterwards()
