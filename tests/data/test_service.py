"""tf.data service with real processes on loopback: the same batches, and an end to the run where a machine is lost."""

import contextlib
import gc
import itertools
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import errors, pipeline, service
from data.augment import Augmentation
from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ, metrics_of, state_of

BATCH, STEPS = 8, 12


class Machine:
    """A running `python -m data.service`."""

    def __init__(self, port: int | None = None, environ: dict[str, str] | None = None) -> None:
        self.port = port or free_ports()
        command = [sys.executable, "-m", "data.service", f"--port={self.port}", "--host=127.0.0.1"]
        environ = clean_environ() | (environ or {})
        self.process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)
        self.address = f"grpc://127.0.0.1:{self.port}"

    def wait(self) -> "Machine":
        """Returns once it serves."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith(f"{self.address} serves")
        return self

    def end(self, by: int = signal.SIGKILL) -> int:
        self.process.send_signal(by)
        self.process.communicate(timeout=GUARD_SECS)
        return self.process.returncode


def free_ports() -> int:
    """The first of two that are free."""
    while True:
        with socket.create_server(("", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("", port + 1)).close()
            except OSError:
                continue
            return port


@pytest.fixture(scope="module")
def machines() -> Iterator[list[Machine]]:
    """Three, to be left alive."""
    started = [Machine() for _ in range(3)]
    yield [machine.wait() for machine in started]
    gc.collect()  # an iterator that is left over would wait for them
    for machine in started:
        machine.end()


@pytest.fixture
def start() -> Iterator[Callable[..., Machine]]:
    """Starts a machine that ends with the test."""
    with contextlib.ExitStack() as stack:

        def started(port: int | None = None) -> Machine:
            machine = Machine(port)
            stack.callback(machine.end)
            return machine.wait()

        yield started


@pytest.fixture
def mortal(start: Callable[..., Machine]) -> Machine:
    """One, to be killed."""
    return start()


@pytest.fixture(scope="module")
def photos(write_tfds: Callable[..., str]) -> pipeline.Dataset:
    """50 photographs of varying size in 3 shards: each is cropped at random, by its step and row."""
    rng = np.random.default_rng(0)
    image = tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg")
    features = {"image": image, "label": tfds.features.ClassLabel(num_classes=50)}
    examples = [{"image": rng.integers(0, 256, (20 + row % 7, 30, 3), np.uint8), "label": row} for row in range(50)]
    data_dir = write_tfds("photos", features, ("image", "label"), {"train": examples}, num_shards=3)
    return pipeline.open_dataset("photos", data_dir)


def batches(dataset: pipeline.Dataset, **changed) -> tf.data.Dataset:
    arguments = {"global_batch_size": BATCH, "per_replica_batch_size": BATCH, "seed": 3, "shuffle_mib": 1.0}
    return pipeline.train_batches(dataset, image_size=16, **(arguments | changed))


def served(machines: list[Machine], dataset: pipeline.Dataset, **changed) -> tf.data.Dataset:
    addresses = [machine.address for machine in machines]
    return service.read(addresses, lambda k, parts: batches(dataset, part=(k, parts), **changed))


def same(found: tf.data.Dataset, expected: tf.data.Dataset, count: int) -> bool:
    pairs = list(zip(found.take(count).as_numpy_iterator(), expected.take(count).as_numpy_iterator(), strict=True))
    assert len(pairs) == count
    return all(np.array_equal(a, b) for pair in pairs for a, b in zip(*pair, strict=True))


@pytest.mark.parametrize(("count", "start_step"), [(1, 7), (3, 0), (3, 7)])
def test_batches_are_those_of_reading_here(machines, photos, count, start_step):
    # 12 steps of 8 go over the end of an epoch of 50.
    found = served(machines[:count], photos, start_step=start_step)
    assert same(found, batches(photos, start_step=start_step), STEPS)
    assert not same(found, batches(photos, start_step=start_step + 1), 1)


def test_images_are_augmented_there_as_they_are_here(machines, photos):
    how = Augmentation(crop_area=0.1, rand_augment=1, rand_augment_magnitude=9.0, flip="both", mixup=0.2, cutmix=1.0)
    assert same(served(machines[:2], photos, augmentation=how), batches(photos, augmentation=how), STEPS)
    assert len(next(iter(batches(photos, augmentation=how)))) == 3, "with the numbers of the device"


def test_hosts_and_replicas_share_machines(machines, photos):
    for host in range(2):
        share = {"host_index": host, "num_hosts": 2, "per_replica_batch_size": BATCH // 4}
        assert same(served(machines, photos, **share), batches(photos, **share), 2 * STEPS)


def test_a_batch_out_of_turn_ends_the_run(machines, photos, monkeypatch):
    lossy = lambda *args, **kwargs: lambda dataset: dataset.skip(1)  # noqa: E731
    monkeypatch.setattr(tf.data.experimental.service, "distribute", lossy)
    found = served(machines, photos)
    with pytest.raises(service.ServiceLostError, match="restarted"), watched(machines):
        next(iter(found))


def test_faults_of_the_data_are_told_as_they_are(machines, photos, tmp_path):
    gone = {path: str(tmp_path / "gone") for path in photos.split("train").paths}
    with pytest.raises(tf.errors.NotFoundError, match="gone; No such file"), watched(machines):
        next(iter(served(machines, photos, copies=gone)))


def watched(machines: list[Machine], on_lost: Callable[[str], None] = print, grace_secs: float = GUARD_SECS):
    return service.watched([m.address for m in machines], on_lost, grace_secs=grace_secs, every_secs=0.05)


def read_until_lost(start, machine: Machine, photos: pipeline.Dataset, grace_secs: float, by: int) -> str:
    """What is said of a machine that gets a signal while batches are read, which then wait for ever."""
    lost, said = threading.Event(), []

    def on_lost(message: str) -> None:
        said.append(message)
        lost.set()

    iterator = iter(served([machine], photos))
    with watched([machine], on_lost, grace_secs):
        next(iterator)
        machine.process.send_signal(by)
        assert lost.wait(GUARD_SECS)
    # A run ends here and now. This process lives on, and has to delete the iterator.
    machine.process.send_signal(signal.SIGCONT)
    if by == signal.SIGKILL:
        start(machine.port)
    del iterator
    (message,) = said
    return message


def test_a_killed_machine_is_noticed(start, mortal, photos):
    message = read_until_lost(start, mortal, photos, grace_secs=GUARD_SECS, by=signal.SIGKILL)
    assert re.search(rf"lost: 127.0.0.1:{mortal.port}: Connection refused.* last checkpoint", message)


def test_a_silent_machine_has_its_time(start, mortal, photos, monkeypatch):
    monkeypatch.setattr(service, "_PROBE_TIMEOUT_SECS", 0.1)
    message = read_until_lost(start, mortal, photos, grace_secs=0.2, by=signal.SIGSTOP)
    assert f"lost: 127.0.0.1:{mortal.port}: timed out" in message


def test_a_restarted_machine_has_forgotten_the_run(start, mortal, photos):
    iterator = iter(served([mortal], photos))
    next(iterator)
    mortal.end()
    again = start(mortal.port)
    with pytest.raises(service.ServiceLostError, match="restarted, .*last checkpoint"), watched([again]):
        for _ in itertools.count():
            next(iterator)


def test_who_does_not_answer_is_named(machines):
    port = free_ports()
    with pytest.raises(service.ServiceLostError, match=f"127.0.0.1:{port}: Connection refused. Start it"):
        service.check([machines[0].address, f"grpc://127.0.0.1:{port}"])
    with pytest.raises(service.ServiceLostError, match="nowhere.invalid"):
        service.check(["grpc://nowhere.invalid:5050"])
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer() -> None:
            with stranger.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400")

        answering = threading.Thread(target=answer)
        answering.start()
        with pytest.raises(service.ServiceLostError, match="no gRPC there, it answers b'HTTP/1.1"):
            service.check([f"grpc://127.0.0.1:{stranger.getsockname()[1]}"])
        answering.join()


def test_mistakes_are_named():
    assert service.parse("grpc://a:1,b-2.c:65534") == ("grpc://a:1", "grpc://b-2.c:65534")
    for text in ("", "grpc://a", "a:0", "a:65535", "http://a:1", "a:1,", "a:b:1"):
        with pytest.raises(errors.DataError, match=f"Received: {re.escape(repr(text))}"):
            service.parse(text)
    with pytest.raises(errors.DataError, match="names a machine twice"):
        service.parse("grpc://a:1,a:1")


def test_the_command_says_what_is_wrong(start, machines, capfd):
    for port in (machines[0].port, machines[0].port - 1):  # gRPC itself would share the port
        command = [sys.executable, "-m", "data.service", f"--port={port}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GUARD_SECS)
        assert done.returncode == service.EXIT_CONFIG
        assert f"Ports {port} and {port + 1} cannot be opened" in done.stderr
    assert service.main(["service", "--port=65535"]) == service.EXIT_USAGE
    assert service.main(["service", "5050"]) == service.EXIT_USAGE
    assert "Nothing but flags. Received: 5050" in capfd.readouterr().err
    assert start().end(signal.SIGTERM) == service.EXIT_OK


@pytest.mark.nightly
def test_training_goes_on_where_a_machine_was_lost(
    machines: list[Machine], mortal: Machine, trainer: Trainer, tmp_path: pathlib.Path
) -> None:
    flags = ["--mode=train", "--train_steps=600", "--checkpoint_every_steps=20", "--log_every_steps=10"]
    trainer.run(f"--model_dir={tmp_path}/here", *flags)
    there = f"--model_dir={tmp_path}/there"
    process = trainer.start(there, *flags, f"--data_service={machines[0].address},{mortal.address}")
    assert process.stdout is not None
    for line in process.stdout:
        if "loss" in line:
            mortal.end()
            break
    _, err = process.communicate(timeout=GUARD_SECS)
    assert process.returncode == 75, err
    assert f"trainer: A machine of the data service is lost: 127.0.0.1:{mortal.port}" in err
    trainer.run(there, *flags, "--data_service=" + ",".join(machine.address for machine in machines))
    here, after = state_of(tmp_path / "here"), state_of(tmp_path / "there")
    assert here.keys() == after.keys()
    assert all(np.array_equal(here[name], after[name]) for name in here)
    assert metrics_of(tmp_path / "here")[-1] == metrics_of(tmp_path / "there")[-1]
    refused = trainer.run(f"--model_dir={tmp_path}/none", f"--data_service={mortal.address}", code=75)
    assert "The data service cannot be reached" in refused.stderr
    assert not (tmp_path / "none").exists()
