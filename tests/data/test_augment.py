"""Parts of images: the right ones, the same on any number of hosts and after a restart."""

import io

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from data import parse, pipeline, stages, synthetic
from data.augment import NONE, Augmentation, crops, numbers

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


def train(
    photos: pipeline.Dataset,
    hosts: int,
    replicas: int,
    start: int,
    steps: int = 6,
    seed: int = 1,
    augmentation: Augmentation = NONE,
) -> list:
    """(images, labels) of each step, and the numbers of the device where it has any."""
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
            augmentation=augmentation,
        )
        found = [tuple(part.numpy() for part in batch) for batch in batches.take((steps - start) * replicas)]
        parts.append(
            [[part for part in zip(*found[i : i + replicas], strict=True)] for i in range(0, len(found), replicas)]
        )
    return [
        tuple(np.concatenate([array for part in step for array in part[kind]]) for kind in range(len(step[0])))
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


# --- what options add -------------------------------------------------------------------------------------------------

EVERYTHING = Augmentation(
    crop_area=0.1, rand_augment=1, rand_augment_magnitude=9.0, flip="both", random_erasing=0.5, mixup=0.2, cutmix=1.0
)


def test_parts_of_random_area_have_area_ratio_and_place():
    window = crops.of_area(0.25)
    shape = (200, 300)
    found = np.stack([window(tf.constant(shape), tf.constant([0, row], tf.int64)).numpy() for row in range(400)])
    top, left, height, width = found.T.astype(float)
    assert (top >= 0).all() and (left >= 0).all() and (top + height <= 200).all() and (left + width <= 300).all()
    areas, ratios = height * width / (200 * 300), width / height
    assert 0.24 < areas.min() < 0.3 and 0.8 < areas.max() <= 1
    assert 0.74 < ratios.min() < 0.8 and 1.25 < ratios.max() < 1.35
    for first, room in ((top, 200 - height), (left, 300 - width)):
        assert np.mean(first / np.maximum(room, 1)) == pytest.approx(0.5, abs=0.06)
    assert len(np.unique(found, axis=0)) > 390


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_a_part_of_random_area_is_that_of_numpy(kind):
    image, seed = gradient(120, 90), tf.constant([3, 5], tf.int64)
    top, left, height, width = crops.of_area(0.3)(tf.constant([120, 90]), seed).numpy()
    assert top > 5 and left > 5
    wanted = tf.image.resize(image[top : top + height, left : left + width], (SIZE, SIZE))
    encoded = tf.constant(encode(image, kind))
    found = crops.crop_encoded(encoded, seed, crops.of_area(0.3), SIZE, 3, is_jpeg=False).numpy()
    assert np.abs(found - wanted)[1:-1, 1:-1].max() <= (0.51 if kind == "png" else 5)


def test_padded_images_are_moved_as_numpy_moves_them():
    images = np.random.default_rng(0).integers(1, 256, (50, 7, 5, 3), np.uint8)
    places = np.random.default_rng(1).random((50, 2), np.float32)
    found = crops.out_of_padded(tf.constant(images), tf.constant(places), 2).numpy()
    corners = set()
    for image, moved, place in zip(images, found, places, strict=True):
        y, x = (int(p * 5) for p in place)
        corners.add((y, x))
        np.testing.assert_array_equal(moved, np.pad(image, ((2, 2), (2, 2), (0, 0)))[y : y + 7, x : x + 5])
    assert len(corners) > 18


def test_augmented_batches_are_the_same_on_any_hosts_and_after_a_restart(photos):
    alone = train(photos, 1, 1, 0, augmentation=EVERYTHING)
    assert [part.shape for part in alone[0]] == [(8, SIZE, SIZE, 3), (8,), (8, 11)]
    for hosts, replicas, start in ((2, 1, 0), (1, 4, 2)):
        for found, wanted in zip(
            train(photos, hosts, replicas, start, augmentation=EVERYTHING), alone[start:], strict=True
        ):
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(one, other)


def test_each_option_changes_images_and_none_the_order(photos):
    plain = train(photos, 1, 1, 0, 3)
    for changed in ({"crop_area": 0.1}, {"crop_padding": 4}, {"rand_augment": 1, "rand_augment_magnitude": 9.0}):
        found = train(photos, 1, 1, 0, 3, augmentation=Augmentation(**changed))
        for (x, y), (plain_x, plain_y) in zip(found, plain, strict=True):
            np.testing.assert_array_equal(y, plain_y)
            assert (x != plain_x).any(axis=(1, 2, 3)).mean() > 0.7, changed


def test_raw_and_made_up_images_are_cropped_too(write_tfds):
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, (8, 12, 10, 3), np.uint8)
    features = {
        "image": tfds.features.Tensor(shape=(12, 10, 3), dtype=np.uint8, encoding="bytes"),
        "label": tfds.features.ClassLabel(num_classes=8),
    }
    examples = [{"image": image, "label": row} for row, image in enumerate(images)]
    raw = pipeline.open_dataset("raw", write_tfds("raw", features, ("image", "label"), {"train": examples}))
    sizes = {
        "global_batch_size": 8,
        "per_replica_batch_size": 8,
        "seed": 0,
        "augmentation": Augmentation(crop_area=0.1),
    }
    x, y = next(iter(pipeline.train_batches(raw, shuffle_mib=1, **sizes)))
    seeds = numbers.seeds(numbers.Purpose.CROP, 0, tf.constant(0, tf.int64), 8)
    for found, row, seed in zip(x.numpy(), y.numpy(), seeds, strict=True):
        top, left, height, width = crops.of_area(0.1)(tf.constant([12, 10]), seed).numpy()
        wanted = tf.image.resize(images[row, top : top + height, left : left + width], (12, 10))
        np.testing.assert_allclose(found, wanted, atol=0.51)
    dataset = synthetic.open_dataset("synthetic")
    plain, cropped = (
        next(iter(synthetic.train_batches(dataset, image_size=12, **(sizes | {"augmentation": how}))))[0]
        for how in (Augmentation(), Augmentation(crop_area=0.1))
    )
    assert cropped.shape == plain.shape and (cropped != plain).numpy().any(axis=(1, 2, 3)).mean() > 0.7  # or all of it


def test_the_last_stage_is_named_after_what_it_does(photos):
    sizes = {"global_batch_size": 8, "per_replica_batch_size": 8, "shuffle_mib": 1, "image_size": SIZE}
    *_, last = stages.train_stages(photos, augmentation=EVERYTHING, **sizes)
    assert last.name == "decode, crop and augment"
    for one, other in zip(
        next(iter(last.batches(1))), train(photos, 1, 1, 0, 1, augmentation=EVERYTHING)[0], strict=True
    ):
        np.testing.assert_array_equal(one, other)
