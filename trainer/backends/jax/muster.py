"""Where the processes of a run meet before JAX connects them, and how each knows that the others still live.

JAX' own coordination service cannot say who is missing, crashes on a port in use, and kills the whole process from C++
when a peer is gone, past exit codes and last words. So all meet at the chief's address first, within our limit and in
our words; then nothing is left for JAX to wait for. The connections stay open as lifelines: each sends a line now and
then, and a process whose line breaks or falls silent is lost. The others follow it within seconds, whatever they do.

Lines, each way: `{"index": 1, "workers": 2}` and `{"coordinator": "host:port"}` to meet; then `alive`, `finished`,
`failed` and `lost WORDS`.
"""

import contextlib
import dataclasses
import errno
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence

from trainer.errors import ConfigError, RetryError

_BEAT_SECS = 5.0  # between two signs of life
_SILENCE_SECS = 60.0  # without one: a machine that is gone says no goodbye
_PARTING_SECS = 10.0  # for a process to end itself once another has failed, and to be told of
_RETRY_SECS = 0.2  # between two tries to reach the chief
_GONE: dict[str, str] = {}  # the answer of a chief that hangs up
_MISSING = "not every worker came within --connect_timeout_secs={:g}: {}. Start them all and run again"
_MAX_BYTES = 4096  # at once; who sends longer lines is none of us


@dataclasses.dataclass(eq=False)
class _Line:
    """A connection to another process, read line by line."""

    socket: socket.socket
    address: str
    buffer: bytes = b""
    heard_at: float = dataclasses.field(default_factory=time.monotonic)
    word: str = ""  # with which the process leaves: finished, failed
    is_open: bool = True

    def send(self, text: str) -> None:
        """Sends a line; that nobody reads it any more is noticed when reading."""
        with contextlib.suppress(OSError):
            self.socket.sendall(f"{text}\n".encode())

    def read(self) -> list[str] | None:
        """The lines that have come; None at the end of them."""
        try:
            received = self.socket.recv(_MAX_BYTES)
        except OSError:
            return None
        if not received or len(self.buffer) > _MAX_BYTES:
            return None
        self.heard_at = time.monotonic()
        *lines, self.buffer = (self.buffer + received).split(b"\n")
        return [line.decode(errors="replace") for line in lines]


class Peers:
    """The other processes that this one hears of: all workers for the chief, the chief for a worker. Made by `meet`.

    Attributes:
        coordinator: host:port of JAX' coordination service.
        lost: which process has failed or died first, in words; empty while all is well.
    """

    def __init__(self, lines: dict[int, _Line], coordinator: str):
        self.coordinator, self.lost = coordinator, ""
        self._lines, self._is_chief = lines, 0 not in lines
        self._changed = threading.Condition()
        self._parting = threading.Event()
        self._watcher: threading.Thread | None = None

    def watch(self, on_loss: Callable[[str], None]) -> None:
        """Watches from a thread of its own.

        Args:
            on_loss: called with what to tell the user once a process is lost and this one has not begun to part soon.
        """
        self._watcher = threading.Thread(target=self._watch, args=(on_loss,), name="lifelines", daemon=True)
        self._watcher.start()

    def part(self, *, failed: bool) -> bool:
        """Tells the others that this process ends, and waits until they do; True if all have finished.

        Workers that have finished wait for the chief, as long as it lives. What has failed has not the time.
        """
        self._parting.set()
        word, limit_secs = ("failed", _PARTING_SECS) if failed else ("finished", None)
        if failed or not self._is_chief:
            self._tell(word)
        with self._changed:
            self._changed.wait_for(
                lambda: all(line.word or not line.is_open for line in self._lines.values()), limit_secs
            )
        if failed and self._is_chief:  # the last to leave, for JAX' service ends with it
            with self._changed:
                self._changed.wait_for(lambda: not any(line.is_open for line in self._lines.values()), limit_secs)
        elif self._is_chief:
            self._tell(word)
        return not failed and all(line.word == word for line in self._lines.values())

    def close(self) -> None:
        """Hangs up, once all have parted."""
        for line in self._lines.values():
            with contextlib.suppress(OSError):  # hung up already
                line.socket.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None:
            self._watcher.join()
        for line in self._lines.values():
            line.socket.close()

    def _tell(self, text: str) -> None:
        for line in self._lines.values():
            if line.is_open:
                line.send(text)

    def _watch(self, on_loss: Callable[[str], None]) -> None:
        with selectors.DefaultSelector() as selector:
            for index, line in self._lines.items():
                selector.register(line.socket, selectors.EVENT_READ, index)
            beat_at = time.monotonic()
            while selector.get_map():
                if time.monotonic() >= beat_at:
                    self._tell("alive")
                    beat_at = time.monotonic() + _BEAT_SECS
                for key, _ in selector.select(max(0.0, beat_at - time.monotonic())):
                    self._hear(key.data, on_loss)
                for index, line in self._lines.items():
                    if line.is_open and time.monotonic() - line.heard_at > _SILENCE_SECS:
                        self._close(index, f"has said nothing for {_SILENCE_SECS:g} s", on_loss)
                    if not line.is_open and line.socket in selector.get_map():
                        selector.unregister(line.socket)

    def _hear(self, index: int, on_loss: Callable[[str], None]) -> None:
        """Takes what has come from a process."""
        line = self._lines[index]
        said = line.read()
        for text in said or []:
            word, _, rest = text.partition(" ")
            if word in ("finished", "failed"):
                line.word = word
            if word == "failed":
                self._lose(f"worker {index} at {line.address} has failed; its own log says why", on_loss)
            if word == "lost":
                self._lose(rest, on_loss)
        if said is None:
            self._close(index, "is dead, or cannot be reached any more", on_loss)
        with self._changed:
            self._changed.notify_all()

    def _close(self, index: int, why: str, on_loss: Callable[[str], None]) -> None:
        line = self._lines[index]
        line.is_open = False
        if not line.word:
            self._lose(f"worker {index} at {line.address} {why}", on_loss)
        with self._changed:
            self._changed.notify_all()

    def _lose(self, what: str, on_loss: Callable[[str], None]) -> None:
        """Passes on the first loss, and leaves this process a while to notice it by itself, in a call that fails."""
        if self.lost:
            return
        self.lost = what
        self._tell(f"lost {what}")

        def follow() -> None:
            if not self._parting.wait(_PARTING_SECS):
                on_loss(f"{what}. The same command goes on from the last checkpoint")

        threading.Thread(target=follow, name="lost", daemon=True).start()


# --- the chief ---


def receive(addresses: Sequence[str], *, timeout_secs: float, serve: Callable[[], int]) -> Peers:
    """Waits in the chief until all workers are there, and tells them where JAX' service is.

    Args:
        addresses: host:port of each process, the chief's first: at that all meet.
        timeout_secs: how long to wait, in seconds.
        serve: called once all are there; returns the port of the service.

    Raises:
        ConfigError: the processes do not agree on how many they are.
        RetryError: not all came in time, or the port is in use.
    """
    deadline = time.monotonic() + timeout_secs
    host, _, port = addresses[0].rpartition(":")
    there: dict[int, _Line] = {}
    with _listen(int(port)) as server, selectors.DefaultSelector() as selector, contextlib.ExitStack() as failing:
        selector.register(server, selectors.EVENT_READ)
        while len(there) < len(addresses) - 1:
            if time.monotonic() >= deadline:
                raise _late(addresses, there, timeout_secs)
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is server:
                    connection, (caller, *_) = server.accept()
                    failing.enter_context(connection)
                    selector.register(connection, selectors.EVENT_READ, _Line(connection, caller))
                elif not _is_welcome(key.data, there, addresses):
                    selector.unregister(key.fileobj)
                    key.data.socket.close()
        coordinator = f"{host}:{serve()}"
        failing.pop_all()
        for key in selector.get_map().values():
            if key.data is not None and key.data not in there.values():
                key.data.socket.close()
    for line in there.values():
        line.send(json.dumps({"coordinator": coordinator}))
    return Peers(there, coordinator)


def _is_welcome(line: _Line, there: dict[int, _Line], addresses: Sequence[str]) -> bool:
    """Takes down who has come; False for one that is gone again before all were there, or none of us."""
    said = line.read()
    if said == []:  # half a line
        return True
    hello = _parsed(said[0]) if said else {}
    index = hello.get("index")
    if not isinstance(index, int) or not 0 < index < len(addresses):
        for gone in [i for i, other in there.items() if other is line]:
            del there[gone]
        return False
    if hello.get("workers") != len(addresses):
        refusal = f"the chief knows of {len(addresses)} workers, and worker {index} of {hello.get('workers')}"
        line.send(json.dumps({"refused": refusal}))
        raise ConfigError(f"{refusal}. Give all of them the same cluster")
    line.address = addresses[index]
    there[index] = line  # of one that was started again the newest
    return True


def _late(addresses: Sequence[str], there: dict[int, _Line], timeout_secs: float) -> RetryError:
    """Says who is missing, here and to those who are not."""
    missing = ", ".join(f"worker {i} at {a}" for i, a in enumerate(addresses) if i and i not in there)
    for line in there.values():
        line.send(json.dumps({"missing": missing}))
    return RetryError(_MISSING.format(timeout_secs, missing))


def _listen(port: int) -> socket.socket:
    dual = socket.has_dualstack_ipv6()
    try:
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=dual)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"The chief cannot listen at port {port}: {error.strerror}. Give it another") from error
        raise RetryError(
            f"The port {port} of the chief is in use. Wait for the other run's end, or give the cluster another port"
        ) from error


# --- a worker ---


def report(addresses: Sequence[str], index: int, *, timeout_secs: float) -> Peers:
    """Calls the chief until all are there; one that is started again meanwhile, anew. See `receive`.

    Args:
        addresses: host:port of each process.
        index: of this process.
        timeout_secs: how long to wait, in seconds.
    """
    deadline = time.monotonic() + timeout_secs
    chief = addresses[0]
    host, _, port = chief.rpartition(":")
    reason = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            line = _Line(socket.create_connection((host, int(port)), timeout=left), chief)
        except OSError as error:
            reason = str(error.strerror or error)
            time.sleep(min(_RETRY_SECS, left))
            continue
        line.send(json.dumps({"index": index, "workers": len(addresses)}))
        answer = _answer(line, deadline)
        if "coordinator" in answer:
            line.socket.settimeout(None)
            return Peers({0: line}, answer["coordinator"])
        line.socket.close()
        if "refused" in answer:
            raise ConfigError(f"{answer['refused']}. Give all of them the same cluster")
        if "missing" in answer:
            raise RetryError(_MISSING.format(timeout_secs, answer["missing"]))
        reason = "it closes connections" if answer is _GONE else "it answers, and waits for others"
        time.sleep(_RETRY_SECS)
    raise RetryError(_MISSING.format(timeout_secs, f"worker 0, the chief, at {chief} ({reason})"))


def _answer(line: _Line, deadline: float) -> dict[str, str]:
    while (left := deadline - time.monotonic()) > 0:
        line.socket.settimeout(left)
        said = line.read()
        if said is None and time.monotonic() < deadline:
            return _GONE
        if said:
            return _parsed(said[0])
    return {}


def _parsed(text: str) -> dict:
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}
