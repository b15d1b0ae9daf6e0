"""JAX' coordination service, in a process beside the chief: `python -m trainer.backends.jax.coordinator NUM_PROCESSES`.

Within the chief, where `jax.distributed.initialize` has it, it is gone with a chief that is killed; and of a process
that loses it JAX makes a core dump. Here it outlives the chief for as long as the others take to end themselves. The
names that JAX keeps private of all this stand here.

It writes its port to its standard output, and ends with its standard input: at once after a line, without one later.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

from trainer.errors import RetryError

_LINGER_SECS = 30.0  # longer than `muster` leaves to a process that has lost another
_SILENCE_SECS = 300  # without a sign of life JAX kills all processes; `muster` has long done so
_SHUTDOWN_SECS = 30  # for all to leave together, who have agreed to
_CONNECT_SECS = 60  # all are there when it begins


class Service:
    """The process, as its parent has it: the chief."""

    def __init__(self, num_processes: int):
        """Starts it; what it imports takes a moment, in which the others may come."""
        command = [sys.executable, "-m", __name__, str(num_processes)]
        pipe = subprocess.PIPE
        # A session of its own, for Ctrl-C is for the chief; no log, which tells what the processes tell themselves and
        # would keep the chief's own open behind it.
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )

    def port(self) -> int:
        """Waits until it serves, and returns where.

        Raises:
            RetryError: it does not start.
        """
        line = self._process.stdout.readline() if self._process.stdout else ""
        if not line:
            raise RetryError(f"JAX' coordination service does not start (exit code {self._process.wait()}). Run again")
        return int(line)

    def end(self) -> None:
        """Ends it, once nobody needs it any more."""
        self._process.communicate("end\n")

    @contextlib.contextmanager
    def ended_by_failure(self) -> Iterator[None]:
        """Ends it if the block fails."""
        try:
            yield
        except BaseException:
            self._process.kill()
            raise


def join(coordinator: str, index: int, num_processes: int) -> None:
    """Connects this process with the service; what `jax.distributed.initialize` does, without a service of its own.

    Args:
        coordinator: host:port of the service.
        index: of this process.
        num_processes: how many there are.
    """
    from jax._src import distributed
    from jaxlib import _jax

    client = _jax.get_distributed_runtime_client(
        coordinator,
        index,
        init_timeout=_CONNECT_SECS,
        heartbeat_timeout=_SILENCE_SECS,
        shutdown_timeout=_SHUTDOWN_SECS,
        use_compression=True,
    )
    client.connect()
    state = distributed.global_state
    state.client, state.coordinator_address = client, coordinator
    state.process_id, state.num_processes = index, num_processes


def _serve(num_processes: int) -> None:
    from jaxlib import _jax

    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    service = _jax.get_distributed_runtime_service(
        f"[::]:{port}", num_processes, heartbeat_timeout=_SILENCE_SECS, shutdown_timeout=_SHUTDOWN_SECS
    )
    print(port, flush=True)
    if not sys.stdin.readline():
        time.sleep(_LINGER_SECS)
    service.shutdown()


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
