"""What people call what stands in a dataset: classes by their names, tokens as text, records by file and number."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import tensorflow_datasets as tfds

from data import parse, pipeline, tokenizer


@dataclasses.dataclass(frozen=True)
class Names:
    """Of one split of a dataset; empty where it has no names.

    classes: of the label. categories: of inputs that are one, by the input's name ("" of the only one).
    reader: makes text of tokens, where the tokenizer is known.
    shards: path of each file and its number of records.
    """

    classes: Sequence[str] = ()
    categories: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    reader: tokenizer.Tokenizer | None = None
    shards: Sequence[tuple[str, int]] = ()

    def of_class(self, index: int) -> str:
        """The name of a class; its number where it has none."""
        return self.classes[index] if index < len(self.classes) else str(index)

    def of_category(self, name: str, value: float) -> str | None:
        """What the input `name` means by a number; None where it is a quantity."""
        names = self.categories[name] if name in self.categories else ()
        return names[int(value)] if 0 <= value < len(names) else None

    def of_record(self, position: int) -> str:
        """The record at a position in file order: path#number in the file."""
        ends = list(itertools.accumulate(count for _, count in self.shards))
        shard = bisect.bisect_right(ends, position)
        path, count = self.shards[shard]
        return f"{path}#{position - ends[shard] + count}"


def of(dataset: pipeline.Dataset, split: str, image_size: int | None = None) -> Names:
    """The names of a dataset; arguments and errors as of `pipeline.eval_batches`."""
    fields = parse.select_fields(dataset.info, image_size)
    named = {name or "": _names(field.feature) for name, field in fields.inputs.items()}
    vocabularies = [field.array.below for field in fields.inputs.values() if field.array.below and field.array.shape]
    return Names(
        _names(fields.label.feature),
        {name: names for name, names in named.items() if names},
        tokenizer.beside(dataset.directory, vocabularies[0]) if vocabularies else None,
        dataset.split(split).filled,
    )


def _names(feature: object) -> list[str]:
    if isinstance(feature, tfds.features.Sequence):
        feature = feature.feature
    is_named = isinstance(feature, tfds.features.ClassLabel) and feature.num_classes
    return list(feature.names) if is_named else []  # type: ignore[attr-defined]
