"""The devices of a run, whatever the backend, and how they are connected.

`connect` and `rehearse` are those of the backend; what they may raise stands there.
"""

import abc
import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from trainer import backend
from trainer.hardware import Target

if typing.TYPE_CHECKING:
    import tensorflow as tf

# Makes the pipeline of one host: of shares of a replica, those of a step one after the other.
MakeBatches = Callable[["tf.distribute.InputContext"], "tf.data.Dataset"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster(abc.ABC):
    """Connected devices, ready for variables."""

    kind: typing.Literal["tpu", "gpu", "cpu"]
    num_replicas: int  # over all workers
    description: str  # one line: how it was resolved, and the devices
    num_workers: int = 1  # processes that train together, each running this program
    worker_index: int = 0
    num_hosts: int = 1  # input pipelines of the whole cluster
    has_evaluator: bool = False  # a process that does not train evaluates what these train

    @property
    def is_chief(self) -> bool:
        """Whether this process writes what is written once: checkpoints, logs, exports."""
        return self.worker_index == 0

    @abc.abstractmethod
    def agree(self, values: Sequence[int]) -> list[int]:
        """Sums over all workers what each of them says; all call it together, with as many values."""

    @abc.abstractmethod
    def scope(self) -> contextlib.AbstractContextManager:
        """Where models, optimizers and metrics are made, and their variables assigned to."""

    @abc.abstractmethod
    def distribute(self, make: MakeBatches) -> Iterable[Any]:
        """The global batches of a step, each replica's share on its device.

        Args:
            make: the pipeline of one host, of which each element is the share of one replica.
        """

    @abc.abstractmethod
    def local(self, value: Any) -> list[Any]:
        """Of a leaf of a batch of `distribute` (or a share of one replica) the parts of this process' replicas."""

    @contextlib.contextmanager
    def watched(self, on_loss: Callable[[str], None]) -> Iterator[None]:
        """While this lasts, a worker that is lost ends the others too; at its end they part from each other.

        Args:
            on_loss: called, from a thread, with what to tell the user, where the loss of another worker leaves this
                one waiting; it ends the process.
        """
        yield  # tf.distribute has its own way: its calls fail


def locate(target: Target, *, timeout_secs: float) -> Target:
    """What `hardware.resolve` found, and who else belongs to it, where only the network of the machine tells.

    Args:
        target: from `hardware.resolve`.
        timeout_secs: of the question, in seconds.
    """
    return backend.part("cluster").locate(target, timeout_secs=timeout_secs)


def connect(target: Target, *, connect_timeout_secs: float) -> Cluster:
    """Connects what `hardware.resolve` found; call it once, in the main thread, before the backend is in use."""
    return backend.part("cluster").connect(target, connect_timeout_secs=connect_timeout_secs)


def rehearse(num_replicas: int) -> tuple[Cluster, Cluster]:
    """One replica, and `num_replicas` virtual ones, both on this machine's CPU, whatever else it has; call it first."""
    return backend.part("cluster").rehearse(num_replicas)
