"""What a profile of the input pipeline says: rates, verdict, advice, table, JSON. Pure: text from values.

Stages overlap and share the processor's cores, so a stage alone has no rate that means anything. Measured is the
pipeline up to and including each stage; what a stage *adds* to an example's time is what taking it away would save.
"""

import dataclasses
import math
import statistics
from typing import Any

# The rule of thumb: a pipeline at least this many times as fast as the model has room for evaluation, checkpoints,
# other users of the machine and the next, faster model.
ENOUGH = 2.0
_MEGA, _GIGA = 1e6, 1e9
# The last stage: the whole pipeline, handed to the devices.
TRANSFER = "transfer"
# Images up to this much larger than need be are not worth a rebuild.
LARGE = 1.25
ROUNDS_FOR_A_SPREAD = 3
# Below this share of the pipeline's time, other stages are worth a look too.
_DOMINANT = 0.5


@dataclasses.dataclass(frozen=True)
class Rate:
    """How fast something went.

    name: of the stage, the pipeline being measured up to and including it; or of the model.
    examples_per_sec: of each round.
    bytes_per_example: that leave the stage; for strings their contents.
    """

    name: str
    examples_per_sec: tuple[float, ...]
    bytes_per_example: float

    @property
    def median(self) -> float:
        """Examples/s, the median over the rounds."""
        return statistics.median(self.examples_per_sec)

    @property
    def secs_per_example(self) -> float:
        """Of the median."""
        return 1 / self.median

    @property
    def mb_per_sec(self) -> float:
        """10**6 bytes a second that leave the stage."""
        return self.median * self.bytes_per_example / _MEGA


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """What of dataset, machine and devices the advice depends on.

    dataset: its name.
    num_shards: of the training split; 0 for a synthetic dataset, which has none.
    num_streams: in which they are read at the same time.
    most_streams: in which they would be, were there enough of them.
    dataset_bytes: of all records of the split.
    memory_bytes: of this machine.
    remote: the files are behind a network and not cached on this machine.
    image_size: side in pixels, as told to the run, or None.
    wanted_side: length in pixels of the shorter side that `image_size` makes use of, None without it.
    image_formats: how images are encoded, such as ("png",); () where none are.
    image_side: mean length in pixels of the shorter side as stored, None where it is not known.
    cores: processors that the pipeline may use.
    device_kind: "tpu", "gpu" or "cpu".
    devices: one line.
    """

    dataset: str
    num_shards: int
    num_streams: int
    most_streams: int
    dataset_bytes: float
    memory_bytes: int
    remote: bool
    image_size: int | None
    wanted_side: int | None
    image_formats: tuple[str, ...]
    image_side: float | None
    cores: int
    device_kind: str
    devices: str


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured.

    stages: in the order of the pipeline; the last one is all of it.
    model: examples/s that the train step takes from a batch that is there already.
    """

    stages: tuple[Rate, ...]
    model: Rate
    circumstances: Circumstances

    @property
    def ratio(self) -> float:
        """Speed of the pipeline over that of the model."""
        return self.stages[-1].median / self.model.median

    def added_secs(self) -> list[float]:
        """What each stage adds to the time of an example; noise below what stands before it counts as nothing."""
        added, so_far = [], 0.0
        for stage in self.stages:
            added.append(max(0.0, stage.secs_per_example - so_far))
            so_far = max(so_far, stage.secs_per_example)
        return added

    @property
    def slowest(self) -> int:
        """Index of the stage that adds most."""
        added = self.added_secs()
        return added.index(max(added))


def headline(profile: Profile) -> str:
    """The verdict in one sentence."""
    ratio = profile.ratio
    rates = f"the pipeline gives {profile.stages[-1].median:,.0f} examples/s, {ratio:,.2f} times what the model takes"
    rates += f" ({profile.model.median:,.0f})"
    if ratio >= ENOUGH:
        return f"fast enough: {rates}"
    if ratio >= 1:
        return f"barely fast enough: {rates}; asked for are {ENOUGH:g} times"
    return f"too slow: {rates}; the devices would wait {1 - ratio:.0%} of the time"


def slowest(profile: Profile) -> str:
    """The stage that costs most, and how much."""
    added = profile.added_secs()
    index = profile.slowest
    share = added[index] / sum(added)
    text = f"{profile.stages[index].name}: {_micros(added[index])} of the {_micros(sum(added))} an example takes"
    text += f" ({share:.0%})"
    if share < _DOMINANT:
        second = max((i for i in range(len(added)) if i != index), key=lambda i: added[i])
        text += f", next {profile.stages[second].name} ({added[second] / sum(added):.0%})"
    return text


def advice(profile: Profile) -> list[str]:
    """What to change, most telling first; nothing where the pipeline is fast enough."""
    if profile.ratio >= ENOUGH:
        return []
    name = profile.stages[profile.slowest].name
    about = {"read": _about_read, "shuffle": _about_shuffle, "parse": _about_parse, TRANSFER: _about_transfer}
    lines = about[name](profile) if name in about else _about_decode(profile)
    waits = name == TRANSFER or (name == "read" and profile.circumstances.remote)
    return lines if waits else [*lines, *_about_cores(profile)]


def _about_read(profile: Profile) -> list[str]:
    facts, read = profile.circumstances, profile.stages[0]
    lines = []
    if facts.num_shards and facts.num_streams < (
        wanted := facts.most_streams if facts.remote else min(facts.most_streams, facts.cores)
    ):
        lines.append(
            f"more shards: the {facts.num_shards} there are read as {facts.num_streams} streams at the same time; "
            f"rebuild the dataset with {wanted} or more"
        )
    if facts.remote:
        lines.append(
            f"read from nearer: {read.mb_per_sec:,.0f} MB/s come over the network; --cache keeps the "
            f"{facts.dataset_bytes / _GIGA:,.1f} GB of the split on this machine, else use a bucket in its region"
        )
    else:
        lines.append(f"smaller records, or a faster disk: {read.mb_per_sec:,.0f} MB/s are read")
    return lines


def _about_shuffle(profile: Profile) -> list[str]:
    return ["a smaller --shuffle_mib: picking records out of the shuffle window costs more than reading them"]


def _about_parse(profile: Profile) -> list[str]:
    size = profile.stages[profile.slowest].bytes_per_example
    return [f"smaller records: {size:,.0f} bytes an example are parsed"]


def _about_decode(profile: Profile) -> list[str]:
    """For the stage that makes tensors of stored images."""
    facts, decoded, before = profile.circumstances, profile.stages[profile.slowest], profile.stages[profile.slowest - 1]
    lines = []
    if facts.image_side and facts.wanted_side and facts.image_side > LARGE * facts.wanted_side:
        lines.append(
            f"smaller images: the shorter side has {facts.image_side:,.0f} pixels as stored "
            f"({before.bytes_per_example / 1e3:,.0f} kB); rebuild the dataset with {facts.wanted_side}, which is all "
            f"that image_size={facts.image_size} makes use of"
        )
    if other := [name for name in facts.image_formats if name != "jpeg"]:
        lines.append(
            f"JPEG: of a JPEG only the crop is decoded, of {', '.join(other).upper()} all of it; rebuild the dataset"
        )
    unpacked = profile.stages[0].mb_per_sec * _MEGA / decoded.bytes_per_example  # examples/s
    if facts.image_formats and unpacked > ENOUGH * decoded.median:
        lines.append(
            f"decoded images in the records (uint8 tensors), {decoded.bytes_per_example / 1e3:,.0f} kB each: read with "
            f"the {profile.stages[0].mb_per_sec:,.0f} MB/s measured here that would be {unpacked:,.0f} examples/s"
        )
    return lines


def _about_transfer(profile: Profile) -> list[str]:
    size = profile.stages[-1].bytes_per_example
    return [
        f"fewer bytes to the devices: {size / 1e3:,.1f} kB an example; keep inputs uint8 and let the model normalise, "
        "or use smaller images"
    ]


def _about_cores(profile: Profile) -> list[str]:
    """For stages that compute."""
    facts = profile.circumstances
    needed = math.ceil(facts.cores * ENOUGH / profile.ratio)
    return [
        f"more cores: {ENOUGH:g} times the model's speed takes about {needed:,} like the {facts.cores} of this machine"
        ", here or on other machines with --data_service"
    ]


def caveats(profile: Profile) -> list[str]:
    """What the figures do not say."""
    facts, lines = profile.circumstances, []
    if facts.device_kind != "tpu":
        lines.append(f"the model's speed was measured without a TPU ({facts.devices}): a TPU will want more")
    if facts.device_kind == "cpu":
        lines.append("pipeline and model were measured one at a time, and in training they share this machine's cores")
    if not facts.num_shards:
        lines.append(f"{facts.dataset} reads no files: this says nothing about the pipeline of a real dataset")
    elif not facts.remote and facts.dataset_bytes < facts.memory_bytes:
        lines.append("the files fit in this machine's memory: they may have been read from there, not from the disk")
    if len(profile.model.examples_per_sec) < ROUNDS_FOR_A_SPREAD:
        lines.append(f"only {len(profile.model.examples_per_sec)} rounds fitted in the time: the spread is a guess")
    return lines


def rows(profile: Profile) -> list[tuple[str, ...]]:
    """The table: a heading, a line a stage, a line for the model."""
    lines: list[tuple[str, ...]] = [("up to", "examples/s", "min", "max", "MB/s", "adds an example", "share")]
    added = profile.added_secs()
    for stage, secs in zip(profile.stages, added, strict=True):
        lines.append((*_rates(stage), _micros(secs), f"{secs / sum(added):.0%}"))
    lines.append((*_rates(profile.model), _micros(profile.model.secs_per_example), ""))
    return lines


def _rates(rate: Rate) -> tuple[str, ...]:
    low, high = min(rate.examples_per_sec), max(rate.examples_per_sec)
    return rate.name, f"{rate.median:,.0f}", f"{low:,.0f}", f"{high:,.0f}", f"{rate.mb_per_sec:,.1f}"


def summary(profile: Profile) -> list[tuple[str, str]]:
    """The verdict as rows (heading, text)."""
    found = [("verdict", headline(profile)), ("slowest", slowest(profile))]
    found += [("change", text) for text in advice(profile)]
    return found + [("note", text) for text in caveats(profile)]


def to_json(profile: Profile) -> dict[str, Any]:
    """Everything, for `profile_input.json`: rates in examples/s and 10**6 bytes/s, times in seconds."""
    added = profile.added_secs()
    stages = [
        {**_rate_json(stage), "added_secs_per_example": secs} for stage, secs in zip(profile.stages, added, strict=True)
    ]
    return {
        "verdict": {
            "pipeline_over_model": profile.ratio,
            "enough": profile.ratio >= ENOUGH,
            "slowest_stage": profile.stages[profile.slowest].name,
            "text": headline(profile),
            "advice": advice(profile),
            "caveats": caveats(profile),
        },
        "stages": stages,
        "model": _rate_json(profile.model),
        "circumstances": dataclasses.asdict(profile.circumstances),
    }


def _rate_json(rate: Rate) -> dict[str, Any]:
    return {
        "name": rate.name,
        "examples_per_sec": rate.median,
        "examples_per_sec_of_rounds": list(rate.examples_per_sec),
        "mb_per_sec": rate.mb_per_sec,
        "bytes_per_example": rate.bytes_per_example,
    }


def _micros(secs: float) -> str:
    micros = secs * 1e6
    return f"{micros:,.0f} us" if micros >= 100 else f"{micros:.3g} us"
