"""What an audit can find. Plain Python, imports in no time."""

import dataclasses

# A shard with so many bad records was written wrongly; to list them all helps no one.
MAX_FINDINGS = 1_000

# Every kind of fault that is looked for.
KINDS = {
    "missing_file": "a shard is not there",
    "empty_file": "a shard holds no bytes",
    "length_crc": "the length of a record does not fit its checksum",
    "data_crc": "the data of a record does not fit its checksum",
    "truncated": "a shard ends within a record",
    "count_mismatch": "a shard holds another number of records than dataset_info.json states",
    "not_an_example": "a record is no tf.train.Example",
    "not_parsed": "a record does not parse, for a reason not listed here",
    "missing_feature": "a record lacks a feature",
    "wrong_dtype": "a feature is stored as another type",
    "wrong_shape": "a feature holds another number of values",
    "value_range": "an integer does not fit the feature's dtype",
    "label_range": "a label is no class",
    "non_finite": "a float is NaN or infinite",
    "undecodable_image": "an image has no known header or, with --decode, does not decode",
    "image_size": "an image has another height or width than the feature",
    "image_channels": "an image has another number of channels than the feature",
    "duplicate_record": "a record has the same content as an earlier one, of any split",
    "duplicate_key": "--key_feature holds the same value as in an earlier record, of any split",
}
# Training on these is no error: they may be meant so.
HARMLESS = frozenset({"duplicate_record", "duplicate_key"})


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault.

    split: it lies in.
    file: name of the shard; None for what concerns the whole split.
    record: number of the record in the file, from 0; None for what concerns the whole file.
    offset: of that record, in bytes.
    kind: one of KINDS.
    message: what is wrong, for the user.
    """

    split: str
    file: str | None
    record: int | None
    offset: int | None
    kind: str
    message: str

    def __str__(self) -> str:
        place = self.file or f"split {self.split}"
        if self.record is not None:
            place += f", record {self.record} at byte {self.offset}"
        return f"{place}: {self.message} [{self.kind}]"
