"""What can be wrong with a record whose bytes are sound: checks of whole batches, against the dataset's own features.

Records are parsed by the operation that training uses, so what passes here parses there.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core import example_parser

from data import errors, image_header

UNLABELLED = -1  # what TFDS writes where a split has no labels
NO_VALUE = -2  # of a record that does not parse; fingerprints are not negative

# Fingerprint64 of a record, less one bit: tf.strings.to_hash_bucket_fast, which is the same everywhere and for ever.
_FINGERPRINTS = 2**63 - 1
# What TensorFlow says of a record that does not parse, what that is here, and what it says to the user.
_PARSE_ERRORS = (
    (
        r"Feature: (?P<key>.+?) \(data type: \w+\) is required but could not be found",
        "missing_feature",
        "feature {key!r} is missing",
    ),
    (
        r"Key: (?P<key>.+?), Index.*Data types don't match\."
        r" Data type: (?P<found>\w+) but expected type: (?P<wanted>\w+)",
        "wrong_dtype",
        "feature {key!r} holds {found}, not {wanted}",
    ),
    (
        r"Key: (?P<key>.+?), Index.*Number of \w+ values != expected\.\s*[Vv]alues size: (?P<found>\d+)"
        r" but output shape: (?P<wanted>\[[^\]]*\])",
        "wrong_shape",
        "feature {key!r} holds {found} values, not those of shape {wanted}",
    ),
    (r"Key: (?P<key>.+?), Index", "wrong_shape", "feature {key!r} does not parse"),
    (r"Could not parse example input", "not_an_example", "the data is no tf.train.Example"),
)


class Problem(NamedTuple):
    """What is wrong with one record.

    row: of the record in its batch.
    kind: e.g. "missing_feature"; see `data.audit` for all of them.
    message: with the name of the feature and the value.
    """

    row: int
    kind: str
    message: str


class Batch(NamedTuple):
    """What a batch of N records holds.

    fingerprints: [N] int64; records of equal content have equal ones.
    keys: [N] int64, fingerprints of `key_feature`; None without one. NO_VALUE where a record does not parse.
    labels: [N] int64; None without a class label. NO_VALUE where a record does not parse.
    images: what the headers of the images tell.
    problems: in order of the records.
    """

    fingerprints: np.ndarray
    keys: np.ndarray | None
    labels: np.ndarray | None
    images: list[image_header.Header]
    problems: list[Problem]


@dataclasses.dataclass(frozen=True)
class _Check:
    """is_bad: values [N, ...] to [N] bool. describe: one record's values [...] to what is wrong with them."""

    kind: str
    key: str
    is_bad: Callable[[tf.Tensor], tf.Tensor]
    describe: Callable[[np.ndarray], str]


class RecordChecks:
    """Checks records of one dataset.

    Args:
      info: tfds.core.DatasetInfo.
      decode: decode every image as well, instead of reading its header only.
      key_feature: name of a feature that no two records may share, or None.

    Raises:
      DataError: there is no feature `key_feature`, or it is not one value a record.
    """

    def __init__(self, info: Any, *, decode: bool = False, key_feature: str | None = None):
        stored = info.features.get_serialized_info()
        flat = tfds.core.utils.flatten_nest_dict(stored) if isinstance(stored, dict) else {"": stored}
        self._specs = example_parser.ExampleParser(stored).flat_feature_specs
        leaves = dict(_leaves(info.features, ""))
        self._checks = [check for key in flat if key in self._specs for check in _checks(key, flat[key], leaves)]
        self._images = {key: leaf for key, leaf in leaves.items() if isinstance(leaf, tfds.features.Image)}
        self._decode = decode
        labels = [key for key, leaf in leaves.items() if type(leaf) is tfds.features.ClassLabel]
        supervised = [key for key in labels if info.supervised_keys and key == info.supervised_keys[-1]]
        self._label_key = next(iter(supervised + labels), None)
        if key_feature is not None and getattr(self._specs.get(key_feature), "shape", None) != ():
            scalars = [key for key, spec in self._specs.items() if getattr(spec, "shape", None) == ()]
            raise errors.DataError(
                f"The key must be a feature with one value a record. Received: {key_feature!r}; "
                f"choose among {', '.join(scalars) or 'none'}."
            )
        self._key_feature = key_feature

    def __call__(self, records: tf.Tensor) -> Batch:
        """Checks records [N] string. Thread-safe."""
        fingerprints = tf.strings.to_hash_bucket_fast(records, _FINGERPRINTS).numpy()
        batch = Batch(
            fingerprints,
            keys=None if self._key_feature is None else np.full(len(fingerprints), NO_VALUE, np.int64),
            labels=None if self._label_key is None else np.full(len(fingerprints), NO_VALUE, np.int64),
            images=[],
            problems=[],
        )
        self._check(records, 0, batch)
        return batch._replace(problems=sorted(batch.problems))

    def _check(self, records: tf.Tensor, first: int, batch: Batch) -> None:
        """Checks the part of a batch that begins at index `first`; fills in `batch`."""
        try:
            # Not within a tf.function: that drops a parse whose values nobody asks for, and its errors with it.
            values = tf.io.parse_example(records, self._specs)
        # The whole batch fails to parse, for one record or more. TensorFlow quotes bytes that are no example, and what
        # is not UTF-8 breaks the making of its own error (seen with 2.20).
        except (tf.errors.InvalidArgumentError, UnicodeDecodeError) as error:
            if len(records) == 1:
                batch.problems.append(Problem(first, *_parse_problem(error)))
                return
            half = len(records) // 2
            self._check(records[:half], first, batch)
            self._check(records[half:], first + half, batch)
            return
        for check in self._checks:
            for row in np.flatnonzero(check.is_bad(values[check.key])).tolist():
                message = f"feature {check.key!r} {check.describe(values[check.key][row].numpy())}"
                batch.problems.append(Problem(first + row, check.kind, message))
        if batch.labels is not None:
            batch.labels[first : first + len(records)] = values[self._label_key]
        if batch.keys is not None:
            key = values[self._key_feature]
            text = key if key.dtype == tf.string else tf.strings.as_string(key)
            batch.keys[first : first + len(records)] = tf.strings.to_hash_bucket_fast(text, _FINGERPRINTS)
        for key in self._images:
            prefixes = tf.strings.substr(values[key], 0, image_header.PREFIX_BYTES).numpy()  # [N] bytes
            for row, prefix in enumerate(prefixes):
                problems = self._check_image(key, prefix, values[key], row, batch.images)
                batch.problems.extend(problem._replace(row=first + problem.row) for problem in problems)

    def _check_image(
        self, key: str, prefix: bytes, encoded: tf.Tensor, row: int, images: list[image_header.Header]
    ) -> Iterator[Problem]:
        """Checks image `row` of encoded [N] string, which begins with `prefix`; appends to `images`."""
        header = image_header.read(prefix)
        if header is None:
            message = f"feature {key!r} is no PNG, JPEG, GIF, BMP or WebP image: {prefix[:8]!r}"
            yield Problem(row, "undecodable_image", message)
            return
        try:
            if self._decode:
                header = _decoded(encoded[row], header)
            elif header == image_header.UNKNOWN:
                header = image_header.read(encoded[row].numpy()) or header
        except tf.errors.OpError as error:
            message = f"feature {key!r} does not decode: {_first_line(error.message)}"
            yield Problem(row, "undecodable_image", message)
            return
        images.append(header)
        for kind, message in _image_problems(key, header, self._images[key]):
            yield Problem(row, kind, message)


def image_shape(feature: Any) -> tuple[int, ...] | None:
    """(H, W, C) of a tensor that is an image, one of uint8 with 1, 3 or 4 channels; None for any other feature."""
    shape = feature.shape
    is_image = type(feature) is tfds.features.Tensor and feature.tf_dtype == tf.uint8 and len(shape) == 3
    return shape if is_image and None not in shape and shape[-1] in (1, 3, 4) else None


def _leaves(features: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(flat key, feature) of everything that is not inside a sequence."""
    if not isinstance(features, tfds.features.FeaturesDict):
        yield prefix, features
        return
    for key, feature in features.items():
        yield from _leaves(feature, f"{prefix}/{key}" if prefix else key)


def _checks(key: str, stored: Any, leaves: dict[str, Any]) -> Iterator[_Check]:
    """What can be said of the values of one stored feature."""
    leaf: Any = leaves.get(key)
    dtype = tf.as_dtype(stored.tf_dtype)
    if type(leaf) is tfds.features.ClassLabel and leaf.num_classes:
        classes = leaf.num_classes
        yield _Check(
            "label_range",
            key,
            # UNLABELLED waits: a split may be so as a whole, which is no fault.
            lambda v: _any((v < 0) & (v != UNLABELLED) | (v >= classes)),
            lambda v: f"is {v}, outside 0..{classes - 1}",
        )
    elif dtype.is_floating:
        yield _Check(
            "non_finite",
            key,
            lambda v: _any(~tf.math.is_finite(v)),
            lambda v: f"holds {np.size(v) - np.isfinite(v).sum()} values of {np.size(v)} that are NaN or infinite",
        )
    elif (dtype.is_integer or dtype.is_bool) and dtype not in (tf.int64, tf.uint64):
        low, high = (0, 1) if dtype.is_bool else (dtype.min, dtype.max)
        yield _Check(
            "value_range",
            key,
            lambda v: _any((v < low) | (v > high)),
            lambda v: f"holds {np.min(v)}..{np.max(v)}, outside {low}..{high} of {dtype.name}",
        )
    elif type(leaf) is tfds.features.Tensor and _is_raw(leaf):
        size = math.prod(leaf.shape) * tf.as_dtype(leaf.tf_dtype).size
        yield _Check(
            "wrong_shape",
            key,
            lambda v: tf.strings.length(v) != size,
            lambda v: f"holds {len(v)} bytes, not {size} for shape {leaf.shape} of {leaf.tf_dtype.name}",
        )


def _any(bad: Any) -> tf.Tensor:
    """[N, ...] bool, dense or ragged, to [N] bool."""
    if isinstance(bad, tf.RaggedTensor):
        bad = bad.to_tensor()
    return tf.reduce_any(bad, axis=list(range(1, bad.shape.rank)))


def _is_raw(feature: Any) -> bool:
    is_bytes = feature.to_json_content().encoding == tfds.features.Encoding.BYTES.value
    return is_bytes and None not in feature.shape and feature.tf_dtype != tf.string


def _decoded(image: tf.Tensor, header: image_header.Header) -> image_header.Header:
    """Size as decoded, which reads all of the image; channels as stored where the header tells them."""
    height, width, channels = tf.io.decode_image(image, expand_animations=False).shape
    return image_header.Header(height, width, header.channels or channels)


def _image_problems(key: str, header: image_header.Header, feature: Any) -> Iterator[tuple[str, str]]:
    """(kind, message) of what the header tells against the feature."""
    height, width, channels = feature.shape[-3:]
    sides = ((header.height, height), (header.width, width))
    if any(None not in (stored, stated) and stored != stated for stored, stated in sides):
        message = f"feature {key!r} is {header.height}x{header.width} pixels, not {height}x{width}"
        yield "image_size", message
    is_plain = feature.tf_dtype in (tf.uint8, tf.uint16)  # TFDS stores floats as the four bytes of RGBA
    is_other = None not in (header.channels, channels) and header.channels != channels
    # Grey is spread over red, green and blue when read, and nothing is lost; any other conversion drops something.
    if is_plain and is_other and (header.channels, channels) != (1, 3):
        yield "image_channels", f"feature {key!r} has {header.channels} channels, not {channels}"


def _parse_problem(error: Exception) -> tuple[str, str]:
    message = str(error.object, errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    for pattern, kind, text in _PARSE_ERRORS:
        match = re.search(pattern, message, re.DOTALL)
        if match:
            return kind, text.format(**match.groupdict())
    return "not_parsed", _first_line(message)


def _first_line(message: str) -> str:
    """The first line of an error of TensorFlow's without the name of the operation."""
    return re.sub(r"^\{\{.*?\}\}\s*", "", message.splitlines()[0]).removesuffix(" name:").strip()
