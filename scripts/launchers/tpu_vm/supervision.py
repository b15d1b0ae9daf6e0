"""Keeps a TPU VM and the run on it going until the run ends: creates, installs, starts; again when the TPU is lost.

Every round first looks at what there is, so it may be ended and started again at any time, and takes over what it
finds. How a run has ended its VM tells. Where that is gone before it could, another VM runs the same command, which
finds in `model_dir` that it has ended, or goes on.
"""

import contextlib
import signal
import time
from collections.abc import Iterator

from scripts.launchers.actions import Actions, say
from scripts.launchers.tpu_vm.machine import READY, Found, Machine, look, node_state, request_state
from scripts.launchers.tpu_vm.remote import RUNNING, Remote
from trainer.errors import (
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_RETRY,
    EXIT_USAGE,
    ConfigError,
    RetryError,
    TrainerError,
    UsageError,
)

_LAST_LINES = 50
_MAX_WAIT_SECS = 600.0  # between two tries that fail


class Supervisor:
    """Of one machine and one run.

    Args:
        remote: the run on its machine.
        poll_secs: between two looks at what goes well.
        max_failures: how often in a row something may fail before the run is seen to run.
        delete_when_done: whether the machine goes when the run has ended.
    """

    def __init__(self, remote: Remote, *, poll_secs: float, max_failures: int, delete_when_done: bool):
        self.remote, self.machine, self.actions = remote, remote.machine, remote.actions
        self.poll_secs, self.max_failures, self.delete_when_done = poll_secs, max_failures, delete_when_done
        self._failures = 0

    def rehearse(self) -> None:
        """Prints what `run` does, in its order."""
        actions, machine = self.actions, self.machine
        actions.note("1. Where there is no TPU of this name:")
        actions.run(machine.create())
        actions.note("\n2. Once it is READY, where the run has not been started there:")
        self.remote.install()
        self.remote.start()
        actions.note(f"\n3. Every {self.poll_secs:g} s: is the TPU there, and how is the run?")
        actions.run(machine.list_all(queued=False))
        actions.run(machine.list_all(queued=True))
        actions.run(machine.ssh(self.remote.status_line))
        actions.note("\n4. When the TPU is preempted, what is left of it goes, and all begins again:")
        actions.run(machine.delete(queued=machine.queued))
        actions.note("\n5. When the run has ended (exit code 0, 2, 78 or a defect), the end of its log:")
        actions.run(self.remote.logs(_LAST_LINES))
        if self.delete_when_done:
            actions.run(machine.delete(queued=machine.queued))
        else:
            actions.note("The TPU stays, and is billed, until you delete it; --delete_when_done does.")

    def run(self) -> None:
        """Goes on until the run has ended.

        Raises:
            TrainerError: of the exit code of the run, where that is not 0; RetryError after too many failures.
        """
        with self._told_what_stays():
            code = self._code_of_run()
            self.actions.run(self.remote.logs(_LAST_LINES), check=False)
            if self.delete_when_done:
                delete(self.machine, self.actions)
        say(f"the run has ended with exit code {code}")
        if code != EXIT_OK:
            errors: dict[int, type[TrainerError]] = {EXIT_USAGE: UsageError, EXIT_CONFIG: ConfigError}
            raise errors.get(code, TrainerError)(f"the run ended with exit code {code}; the end of its log is above")

    def _code_of_run(self) -> int:
        while True:
            try:
                code = self._round()
            except RetryError as error:
                self._failures += 1
                if self._failures >= self.max_failures:
                    raise RetryError(f"{self._failures} failures in a row, the last one: {error}") from error
                wait_secs = min(self.poll_secs * 2**self._failures, _MAX_WAIT_SECS)
                say(f"{error}; failure {self._failures} of {self.max_failures}, next try in {wait_secs:g} s")
                time.sleep(wait_secs)
            else:
                if code is not None:
                    return code

    def _round(self) -> int | None:
        """Takes one look, and does what is to be done; the exit code of a run that has ended."""
        node = node_state(self.machine, self.actions)
        if node == READY:
            return self._round_of_run()
        found = Found(node, request_state(self.machine, self.actions))
        if found.is_lost:
            say(f"lost: {found} of {self.machine.name}")
            refused = found.request == "FAILED"
            if refused:
                self.actions.run(self.machine.describe_request(), check=False)
            delete(self.machine, self.actions)
            if refused:  # the next one may be too: that is no preemption
                raise RetryError(f"the queued resource {self.machine.name} was refused; above is why")
        elif not found.exists:
            say(f"there is no {self.machine.name}: creating it")
            self.actions.run(self.machine.create())
        elif found.node == "STOPPED":
            raise ConfigError(f"somebody has stopped {self.machine.name}. Start or delete it, and supervise it again")
        else:
            say(f"waiting for {found} of {self.machine.name}")
            time.sleep(self.poll_secs)
        return None

    def _round_of_run(self) -> int | None:
        status = self.remote.status()
        if isinstance(status, int) and status != EXIT_RETRY:
            return status
        if status != RUNNING:
            self.remote.install()
            self.remote.start()
        self._failures = 0
        time.sleep(self.poll_secs)
        return None

    @contextlib.contextmanager
    def _told_what_stays(self) -> Iterator[None]:
        """However it ends, nothing that is billed is left behind in silence."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
        try:
            yield
        finally:
            tell_what_stays(self.machine, self.actions)


def delete(machine: Machine, actions: Actions) -> None:
    """Deletes whatever there is of the machine."""
    found = look(machine, actions)
    if found.exists:
        actions.run(machine.delete(queued=found.request is not None))


def tell_what_stays(machine: Machine, actions: Actions) -> None:
    """Says what exists, and how to delete it."""
    try:
        found = look(machine, actions)
    except RetryError as error:
        say(f"{error}. {machine.name} may exist, and be billed; see `scripts/launch tpu-vm delete`")
        return
    if not found.exists:
        say(f"nothing of {machine.name} exists any more")
        return
    project = f" --project={machine.project}" if machine.project else ""
    say(
        f"there is still, and is billed: {found} of {machine.name}. To delete it: "
        f"scripts/launch tpu-vm delete --name={machine.name} --zone={machine.zone}{project} --submit"
    )
