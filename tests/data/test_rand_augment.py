"""RandAugment's operations are Pillow's, or geometry that can be worked out; which one comes follows from numbers."""

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageEnhance, ImageOps

from data.augment import rand_augment
from data.augment.rand_augment import OPERATIONS

HEIGHT, WIDTH = 33, 47  # odd, so that the centre is a pixel
STRENGTH = 0.5


@pytest.fixture(scope="module")
def image() -> np.ndarray:
    """[H, W, 3] uint8 in 20..220, smooth enough for the blurred to differ by more than a level."""
    small = np.random.default_rng(0).uniform(20, 220, (6, 8, 3)).astype(np.float32)
    return tf.image.resize(small, (HEIGHT, WIDTH)).numpy().astype(np.uint8)


def apply(name: str, image: np.ndarray, direction: float = 1.0, strength: float = STRENGTH) -> np.ndarray:
    found = OPERATIONS[name](tf.constant(image), strength, tf.constant(direction)).numpy()
    assert found.shape == image.shape and found.dtype == np.uint8
    return found


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_colours_are_pillows(image, channels, direction):
    image = image[..., :channels]
    factor = 1 + direction * 0.45
    wanted = {
        "identity": lambda p: p,
        "auto_contrast": ImageOps.autocontrast,
        "equalize": ImageOps.equalize,
        "solarize": lambda p: ImageOps.solarize(p, 128),
        "posterize": lambda p: ImageOps.posterize(p, 6),
        "color": lambda p: ImageEnhance.Color(p).enhance(factor),
        "contrast": lambda p: ImageEnhance.Contrast(p).enhance(factor),
        "brightness": lambda p: ImageEnhance.Brightness(p).enhance(factor),
        "sharpness": lambda p: ImageEnhance.Sharpness(p).enhance(factor),
    }
    exact = ("identity", "equalize", "solarize", "posterize")
    for name, reference in wanted.items():
        pillow = np.asarray(reference(Image.fromarray(image.squeeze(-1) if channels == 1 else image)))
        found = apply(name, image, direction).astype(int)
        # Pillow cuts off where this rounds.
        apart = np.abs(found - pillow.reshape(image.shape)).max()
        assert apart <= (0 if name in exact else 1), name
        if name != "identity" and not (name == "color" and channels == 1):
            assert np.abs(found - image).max() > 1, f"{name} does nothing"


def test_images_of_one_colour_stay_where_nothing_can_be_stretched():
    flat = np.full((HEIGHT, WIDTH, 3), 77, np.uint8)
    for name in ("auto_contrast", "equalize", "contrast", "color", "sharpness"):
        np.testing.assert_array_equal(apply(name, flat), flat, err_msg=name)
    np.testing.assert_array_equal(apply("sharpness", flat[:2]), flat[:2])


@pytest.mark.parametrize("direction", [1.0, -1.0])
def test_places_follow_from_geometry(direction):
    y, x = (a.astype(float) for a in np.mgrid[:HEIGHT, :WIDTH])
    image = np.stack([4 * y + 20, 4 * x + 20, np.full_like(y, 100)], axis=-1).astype(np.uint8)
    from_middle = y - (HEIGHT - 1) / 2, x - (WIDTH - 1) / 2
    angle = direction * np.radians(15)
    shift = direction * 0.5 * 150 / 331
    leads_to = {  # of each place, which row and column of the image it shows
        "rotate": (
            np.sin(angle) * from_middle[1] + np.cos(angle) * from_middle[0] + (HEIGHT - 1) / 2,
            np.cos(angle) * from_middle[1] - np.sin(angle) * from_middle[0] + (WIDTH - 1) / 2,
        ),
        "shear_x": (y, x + direction * 0.15 * from_middle[0]),
        "shear_y": (y + direction * 0.15 * from_middle[1], x),
        "translate_x": (y, x + shift * WIDTH),
        "translate_y": (y + shift * HEIGHT, x),
    }
    for name, (row, column) in leads_to.items():
        found = apply(name, image, direction).astype(float)
        inside = (row >= 0) & (row <= HEIGHT - 1) & (column >= 0) & (column <= WIDTH - 1)
        outside = (row < -1) | (row > HEIGHT) | (column < -1) | (column > WIDTH)
        # The nearest pixel: half of one off at most, and a pixel is 4 levels.
        np.testing.assert_allclose(found[inside][:, 0], 4 * row[inside] + 20, atol=2.01, err_msg=name)
        np.testing.assert_allclose(found[inside][:, 1], 4 * column[inside] + 20, atol=2.01, err_msg=name)
        assert inside.mean() > 0.6 and outside.any()
        assert (found[outside] == 128).all(), f"{name}: grey where the image does not reach"


def test_numbers_choose_operation_and_direction(image):
    names = list(OPERATIONS)
    numbers = [((index + 0.5) / len(names), direction) for index in range(len(names)) for direction in (0.2, 0.7)]
    batch = tf.constant(np.broadcast_to(image, (len(numbers), *image.shape)))
    one = tf.function(lambda images, given: rand_augment.rand_augment(images, given, 1, 10 * STRENGTH))
    found = one(batch, tf.constant(numbers)).numpy()
    alone = [apply(names[row // 2], image, 1.0 if row % 2 == 0 else -1.0) for row in range(len(numbers))]
    # Graphs round sines otherwise, so that another pixel may be the nearest.
    assert _apart(found, alone).mean(axis=(1, 2, 3)).max() < 1
    followed = [(*numbers[row], *numbers[-1 - row]) for row in range(len(numbers))]
    two = tf.function(lambda images, given: rand_augment.rand_augment(images, given, 2, 10 * STRENGTH))
    wanted = [apply(names[-1 - row // 2], first, 1.0 if row % 2 else -1.0) for row, first in enumerate(alone)]
    assert _apart(two(batch, tf.constant(followed)).numpy(), wanted).mean(axis=(1, 2, 3)).max() < 2


def _apart(one: np.ndarray, other: list) -> np.ndarray:
    return np.abs(one.astype(int) - np.stack(other).astype(int))


def test_a_larger_magnitude_changes_more(image):
    for name in OPERATIONS.keys() - {"identity", "auto_contrast", "equalize"}:
        little, much = (np.abs(apply(name, image, strength=s).astype(int) - image).mean() for s in (0.01, 0.5))
        assert little < min(4, much), (name, little, much)
