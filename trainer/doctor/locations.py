"""Where a run reads and writes: local directories, and gs:// by TensorFlow's own client, which is what a run uses."""

import concurrent.futures
import dataclasses
import functools
import importlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from data import catalog
from trainer.doctor import accelerator, machine
from trainer.doctor.findings import Case, Finding, failed, passed, skipped, warned
from trainer.options import LAST_RUN

LOGIN = "Run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to a service account's key"
ANSWER_SECS = 15.0  # for all places; counted from where TensorFlow is imported
_AGAIN = "Check the network, https_proxy and Google Cloud's status, and run again"
_READER, _WRITER = "roles/storage.objectViewer", "roles/storage.objectAdmin"
_PERMISSION = re.compile(r"storage\.\w+\.\w+")
_LOCATED = re.compile(r"is in '([^']*)' location")
_NOWHERE = "nowhere"
# Options that name a directory -> whether a run writes there.
_OPTIONS = {"model_dir": True, "export_dir": True, "tensorboard_dir": True, "init_from": False, "cache_dir": True}
_PROBE = ".doctor-probe"
# Parts of the world that a bucket may span, and what names of zones in them begin with:
# https://cloud.google.com/storage/docs/locations#location-mr
_MULTI_REGIONS = {"us": "us-", "eu": "europe-", "asia": "asia-"}
# TensorFlow's own are 10 tries, the first after 1 s: more patience than a look has time.
_RETRIES = {"GCS_RETRY_CONFIG_MAX_RETRIES": "2", "GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "100000"}


@dataclasses.dataclass(frozen=True)
class Place:
    """A directory in the flags."""

    option: str
    path: str
    writes: bool

    @property
    def is_remote(self) -> bool:
        """Whether it is on a network file system, such as gs://."""
        return catalog.is_remote(self.path)

    @property
    def bucket(self) -> str:
        """gs://bucket of it."""
        scheme, _, rest = self.path.partition("://")
        return f"{scheme}://{rest.split('/')[0]}"


def of(case: Case) -> list[Place]:
    """All directories that the run would read or write."""
    config, found = case.config, []
    described = catalog.described_by(config.dataset) if config.dataset else None
    if catalog.is_remote(described):
        found.append(Place("dataset", str(described), False))
    elif described is not None and not os.path.isabs(described):
        data_dir = config.data_dir or case.environ.get("TFDS_DATA_DIR")
        if data_dir is not None and catalog.is_remote(data_dir):
            found.append(Place("data_dir", data_dir, False))
    for option, writes in _OPTIONS.items():
        path = getattr(config, option)
        if path and (option, path) != ("init_from", LAST_RUN):
            found.append(Place(option, path, writes))
    return found


# --- this machine ---


def local(case: Case) -> Iterator[Finding]:
    """Directories on this machine: written where a run writes, there where it reads."""
    places = [place for place in of(case) if not place.is_remote]
    target = accelerator.target_of(case)
    if not case.config.model_dir:
        yield skipped("model_dir", "not given")
    for place in places:
        if target is not None and target.is_remote:
            what = f"{place.path} is of this machine, and the TPU's worker is another one"
            yield failed(place.option, what, f"Give --{place.option}=gs://...")
        elif place.writes:
            yield machine.writable(place.option, place.path, f"Give --{place.option} another directory")
        elif os.path.isdir(place.path):
            yield passed(place.option, place.path)
        else:
            yield failed(place.option, f"there is no directory {place.path}", f"Mend --{place.option}")


# --- gs:// ---


def buckets(case: Case) -> Iterator[Finding]:
    """Each place on gs://: list, read and, where a run writes, write and delete a probe object."""
    remote = [place for place in of(case) if place.is_remote]
    if not remote:
        yield skipped("buckets", "nothing is on gs://")
        return
    if "tensorflow" not in case.facts:
        yield skipped("buckets", "they are met through TensorFlow, which cannot be used here")
        return
    before_tensorflow(case)
    yield from _side_by_side(remote, _bucket, _silent)


def buckets_unfinished(how: str) -> Finding:
    """TensorFlow's client has not even come so far as to say that nobody answers."""
    return failed("buckets", f"gs:// was not looked at to the end: {how}", _AGAIN, retryable=True)


def _silent(place: Place) -> Finding:
    what = f"{place.path} does not answer within {ANSWER_SECS:g} s"
    return failed(place.option, what, _AGAIN, retryable=True)


def _side_by_side(
    places: Sequence[Place], look: Callable[[Place], Finding], silent: Callable[[Place], Finding]
) -> Iterator[Finding]:
    """What `look` finds at each place, or `silent` where it does not come back.

    In one process, since each import of TensorFlow takes seconds; its file functions let other threads run.
    """
    importlib.import_module("tensorflow")
    pool = concurrent.futures.ThreadPoolExecutor(len(places))
    futures = {pool.submit(look, place): place for place in places}
    concurrent.futures.wait(futures, timeout=ANSWER_SECS)
    for future, place in futures.items():
        yield future.result() if future.done() else silent(place)


def _bucket(place: Place) -> Finding:
    from trainer import storage

    done: list[str] = []
    for verb, permission, work in _operations(place):
        try:
            work()
        except storage.FILE_ERRORS as error:
            return _bucket_failure(place, verb, permission, storage.fault(error).name, storage.reason(error))
        done.append(verb)
    return passed(place.option, f"{place.path}: {', '.join(done)}")


def before_tensorflow(case: Case) -> None:
    """Call before a probe of the second round imports TensorFlow: it takes no chip and no GPU, and is less patient."""
    os.environ |= {"TPU_LOAD_LIBRARY": "0", "CUDA_VISIBLE_DEVICES": "-1"}
    for name, value in _RETRIES.items():
        os.environ.setdefault(name, value)
    if not case.facts.get("on_google_cloud"):
        os.environ["NO_GCE_CHECK"] = "true"  # else it waits for a metadata server that is not there


def _operations(place: Place) -> Iterator[tuple[str, str, Callable[[], Any]]]:
    """What is done there: verb, the permission that it takes, and the work."""
    import tensorflow as tf

    from trainer import storage

    directory = place.path.rstrip("/")
    names: list[str] = []
    yield "list", "storage.objects.list", lambda: names.extend(storage.names(directory))
    if place.writes:
        name, content = f"{directory}/{_PROBE}-{uuid.uuid4().hex}", b"the doctor was here"
        yield "write", "storage.objects.create", lambda: storage.replace(name, content)
        yield "read", "storage.objects.get", lambda: storage.read(name)
        yield "delete", "storage.objects.delete", lambda: tf.io.gfile.remove(name)
        return

    def read_any() -> None:
        for file in names:
            path = f"{directory}/{file}"
            if not tf.io.gfile.isdir(path):
                with tf.io.gfile.GFile(path, "rb") as opened:
                    opened.read(1)
                return

    yield "read", "storage.objects.get", read_any


def _bucket_failure(place: Place, verb: str, permission: str, fault: str, reason: str) -> Finding:
    received = f"Received: {reason}"
    if fault == "DENIED":
        missing = found[0] if (found := _PERMISSION.search(reason)) else permission
        role = _WRITER if place.writes else _READER
        remedy = (
            f"Give the account of the run {role}: gcloud storage buckets add-iam-policy-binding {place.bucket} "
            f"--member=serviceAccount:ACCOUNT --role={role}. Where it has none: {LOGIN}"
        )
        what = f"no permission to {verb} in {place.path}: {missing} is missing. {received}"
        return failed(place.option, what, remedy)
    if fault == "MISSING":
        what = f"there is no {place.bucket}, or nothing in it to {verb}. {received}"
        return failed(place.option, what, f"Mend --{place.option}, or create the bucket")
    if fault == "SPACE":
        what = f"no room to {verb} in {place.path}. {received}"
        return failed(place.option, what, "Make room in TMPDIR, where TensorFlow stages it", retryable=True)
    what = f"{place.path}: cannot {verb} now. {received}"
    return failed(place.option, what, _AGAIN, retryable=True)


def regions(case: Case) -> Iterator[Finding]:
    """Where buckets are, against the zone of the TPU."""
    zone = zone_of(case)
    buckets = {place.bucket: place for place in of(case) if place.is_remote}
    if zone is None or not buckets or "tensorflow" not in case.facts:
        yield skipped("region", "it takes a bucket, a TPU whose zone is known, and TensorFlow")
        return
    before_tensorflow(case)
    # TensorFlow's client refuses to open what lies elsewhere than here, and says where that is. It reads this when it
    # is imported (gcs_file_system.cc), so this process is of no other use.
    os.environ["GCS_ALLOWED_BUCKET_LOCATIONS"] = _NOWHERE
    untold = functools.partial(_untold, why=f"no answer within {ANSWER_SECS:g} s")
    yield from _side_by_side(list(buckets.values()), functools.partial(_region, zone), untold)


def regions_unfinished(how: str) -> Finding:
    """It is no fault of the region that nobody answers."""
    return skipped("region", how)


def _region(zone: str, place: Place) -> Finding:
    import tensorflow as tf

    from trainer import storage

    try:
        with tf.io.gfile.GFile(f"{place.bucket}/{_PROBE}", "rb") as file:
            file.read(1)
    except storage.FILE_ERRORS as error:
        reason = storage.reason(error)
        if found := _LOCATED.search(reason):
            return judged_region(place.bucket, found[1].lower(), zone)
        return _untold(place, reason)
    return _untold(place, "it was opened")


def _untold(place: Place, why: str) -> Finding:
    return skipped("region", f"{place.bucket} does not tell (it takes storage.buckets.get): {why}")


def zone_of(case: Case) -> str | None:
    """The zone of the TPU, or of this VM where it is the TPU's."""
    target = accelerator.target_of(case)
    if target is None or target.tpu is None:
        return None
    return target.zone or case.facts.get("zone")


def judged_region(bucket: str, location: str, zone: str) -> Finding:
    """What the place of a bucket means for a TPU in `zone`."""
    if zone.startswith(f"{location}-") or zone.startswith(_MULTI_REGIONS.get(location, _NOWHERE)):
        return passed("region", f"{bucket} is in {location}, the TPU in {zone}")
    what = f"{bucket} is in {location}, the TPU in {zone}: every byte crosses regions, slowly and for money"
    return warned("region", what, f"Copy it to a bucket in {zone.rpartition('-')[0]}, unless {location} spans that too")
