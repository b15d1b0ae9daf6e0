"""What a run says, through Python's logging: plain lines for people, or JSON lines as Cloud Logging reads them.

Modules say things through `logging.getLogger(__name__)`; values go beside the message as `extra={"fields": {...}}`.
The one handler sits on the root logger, so that warnings of TensorFlow, absl and Python itself come out the same way.
JSON fields: https://cloud.google.com/logging/docs/structured-logging#special-payload-fields
Stacks: https://cloud.google.com/error-reporting/docs/formatting-error-messages
"""

import contextlib
import datetime
import json
import logging
import math
import os
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from trainer import terminal

# Of what is said of its own accord and is no warning: what the user asked for, which `quiet` leaves.
RESULT = (logging.INFO + logging.WARNING) // 2
FORMATS = ("text", "json")
_OURS = "trainer"
_STDERR = 2
_LABELS = "logging.googleapis.com/labels"

_log = logging.getLogger(_OURS)


def configure(
    format: str,
    *,
    redact: Callable[[str], str],
    quiet: bool = False,
    worker_index: int = 0,
    num_workers: int = 1,
) -> None:
    """Sends what is logged to stdout (INFO, RESULT) and stderr (WARNING and above); a second call replaces the first.

    Workers but the chief, of index 0, keep to warnings and errors. Uncaught exceptions of any thread are logged too.

    Args:
        format: of `FORMATS`.
        redact: takes secrets out of a text; every text passes through it.
        quiet: leave out INFO.
        worker_index: of this process among those that train together.
        num_workers: how many these are.
    """
    formatter: logging.Formatter = _Json(redact, worker_index, num_workers)
    if format == "text":
        formatter = _Text(redact, worker_index)
    global _formatter
    _formatter = formatter
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Console)]:
        root.removeHandler(old)
    level = logging.WARNING if worker_index else RESULT if quiet else logging.INFO
    root.addHandler(_Console(formatter, level))
    _log.setLevel(logging.INFO)
    # TensorFlow brings a handler of its own where it was imported before the root logger had any.
    tensorflow = logging.getLogger("tensorflow")
    for theirs in list(tensorflow.handlers):
        tensorflow.removeHandler(theirs)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread


def wanted_format(argv: Sequence[str]) -> str:
    """The log format that a command line asks for, looked up before anything is checked, so that what is wrong with the
    command line is said in it."""
    format = FORMATS[0]
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = argument.partition("=")
        if argument.startswith("-") and name.lstrip("-") == "log_format":
            format = value if equals else following
    return format if format in FORMATS else FORMATS[0]


def report_failure(message: str, exit_code: int, defect: BaseException | None = None) -> None:
    """The last line of a run that fails: `trainer: <message>` on stderr, or an entry of severity ERROR; of a defect
    CRITICAL and with its stack."""
    level = logging.CRITICAL if defect else logging.ERROR
    stack = defect if isinstance(_formatter, _Json) else None  # Error Reporting reads it; people have a file
    _log.log(level, "%s", message, exc_info=stack, extra={"fields": {"exit_code": exit_code}, "is_last_word": True})


def write_last_words(message: str, exit_code: int, *, stack: str | None = None) -> None:
    """The same for a process that ends from a thread: past logging and `sys.stderr`, whose locks others may hold."""
    record = logging.LogRecord(_OURS, logging.ERROR, __file__, 0, message, None, None, sinfo=stack)
    record.fields, record.is_last_word = {"exit_code": exit_code}, True
    terminal.leave()
    os.write(_STDERR, f"{_formatter.format(record)}\n".encode())


class _Console(logging.Handler):
    """Writes to stdout or stderr as they are at that moment (tests and libraries replace them)."""

    def __init__(self, formatter: logging.Formatter, level: int):
        super().__init__(level)
        self._failing = False
        self.setFormatter(formatter)
        # Notes of libraries say nothing a user of this program can act on.
        self.addFilter(lambda record: _is_ours(record) or record.levelno >= logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        stream: TextIO = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
        try:
            # One write: lines of several threads and processes on one pipe stay whole.
            stream.write(self.format(record) + "\n")
            stream.flush()
        except (OSError, ValueError) as error:  # a full disk or a closed pipe must not end a run over its log
            if not self._failing:
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(f"{_OURS}: warning: the log cannot be written: {error}\n")
            self._failing = True
        except Exception:  # a message and arguments that do not fit: Python says where
            self.handleError(record)


class _Text(logging.Formatter):
    """The message as it is; before warnings and errors who speaks, and of which kind it is."""

    def __init__(self, redact: Callable[[str], str], worker_index: int):
        super().__init__()
        self._redact, self._worker_index = redact, worker_index

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            text = f"{self._prefix(record)}{text}"
        stack = _stack(record)
        return self._redact(f"{text}\n{stack}" if stack else text)

    def _prefix(self, record: logging.LogRecord) -> str:
        speaker = _OURS if _is_ours(record) else record.name
        worker = f"worker {self._worker_index}: " if self._worker_index else ""
        kind = "warning: " if record.levelno < logging.ERROR else "error: "
        return f"{speaker}: {worker}{'' if getattr(record, 'is_last_word', False) else kind}"


class _Json(logging.Formatter):
    """One JSON object a record, on one line."""

    def __init__(self, redact: Callable[[str], str], worker_index: int, num_workers: int):
        super().__init__()
        self._redact = redact
        self._worker_index, self._num_workers = worker_index, num_workers

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: Mapping[str, Any] = getattr(record, "fields", {})
        entry = {
            **{name: self._valid(value) for name, value in fields.items()},
            "severity": _severity(record.levelno),
            "message": self._redact(record.getMessage()),
            "time": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "logger": record.name,
            "worker_index": self._worker_index,
            _LABELS: {"worker_index": str(self._worker_index), "num_workers": str(self._num_workers)},
        }
        stack = _stack(record)
        if stack:
            entry["stack_trace"] = self._redact(stack)
        return json.dumps(entry, allow_nan=False)

    def _valid(self, value: Any) -> Any:
        """What JSON can hold; NaN and infinity, which it cannot, as text like in protobuf's JSON."""
        if value is None or isinstance(value, bool | int):
            return value
        if isinstance(value, float):
            if math.isfinite(value):
                return value
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        if isinstance(value, Mapping):
            return {self._redact(str(name)): self._valid(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._valid(inner) for inner in value]
        if hasattr(value, "item"):  # a scalar of NumPy or TensorFlow
            return self._valid(value.item())
        return self._redact(str(value))


_formatter: logging.Formatter = _Text(lambda text: text, 0)  # of the console


def _is_ours(record: logging.LogRecord) -> bool:
    return record.name.split(".")[0] == _OURS


def _severity(level: int) -> str:
    """Cloud Logging's name of the highest level of Python's that `level` reaches."""
    for severity in ("CRITICAL", "ERROR", "WARNING", "INFO"):
        if level >= getattr(logging, severity):
            return severity
    return "DEBUG"


def _stack(record: logging.LogRecord) -> str:
    if record.exc_info and record.exc_info[0]:
        return "".join(traceback.format_exception(*record.exc_info)).rstrip("\n")
    return record.stack_info or ""


def _log_uncaught(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, where)
        return
    summary = traceback.format_exception_only(kind, error)[-1].strip()
    _log.critical("a defect of the trainer: %s", summary, exc_info=(kind, error, where))


def _log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    name = args.thread.name if args.thread else "a thread"
    summary = traceback.format_exception_only(args.exc_type, args.exc_value)[-1].strip()
    _log.error(
        "an error in thread %s: %s",
        name,
        summary,
        exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
    )
