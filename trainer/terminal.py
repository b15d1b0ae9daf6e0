"""A line at the bottom of the terminal that says what is being done, while all that is written scrolls above it.

One line a process, as it has one console. A thread draws it over itself with a single write, so it does not flicker.
Streams of Python are led around it; what writes to the descriptor past them (C++) can spoil it until it is drawn again.
tqdm is not what draws it: that counts one loop, and knows nothing of phases, of the rest of the console, of a process
that ends from a thread, or of one in the background of a shell.
"""

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TextIO

# From the columns that there are to a text of at most that many, on one line.
Source = Callable[[int], str]

_REFRESH_SECS = 0.5
_LEAVING_SECS = 0.5  # a terminal that is held (Ctrl-S) must not keep a process that ends
_ERASE_LINE = "\r\x1b[K"
_ERASE_REST = "\x1b[K"
_ASCII = str.maketrans("━─", "#-")  # for terminals that know no more


class _Line:
    """The line, and the streams that write above it. Made by `begin`."""

    def __init__(self, stream: TextIO, source: Source):
        self.source = source
        self._descriptor, self._encoding = stream.fileno(), stream.encoding
        self._knows_bars = "utf" in stream.encoding.lower()
        self._text = ""  # as it stands there now
        self._is_torn = False  # somebody has written a part of a line, which stays until it is whole
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._replaced: list[tuple[str, TextIO]] = []
        threading.Thread(target=self._keep, name="terminal", daemon=True).start()

    def lead_around(self, name: str) -> None:
        """Lets what is written to `sys.NAME` come above the line from now on."""
        stream = getattr(sys, name)
        self._replaced.append((name, stream))
        setattr(sys, name, _Above(stream, self))

    @contextlib.contextmanager
    def making_room(self, text: str) -> Iterator[None]:
        """Around writing `text`."""
        with self._lock:
            shown, self._text = self._text, ""
            if shown:
                self._write(_ERASE_LINE)
            try:
                yield
            finally:
                if text:
                    self._is_torn = not text.endswith(("\n", "\r"))
                if shown:
                    self._draw(shown)

    def end(self) -> None:
        """Clears the line for good; called twice, or while another thread is held up in a write, it does no harm."""
        self._over.set()
        if self._lock.acquire(timeout=_LEAVING_SECS):
            try:
                if self._text:
                    self._write(_ERASE_LINE)
                self._text = ""
            finally:
                self._lock.release()
        for name, stream in self._replaced:
            if isinstance(getattr(sys, name), _Above):
                setattr(sys, name, stream)
        self._replaced.clear()

    def forget(self) -> None:
        """In a forked child, which has neither the thread nor a right to the lock: its parent draws on."""
        self._lock, self._text = threading.RLock(), ""
        self.end()

    def _keep(self) -> None:
        while not self._over.wait(_REFRESH_SECS):
            with contextlib.suppress(OSError):  # no size, no terminal any more
                columns = os.get_terminal_size(self._descriptor).columns
                text = self.source(columns - 1)  # in the last column some terminals wrap
                with self._lock:
                    self._draw(text)

    def _draw(self, text: str) -> None:
        if self._over.is_set() or self._is_torn or not _is_in_foreground(self._descriptor):
            return
        self._write(f"\r{text if self._knows_bars else text.translate(_ASCII)}{_ERASE_REST}")
        self._text = text

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._descriptor, text.encode(self._encoding, errors="replace"))


class _Above:
    """A stream whose text comes above the line; all else of it is as it was."""

    def __init__(self, stream: TextIO, line: _Line):
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        """As of the stream."""
        with self._line.making_room(text):
            written = self._stream.write(text)
            self._stream.flush()
        return written

    def writelines(self, lines: Any) -> None:
        """As of the stream."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_line: _Line | None = None  # of this process


def begin(source: Source) -> None:
    """Shows the line, where there is a terminal for it."""
    global _line
    if _line is None and is_wanted(sys.stdout, sys.stderr, os.environ):
        _line = _Line(sys.stderr, source)
        os.register_at_fork(after_in_child=_line.forget)
        for name in ("stdout", "stderr"):
            if getattr(sys, name).isatty():
                _line.lead_around(name)


def show(source: Source) -> None:
    """From now on the line, if there is one, says what `source` does."""
    if _line is not None:
        _line.source = source


def leave() -> None:
    """Clears the line for good. From any thread, at any moment."""
    global _line
    line, _line = _line, None
    if line is not None:
        line.end()


def is_wanted(stdout: TextIO | None, stderr: TextIO | None, environ: Mapping[str, str]) -> bool:
    """Whether a person looks: stderr is a terminal that can erase, and stdout is one too or goes to a file.

    Down a pipe stdout may come to the same terminal, as from `tee`, and then nothing can be led around the line.
    """
    if stdout is None or stderr is None or environ.get("TERM", "dumb") == "dumb":
        return False
    try:
        if not stderr.isatty():
            return False
        return stdout.isatty() or not (_is(stdout, stat.S_ISFIFO) or _is(stdout, stat.S_ISSOCK))
    except (OSError, ValueError):  # closed
        return False


def _is(stream: TextIO, kind: Callable[[int], bool]) -> bool:
    return kind(os.fstat(stream.fileno()).st_mode)


def _is_in_foreground(descriptor: int) -> bool:
    """Whether the terminal is this job's, and not that of a shell which has put it aside (`&`, Ctrl-Z)."""
    try:
        return os.tcgetpgrp(descriptor) == os.getpgrp()
    except OSError:  # not the terminal that signals come from
        return True
