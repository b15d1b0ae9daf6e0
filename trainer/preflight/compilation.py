"""Compiles lowered programs for TPU slices: in a process of its own, within a time limit, from a cache where known.

`compiler.py` is that process. It runs in the environment of the extra `preflight`, which need not be this one.
"""

import dataclasses

KINDS = ("oom", "unsupported", "timeout", "crash", "moved", "other")


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM of one replica in bytes, as XLA:TPU lays it out."""

    arguments: int  # weights, optimizer state, batch: padded to the tiles of the device
    outputs: int
    aliased: int  # of the outputs: written over arguments, so they count once
    temporaries: int  # activations and all else that lives within the step: peak - (arguments + outputs - aliased)
    code: int
    peak: int


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An argument of the program, in the order of the lowered one."""

    bytes: int  # on the device, with padding
    aliased: bool  # whether an output is written over it: an updated variable


@dataclasses.dataclass(frozen=True)
class Collective:
    """Like operations that cross replicas, together."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    dtype: str  # f32, bf16, ...
    count: int
    bytes: int  # what one replica holds, over all `count`


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA:TPU says of a program that it has compiled."""

    memory: Memory
    parameters: tuple[Parameter, ...]
    flops: float  # of one replica
    bytes_accessed: float  # of one replica
    collectives: tuple[Collective, ...]
    seconds: float  # that the compilation took, when it ran
    versions: dict[str, str]  # of jax, jaxlib, libtpu


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why there is no program. `kind` is one of KINDS."""

    kind: str
    message: str  # for the user; of the compiler where it has said something
    used_bytes: int | None = None  # of oom: what the program would need
    available_bytes: int | None = None
    operation: str | None = None  # of unsupported
    source: str | None = None  # of unsupported: file:line of the user's model, where the compiler knows it
