"""Which lines of a traceback are the user's own: not of Python, TensorFlow or Keras, nor of this program."""

import linecache
import pathlib
import re
import sysconfig
from collections.abc import Iterable

_HERE = pathlib.Path(__file__).parent
_OURS = (f"{_HERE}/", f"{_HERE.parent / 'data'}/")
_MODELS = f"{_HERE / 'models'}/"  # read by users, and copied for models of their own
_PACKAGES = re.compile(r"/(site|dist)-packages/(absl|keras|numpy|tensorflow|tensorflow_datasets|tf_keras|tree)/")
_LIBRARY = f"{sysconfig.get_paths()['stdlib']}/"
_TEXT_CHARS = 60
_ENTRY = re.compile(r'File "([^"]+)", line (\d+)')


def is_users(file: str) -> bool:
    """Whether a source file is the user's: a model of `trainer/models` counts as theirs."""
    if file.startswith("<") or _PACKAGES.search(file):
        return False
    if file.startswith(_LIBRARY):
        return "-packages/" in file
    return file.startswith(_MODELS) or not file.startswith(_OURS)


def innermost(frames: Iterable[tuple[str, int]]) -> str | None:
    """`file:line` and what stands there, for the last of `(file, line)` that is the user's own; None without one."""
    own = [(file, line) for file, line in frames if is_users(file)]
    if not own:
        return None
    file, line = own[-1]
    text = linecache.getline(file, line).strip()
    if len(text) > _TEXT_CHARS:
        text = f"{text[:_TEXT_CHARS]}..."
    return f"{file}:{line}" + (f" ({text})" if text else "")


def named_in(text: str) -> list[tuple[str, int]]:
    """`(file, line)` of each entry of a traceback within a text: TensorFlow's on where an operation was made.

    TensorFlow leaves out what all its paths begin with; a file of ours among them tells what that was.
    """
    found = _ENTRY.findall(text)
    known = f"{_HERE / 'replicated.py'}"
    cut = next((known.removesuffix(file) for file, _ in found if known.endswith(file)), "")
    return [(file if file.startswith(("/", "<")) else cut + file, int(line)) for file, line in found]


def of_exception(error: BaseException) -> list[tuple[str, int]]:
    """`(file, line)` of each frame that an exception passed, those of its causes last."""
    frames: list[tuple[str, int]] = []
    seen: BaseException | None = error
    while seen is not None:
        where = seen.__traceback__
        while where is not None:
            frames.append((where.tb_frame.f_code.co_filename, where.tb_lineno))
            where = where.tb_next
        seen = seen.__cause__ or seen.__context__
    return frames


def root_of(error: BaseException) -> BaseException:
    """What an exception goes back to: libraries wrap those of user code in their own."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
