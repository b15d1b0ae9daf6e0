"""What the device does to a batch is what NumPy does with the same numbers, and the loss takes what comes of it."""

import dataclasses
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from data import augment
from data.augment import numbers, rand_augment
from data.spec import Array, Spec
from trainer import augmentation, plan, tasks
from trainer.config import Config, merge
from trainer.errors import ConfigError
from trainer.options import augmentation as options
from trainer.tasks import classification

HEIGHT, WIDTH, BATCH = 9, 12, 64
SPEC = Spec(Array((HEIGHT, WIDTH, 3), "uint8"), Array((), "int32"), 5)


def config(**given) -> Config:
    return merge({"dataset": "d", "model_dir": "m"} | given)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (BATCH, HEIGHT, WIDTH, 3), np.uint8)


def drawn(columns: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).random((BATCH, columns), np.float32)


def both(function, *arrays, **kwargs) -> list[np.ndarray]:
    """What comes out with XLA, which has to be what comes out without, with shapes as they went in."""
    tensors = [tf.constant(array) for array in arrays]
    plain, compiled = (
        tf.function(lambda *given: function(*given, **kwargs), jit_compile=xla, autograph=False)(*tensors)
        for xla in (False, True)
    )
    plain, compiled = (list(found) if isinstance(found, tuple) else [found] for found in (plain, compiled))
    for one, other, given in zip(plain, compiled, tensors, strict=False):
        assert one.shape == given.shape and one.dtype == given.dtype
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1 if one.dtype == tf.uint8 else 1e-6)
    return [found.numpy() for found in plain]


def test_flips_are_numpys(images):
    given = drawn(2)
    [sideways] = both(augmentation.flipped, images, given[:, :1])
    [either] = both(augmentation.flipped, images, given)
    for row in range(BATCH):
        wanted = images[row, :, ::-1] if given[row, 0] < 0.5 else images[row]
        np.testing.assert_array_equal(sideways[row], wanted)
        np.testing.assert_array_equal(either[row], wanted[::-1] if given[row, 1] < 0.5 else wanted)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_erased_rectangles_are_numpys(images, dtype):
    given, chance = drawn(5), 0.6
    stored = images.astype(dtype)
    [found] = both(augmentation.erased, stored, given, chance=chance)
    sizes = []
    for image, erased, (whether, area, ratio, top, left) in zip(stored, found, given.astype(float), strict=True):
        wanted = image.copy()
        if whether < chance:
            pixels, ratio = (0.02 + 0.38 * area) * HEIGHT * WIDTH, 0.3 * math.exp(ratio * math.log(1 / 0.09))
            rows = int(np.clip(round(math.sqrt(pixels * ratio)), 1, HEIGHT))
            columns = int(np.clip(round(math.sqrt(pixels / ratio)), 1, WIDTH))
            y, x = int(top * (HEIGHT - rows + 1)), int(left * (WIDTH - columns + 1))
            mean = image.astype(float).mean((0, 1))
            wanted[y : y + rows, x : x + columns] = np.round(mean) if dtype == "uint8" else mean
            sizes.append(rows * columns)
        np.testing.assert_allclose(erased, wanted, atol=1e-4)
    assert 0.4 < len(sizes) / BATCH < 0.8
    assert 0.02 < min(sizes) / (HEIGHT * WIDTH) < 0.1 < 0.3 < max(sizes) / (HEIGHT * WIDTH) < 0.5


def _mixed(images: np.ndarray, labels: np.ndarray, given: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mixup and CutMix row by row."""
    mixtures, shares = [], []
    for row, (own, is_box, y, x) in enumerate(given):
        own = float(own)
        mine, other = images[row].astype(float), images[row ^ 1].astype(float)
        mixture = own * mine + (1 - own) * other
        if is_box:
            high, wide = (int(side * math.sqrt(1 - own)) // 2 for side in (HEIGHT, WIDTH))
            y, x = int(y * HEIGHT), int(x * WIDTH)
            rows, columns = slice(max(y - high, 0), y + high), slice(max(x - wide, 0), x + wide)
            mixture = mine.copy()
            mixture[rows, columns] = other[rows, columns]
            mask = np.ones((HEIGHT, WIDTH))
            mask[rows, columns] = 0
            own = mask.mean()
        mixtures.append(np.round(mixture))
        shares.append(own * labels[row] + (1 - own) * labels[row ^ 1])
    return np.stack(mixtures), np.stack(shares)


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.2, 0.0), (0.0, 1.0), (0.4, 0.8)])
def test_mixtures_are_numpys_and_keep_the_mass_of_labels(images, mixup, cutmix):
    wanted = augment.Augmentation(mixup=mixup, cutmix=cutmix)
    given = numbers.of_device(wanted, 3, tf.constant(7, tf.int64), BATCH, tf.constant(0), BATCH).numpy()
    np.testing.assert_array_equal(given[::2], given[1::2])
    assert len(np.unique(given[:, 0])) > BATCH // 2 - 3  # some are 1 as far as float32 can tell
    assert set(given[:, 1]) == {float(kind) for kind, alpha in enumerate((mixup, cutmix)) if alpha}
    labels = classification.shares(tf.range(BATCH) % 5, 0.1, SPEC).numpy()
    mixtures, shares = both(augmentation.mixed, images, labels, given)
    expected = _mixed(images, labels, given)
    boxes = given[:, 1] == 1
    np.testing.assert_array_equal(mixtures[boxes], expected[0][boxes])
    np.testing.assert_allclose(mixtures, expected[0], atol=1)  # halves round either way
    np.testing.assert_allclose(shares, expected[1], atol=1e-6)
    np.testing.assert_allclose(shares.sum(axis=1), 1, atol=1e-6)
    assert (mixtures != images).any((1, 2, 3)).mean() > 0.5


def test_the_weights_of_mixing_are_of_the_beta_distribution():
    # The mass of Beta(a, a) within t of either end, for small t, is 2 t^a / (a B(a, a)); and its variance is 1/(8a+4).
    for alpha in (0.05, 0.2, 1.0):
        wanted = augment.Augmentation(mixup=alpha)
        rows = 200_000
        given = numbers.of_device(wanted, 0, tf.constant(0, tf.int64), rows, tf.constant(0), rows).numpy()
        own = given[::2, 0].astype(float)
        beta = math.gamma(alpha) ** 2 / math.gamma(2 * alpha)
        for t in (1e-4, 1e-3):
            assert np.mean(np.minimum(own, 1 - own) < t) == pytest.approx(2 * t**alpha / (alpha * beta), abs=5e-3)
        assert own.mean() == pytest.approx(0.5, abs=5e-3)
        assert own.var() == pytest.approx(1 / (8 * alpha + 4), rel=0.02)


def test_numbers_differ_with_seed_step_purpose_and_pair_and_are_cut_to_rows():
    everything = augment.Augmentation(flip=augment.BOTH, random_erasing=0.5, mixup=0.2, cutmix=1.0)

    def of(seed: int, step: int, first: int = 0, count: int = 8, wanted=everything) -> np.ndarray:
        return numbers.of_device(wanted, seed, tf.constant(step, tf.int64), 8, tf.constant(first), count).numpy()

    whole = of(0, 5)
    assert whole.shape == (8, sum(numbers.columns(everything).values())) == (8, 11)
    np.testing.assert_array_equal(of(0, 5, 2, 4), whole[2:6])
    found = np.stack([of(seed, step) for seed in (0, 1) for step in (0, 1, 2)])[..., :7]  # what no pair shares
    assert len(np.unique(found)) == found.size
    for mixing in (augment.Augmentation(mixup=1.0), augment.Augmentation(cutmix=1.0)):
        pairs = np.stack([of(seed, step, wanted=mixing)[::2, [0, 2, 3]] for seed in (0, 1) for step in (0, 1, 2)])
        assert len(np.unique(pairs)) == pairs.size
    # An option that is off changes nothing for those that stay.
    np.testing.assert_array_equal(
        of(0, 5, wanted=dataclasses.replace(everything, random_erasing=0.0))[:, 2:], whole[:, 7:]
    )


def test_the_loss_and_accuracy_of_shares_agree_with_those_of_classes():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(BATCH, 5)).astype("float32")
    classes = generator.integers(0, 5, BATCH).astype("int32")
    certain = classification.shares(tf.constant(classes), 0.0, SPEC)
    loss, [accuracy] = tasks.loss(SPEC), tasks.metrics(SPEC)
    reference = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(classes, logits)
    np.testing.assert_allclose(loss(classes, logits), reference, rtol=1e-6)
    np.testing.assert_allclose(loss(certain, logits), reference, rtol=1e-6)
    for labels in (classes, certain):
        accuracy.reset_state()
        accuracy.update_state(labels, logits)
        assert float(accuracy.result()) == pytest.approx(np.mean(logits.argmax(1) == classes))
    smooth = classification.shares(tf.constant(classes), 0.1, SPEC).numpy()
    np.testing.assert_allclose(smooth.sum(axis=1), 1, atol=1e-6)
    smoothed = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)(certain, logits)
    np.testing.assert_allclose(loss(smooth, logits), smoothed, rtol=1e-5)


def test_the_device_does_arithmetic_only():
    """No operation that a TPU is slow at or that would draw numbers, of which none are to be drawn there."""
    everything = config(flip="both", random_erasing=0.25, mixup=0.2, cutmix=1, label_smoothing=0.1)
    prepared = augmentation.prepare(everything, SPEC)
    columns = sum(numbers.columns(augmentation.of(everything)).values())
    x, y, given = tf.zeros((4, HEIGHT, WIDTH, 3), tf.uint8), tf.zeros(4, tf.int32), tf.zeros((4, columns))
    step = tf.function(lambda *data: prepared(data), jit_compile=True, autograph=False)
    program = step.experimental_get_compiler_ir(x, y, given)(stage="hlo")
    assert " reverse(" in program and " select(" in program
    for slow in (" gather(", " scatter(", " rng", " custom-call(", " while(", " sort(", " dynamic-slice("):
        assert slow not in program, slow


@pytest.mark.parametrize("option", [{"flip": "horizontal"}, {"random_erasing": 0.5}, {"mixup": 0.2}])
def test_one_operation_alone_is_given_all_numbers(images, option) -> None:
    settings = config(**option)
    [columns] = numbers.columns(augmentation.of(settings)).values()
    x, y = augmentation.prepare(settings, SPEC)((images, np.zeros(BATCH, "int32"), drawn(columns)))
    assert x.shape == images.shape and (np.asarray(x) != images).any() and len(y) == BATCH


def test_options_are_those_of_the_data_side():
    assert options._FLIPS == augment.FLIPS and options.MOST_MAGNITUDE == rand_augment.MOST
    assert augmentation.of(config()) == dataclasses.replace(augment.NONE, rand_augment_magnitude=9.0)
    assert augmentation.of(config(mixup=0.2, flip="both")).mixup == 0.2


def test_it_says_what_happens_where():
    found = augmentation.describe(
        config(crop_padding=4, rand_augment=2, flip="horizontal", cutmix=1, label_smoothing=0.1)
    )
    assert found == "crop of the padded image, RandAugment on the host; flip, CutMix, label smoothing on the device"
    assert augmentation.describe(config()) == ""
    assert augmentation.prepare(config(rand_augment=2), SPEC) is None


@pytest.mark.parametrize(
    ("given", "spec", "said"),
    [
        (
            {"flip": "both", "mixup": 0.2},
            {"inputs": {"a": SPEC.inputs, "b": SPEC.inputs}},
            "flip, mixup is for data whose",
        ),
        (
            {"crop_padding": 4},
            {"inputs": Array((7,), "float32")},
            "crop of the padded image is for data whose input is one",
        ),
        ({"rand_augment": 2}, {"inputs": Array((8, 8, 3), "float32")}, "RandAugment takes uint8 images"),
        ({"rand_augment": 2}, {"inputs": Array((8, 8, 4), "uint8")}, "with 1 or 3 channels"),
        ({"label_smoothing": 0.1}, {"task": "", "num_classes": None}, "labels that can be shares of classes"),
    ],
)
def test_what_data_cannot_have_is_refused(given, spec, said):
    with pytest.raises(ConfigError, match=said):
        augmentation.check(config(**given), dataclasses.replace(SPEC, **spec))
    augmentation.check(config(), dataclasses.replace(SPEC, **spec))
    augmentation.check(config(**given), SPEC)


def test_options_without_effect_are_refused():
    with pytest.raises(ConfigError) as raised:
        config(crop_area=0.1, crop_padding=4, rand_augment_magnitude=12.0)
    assert "two ways to crop" in str(raised.value)
    assert "no effect with rand_augment=0" in str(raised.value)
    assert "at most 10. Received: 12" in str(raised.value)


def test_pairs_need_an_even_share_of_the_batch():
    sizes = {"num_train_examples": 100, "num_eval_examples": 10}
    with pytest.raises(ConfigError, match="global_batch_size=18, 9 on each of 2. Nearest sizes: 16 or 20"):
        plan.resolve(config(mixup=0.2, global_batch_size=18), num_replicas=2, **sizes)
    assert plan.resolve(config(global_batch_size=18), num_replicas=2, **sizes).per_replica_batch_size == 9
