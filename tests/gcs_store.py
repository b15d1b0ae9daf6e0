"""What a Google Cloud Storage holds and how it fails: objects with generations, uploads under way, faults."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import pathlib
import random
import re
import threading
import time
import typing
import urllib.parse


@dataclasses.dataclass(frozen=True)
class Blob:
    """One generation of an object."""

    data: bytes
    generation: int
    updated: str


@dataclasses.dataclass
class Upload:
    """A resumable upload under way."""

    bucket: str
    name: str
    query: dict[str, str]
    data: bytearray = dataclasses.field(default_factory=bytearray)


@dataclasses.dataclass
class Fault:
    """What goes wrong, with which requests, how often."""

    code: int | None = None
    drop: str | None = None
    lose: bool = False
    delay_secs: float = 0.0
    times: int | None = 1
    method: str = ""
    path: str = ""
    message: str = "as asked for"  # that an answer of `code` carries
    share: float = 1.0  # of the requests that it is about; which ones follows from them, not from their order

    def matches(self, method: str, path: str) -> bool:
        """Whether it is about this request; `path` is unquoted and has its query."""
        return bool(re.fullmatch(self.method or ".*", method) and re.search(self.path, path)) and self.times != 0


class StorageError(Exception):
    """An answer other than success."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code


class Store:
    """Objects by bucket and name, thread-safe; in a directory too, where one is given, so that they survive."""

    def __init__(self, buckets: typing.Iterable[str], directory: pathlib.Path | None):
        self.lock = threading.RLock()
        self.buckets: dict[str, dict[str, Blob]] = {bucket: {} for bucket in buckets}
        self.uploads: dict[str, Upload] = {}
        self.faults: list[Fault] = []
        self.log: list[dict] = []
        self._asked: collections.Counter[str] = collections.Counter()
        self._generation = int(time.time() * 1e6)  # larger than those of a server before, as Google's are
        self._directory = directory
        for bucket in self.buckets:
            for file in sorted((directory / bucket).glob("*")) if directory else []:
                self._add(bucket, urllib.parse.unquote(file.name), file.read_bytes())

    def get(self, bucket: str, name: str) -> Blob:
        """The object; StorageError 404 where there is none."""
        with self.lock:
            if bucket not in self.buckets or name not in self.buckets[bucket]:
                raise StorageError(404, f"No such object: {bucket}/{name}")
            return self.buckets[bucket][name]

    def put(self, bucket: str, name: str, data: bytes, query: typing.Mapping[str, str]) -> Blob:
        """Makes a new generation of an object, whole."""
        with self.lock:
            self._check(bucket, name, query)
            if self._directory:
                (self._directory / bucket).mkdir(parents=True, exist_ok=True)
                (self._directory / bucket / urllib.parse.quote(name, safe="")).write_bytes(data)
            return self._add(bucket, name, data)

    def delete(self, bucket: str, name: str, query: typing.Mapping[str, str]) -> None:
        """Removes an object."""
        with self.lock:
            self.get(bucket, name)
            self._check(bucket, name, query)
            del self.buckets[bucket][name]
            if self._directory:
                (self._directory / bucket / urllib.parse.quote(name, safe="")).unlink()

    def metadata(self, bucket: str, name: str) -> dict[str, str]:
        """As the API describes an object."""
        blob = self.get(bucket, name)
        return {
            "kind": "storage#object",
            "bucket": bucket,
            "name": name,
            "size": str(len(blob.data)),
            "generation": str(blob.generation),
            "metageneration": "1",
            "updated": blob.updated,
            "timeCreated": blob.updated,
        }

    def list(self, bucket: str, query: typing.Mapping[str, str], page_size: int) -> dict:
        """One page of a listing, in the order of names."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        size = min(page_size, int(query.get("maxResults", page_size)))
        with self.lock:
            entries: dict[str, bool] = {}  # name of an object, or prefix -> whether it is a prefix
            for name in sorted(self.buckets[bucket]):
                rest = name.removeprefix(prefix) if name.startswith(prefix) else None
                if rest is None:
                    continue
                if delimiter and delimiter in rest:
                    entries[prefix + rest.split(delimiter)[0] + delimiter] = True
                else:
                    entries[name] = False
            left = [name for name in sorted(entries) if name > query.get("pageToken", "")]
            page = left[:size]
            answer: dict[str, typing.Any] = {"kind": "storage#objects"}
            if items := [self.metadata(bucket, name) for name in page if not entries[name]]:
                answer["items"] = items
            if prefixes := [name for name in page if entries[name]]:
                answer["prefixes"] = prefixes
            if len(left) > size:
                answer["nextPageToken"] = page[-1]
            return answer

    def fault(self, method: str, path: str) -> Fault | None:
        """The first fault that hits a request, counted."""
        with self.lock:
            request = f"{method} {path}"
            self._asked[request] += 1
            for place, fault in enumerate(self.faults):
                chance = random.Random(f"{place} {request} {self._asked[request]}").random()
                if fault.matches(method, path) and chance < fault.share:
                    fault.times = None if fault.times is None else fault.times - 1
                    return fault
            return None

    def _add(self, bucket: str, name: str, data: bytes) -> Blob:
        self._generation += 1
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"
        blob = self.buckets[bucket][name] = Blob(data, self._generation, now)
        return blob

    def _check(self, bucket: str, name: str, query: typing.Mapping[str, str]) -> None:
        if bucket not in self.buckets:
            raise StorageError(404, f"The specified bucket does not exist: {bucket}")
        if "ifGenerationMatch" in query:
            blob = self.buckets[bucket].get(name)
            if int(query["ifGenerationMatch"]) != (blob.generation if blob else 0):
                raise StorageError(412, "At least one of the pre-conditions you specified did not hold.")
