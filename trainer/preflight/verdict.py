"""What XLA:TPU says of a program, read from what `compiler.py` leaves: figures, texts and libtpu's log. Pure.

The texts are no interface. Each was seen with the versions in `compiler.VERSIONS`, and where one is not as expected
that is an answer of its own ("moved"), never a guess.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.preflight.compiler import MovedError

KINDS = ("oom", "unsupported", "timeout", "crash", "moved", "other")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
_SHAPE = re.compile(r"(?P<dtype>\w+)\[(?P<dimensions>[\d,]*)\](\{(?P<layout>[^}]*)\})?")
_LARGEST = 5  # pieces of memory that are told of a program that does not fit


@dataclasses.dataclass(frozen=True)
class Memory:
    """HBM of one replica in bytes, as XLA:TPU lays it out. VMEM, where small temporaries live, is not in it."""

    arguments: int  # weights, optimizer state, batch: padded to the tiles of the device
    outputs: int
    aliased: int  # of the outputs: written over arguments, so they count once
    temporaries: int  # activations, gradients and all else that lives within the step
    code: int
    available: int  # what a program may fill
    reserved: int  # for the runtime, not in `available`

    @property
    def peak(self) -> int:
        """What the program takes, to be compared with `available`."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An argument of the program, in the order of the lowered one."""

    bytes: int  # on the device, with padding
    aliased: bool  # whether an output is written over it: an updated variable


@dataclasses.dataclass(frozen=True)
class Collective:
    """Operations that cross replicas, of one kind and dtype."""

    kind: str  # all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute
    dtype: str  # f32, bf16, ...
    count: int
    bytes: int  # what one replica holds of their results, all `count` together


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What XLA:TPU says of a program that it has compiled."""

    memory: Memory
    parameters: tuple[Parameter, ...]
    flops: float  # of one replica
    bytes_accessed: float  # of one replica; in VMEM too
    collectives: tuple[Collective, ...]
    seconds: float  # that the compilation took, when it ran
    versions: dict[str, str]  # of jax, jaxlib, libtpu


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why there is no program."""

    kind: str  # one of KINDS
    message: str  # the compiler's, where it has said something
    used_bytes: int | None = None  # oom: what the program would need
    available_bytes: int | None = None  # oom
    largest: tuple[str, ...] = ()  # oom: the largest pieces of memory, and the arrays in each by turns
    operation: str | None = None  # unsupported: of HLO, such as dot, where the compiler names it
    op_name: str | None = None  # unsupported: of the backend, with the names of layers, where the compiler names it


def read(fields: Mapping[str, Any], module: str, log: str) -> Compiled:
    """Takes a compiled program together.

    Args:
        fields: `compiled` of the result of compiler.py.
        module: text of the optimised program.
        log: what the compiler wrote to stderr.

    Raises:
        MovedError: a text is not as it was in the versions that this was written for.
    """
    parameters = tuple(_parameters(module))
    total = sum(parameter.bytes for parameter in parameters)
    if total != fields["arguments"]:
        raise MovedError(f"the layouts of all arguments make {total} bytes, libtpu says {fields['arguments']}")
    return Compiled(
        memory=_memory(fields, log),
        parameters=parameters,
        flops=fields["flops"],
        bytes_accessed=fields["bytes_accessed"],
        collectives=collectives(module),
        seconds=fields["seconds"],
        versions=fields["versions"],
    )


def _memory(fields: Mapping[str, Any], log: str) -> Memory:
    """The log has what the API lacks, the limit and the reserve, and mends what the API says of temporaries.

    libtpu's `temp_size_in_bytes` counts what is lost to fragmentation twice; its `peak_memory_in_bytes`, not used here,
    leaves that out and counts VMEM as HBM. The log's sum tells: "Total hbm usage" is reserved + program + arguments.
    """
    limit = re.search(r"program HBM usage: \S+ / (\S+)\n", log)
    reserved = re.search(r"Total hbm usage >= .*\n\s+reserved\s+(\S+)", log)
    program = re.search(r"Program hbm requirement .*\n((?:    .*\n)*)", log)
    if not (limit and reserved and program):
        raise MovedError("libtpu's log does not say how the program uses HBM")
    fragmentation = re.search(r"HLO temp .* fragmentation \(([^)]+)\)", program[1])
    return Memory(
        arguments=fields["arguments"],
        outputs=fields["outputs"],
        aliased=fields["aliased"],
        temporaries=fields["temporaries"] - (_bytes(fragmentation[1]) if fragmentation else 0),
        code=fields["code"],
        available=_bytes(limit[1]),
        reserved=_bytes(reserved[1]),
    )


def _bytes(text: str) -> int:
    """Bytes in libtpu's `15.75G`, `176.5K`, `512B`."""
    match = re.fullmatch(r"([\d.]+)([KMGT]?)B?", text)
    if not match:
        raise MovedError(f"{text!r} is no number of bytes")
    return round(float(match[1]) * _UNITS[match[2]])


def _parameters(module: str) -> Iterator[Parameter]:
    header = module.partition("\n")[0]
    layouts = re.search(r"entry_computation_layout=\{\((.*?)\)->", header)
    if not layouts:
        raise MovedError("an optimised program does not begin with its entry_computation_layout")
    aliases = re.search(r"input_output_alias=\{(.*?) \}", header)
    aliased = set(re.findall(r": \((\d+),", aliases[1])) if aliases else set()
    for index, shape in enumerate(_SHAPE.finditer(layouts[1])):
        yield Parameter(_padded_bytes(shape), str(index) in aliased)


def _padded_bytes(shape: re.Match[str]) -> int:
    """Bytes on the device of `f32[20,1000]{1,0:T(8,128)}`: 24 x 1024 elements of 4 bytes.

    The layout lists dimensions from the fastest on, and a tile pads as many of these as it has sizes. Further tiles
    only order the elements within the first. https://openxla.org/xla/tiled_layout
    """
    dimensions = [int(size) for size in shape["dimensions"].split(",") if size]
    order, _, tiles = (shape["layout"] or "").partition(":")
    slowest_first = [dimensions[int(axis)] for axis in reversed(order.split(",")) if axis]
    match = re.search(r"T\(([\d,]+)\)", tiles)
    tile = [int(size) for size in match[1].split(",")] if match else []
    slowest_first = [1] * (len(tile) - len(slowest_first)) + slowest_first
    whole = len(slowest_first) - len(tile)
    padded = [math.ceil(size / unit) * unit for size, unit in zip(slowest_first[whole:], tile, strict=True)]
    return math.prod(slowest_first[:whole] + padded) * _bits(shape["dtype"]) // 8


def _bits(dtype: str) -> int:
    """Bits of an element: 16 of bf16, 8 of f8e4m3fn and of pred."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8


def collectives(module: str) -> tuple[Collective, ...]:
    """What crosses replicas in an optimised program.

    An asynchronous operation is a start and a done, of which the start counts. One in the body of a loop counts once.
    """
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    sizes: collections.Counter[tuple[str, str]] = collections.Counter()
    for match in re.finditer(rf"^.*? = (.*?) ({_COLLECTIVES})(-start)?\(", module, re.MULTILINE):
        shapes = list(_SHAPE.finditer(match[1]))
        if match[3] and match[2] in ("all-gather", "collective-permute"):
            shapes = shapes[1:2]  # (operand, result, ...)
        for shape in shapes:
            elements = math.prod(int(size) for size in shape["dimensions"].split(",") if size)
            sizes[match[2], shape["dtype"]] += elements * _bits(shape["dtype"]) // 8
        counts.update({(match[2], shape["dtype"]) for shape in shapes})
    return tuple(Collective(*key, count, sizes[key]) for key, count in sorted(counts.items()))


def refusal(error: str, log: str) -> Refusal:
    """Sorts what XLA:TPU says of a program that it does not compile."""
    message = re.sub(r", (frontend_attributes|metadata|backend_config)=\{.*?\}", "", error.partition("\n")[0]).strip()
    # "Ran out of memory on HBM, the total memory required for HLO temporaries (24.48G) exceeds available HBM (15.75G)."
    # Arguments and outputs are in that sum too (seen).
    sizes = re.search(r"\(([^)]+)\) exceeds available HBM \(([^)]+)\)", error)
    if sizes:
        exactly = re.search(r"Ran out of memory in memory space hbm.*\n(?:.*\n){0,3}?Total bytes: (\d+)", log)
        used = int(exactly[1]) if exactly else _bytes(sizes[1])
        return Refusal("oom", message, used, _bytes(sizes[2]), largest=_largest(log))
    lost = re.search(r"failed to legalize operation '([\w.]+)'", error)
    if lost:
        message = f"{lost[1]} has no form in StableHLO, the only way to XLA:TPU here. That says nothing about a TPU"
        return Refusal("other", message, operation=lost[1])
    instruction = re.search(r"%\S+ = \S+ ([\w-]+)\(", error) or re.search(r"operand type for (\w+)", error)
    op_name = re.search(r'op_name="([^"]*)"', error)
    return Refusal(
        "unsupported" if error.startswith(("UNIMPLEMENTED", "INVALID_ARGUMENT")) else "other",
        message,
        operation=instruction[1].lower() if instruction else None,
        op_name=op_name[1] if op_name else None,
    )


def last_words(log: str) -> Refusal | None:
    """What libtpu said when it aborted the process, as it does for complex128; None where it did not abort."""
    fatal = re.search(r"^F\d{4} \S+ +\d+ \S+\] (.*)", log, re.MULTILINE)
    if not fatal:
        return None
    return Refusal("unsupported" if fatal[1].startswith("Unsupported") else "crash", fatal[1])


def _largest(log: str) -> tuple[str, ...]:
    """`1.59GiB: bf16[1024,112,112,64], ...` of the log's table; the largest first."""
    table = re.search(r"used_by_n_values; shapes_list\n\s*-+\n((?:.*;.*\n)+)", log)
    rows = table[1].splitlines()[:_LARGEST] if table else []
    cells = [[cell.strip() for cell in row.split(";")] for row in rows]
    return tuple(f"{size}: {shapes}" for _, size, _, _, shapes in cells)
