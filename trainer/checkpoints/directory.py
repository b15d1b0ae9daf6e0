"""Checkpoints as they lie in a directory: what is complete, what is whole, what was left behind.

    DIRECTORY/STEP/arrays-TOKEN.index, .data-...   a tensor bundle (bundle.py); every write has a token of its own
    DIRECTORY/STEP/COMMIT.json                     the marker, written last: what has one is complete

Nothing that a marker names is ever written again: a step saved anew gets a new bundle, and its marker is replaced
whole. So a process killed anywhere leaves either the checkpoint before or the new one. Of two checkpoints the *newer*
is the one committed later, which after going back to an older one is not the one with the larger step.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import secrets
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from trainer import storage
from trainer.checkpoints import bundle
from trainer.checkpoints.bundle import DamagedError
from trainer.errors import ConfigError, RetryError
from trainer.storage import Fault

MARKER = "COMMIT.json"
FORMAT = 1

# Users know it by the name of the store.
_log = logging.getLogger("trainer.checkpoints")
_T = TypeVar("_T")
Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Saved:
    """One complete checkpoint whose bytes are whole; its arrays are read-only."""

    step: int
    arrays: Arrays
    facts: Mapping[str, Any]
    path: str


@dataclasses.dataclass(frozen=True)
class Marker:
    """The content of COMMIT.json. `serial` counts the commits of a run."""

    serial: int
    step: int
    facts: Mapping[str, Any]
    bundle_name: str
    arrays: Mapping[str, Mapping[str, Any]]  # name -> dtype, shape, crc32
    num_bytes: int
    time: str
    format: int = FORMAT

    def encode(self) -> bytes:
        """As JSON, with a checksum of itself."""
        fields = dataclasses.asdict(self)
        return json.dumps({"crc32": _crc_of(fields), **fields}, indent=1).encode()

    @classmethod
    def decode(cls, path: str, content: bytes) -> "Marker":
        """Raises DamagedError for what nobody wrote, ConfigError for what another version wrote."""
        try:
            fields = json.loads(content)
            intact = fields.pop("crc32") == _crc_of(fields)
            version = fields["format"]
            marker = cls(**fields) if version == FORMAT else None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedError(f"{path} is no marker: {type(error).__name__}: {error}") from error
        if not intact:
            raise DamagedError(f"{path} does not match its own checksum")
        if marker is None:
            raise ConfigError(
                f"the checkpoint is of another version of the trainer. Received: {path} with format {version}; "
                f"this version reads {FORMAT}. Use that version, or another model_dir"
            )
        return marker

    @property
    def forms(self) -> dict[str, bundle.Form]:
        """Dtype and shape of every array."""
        return {name: bundle.Form(a["dtype"], tuple(a["shape"])) for name, a in self.arrays.items()}


class CheckpointDir:
    """The checkpoints in one directory.

    Args:
        path: local or gs://.
        waits_secs: waits before what failed for a passing reason is tried again.

    Attributes:
        damaged: steps that were found damaged.
    """

    def __init__(self, path: str, waits_secs: Sequence[float]):
        self.path = path.rstrip("/")
        self.damaged: set[int] = set()
        self._waits = waits_secs

    # Reading.

    def marked(self) -> set[int]:
        """Steps that are complete."""
        return {step for step in self._steps() if MARKER in storage.names(self.of(step))}

    def markers(self) -> dict[int, Marker]:
        """The markers that are no garbage, by step."""
        found = {}
        for step in self.marked():
            with contextlib.suppress(DamagedError):
                found[step] = self.marker(step)
        return found

    def first_whole(
        self, order: Callable[[Sequence[Marker]], list[Marker]], only: str | tuple[str, ...] = ""
    ) -> Saved | None:
        """The first in order whose bytes are whole, with a warning for each that is not; None where there are none.

        Args:
            order: puts markers in the order of preference; may leave some out.
            only: what names of arrays begin with to be read.

        Raises:
            ConfigError: there are some and all are damaged, or no permission.
            RetryError: storage could not be read; that never counts as damage.
        """
        damaged: list[str] = []
        found = []
        for step in self.careful(self.marked):
            marker = self._whole_or_warn(step, functools.partial(self.marker, step), damaged)
            if marker is not None:
                found.append(marker)
        candidates = order(found)
        for marker in candidates:
            saved = self._whole_or_warn(marker.step, functools.partial(self.read, marker, only), damaged)
            if saved is not None:
                return saved
        if damaged and (candidates or not found):
            raise ConfigError(
                "no checkpoint is whole, and a run is not begun anew over damaged ones. Restore one from a copy, or "
                "use another model_dir. Received:" + "".join(f"\n  {text}" for text in damaged)
            )
        return None

    def verify(self, marker: Marker, arrays: Arrays) -> None:
        """Raises DamagedError where the bundle of a marker does not hold the bytes of `arrays`."""
        self._as_damage(lambda: bundle.verify(f"{self.of(marker.step)}/{marker.bundle_name}", arrays))

    def of(self, step: int) -> str:
        """The directory of one checkpoint."""
        return f"{self.path}/{step}"

    # Writing.

    def write_bundle(self, step: int, arrays: Arrays) -> str:
        """Writes a bundle, reads it back and makes it durable. Returns its name; leaves nothing where that fails.

        Raises:
            DamagedError: storage has not kept what was written.
            storage.FILE_ERRORS: it could not be written.
        """
        path, name = self.of(step), f"arrays-{secrets.token_hex(4)}"
        try:
            storage.make_directory(path)
            self._as_damage(lambda: bundle.write(f"{path}/{name}", arrays))  # on gs:// it renames what it uploaded
            self._as_damage(lambda: bundle.verify(f"{path}/{name}", arrays))
            storage.sync([*(f"{path}/{file}" for file in storage.names(path) if file.startswith(name)), path])
        except Exception:
            # A full disk stays full while half a checkpoint lies on it.
            with contextlib.suppress(*storage.FILE_ERRORS):
                self._remove_files(path, only=(name,))
            raise
        return name

    def commit(self, step: int, name: str, arrays: Mapping[str, Any], facts: Mapping[str, Any], serial: int) -> None:
        """Writes or replaces the marker of a step whose bundle `name` is whole; `arrays` as `describe` gives them."""
        num_bytes = sum(bundle.Form(a["dtype"], tuple(a["shape"])).num_bytes for a in arrays.values())
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        marker = Marker(serial, step, facts, name, arrays, num_bytes, now)
        storage.replace(f"{self.of(step)}/{MARKER}", marker.encode())

    def remove(self, step: int) -> None:
        """Removes a complete checkpoint, the marker first: a kill in between leaves no lie."""
        storage.remove(f"{self.of(step)}/{MARKER}")
        storage.remove_directory(self.of(step))

    def remove_leftovers(self) -> None:
        """Removes steps without a marker: what killed saves left."""
        marked = self.marked()
        for step in self._steps():
            if step not in marked:
                storage.remove_directory(self.of(step))

    def remove_strays(self, marker: Marker) -> None:
        """Removes what lies beside the bundle of a marker: what a rewrite replaced, and tries that failed."""
        self._remove_files(self.of(marker.step), but=(MARKER, f"{marker.bundle_name}."))

    def leftover_bytes(self) -> int:
        """Bytes that `remove_leftovers` would free in a local directory."""
        marked = self.marked()
        return sum(storage.size(self.of(step)) for step in self._steps() if step not in marked)

    def marker(self, step: int) -> Marker:
        """The marker of a step; raises DamagedError, ConfigError as `Marker.decode`, storage.FILE_ERRORS."""
        path = f"{self.of(step)}/{MARKER}"
        return Marker.decode(path, storage.read(path))

    def read(self, marker: Marker, only: str | tuple[str, ...] = "") -> Saved:
        """What a marker names, read whole; raises DamagedError, storage.FILE_ERRORS."""
        path = self.of(marker.step)
        forms = {name: form for name, form in marker.forms.items() if name.startswith(only)}
        arrays = dict(bundle.read(f"{path}/{marker.bundle_name}", forms))
        for name, array in arrays.items():
            if bundle.checksum(array) != marker.arrays[name]["crc32"]:
                raise DamagedError(f"{name} in {marker.bundle_name} does not match its checksum")
        return Saved(marker.step, arrays, marker.facts, path)

    def _as_damage(self, work: Callable[[], None]) -> None:
        """Does work on a bundle; what should be there by then and is not, or is not whole, is DamagedError."""
        try:
            work()
        except storage.FILE_ERRORS as error:
            if storage.fault(error) in (Fault.MISSING, Fault.UNREADABLE):
                raise DamagedError(f"not kept as it was written: {storage.reason(error)}") from error
            raise

    def _whole_or_warn(self, step: int, work: Callable[[], _T], damaged: list[str]) -> _T | None:
        """What `work` reads; None with a warning where that is damaged. Seen twice: storage may have answered badly."""
        with contextlib.suppress(DamagedError):
            return self.careful(work)
        try:
            return self.careful(work)
        except DamagedError as error:
            damaged.append(f"{self.of(step)}: {error}")
            self.damaged.add(step)
            _log.warning("the checkpoint in %s is damaged and passed over: %s", self.of(step), error)
            return None

    def careful(self, work: Callable[[], _T]) -> _T:
        """What `work` reads, with passing errors tried again and every other told as DamagedError or as one of ours."""
        try:
            return storage.retry(work, self._waits, storage.is_passing)
        except storage.FILE_ERRORS as error:
            kind = storage.fault(error)
            if kind in (Fault.MISSING, Fault.UNREADABLE):
                raise DamagedError(storage.reason(error)) from error
            received = f"Received: {self.path}: {storage.reason(error)}"
            if kind is Fault.DENIED:
                mend = storage.remedy(error) or "Give the run read permission"
                raise ConfigError(f"the checkpoints may not be read. {mend}. {received}") from error
            raise RetryError(
                f"the checkpoints could not be read. Run again once storage answers. {received}"
            ) from error

    def _remove_files(self, path: str, *, only: tuple[str, ...] = ("",), but: tuple[str, ...] = ()) -> None:
        """Removes files by what their names begin with."""
        for name in storage.names(path):
            if name.startswith(only) and not name.startswith(but):
                storage.remove(f"{path}/{name}")

    def _steps(self) -> list[int]:
        return [int(name) for name in storage.names(self.path) if name.isdecimal()]


def describe(arrays: Arrays) -> dict[str, dict[str, Any]]:
    """Dtype, shape and checksum of every array, as a marker has them."""
    return {
        name: {"dtype": form.dtype, "shape": list(form.shape), "crc32": bundle.checksum(array)}
        for name, array in arrays.items()
        for form in [bundle.form(array)]
    }


def one_of(path: str, waits_secs: Sequence[float]) -> tuple[CheckpointDir, int | None]:
    """The checkpoints meant by a model_dir, by its directory of checkpoints, or by one checkpoint (then its step too).

    Raises:
        ConfigError: it is none of them.
    """
    path = path.rstrip("/")
    parent, base = os.path.split(path)
    if MARKER in storage.names(path) and base.isdecimal():
        return CheckpointDir(parent, waits_secs), int(base)
    for directory in (path, f"{path}/checkpoints"):
        if any(name.isdecimal() for name in storage.names(directory)):
            return CheckpointDir(directory, waits_secs), None
    raise ConfigError(
        f"no checkpoint is there. Received: {path}. Give a model_dir, its directory of checkpoints, or one checkpoint "
        f"(a directory named by its step, with {MARKER} in it)"
    )


def _crc_of(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())
