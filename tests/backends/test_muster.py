"""The processes of a run on JAX, here threads: who meets, who is missing, and that none is lost unnoticed."""

import concurrent.futures
import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from tests.test_cluster import free_ports
from trainer.backends.jax import muster
from trainer.errors import ConfigError, RetryError

GUARD_SECS = 60  # only ends a test that hangs
PORT = 4711  # of the service, which nobody starts here


@pytest.fixture
def addresses() -> list[str]:
    return [f"127.0.0.1:{port}" for port in free_ports(3)]


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor() as made:
        yield made


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What was opened is closed after the test."""
    made: list[muster.Peers] = []
    init = muster.Peers.__init__
    monkeypatch.setattr(muster.Peers, "__init__", lambda self, *args: (init(self, *args), made.append(self))[0])
    yield
    for peers in made:
        peers.close()


def come(addresses: list[str], index: int, timeout_secs: float = GUARD_SECS) -> muster.Peers:
    if index == 0:
        return muster.receive(addresses, timeout_secs=timeout_secs, serve=lambda: PORT)
    return muster.report(addresses, index, timeout_secs=timeout_secs)


def met(pool: concurrent.futures.Executor, addresses: list[str]) -> list[muster.Peers]:
    coming = [pool.submit(come, addresses, index) for index in reversed(range(len(addresses)))]
    return [each.result(GUARD_SECS) for each in reversed(coming)]


def hang_up(peers: muster.Peers) -> None:
    """As the kernel does for a process that is killed."""
    for line in peers._lines.values():
        line.socket.shutdown(socket.SHUT_RDWR)


class Told:
    """What `on_loss` hears."""

    def __init__(self) -> None:
        self.text, self._heard = "", threading.Event()

    def __call__(self, text: str) -> None:
        self.text = text
        self._heard.set()

    def wait(self) -> str:
        assert self._heard.wait(GUARD_SECS)
        return self.text


def test_all_meet_whoever_else_calls(pool: concurrent.futures.ThreadPoolExecutor, addresses: list[str]) -> None:
    chief = pool.submit(come, addresses, 0)
    host, _, port = addresses[0].rpartition(":")
    with contextlib.ExitStack() as stack:

        def call(hello: bytes) -> socket.socket:
            while True:
                with contextlib.suppress(ConnectionRefusedError):  # not up yet
                    line = stack.enter_context(socket.create_connection((host, int(port))))
                    line.sendall(hello)
                    return line

        call(b"GET / HTTP/1.1\r\n")
        call(b'{"index": 7, "workers": 3}\n')
        call(b"")
        # Worker 1 is started again while its old connection still stands: the newest counts.
        old, new = (call(b'{"index": 1, "workers": 3}\n') for _ in range(2))
        other = pool.submit(come, addresses, 2)
        found = [each.result(GUARD_SECS).coordinator for each in (chief, other)]
        assert found == [f"127.0.0.1:{PORT}"] * 2
        with new.makefile() as text:
            assert json.loads(text.readline()) == {"coordinator": f"127.0.0.1:{PORT}"}
        assert old.recv(1) == b""


def test_the_missing_are_named_to_all_who_are_there(
    pool: concurrent.futures.ThreadPoolExecutor, addresses: list[str]
) -> None:
    worker = pool.submit(come, addresses, 2)
    for waiting in (pool.submit(come, addresses, 0, 2.0), worker):
        with pytest.raises(RetryError, match=f"--connect_timeout_secs=.*: worker 1 at {addresses[1]}") as told:
            waiting.result(GUARD_SECS)
        assert addresses[2] not in str(told.value)


def test_a_missing_chief_is_named(addresses: list[str]) -> None:
    with pytest.raises(RetryError, match=rf"worker 0, the chief, at {addresses[0]} \(Connection refused\)"):
        come(addresses, 1, timeout_secs=0.5)


def test_those_that_know_of_different_workers_do_not_meet(
    pool: concurrent.futures.ThreadPoolExecutor, addresses: list[str]
) -> None:
    for process in (pool.submit(come, addresses, 0), pool.submit(come, addresses[:2], 1)):
        with pytest.raises(ConfigError, match="the chief knows of 3 workers, and worker 1 of 2"):
            process.result(GUARD_SECS)


def test_a_port_in_use(addresses: list[str]) -> None:
    port = int(addresses[0].rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(RetryError, match=f"port {port} .* is in use"):
        come(addresses, 0)


def test_who_finishes_waits_for_all(pool: concurrent.futures.ThreadPoolExecutor, addresses: list[str]) -> None:
    told = Told()
    processes = met(pool, addresses)
    for process in processes:
        process.watch(told)
    chief, *workers = processes
    parting = [pool.submit(worker.part, failed=False) for worker in workers]
    assert not concurrent.futures.wait(parting, timeout=0.5).done, "the chief still exports"
    assert chief.part(failed=False)
    assert all(each.result(GUARD_SECS) for each in parting)
    for process in processes:
        hang_up(process)
    assert not told.text and not any(process.lost for process in processes)


@pytest.mark.parametrize(("victim", "others"), [(0, (1, 2)), (1, (0, 2))])
def test_a_dead_process_ends_all_others(
    pool: concurrent.futures.ThreadPoolExecutor,
    addresses: list[str],
    monkeypatch: pytest.MonkeyPatch,
    victim: int,
    others: tuple[int, int],
) -> None:
    monkeypatch.setattr(muster, "_PARTING_SECS", 0.2)
    processes, told = met(pool, addresses), [Told() for _ in addresses]
    for other in others:
        processes[other].watch(told[other])
    hang_up(processes[victim])
    for other in others:
        assert f"worker {victim} at {addresses[victim]} is dead" in told[other].wait()


def test_a_silent_process_is_a_lost_one(
    pool: concurrent.futures.ThreadPoolExecutor, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster, "_PARTING_SECS", 0.2)
    monkeypatch.setattr(muster, "_BEAT_SECS", 0.1)
    monkeypatch.setattr(muster, "_SILENCE_SECS", 5.0)
    processes, told = met(pool, addresses), [Told() for _ in addresses]
    for speaking in (0, 2):
        processes[speaking].watch(told[speaking])
    for speaking in (0, 2):
        assert f"worker 1 at {addresses[1]} has said nothing for 5 s" in told[speaking].wait()


def _ended(thread: threading.Thread) -> None:
    """Waits for a thread that may just be about to start, which nothing waits for."""
    while True:
        try:
            thread.join(GUARD_SECS)
            return
        except RuntimeError:
            continue


def test_who_stops_together_is_not_told_of_losses(
    pool: concurrent.futures.ThreadPoolExecutor, addresses: list[str]
) -> None:
    """An agreed stop: each ends with an error of its own, and the chief leaves last."""
    processes, told = met(pool, addresses), Told()
    for process in processes:
        process.watch(told)
    chief, *workers = [pool.submit(process.part, failed=True) for process in processes]
    assert [worker.result(GUARD_SECS) for worker in workers] == [False, False]
    assert not chief.done()
    for process in processes[1:]:
        hang_up(process)
    assert not chief.result(GUARD_SECS)
    for thread in threading.enumerate():
        if thread.name == "lost":  # would tell
            _ended(thread)
    assert not told.text


def test_a_process_that_fails_alone_takes_the_others_with_it(
    pool: concurrent.futures.ThreadPoolExecutor, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(muster, "_PARTING_SECS", 0.2)
    processes, told = met(pool, addresses), [Told() for _ in addresses]
    for index in (0, 2):
        processes[index].watch(told[index])
    processes[1].part(failed=True)
    for index in (0, 2):
        assert f"worker 1 at {addresses[1]} has failed" in told[index].wait()


def test_lines_are_what_the_docstring_says(addresses: list[str], pool: concurrent.futures.ThreadPoolExecutor) -> None:
    chief = pool.submit(come, addresses[:2], 0)
    host, _, port = addresses[0].rpartition(":")
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            line = socket.create_connection((host, int(port)))
            break
    with line, line.makefile("rw") as text:
        text.write('{"index": 1, ')
        text.flush()
        text.write('"workers": 2}\n')
        text.flush()
        assert json.loads(text.readline()) == {"coordinator": f"127.0.0.1:{PORT}"}
        chief.result(GUARD_SECS).watch(Told())
        assert text.readline() == "alive\n"
        text.write("finished\n")
        text.flush()
        assert chief.result().part(failed=False)
        assert "finished\n" in text
