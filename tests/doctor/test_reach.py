"""Faults of what a run reaches over the network: TPU nodes, workers, buckets; real clients against loopback servers."""

import functools
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests import gcs
from tests.doctor.looks import Look, case, look
from tests.doctor.test_machine import tf_config
from tests.tpu_api_server import PROJECT, ZONE, Node, TpuApi
from trainer.doctor import accelerator, locations
from trainer.doctor.findings import Finding

HTTP2_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # all that a gRPC server says before it is asked anything
NODES = {
    "ready": Node("READY", ("10.0.0.2", 8470), kind="v3-8", version="2.20.0", health="HEALTHY"),
    "ill": Node("READY", ("10.0.0.2", 8470), kind="v3-8", health="UNHEALTHY_TENSORFLOW"),
    "creating": Node("CREATING"),
    "preempted": Node("PREEMPTED"),
}
BUCKET = f"gs://{gcs.BUCKET}"
ON_TPU = {"tpu": "my-tpu", "tpu_zone": "us-central1-a", "tpu_project": "p"}


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[Finding]]]:
    """What looks at nodes and buckets find, by their names here."""
    directory = tmp_path_factory.mktemp("reach")
    looks = {
        name: Look("accelerator.node", {"tpu": name, "tpu_zone": ZONE, "tpu_project": PROJECT})
        for name in (*NODES, "unknown", "403")
    }
    for name, path, writes in (
        ("written", f"{BUCKET}/run", True),
        ("read", f"{BUCKET}/data", False),
        ("unlisted", f"{BUCKET}/unlisted", True),
        ("unwritable", f"{BUCKET}/unwritable", True),
        ("unreadable", f"{BUCKET}/unreadable", False),
        ("undeletable", f"{BUCKET}/undeletable", True),
        ("failing", f"{BUCKET}/failing", True),
        ("no bucket", "gs://of-nobody/run", True),
    ):
        looks[name] = Look("locations.buckets", {"model_dir" if writes else "init_from": path})
    buckets = {"model_dir": f"{BUCKET}/run", "init_from": "gs://of-nobody/run"}
    regions = {"regions": Look("locations.regions", ON_TPU | buckets)}
    with gcs.serve(directory) as storage, TpuApi(NODES) as api:
        storage.write("data/shard", b"record")
        storage.write("unreadable/shard", b"record")
        storage.set_faults(
            gcs.Fault(code=403, times=None, path="unlisted"),
            gcs.Fault(code=403, times=None, method="POST|PUT", path="unwritable"),
            gcs.Fault(code=403, times=None, path="unreadable/shard(?!.*fields)"),
            gcs.Fault(code=403, times=None, method="DELETE", path="undeletable"),
            gcs.Fault(code=503, times=None, path="failing"),
        )
        environ = api.environ(directory) | storage.environ()
        yield look(looks, environ, directory) | look(regions, environ, directory, cold=True)


def only(found: list[Finding]) -> Finding:
    [finding] = found
    return finding


@pytest.mark.slow
def test_nodes(reached: dict[str, list[Finding]]) -> None:
    ready = only(reached["ready"])
    assert ready.status == "pass" and "READY: v3-8, 1 workers" in ready.what
    assert ready.facts == {
        "node_workers": [["10.0.0.2", 8470]],
        "node_type": "v3-8",
        "node_version": "2.20.0",
    }
    for name, retryable, words in (
        ("creating", True, "is CREATING, not READY. Wait until it is READY"),
        ("preempted", True, "is PREEMPTED, not READY. It was taken away"),
        ("unknown", False, "does not exist. Check the name"),
        ("403", False, "Ask for the role roles/tpu.viewer"),
    ):
        finding = only(reached[name])
        assert (finding.status, finding.retryable) == ("fail", retryable), finding
        assert words in finding.what
    assert [finding.status for finding in reached["ill"]] == ["pass", "fail"]
    assert "UNHEALTHY_TENSORFLOW" in reached["ill"][1].what and reached["ill"][1].retryable


@pytest.mark.slow
def test_buckets(reached: dict[str, list[Finding]]) -> None:
    assert only(reached["written"]).what == f"{BUCKET}/run: list, write, read, delete"
    assert only(reached["read"]).what == f"{BUCKET}/data: list, read"
    for name, permission, role in (
        ("unlisted", "storage.objects.list", "roles/storage.objectAdmin"),
        ("unwritable", "storage.objects.create", "roles/storage.objectAdmin"),
        ("unreadable", "storage.objects.get", "roles/storage.objectViewer"),
        ("undeletable", "storage.objects.delete", "roles/storage.objectAdmin"),
    ):
        finding = only(reached[name])
        assert (finding.status, finding.retryable) == ("fail", False), finding
        assert f"{permission} is missing" in finding.what and f"--role={role}" in finding.remedy
    failing, nobody = only(reached["failing"]), only(reached["no bucket"])
    assert (failing.status, failing.retryable) == ("fail", True) and "503" in failing.what
    assert (nobody.status, nobody.retryable) == ("fail", False) and "there is no gs://of-nobody" in nobody.what


@pytest.mark.slow
def test_regions(reached: dict[str, list[Finding]]) -> None:
    near, untold = reached["regions"]
    assert near.status == "pass" and "is in us-central1, the TPU in us-central1-a" in near.what, near
    assert untold.status == "skipped" and "gs://of-nobody does not tell" in untold.what


def test_regions_that_hold_others() -> None:
    judged = functools.partial(locations.judged_region, "gs://b")
    assert [judged(where, "europe-west4-a").status for where in ("eu", "europe-west4")] == ["pass", "pass"]
    far = [judged(where, "europe-west4-a") for where in ("us", "europe-west1", "nam4")]
    assert [finding.status for finding in far] == ["warn"] * 3 and "to a bucket in europe-west4" in far[0].remedy


@pytest.fixture
def listen() -> Iterator[Any]:
    """Opens listeners that greet a client and never answer again; returns their ports."""
    listeners, held = [], []

    def accept(listener: socket.socket, greeting: bytes) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            connection.sendall(greeting)

    def start(greeting: bytes) -> int:
        listeners.append(socket.create_server(("127.0.0.1", 0)))
        threading.Thread(target=accept, args=(listeners[-1], greeting), daemon=True).start()
        return listeners[-1].getsockname()[1]

    yield start
    for one in [*listeners, *held]:
        one.close()


def test_workers(listen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "PROBE_SECS", 0.5)
    alive, silent, foreign = listen(HTTP2_SETTINGS), listen(b""), listen(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        dead = closed.getsockname()[1]
    addresses = [f"127.0.0.1:{port}" for port in (alive, silent, dead, foreign)]
    found = list(accelerator.workers(case(tpu=f"grpc://{','.join(addresses)}")))
    told = [(finding.status, finding.retryable) for finding in found]
    assert told == [("fail", True), ("fail", True), ("fail", False), ("pass", False)]
    for finding, address, words in zip(
        found, addresses[1:], ("timed out", "Connection refused", "does not speak gRPC"), strict=False
    ):
        assert address in finding.what and words in finding.what
    assert found[-1].what == "1 of 4 answer"
    helper = case(data_service=f"grpc://127.0.0.1:{dead}")
    assert only(list(accelerator.workers(helper))).retryable, "a data helper that is not up yet"
    assert only(list(accelerator.workers(case()))).status == "skipped"


def test_versions_of_client_and_worker() -> None:
    def judged(told: str) -> Finding:
        return only(list(accelerator.versions(case(tpu="t", facts={"node_version": told, "tensorflow": "2.20.0"}))))

    assert judged("2.20.1").status == "pass" and judged("tpu-vm-tf-2.20.0-pjrt").status == "pass"
    assert judged("v2-alpha-tpuv5").status == "skipped"
    other = judged("2.17.0")
    assert (other.status, other.retryable) == ("fail", False) and "Install TensorFlow 2.17.0 here" in other.remedy


def test_a_port_that_another_run_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = list(accelerator.target(case(environ=tf_config(address, "no-such-host.invalid:1"))))
    assert [(finding.name, finding.status, finding.retryable) for finding in found] == [
        ("target", "pass", False),
        ("port", "fail", True),
        ("peer", "warn", False),
    ]
