"""From serialized records in TFDS format to tensors of the device, a whole batch at a time.

Which features are inputs and label follows the dataset's own `supervised_keys`; how they are stored follows its
features.json. uint8 stays uint8: a quarter of the bytes of float32 cross to the device, and models normalise there.

Images of one size are resized to `image_size` as they are. Of encoded images that vary in size (photographs) a square
is cut out and resized, so that nothing is squeezed: see augment/crops.py. Training may do more to images (augment/).
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core import example_parser

from data import augment, errors
from data.augment import crops, host
from data.spec import Array, Spec

Tensors: TypeAlias = "tf.Tensor | dict[str, tf.Tensor]"

_IMAGE_RANK = 3  # [H, W, C]
_IMAGE_CHANNELS = (1, 3, 4)
_NO_CLASS = -1
_BELOW_BOOLEAN = 2
_RANGE = re.compile(r"\[-?\d+, (\d+)\)")


@dataclasses.dataclass(frozen=True)
class Field:
    """One feature of a record on its way to the device.

    key: name in the record.
    feature: TFDS's description of how it is stored.
    array: shape and dtype on the device.
    resized: an image that the host resizes to `array.shape`.
    cropped: an encoded image of varying size, of which a square becomes `array.shape`.
    multi_hot: any number of classes, which become 1 where they are given and 0 elsewhere.
    """

    key: str
    feature: Any
    array: Array
    resized: bool = False
    cropped: bool = False
    multi_hot: bool = False


@dataclasses.dataclass(frozen=True)
class Fields:
    """Inputs by name (None for the only, nameless one) and the label."""

    inputs: Mapping[str | None, Field]
    label: Field

    def spec(self) -> Spec:
        """What models may know."""
        arrays = {name: field.array for name, field in self.inputs.items()}
        named = {name: array for name, array in arrays.items() if name is not None}
        is_class = isinstance(self.label.feature, tfds.features.ClassLabel)
        num_classes = self.label.feature.num_classes if is_class else None
        return Spec(inputs=named or arrays[None], label=self.label.array, num_classes=num_classes)


def select_fields(info: Any, image_size: int | None) -> Fields:
    """Reads from a dataset's info what its inputs and label are.

    Args:
      info: tfds.core.DatasetInfo.
      image_size: side in pixels to which images are cropped or resized, or None to leave them as they are.

    Raises:
      DataError: no supervised_keys, a feature of varying shape or text, or an `image_size` without an image.
    """
    keys = info.supervised_keys
    if keys is None or len(keys) != 2 or not isinstance(keys[1], str):
        raise errors.DataError(
            f"{info.full_name} must say what is input and what is label: supervised_keys=(input, label), one label. "
            f"Received: supervised_keys={keys}, features {list(info.features)}. Rebuild it with supervised_keys."
        )
    if image_size is not None and image_size < 1:
        raise errors.DataError(f"image_size must be at least 1 pixel. Received: {image_size}.")
    if isinstance(keys[0], str):
        names: dict[str | None, str] = {None: keys[0]}
    elif isinstance(keys[0], Mapping):
        names = dict(keys[0])
    else:
        names = {key: key for key in keys[0]}
    inputs = {name: _input_field(info, key, image_size) for name, key in names.items()}
    if image_size is not None and not any(_is_image(field.feature) for field in inputs.values()):
        raise errors.DataError(
            f"image_size={image_size} has no effect: {info.full_name} has no image input. Leave it out."
        )
    return Fields(inputs, _label_field(info, keys[1]))


def stored_parser(fields: Fields, batch_size: int) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """Makes the function from serialized records [batch_size] string to features as stored: key -> [b, ...]."""
    stored = {field.key: field.feature.get_serialized_info() for field in [*fields.inputs.values(), fields.label]}
    feature_specs = dict(example_parser.ExampleParser(stored).flat_feature_specs)
    if fields.label.multi_hot:
        # Lists of the batch that are shorter than its longest are filled up with what is no class.
        feature_specs[fields.label.key] = tf.io.FixedLenSequenceFeature([], tf.int64, True, default_value=_NO_CLASS)

    def parse(records: tf.Tensor) -> dict[str, tf.Tensor]:
        values = tf.io.parse_example(tf.ensure_shape(records, [batch_size]), feature_specs)
        return {key: tf.cast(values[key], info.tf_dtype) for key, info in stored.items()}

    return parse


def batch_parser(
    fields: Fields, batch_size: int, augmentation: augment.Augmentation = augment.NONE
) -> Callable[[tf.Tensor, host.Numbers | None], tuple[Tensors, tf.Tensor]]:
    """Makes the function that parses one batch.

    Returns:
      Function from serialized records [batch_size] string and the numbers of their rows (`host.draw`; None in
      evaluation, which takes the centre of photographs) to (inputs, label): tensors [batch_size, *shape] as
      `Fields.spec` tells, inputs a dict where they have names.
    """
    stored = stored_parser(fields, batch_size)

    def parse(records: tf.Tensor, given: host.Numbers | None) -> tuple[Tensors, tf.Tensor]:
        values = stored(records)

        def decode(field: Field) -> tf.Tensor:
            value = _decode(field, values[field.key], augmentation, given)
            return tf.ensure_shape(tf.cast(value, field.array.dtype), [batch_size, *field.array.shape])

        inputs = {name: decode(field) for name, field in fields.inputs.items()}
        if given is not None and None in inputs:
            inputs[None] = host.change(inputs[None], given, augmentation)
        return inputs[None] if None in inputs else inputs, decode(fields.label)

    return parse


def crops_photographs(fields: Fields) -> bool:
    """True where a part of each image is taken in any case."""
    return any(field.cropped for field in fields.inputs.values())


def _decode(
    field: Field, stored: tf.Tensor, augmentation: augment.Augmentation, given: host.Numbers | None
) -> tf.Tensor:
    """[b, ...] as stored to [b, *shape]."""
    if field.multi_hot:
        classes = tf.one_hot(stored, field.feature.feature.num_classes)  # [b, longest, C], 0 for _NO_CLASS
        return tf.minimum(tf.reduce_sum(classes, axis=1), 1.0)  # a class may be named twice
    if field.cropped:
        return _crop_photographs(field, stored, augmentation, given)
    size, out = field.array.shape[:2], tf.TensorSpec(field.array.shape, field.feature.tf_dtype)
    decode = field.feature.decode_example
    is_raw = _is_raw_bytes(field.feature)
    if is_raw:
        # Every record has the same number of bytes, so the whole batch decodes at once; TFDS would go one by one.
        stored = tf.io.decode_raw(stored, field.feature.tf_dtype)  # [b, product of shape]
        stored = tf.reshape(stored, [-1, *field.feature.shape])
    if given is not None and host.CROP in given and _is_image(field.feature):
        return host.crop(stored, given, augmentation, out, tf.identity if is_raw else decode)
    if is_raw:
        return crops.resize(stored, size) if field.resized else stored
    if field.resized:
        return tf.map_fn(lambda encoded: crops.resize(decode(encoded), size), stored, fn_output_signature=out)
    return field.feature.decode_batch_example(stored)


def _crop_photographs(
    field: Field, stored: tf.Tensor, augmentation: augment.Augmentation, given: host.Numbers | None
) -> tf.Tensor:
    """[b] encoded images to parts of them [b, size, size, C]; without numbers to the square in the middle."""
    size, _, channels = field.array.shape
    is_jpeg = field.feature.to_json_content().encoding_format == "jpeg"
    window = crops.square if given is None else host.window(augmentation)
    places = tf.fill([tf.shape(stored)[0], 2], 0.5) if given is None else given[host.CROP]

    def crop(image: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        return crops.crop_encoded(*image, window, size, channels, is_jpeg)

    out = tf.TensorSpec(field.array.shape, field.feature.tf_dtype)
    return tf.map_fn(crop, (stored, places), fn_output_signature=out)


def _is_raw_bytes(feature: Any) -> bool:
    # Subclasses may decode in a way of their own, and TFDS does so with uint64, which decode_raw does not know.
    if type(feature) is not tfds.features.Tensor or feature.tf_dtype == tf.uint64:
        return False
    return feature.to_json_content().encoding == tfds.features.Encoding.BYTES.value


def _is_image(feature: Any) -> bool:
    """An Image, or a tensor that looks like one: [H, W, 1|3|4] uint8."""
    if isinstance(feature, tfds.features.Image):
        return True
    return (
        type(feature) is tfds.features.Tensor
        and feature.tf_dtype == tf.uint8
        and len(feature.shape) == _IMAGE_RANK
        and feature.shape[-1] in _IMAGE_CHANNELS
    )


def _is_photograph(feature: Any) -> bool:
    """An encoded uint8 image whose height and width vary; a subclass may decode in a way of its own."""
    return type(feature) is tfds.features.Image and None in feature.shape[:2] and feature.tf_dtype == tf.uint8


def _input_field(info: Any, key: str, image_size: int | None) -> Field:
    feature = info.features[key]
    shape = feature.shape
    resized = cropped = False
    if image_size is not None and _is_image(feature):
        cropped = _is_photograph(feature)
        resized = not cropped and shape[:2] != (image_size, image_size)
        shape = (image_size, image_size, shape[-1])
    if not isinstance(shape, tuple) or None in shape:
        remedy = "set image_size" if _is_image(feature) else "rebuild the dataset with one shape, padded where needed"
        raise errors.DataError(
            f"Feature {key!r} of {info.full_name} varies in shape, and a TPU needs fixed shapes: {remedy}. "
            f"Received: {feature}."
        )
    if isinstance(feature, tfds.features.ClassLabel):
        return Field(key, feature, Array(shape, "int32", below=feature.num_classes))
    below = _below(feature)
    # Token ids are stored small; what models and servers take is the usual type.
    dtype = "int32" if below is not None else _device_dtype(info, key)
    return Field(key, feature, Array(shape, dtype, below), resized, cropped)


def _below(feature: Any) -> int | None:
    """The bound of whole numbers that a feature documents, as `data.build` does of tokens: "[0, 32000)"."""
    documented = _RANGE.fullmatch(feature.doc.value_range or "")
    if documented is None or type(feature) is not tfds.features.Tensor or not feature.tf_dtype.is_integer:
        return None
    return int(documented[1])


def _label_field(info: Any, key: str) -> Field:
    feature = info.features[key]
    if isinstance(feature, tfds.features.Sequence) and isinstance(feature.feature, tfds.features.ClassLabel):
        array = Array((feature.feature.num_classes,), "float32", below=_BELOW_BOOLEAN)
        return Field(key, feature, array, multi_hot=True)
    field = _input_field(info, key, image_size=None)
    array = field.array
    if array.dtype == "bool":
        dtype = "float32" if array.shape else "int32"
        return dataclasses.replace(field, array=Array(array.shape, dtype, below=_BELOW_BOOLEAN))
    if tf.as_dtype(array.dtype).is_integer:
        # Of classes `Spec.num_classes` tells how many there are.
        below = None if isinstance(feature, tfds.features.ClassLabel) else array.below
        array = Array(array.shape, "int32", below)
    return dataclasses.replace(field, array=array)


def _device_dtype(info: Any, key: str) -> str:
    """The stored dtype; float64 as float32, which is all that a TFRecord of floats holds."""
    dtype = info.features[key].tf_dtype
    if dtype == tf.string:
        raise errors.DataError(
            f"Feature {key!r} of {info.full_name} is text, which no TPU takes. Rebuild the dataset with token ids."
        )
    return "float32" if dtype == tf.float64 else dtype.name
