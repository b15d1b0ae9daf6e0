"""The files of `bench_input` and `bench_service`: datasets in TFDS format, made once."""

import pathlib

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

SHARDS = 16
CLASSES = 10
IMAGES = 60_000
PHOTOS = 1_500
PHOTO_SIDE = 256  # what datasets of photographs are commonly stored with


def write(directory: pathlib.Path, features: dict, examples: list[bytes], num_shards: int) -> None:
    """Writes serialized examples as a dataset in TFDS format, once."""
    directory = directory / "1.0.0"
    if (directory / "dataset_info.json").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    shards = np.array_split(np.arange(len(examples)), num_shards)
    for index, rows in enumerate(shards):
        path = directory / f"{directory.parent.name}-train.tfrecord-{index:05d}-of-{num_shards:05d}"
        with tf.io.TFRecordWriter(str(path)) as writer:
            for row in rows:
                writer.write(examples[row])
    split = tfds.core.SplitInfo(
        name="train",
        shard_lengths=[len(rows) for rows in shards],
        num_bytes=sum(map(len, examples)),
        filename_template=tfds.core.ShardedFileTemplate(
            data_dir=directory, dataset_name=directory.parent.name, split="train", filetype_suffix="tfrecord"
        ),
    )
    tfds.folder_dataset.write_metadata(
        data_dir=directory,
        features=tfds.features.FeaturesDict(features),
        split_infos=[split],
        supervised_keys=("image", "label"),
        check_data=False,
    )


def example(image: bytes, label: int) -> bytes:
    """One serialized record."""
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[image])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def label_feature() -> tfds.features.ClassLabel:
    """Ten classes."""
    return tfds.features.ClassLabel(num_classes=CLASSES)


def write_images(directory: pathlib.Path, count: int) -> None:
    """Random 28x28 images, sorted by class."""
    raw = tfds.features.Tensor(shape=(28, 28, 1), dtype=np.uint8, encoding="bytes")
    rng = np.random.default_rng(0)
    examples = [example(rng.bytes(28 * 28), row * CLASSES // count) for row in range(count)]
    write(directory, {"image": raw, "label": label_feature()}, examples, SHARDS)


def write_photos(directory: pathlib.Path) -> None:
    """Cuts of scikit-learn's photographs whose shorter side is 256 pixels, as JPEG of quality 90."""
    from sklearn import datasets

    photos = datasets.load_sample_images().images  # two of [427, 640, 3] uint8
    rng = np.random.default_rng(0)
    examples = []
    for row in range(PHOTOS):
        height, width = rng.permutation([PHOTO_SIDE, int(rng.integers(PHOTO_SIDE, 428))])
        top, left = rng.integers(0, 428 - height), rng.integers(0, 641 - width)
        cut = photos[row % 2][top : top + height, left : left + width]
        examples.append(example(tf.io.encode_jpeg(cut, quality=90).numpy(), row % CLASSES))
    image = tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg")
    write(directory, {"image": image, "label": label_feature()}, examples, SHARDS)
