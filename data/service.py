"""Parsing, decoding and cropping on other machines, in the very order of reading alone: tf.data service.

Each machine runs `python -m data.service`: a dispatcher and its only worker in one process, unknown to the others. With
K of them, machine k computes batches k, k + K, ... of a host's pipeline, and the host takes turns with them:

    machine 0: read ─▶ batches 0, 3, 6 ... ─▶ parse, decode, crop ─┐
    machine 1: read ─▶ batches 1, 4, 7 ... ─▶ parse, decode, crop ─┼─▶ batches 0, 1, 2, 3 ...
    machine 2: read ─▶ batches 2, 5, 8 ... ─▶ parse, decode, crop ─┘

Which batch stands where is decided before anything is sent, so K is as free as the number of threads, and may differ
after a restart. Every machine reads what the host would read alone, and needs as much memory for shuffling: decoding
scales with K, reading does not. Photographs cost the host a sixth of the processor time then; raw images of 1 KB come
at half the speed of reading them here (scripts/bench_service.py, two machines on one).

Why not one dispatcher with K workers (seen with TensorFlow 2.20): without coordination batches come as they are ready.
Coordinated reads (num_consumers) take turns, but in an order of the dispatcher's own (2, 1, 0 with SHARD_HINT on three
workers), and where a worker dies its share of the records is left out without a word.

A machine that is lost ends the run with `ServiceLostError`; TensorFlow itself would wait for it for ever, as for one
that has never been there, hence `check`. tf.data service has no authentication: whoever reaches its ports can make it
read files. Keep them within a private network.
"""

import contextlib
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from absl import flags  # noqa: TID251 - a program of its own

from data import errors

if TYPE_CHECKING:
    import tensorflow as tf

GRPC = "grpc://"
_ADDRESS = re.compile(r"grpc://(?P<host>[A-Za-z0-9.-]+):(?P<port>[0-9]{1,5})")
_MAX_PORT = 2**16 - 2  # the worker's port is the next one
# Batches that a host keeps ready from each machine: one to take, one on its way.
_AHEAD = 2
_PROBE_TIMEOUT_SECS = 5.0
_PROBE_EVERY_SECS = 5.0
_HTTP2_SETTINGS = 4
# What opens an HTTP/2 connection, gRPC's too: preface and an empty SETTINGS frame (RFC 9113, 3.4 and 4.1).
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _HTTP2_SETTINGS, 0, 0, 0, 0, 0])
_OUT_OF_TURN = "the data service sent a batch out of turn"
# What TensorFlow says when a machine has forgotten our job: it was restarted, or had not heard of us for minutes.
_FORGOTTEN = ("Unknown iteration client id", _OUT_OF_TURN)
_AGAIN = "The same command goes on from the last checkpoint, with the machines that --data_service names then."

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_CONFIG = 78


class ServiceLostError(RuntimeError):
    """A machine of the data service is not there, or not any more; another try can succeed."""


def parse(text: str) -> tuple[str, ...]:
    """("grpc://host:port", ...) of "grpc://host:port,host:port", with one entry for each machine.

    Raises:
      DataError: an entry that is no address, or the same twice.
    """
    addresses = tuple(GRPC + entry.strip().removeprefix(GRPC) for entry in text.split(","))
    for address in addresses:
        match = _ADDRESS.fullmatch(address)
        if not match or not 0 < int(match["port"]) <= _MAX_PORT:
            raise errors.DataError(
                f"data_service takes {GRPC}HOST:PORT[,HOST:PORT...], the addresses that `python -m data.service` "
                f"prints. Received: {text!r}."
            )
    if len(set(addresses)) < len(addresses):
        raise errors.DataError(f"data_service names a machine twice; name each once. Received: {text!r}.")
    return addresses


def check(addresses: Sequence[str]) -> None:
    """Raises ServiceLostError where a machine does not answer, which TensorFlow would wait for without end."""
    _bypass_proxy(addresses)
    faults = [fault for address in addresses if (fault := _probe(address))]
    if faults:
        raise ServiceLostError(
            f"The data service cannot be reached: {'; '.join(map(str, faults))}. "
            "Start it on each machine: python -m data.service --port=PORT. Both PORT and PORT + 1 must be reachable."
        )


def read(addresses: Sequence[str], make: Callable[[int, int], "tf.data.Dataset"]) -> "tf.data.Dataset":
    """A dataset that other machines compute, in the same order as alone.

    Args:
      addresses: from `parse`, K of them, seen by `check`.
      make: function from (k, K) to the dataset without end of every K-th element of the whole, beginning with the
        k-th. The machine runs it: its paths must lead to the same files there, and no Python function may be in it.

    Returns:
      Dataset of the elements of `make(0, 1)`, as many ready as fit in two turns.

    Raises:
      tf.errors.OpError: (while reading) what the same dataset raises when read here, and what `watched` translates.
    """
    import tensorflow as tf

    from data import pipeline

    parts = [_served(address, make(k, len(addresses))) for k, address in enumerate(addresses)]
    turns = tf.data.Dataset.range(len(addresses)).repeat()
    return tf.data.Dataset.choose_from_datasets(parts, turns).with_options(pipeline.options())


def _served(address: str, dataset: "tf.data.Dataset") -> "tf.data.Dataset":
    import tensorflow as tf

    # Not compressed: what crosses is uint8 pixels, and packing them would take the time of the cores it is to save.
    distribute = tf.data.experimental.service.distribute(
        tf.data.experimental.service.ShardingPolicy.OFF, address, compression=None
    )

    def in_turn(expected: "tf.Tensor", numbered: tuple) -> "tf.Tensor | tuple":
        number, element = numbered
        with tf.control_dependencies([tf.debugging.assert_equal(number, expected, message=_OUT_OF_TURN)]):
            return tf.nest.map_structure(tf.identity, element)

    # TensorFlow promises "at least once" or less; here a batch too many or too few ends the run.
    return dataset.enumerate().apply(distribute).enumerate().map(in_turn).prefetch(_AHEAD)


@contextlib.contextmanager
def watched(
    addresses: Sequence[str],
    on_lost: Callable[[str], None],
    *,
    grace_secs: float,
    every_secs: float = _PROBE_EVERY_SECS,
) -> Iterator[None]:
    """Reads within: raises ServiceLostError for what TensorFlow says when a machine has lost our job.

    It says nothing where a machine is gone, but waits in C++, out of reach of exceptions. Then a thread calls `on_lost`
    with the message, which has to end the process. TensorFlow also waits for each machine when an iterator is deleted:
    delete it within. After an error the thread goes on, because the iterator is still to be deleted.

    Args:
      addresses: from `parse`.
      on_lost: called in another thread.
      grace_secs: seconds that a machine may be silent, as while its network is away. One that refuses connections is
        gone with all it knew of our job.
      every_secs: seconds between two looks.
    """
    import tensorflow as tf

    over = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(addresses, on_lost, grace_secs, every_secs, over), name="data-service", daemon=True
    )
    watcher.start()
    try:
        yield
        over.set()
    except tf.errors.OutOfRangeError as error:  # what is read has no end
        raise ServiceLostError(f"The data service ended the run's job. {_AGAIN}") from error
    except tf.errors.OpError as error:
        if any(text in str(error) for text in _FORGOTTEN):
            raise ServiceLostError(
                f"A machine of the data service was restarted, or out of touch too long. {_AGAIN}"
            ) from error
        raise


def _watch(
    addresses: Sequence[str],
    on_lost: Callable[[str], None],
    grace_secs: float,
    every_secs: float,
    over: threading.Event,
) -> None:
    import time

    silent_since: dict[str, float] = {}
    while not over.wait(every_secs):
        for address in addresses:
            fault = _probe(address)
            if fault is None:
                silent_since.pop(address, None)
                continue
            silent = time.monotonic() - silent_since.setdefault(address, time.monotonic())
            if not over.is_set() and (isinstance(fault, ConnectionRefusedError) or silent > grace_secs):
                on_lost(f"A machine of the data service is lost: {fault}. {_AGAIN}")
                return


def _probe(address: str) -> OSError | None:
    """What is wrong with a machine, its dispatcher or its worker, or None."""
    host, port = address.removeprefix(GRPC).split(":")
    for number in (int(port), int(port) + 1):
        try:
            with socket.create_connection((host, number), timeout=_PROBE_TIMEOUT_SECS) as connection:
                connection.sendall(_HTTP2_HELLO)
                frame = connection.recv(9)  # length, type, flags, stream
            if frame[3:4] != bytes([_HTTP2_SETTINGS]):
                raise OSError(f"no gRPC there, it answers {frame!r}")
        except OSError as error:
            return type(error)(f"{host}:{number}: {error.strerror or error}")
    return None


def _bypass_proxy(addresses: Sequence[str]) -> None:
    # gRPC takes http_proxy for machines of a private network too, and hangs on it. no_grpc_proxy is read by gRPC alone,
    # in place of no_proxy: https://grpc.github.io/grpc/core/md_doc_environment_variables.html
    hosts = [address.removeprefix(GRPC).split(":")[0] for address in addresses]
    bypassed = os.environ.get("no_grpc_proxy") or os.environ.get("no_proxy") or ""
    os.environ["no_grpc_proxy"] = ",".join(filter(None, [bypassed, *hosts]))


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    """`python -m data.service`: serves until SIGINT or SIGTERM, and returns the exit code."""
    options = _options()
    usage = "usage: python -m data.service [--port=5050] [--host=NAME]"
    try:
        left = options(argv)[1:]
        if left:
            raise flags.Error(f"Nothing but flags. Received: {' '.join(left)}")
    except flags.Error as error:
        print(f"{error}\n{usage}", file=sys.stderr)
        return EXIT_USAGE
    if options.help:
        print(f"{usage}\n{options.get_help()}")
        return EXIT_OK
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # its log lines tell a user nothing he can act on
    host = options.host or socket.gethostname()
    # Blocked before TensorFlow starts threads, which inherit it: a signal then waits for sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        servers = _start(host, options.port)
    except errors.DataError as error:
        print(error, file=sys.stderr)
        return EXIT_CONFIG
    print(f"{GRPC}{host}:{options.port} serves; end it with Ctrl-C", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    del servers
    return EXIT_OK


def _start(host: str, port: int) -> tuple:
    """Dispatcher and worker, both up; they serve as long as they are referred to."""
    try:
        for number in (port, port + 1):
            # gRPC would share a port that is in use (SO_REUSEPORT), and a client reach the one service or the other.
            socket.create_server(("", number)).close()
    except OSError as error:
        raise errors.DataError(
            f"Ports {port} and {port + 1} cannot be opened: {error}. Name others with --port."
        ) from error
    import tensorflow as tf

    service = tf.data.experimental.service
    _bypass_proxy([f"{GRPC}localhost:{port}"])
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=port))
    worker = service.WorkerServer(
        service.WorkerConfig(dispatcher_address=f"localhost:{port}", worker_address=f"{host}:{port + 1}", port=port + 1)
    )
    return dispatcher, worker


def _options() -> flags.FlagValues:
    """Flags of this command alone: absl's global ones belong to the trainer."""
    values = flags.FlagValues()
    flags.DEFINE_integer(
        "port", 5050, "Port; the next one is used too.", lower_bound=1, upper_bound=_MAX_PORT, flag_values=values
    )
    flags.DEFINE_string(
        "host", None, "Name or address at which trainers find this machine; default: its host name.", flag_values=values
    )
    flags.DEFINE_boolean("help", False, "Show this help.", flag_values=values)
    return values


if __name__ == "__main__":
    sys.exit(main(sys.argv))
