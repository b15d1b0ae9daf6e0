"""A step as the program that XLA compiles for a TPU, or what stands in the way, with the user's own line.

`backends/*/lowering.py` makes them, of devices that need not be there:

    cluster_of(num_replicas)                    the devices
    train_step(engine, variables, data)         a step of training, `data` a replica's share of the batch
    test_step(engine, variables, data)          one of evaluation
    function(engine, variables, serve, data)    what an export serves

`engine` and `variables` are those of a `Replicated` on these devices; `data` are nested structures of
`keras.KerasTensor` or the like, fully static. They return a `Lowered`, or raise LoweringError.
"""

import abc
import dataclasses

from trainer import diagnose, places

# How names of parameters begin that are data, not state; of tensors made outside of the step; of foreign variables.
INPUT, CONSTANT, FOREIGN = "input/", "constant/", "foreign/"


@dataclasses.dataclass(frozen=True)
class Obstacle:
    """Why a step cannot be compiled.

    operation: type of the backend's operation, "" where it is none.
    node: its name, which tells the layer; "" where there is none.
    place: the user's own line, `file:line (text)`; "" where none is known.
    reason: in a line.
    instead: what to do, a sentence without its full stop.
    """

    operation: str
    node: str
    place: str
    reason: str
    instead: str

    def is_like(self, other: "Obstacle") -> bool:
        """Whether another step fails on the same: nodes are called differently in each."""
        return (self.place, self.operation, self.reason) == (other.place, other.operation, other.reason)

    def __str__(self) -> str:
        what = f"{self.operation} of {self.node}: " if self.operation else ""
        where = f" At {self.place}." if self.place else ""
        return f"{what}{self.reason}.{where} {self.instead}"


class LoweringError(Exception):
    """Raised with the `Obstacle`."""

    def __init__(self, obstacle: Obstacle):
        super().__init__(str(obstacle))
        self.obstacle = obstacle


@dataclasses.dataclass(frozen=True)
class Lowered(abc.ABC):
    """A program.

    program: serialized: an HloModuleProto for one replica, or a portable artifact of StableHLO for all of them.
    parameters: names in the order of the program's parameters: `input/0`, ..., then names of `Replicated.variables`,
        `foreign/NAME` of other variables and `constant/NAME` of tensors.
    """

    program: bytes
    parameters: tuple[str, ...]

    @abc.abstractmethod
    def remarks(self) -> list[str]:
        """What to look at though it can be compiled, a line each."""

    @abc.abstractmethod
    def obstacle(self, reason: str, name: str | None, kind: str | None) -> Obstacle | None:
        """What the compiler refuses, in the backend's words; None where that cannot be told.

        Args:
            reason: the compiler's.
            name: of the backend's operation, where the compiler knows it.
            kind: of XLA's operation, such as `fft`; the first of the backend's that is called alike is taken for it.
        """


def about_foreign(name: str, place: str) -> str:
    """The remark on a variable that the step uses and no checkpoint of the run has. place: where it is used."""
    what = "a variable that no checkpoint holds; make it with add_weight, random state with keras.random.SeedGenerator"
    return f"{name}: {what}" + (f". At {place}" if place else "")


def untraceable(error: BaseException) -> Obstacle:
    """Of an exception that user code raised while a model was built or traced."""
    *_, cause = places.chain(error)
    reason = f"{type(cause).__name__}: {diagnose.short(cause)}".rstrip(".")
    place = places.of_error(error)
    known = diagnose.find(error)
    instead = known.remedy if known else "It would not train on any hardware either"
    return Obstacle("", "", place.quoted() if place else "", f"the step cannot be traced: {reason}", instead)
