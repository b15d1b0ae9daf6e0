"""Squares out of photographs: the right one, the same on any number of hosts and after a restart."""

import io

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import parse, pipeline
from data.augment import crops, numbers

SIZE = 16


def gradient(height: int, width: int) -> np.ndarray:
    """[H, W, 3] uint8 whose first two channels are row and column."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, np.full_like(rows, 128)], axis=-1).astype(np.uint8)


def encode(image: np.ndarray, kind: str) -> bytes:
    return (tf.io.encode_jpeg(image, quality=100) if kind == "jpeg" else tf.io.encode_png(image)).numpy()


def crop(image: np.ndarray, place: tuple[float, float], size: int, kind: str, is_jpeg: bool = False) -> np.ndarray:
    encoded = tf.constant(encode(image, kind))
    return crops.crop_encoded(encoded, tf.constant(place), crops.square, size, 3, is_jpeg).numpy()


@pytest.mark.parametrize(("kind", "is_jpeg"), [("jpeg", True), ("jpeg", False), ("png", False)])
@pytest.mark.parametrize(
    ("place", "corner"), [((0.5, 0.5), (8, 26)), ((0.0, 0.0), (0, 0)), ((0.999, 1.0), (16, 52)), ((0.0, 0.5), (0, 26))]
)
def test_the_square_is_seven_eighths_of_the_shorter_side(kind, is_jpeg, place, corner):
    image = gradient(128, 164)
    square = crop(image, place, 112, kind, is_jpeg).astype(int)  # 112 of 128: not resized
    top, left = corner
    wanted = image[top : top + 112, left : left + 112].astype(int)
    # JPEG halves the resolution of colour, and rows and columns are colours here.
    assert np.abs(square - wanted)[2:-2, 2:-2].max() <= (0 if kind == "png" else 4)


def test_resized_squares_keep_the_aspect_ratio():
    square = crop(gradient(80, 160), (0.5, 0.5), 35, "png").astype(float)  # a square of 70, by half
    assert np.diff(square[:, :, 0], axis=0) == pytest.approx(2, abs=1)
    assert np.diff(square[:, :, 1], axis=1) == pytest.approx(2, abs=1)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (3, 2), (300, 2)])
def test_tiny_and_narrow_images_are_cropped_too(shape):
    for place in ((0.0, 0.0), (0.5, 0.5), (0.9999, 0.9999)):
        assert crop(np.full((*shape, 3), 200, np.uint8), place, SIZE, "png").min() == 200
        assert crop(np.full((*shape, 3), 200, np.uint8), place, SIZE, "jpeg", is_jpeg=True).min() >= 199


@pytest.fixture(scope="module")
def photos(write_tfds) -> pipeline.Dataset:
    """24 photographs in 2 shards; label: its number."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(20, 60, (24, 2))
    examples = [
        {"image": io.BytesIO(encode(rng.integers(0, 256, (*size, 3), np.uint8), "jpeg")), "label": number}
        for number, size in enumerate(sizes)
    ]
    features = {
        "image": tfds.features.Image(shape=(None, None, 3), encoding_format="jpeg"),
        "label": tfds.features.ClassLabel(num_classes=24),
    }
    data_dir = write_tfds("photos", features, ("image", "label"), {"train": examples}, num_shards=2)
    return pipeline.open_dataset("photos", data_dir)


def train(photos: pipeline.Dataset, hosts: int, replicas: int, start: int, steps: int = 6, seed: int = 1) -> list:
    """(images, labels) of each step."""
    parts = []
    for host in range(hosts):
        batches = pipeline.train_batches(
            photos,
            global_batch_size=8,
            per_replica_batch_size=8 // hosts // replicas,
            seed=seed,
            shuffle_mib=1,
            start_step=start,
            host_index=host,
            num_hosts=hosts,
            image_size=SIZE,
        )
        found = [(x.numpy(), y.numpy()) for x, y in batches.take((steps - start) * replicas)]
        parts.append(
            [[part for part in zip(*found[i : i + replicas], strict=True)] for i in range(0, len(found), replicas)]
        )
    return [
        tuple(np.concatenate([array for part in step for array in part[kind]]) for kind in (0, 1))
        for step in zip(*parts, strict=True)
    ]


def test_crops_are_the_same_on_any_hosts_and_after_a_restart(photos):
    alone = train(photos, 1, 1, 0)
    for hosts, replicas, start in ((2, 1, 0), (1, 4, 2), (4, 2, 5)):
        for found, wanted in zip(train(photos, hosts, replicas, start), alone[start:], strict=True):
            np.testing.assert_array_equal(found[1], wanted[1])
            np.testing.assert_array_equal(found[0], wanted[0])


def test_crops_change_from_epoch_to_epoch_and_with_the_seed(photos):
    def by_label(steps: list) -> dict:
        return {label: image for x, y in steps for image, label in zip(x, y, strict=True)}

    alone = train(photos, 1, 1, 0)
    first, second, other = by_label(alone[:3]), by_label(alone[3:]), by_label(train(photos, 1, 1, 0, 3, seed=2))
    assert first.keys() == second.keys() == other.keys() == set(range(24))
    for another in (second, other):
        assert sum(not np.array_equal(first[label], another[label]) for label in first) > 20


def test_places_differ_with_seed_step_and_row():
    def places(seed: int, step: int) -> list:
        return numbers.uniform(numbers.Purpose.CROP, seed, tf.constant(step, tf.int64), 8, 2).numpy().tolist()

    assert places(0, 5) == places(0, 5)
    found = [place for seed in (0, 1) for step in (0, 1, 2) for place in places(seed, step)]
    assert len({tuple(place) for place in found}) == 48
    assert all(0 <= value < 1 for place in found for value in place)


def test_evaluation_takes_the_centre(photos):
    batches = pipeline.eval_batches(photos, "train", global_batch_size=24, per_replica_batch_size=24, image_size=SIZE)
    x, y, _ = next(iter(batches))
    stored = parse.stored_parser(parse.select_fields(photos.info, SIZE), 24)
    records = next(iter(tf.data.TFRecordDataset(photos.split("train").paths).batch(24)))
    for image, number, encoded in zip(x.numpy(), y.numpy(), stored(records)["image"], strict=True):
        wanted = crops.crop_encoded(encoded, tf.constant([0.5, 0.5]), crops.square, SIZE, 3, is_jpeg=True)
        np.testing.assert_array_equal(image, wanted, err_msg=str(number))


def test_no_more_is_decoded_than_the_square():
    """The graph of a JPEG has no other decoder than the one that crops."""
    graph = tf.function(
        lambda e, p: crops.crop_encoded(e, p, crops.square, SIZE, 3, is_jpeg=True)
    ).get_concrete_function(tf.TensorSpec([], tf.string), tf.TensorSpec([2], tf.float32))
    decoders = [op.type for op in graph.graph.get_operations() if op.type.startswith("Decode")]
    assert decoders == ["DecodeAndCropJpeg"]
