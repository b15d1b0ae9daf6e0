"""What an exception that ends a run means to its user: cause and remedy first, the traceback in a file.

Failures that are known stand in `trainer/failures/`. Types and texts are enough to know one: no TensorFlow is needed.
"""

import contextlib
import datetime
import pathlib
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator

from data.errors import DataError
from trainer import logs, places
from trainer.errors import ConfigError, RetryError, TrainerError
from trainer.failures import KNOWN, Failure

_SHORT_CHARS = 700  # Keras says first where it was, then what
_TRACEBACK = "(the traceback "
_WRITING_SECS = 5.0  # a bucket that does not answer must not keep a process that has failed
_SPEAKERS = {"tensorflow": "TensorFlow", "keras": "Keras", "jax": "JAX", "jaxlib": "JAX", "numpy": "NumPy"}

_COLOURS = re.compile(r"\x1b\[\d*m")
# What else tells where in the graph an error came about, rather than what it is.
_NODES = re.compile(
    r"^(Graph execution error:|in user code:|Detected at node .*|The op is created at:.*"
    r"|Stack trace for op definition:.*|<stack traces unavailable>|[ \t]*tf2xla conversion failed while .*)$"
    r"|\{\{function_node [^}]*\}\} ?|\[\[[{A-Za-z][^\]]*\]\]| ?\[Op:[^\]]+\]( name:\s*$)?",
    re.MULTILINE,
)


# --- what it means ---


def find(error: BaseException | None) -> Failure | None:
    """The known failure that an exception, or one that led to it, is."""
    found = _find(error)
    return found[0] if found else None


def explain(error: BaseException, what: str = "") -> TrainerError:
    """What the user is told of an exception: a message in one line, and the exit code.

    Args:
        error: any; one of ours says itself what it means.
        what: what could not be done, to be said first.
    """
    if isinstance(error, TrainerError):
        return error
    if isinstance(error, DataError):
        return ConfigError(str(error))
    found = _find(error)
    if not found:
        return _unknown(error)
    known, seen = found
    place = None if known.retryable else places.of_error(error)
    sentences = [
        f"{what}: {known.cause}" if what else known.cause,
        known.remedy,
        *([f"It comes about at {place}"] if place else []),
        f"{_speaker(seen)} says: {short(seen)}",
    ]
    return (RetryError if known.retryable else ConfigError)(". ".join(sentences))


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns a known failure into an error that begins with what could not be done; lets others through.

    Raises:
        ConfigError, RetryError: see `trainer/failures/`.
    """
    try:
        yield
    except (TrainerError, DataError):
        raise
    except Exception as error:
        if find(error) is None:
            raise
        raise explain(error, what) from error


def short(error: BaseException) -> str:
    """What an error says, in one line, without where in a graph it came about."""
    text = " ".join(_said(error).split()) or type(error).__name__
    return text if len(text) <= _SHORT_CHARS else f"{text[:_SHORT_CHARS]}..."


def _find(error: BaseException | None) -> tuple[Failure, BaseException] | None:
    for seen in places.chain(error):
        kinds = {kind.__name__ for kind in type(seen).__mro__}
        for known in KNOWN:
            if (not known.kinds or kinds & set(known.kinds)) and re.search(known.pattern, _said(seen), re.DOTALL):
                return known, seen
    return None


def _said(error: BaseException) -> str:
    return _NODES.sub("", places.without(_COLOURS.sub("", places.text_of(error)))).strip()


def _unknown(error: BaseException) -> TrainerError:
    text = f"{type(error).__name__}: {short(error)}"
    place = places.of_error(error)
    if place and place.is_last:
        return ConfigError(f"the model's code fails at {place}: {text}")
    below = f" (under {place})" if place else ""
    return TrainerError(f"this is a defect of the trainer, or a failure that it does not know{below}: {text}")


def _speaker(error: BaseException) -> str:
    """Whose words the error's are, as far as its type or the code that raised it tells."""
    modules = [
        type(error).__module__,
        *(frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)),
    ]
    for module in (modules[0], modules[-1]):
        if speaker := _SPEAKERS.get(module.split(".")[0]):
            return speaker
    return "Python"


# --- telling it ---


@contextlib.contextmanager
def kept(directory: str, redact: Callable[[str], str]) -> Iterator[None]:
    """Writes the traceback of what fails inside to a file `failure-TIME.txt`, and notes on the exception where it is.

    Errors of ours say all there is to say, unless they tell of a user's own code.

    Args:
        directory: where to write if it is there, local or gs://; else it is the directory for temporary files.
        redact: takes secrets out of a text.
    """
    try:
        yield
    except BaseException as error:  # a model's sys.exit() too
        _keep(error, directory, redact)
        raise


def report(error: BaseException, redact: Callable[[str], str]) -> int:
    """Says the last words of a process that an exception ends, and returns its exit code."""
    _keep(error, "", redact)
    told = explain(error)
    message = " ".join([str(told), *(note for note in _notes(error) if note.startswith(_TRACEBACK))])
    is_known = isinstance(error, TrainerError | DataError) or find(error) is not None
    logs.report_failure(message, told.exit_code, None if is_known else error)
    return told.exit_code


def _keep(error: BaseException, directory: str, redact: Callable[[str], str]) -> None:
    if _says_all(error) or any(note.startswith(_TRACEBACK) for note in _notes(error)):
        return
    now = datetime.datetime.now(datetime.UTC)
    name = f"failure-{now:%Y%m%dT%H%M%S.%fZ}.txt"  # to the microsecond, for workers that fail together
    note = f"{_TRACEBACK}could not be written)"
    with contextlib.suppress(Exception):  # this must not fail itself, without memory or directory as it may be
        text = redact("".join(traceback.format_exception(error)))
        content = text.encode(errors="backslashreplace")
        folders = [directory, tempfile.gettempdir()]
        paths = [f"{folder.rstrip('/')}/{name}" for folder in folders if folder]
        note = next((f"{_TRACEBACK}is in {path})" for path in paths if _is_written(path, content)), note)
    error.add_note(note)


def _says_all(error: BaseException) -> bool:
    """Whether it is one of ours, and not about code that its user would want to look through."""
    if not isinstance(error, TrainerError | DataError):
        return False
    place = places.of_error(error.__cause__) if error.__cause__ else None
    return place is None or places.is_trainers(place.path)


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _is_written(path: str, content: bytes) -> bool:
    """Writes a file, or gives up on it within seconds."""
    done = threading.Event()

    def write() -> None:
        with contextlib.suppress(Exception):
            if "://" not in path:
                pathlib.Path(path).write_bytes(content)
                done.set()
            elif tensorflow := sys.modules.get("tensorflow"):
                with tensorflow.io.gfile.GFile(path, "wb") as file:
                    file.write(content)
                done.set()

    thread = threading.Thread(target=write, name="failure", daemon=True)
    thread.start()
    thread.join(_WRITING_SECS)
    return done.is_set()
