"""Which line of the user's own an error or an operation comes from: not of libraries, of this program, nor of what
called it."""

import dataclasses
import itertools
import linecache
import os
import pathlib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import data

# File and number of a line.
Line = tuple[str, int]

_HERE = pathlib.Path(__file__).parent
_OURS = tuple(f"{os.path.abspath(path)}/" for path in (str(_HERE), *data.__path__))
_MODELS = f"{_HERE}/models/"
# By their names: a model of the user's may be installed beside them.
_LIBRARIES = re.compile(
    r"/(site|dist)-packages/(absl|array_record|etils|google|h5py|jax|jaxlib|keras|ml_dtypes|numpy|optree|pandas|PIL"
    r"|pyarrow|scipy|sklearn|tensorflow|tensorflow_datasets|tensorflow_probability|tf_keras|tree|wrapt)/"
)
_STANDARD = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_ENTRY = re.compile(r'^[ \t]*File "(?P<path>[^"]+)", line (?P<line>\d+).*$', re.MULTILINE)
# With the header of a traceback, and what is shown of the line.
_SHOWN = re.compile(
    r"^[ \t]*Traceback \(most recent call last\):$|"
    r'^(?P<indent>[ \t]*)File "[^"]+", line \d+.*$(\n(?P=indent)[ \t]+.*$)*',
    re.MULTILINE,
)
_TEXT_CHARS = 60
# Of an error's text, as much at its beginning and at its end: patterns take too long for megabytes.
_END_CHARS = 20_000


@dataclasses.dataclass(frozen=True)
class Place:
    """A line of a program. `is_last`: nothing of the trainer's was called from there when it failed."""

    path: str
    line: int
    is_last: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"

    def quoted(self) -> str:
        """With what stands there."""
        text = linecache.getline(self.path, self.line).strip()
        if len(text) > _TEXT_CHARS:
            text = f"{text[:_TEXT_CHARS]}..."
        return f"{self} ({text})" if text else str(self)


def of_error(error: BaseException) -> Place | None:
    """The innermost line of the user's, from the text of an error or else its traceback; None where there is none.

    TensorFlow tells in the text where an operation of a graph was made.
    """
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return Place(error.filename, error.lineno, is_last=True)
    for seen in chain(error):
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(seen.__traceback__)]
        for lines in (named_in(text_of(seen)), frames):
            if place := innermost(lines):
                return place
    return None


def innermost(lines: Iterable[Line]) -> Place | None:
    """The last line that is the user's, of those of a traceback."""
    lines = list(lines)
    below = list(itertools.dropwhile(lambda line: not is_ours(line[0]), lines)) or lines
    known = [(path, line) for path, line in below if not _is_library(path)]
    for path, line in reversed(known):
        if not is_ours(path):
            return Place(path, line, is_last=(path, line) == known[-1])
    return None


def of_operation(operation: Any) -> str:
    """The user's line that made an operation of TensorFlow's graph, quoted; "" where there is none."""
    place = innermost((frame.filename, frame.lineno) for frame in operation.traceback)
    return place.quoted() if place else ""


def named_in(text: str) -> list[Line]:
    """The lines of a traceback within a text.

    TensorFlow leaves out what all its paths begin with; a file of ours among them tells what that was.
    """
    found = [(match["path"], int(match["line"])) for match in _ENTRY.finditer(text)]
    ours = [f"{path}" for path in _HERE.glob("*.py")]
    cut = next((whole.removesuffix(path) for path, _ in found for whole in ours if whole.endswith(f"/{path}")), "/")
    return [(path if path.startswith(("/", "<")) else f"{cut}{path}", line) for path, line in found]


def text_of(error: BaseException) -> str:
    """What an error says; of what is very long the beginning and the end."""
    try:
        text = str(error)
    except Exception as fault:  # of the user's class
        text = f"its message fails with {type(fault).__name__}"
    return text if len(text) <= 2 * _END_CHARS else f"{text[:_END_CHARS]}...{text[-_END_CHARS:]}"


def without(text: str) -> str:
    """A text without the lines of tracebacks within it."""
    return _SHOWN.sub("", text)


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and those that led to it, as Python prints them, from the last to the first."""
    told: set[int] = set()
    while error is not None and id(error) not in told:
        yield error
        told.add(id(error))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_ours(path: str) -> bool:
    """Whether a file is the trainer's; its models count as the user's, who put theirs there too."""
    is_model = path.startswith(_MODELS) and not os.path.basename(path).startswith("_")
    return is_trainers(path) and not is_model


def is_trainers(path: str) -> bool:
    """Whether a file is part of the trainer, its models among them."""
    return path.startswith(_OURS)


def _is_library(path: str) -> bool:
    if is_trainers(path):
        return False
    generated = path.startswith("<") or "__autograph_generated_file" in path
    standard = path.startswith(_STANDARD) and "-packages/" not in path
    return generated or standard or _LIBRARIES.search(path) is not None


def users_line() -> str:
    """The innermost line of the user's that runs now, with what stands there; empty where there is none."""
    frames = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    place = innermost(reversed(list(frames)))
    return place.quoted() if place else ""
