"""Fine-tuning: what is frozen stays, each learning rate is the one asked for, on any number of replicas and resumed."""

import itertools
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from data.spec import Array, Spec
from tests.conftest import GUARD_SECS, ROOT, Trainer, clean_environ, state_of
from trainer import finetuning, internals, models, rules
from trainer.config import Config
from trainer.errors import ConfigError

# Each with what it takes beside its learning rate and weight decay.
OPTIMIZERS = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"use_ema": True},
    "Adamax": {},
    "Nadam": {},
    "Adadelta": {},
    "Adagrad": {},
    "Adafactor": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Ftrl": {},
    "Lamb": {},
    "Lion": {},
    "Muon": {"adam_weight_decay": 0.03},
    "ScheduleFreeAdamW": {},
}
STEPS = 10
RNG = np.random.default_rng(0)
# Of two kernels and a bias.
START = [RNG.normal(size=shape).astype("float32") for shape in [(4, 3), (3,), (3, 2)]]
GRADIENTS = [[RNG.normal(size=w.shape).astype("float32") for w in START] for _ in range(STEPS)]


def _network() -> keras.Model:
    body, head = keras.layers.Dense(3, name="body"), keras.layers.Dense(2, name="head", use_bias=False)
    x = keras.Input((4,))
    model = keras.Model(x, head(body(x)))
    model.set_weights(START)
    return model


def _schedule(factor: float) -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.PolynomialDecay(0.1 * factor, STEPS, 0.01 * factor)


def _stepped(name: str, factors: str, rate_factor: float = 1.0, steps: int = STEPS, **options) -> list[np.ndarray]:
    """The weights after `steps` steps of GRADIENTS."""
    model = _network()
    optimizer = getattr(keras.optimizers, name)(_schedule(rate_factor), weight_decay=0.02, **options)
    model.compile(optimizer, "mse", jit_compile=False)
    finetuning.scale_learning_rates(model, Config(learning_rate_factors=factors), None)
    optimizer.build(model.trainable_variables)
    for gradients in GRADIENTS[:steps]:
        optimizer.apply(gradients)
    return model.get_weights()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_factor_makes_the_optimizer_of_that_learning_rate(name: str) -> None:
    # To the bit: 0.25 is a power of two, and each optimizer deals with each variable by itself.
    options = OPTIMIZERS[name] | {"steps": 3}
    scaled = _stepped(name, "head/*=0.25", **options)
    plain, slow = (_stepped(name, "", factor, **options) for factor in (1.0, 0.25))
    np.testing.assert_array_equal(scaled[0], plain[0])
    np.testing.assert_array_equal(scaled[1], plain[1])
    np.testing.assert_array_equal(scaled[2], slow[2])
    assert np.abs(slow[2] - plain[2]).max() > 1e-4


def test_every_optimizer_of_keras_is_looked_at() -> None:
    found = {n for n, c in vars(keras.optimizers).items() if isinstance(c, type) and n[:1].isupper()}
    wrappers = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}
    assert set(OPTIMIZERS) == found - wrappers


def test_sgd_and_adamw_are_numpys() -> None:
    factors = [0.5, 0.0, 3.0]  # of body/kernel, body/bias, head/kernel
    text = "body/kernel=0.5, */bias=0, head*=3"
    sgd, adamw = [w.astype("float64") for w in START], [w.astype("float64") for w in START]
    momenta, means, squares = ([np.zeros_like(w) for w in sgd] for _ in range(3))
    for step, gradients in enumerate(GRADIENTS):
        for i, gradient in enumerate(np.asarray(g, "float64") for g in gradients):
            rate = factors[i] * (0.01 + 0.09 * (1 - step / STEPS))
            sgd[i] -= rate * 0.02 * sgd[i]
            momenta[i] = 0.9 * momenta[i] - rate * gradient
            sgd[i] += momenta[i]
            adamw[i] -= rate * 0.02 * adamw[i]
            means[i] = 0.9 * means[i] + 0.1 * gradient
            squares[i] = 0.999 * squares[i] + 0.001 * gradient**2
            mean, square = means[i] / (1 - 0.9 ** (step + 1)), squares[i] / (1 - 0.999 ** (step + 1))
            adamw[i] -= rate * mean / (np.sqrt(square) + 1e-7)
    for expected, found in ((sgd, _stepped("SGD", text, momentum=0.9)), (adamw, _stepped("AdamW", text))):
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(b, a, atol=2e-5)
    np.testing.assert_array_equal(_stepped("AdamW", text)[1], START[1])


# What is frozen.


def _model(subclassed: bool = False) -> keras.Model:
    class Block(keras.layers.Layer):
        """Has a weight of its own and layers."""

        def build(self, shape: tuple) -> None:
            self.scale = self.add_weight(shape=(), name="scale")
            self.dense, self.norm = keras.layers.Dense(4, name="dense"), keras.layers.BatchNormalization(name="norm")
            self.dense.build(shape)
            self.norm.build(shape)

        def call(self, x, training=False):
            return self.norm(self.dense(x), training=training) * self.scale

    class Network(keras.Model):
        """Has no variables before it is called."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = [Block(name="block_1"), Block(name="block_2")]
            self.head = keras.layers.Dense(2, name="logits")

        def call(self, x, training=False):
            for block in self.blocks:
                x = block(x, training=training)
            return self.head(x)

    model = Network()
    if subclassed:
        return model
    x = keras.Input((4,))
    return keras.Model(x, model.head(model.blocks[1](model.blocks[0](x))))


def _frozen(patterns: str, **options) -> keras.Model:
    model = _model(**options)
    finetuning.freeze(model, Config(freeze=patterns), keras.KerasTensor((3, 4)))
    return model


@pytest.mark.parametrize("unbuilt", [False, True])
def test_patterns_freeze_variables_and_whole_layers(unbuilt: bool) -> None:
    model = _frozen("*block_1/*, *bias", subclassed=unbuilt)
    top = f"{model.name}/" if unbuilt else ""  # as Keras names the variables of a subclassed model
    learning = {v.path.removeprefix(top) for v in model.trainable_weights}
    kept = {"scale", "dense/kernel", "norm/gamma", "norm/beta"}
    assert learning == {f"block_2/{name}" for name in kept} | {"logits/kernel"}
    before = {v.path: v.numpy() for v in model.weights}
    model(np.random.default_rng(0).normal(size=(8, 4)), training=True)
    moved = {v.path.removeprefix(top) for v in model.weights if not np.array_equal(v.numpy(), before[v.path])}
    assert moved == {"block_2/norm/moving_mean", "block_2/norm/moving_variance"}, "batch norm of a frozen layer stands"
    assert len(internals.float_state(model)) == 2, "only what moves is averaged over replicas"


def test_a_weight_of_a_block_does_not_freeze_the_block() -> None:
    learning = {v.path for v in _frozen("block_1/scale").trainable_weights}
    assert "block_1/dense/kernel" in learning and "block_1/scale" not in learning


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ("block_1*, blok_2*", r"names no variable that learns. Received: 'blok_2\*'. There are: block_2/"),
        ("*/moving_mean", r"names no variable that learns"),
        ("*", r"freeze leaves nothing to learn"),
    ],
)
def test_freezing_without_effect_is_refused(patterns: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _frozen(patterns)


def test_factors_without_effect_are_refused() -> None:
    model = _frozen("logits*")
    model.compile("sgd")
    for factors in ("logits/*=10", "block_1/moving_mean=2"):
        with pytest.raises(ConfigError, match="learning_rate_factors names no variable that learns"):
            finetuning.scale_learning_rates(model, Config(learning_rate_factors=factors), None)


@pytest.mark.parametrize("text", ["logits", "logits/*", "logits=-1", "logits=nan", "logits=inf", "=2", "a=1, a=2"])
def test_factors_that_cannot_be_read_are_refused_without_tensorflow(text: str) -> None:
    problems = [p for p in rules.problems(Config(learning_rate_factors=text)) if "learning_rate_factors" in p]
    assert len(problems) == 1 and "Received: " in problems[0]


# Blocks by name.


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (
            ["conv1_conv/kernel", "conv2_block1_1_conv/kernel", "conv2_block2_0_bn/gamma", "predictions/bias"],
            [0, 1, 2, 3],
        ),
        (["stem_conv/kernel", "block1a_dwconv/kernel", "block2b_se/bias", "top_bn/gamma"], [0, 1, 2, 3]),
        (
            ["patches/kernel", "block_00/attention/query/kernel", "block_10/mlp/layer_2/kernel", "norm/gamma"],
            [0, 1, 2, 3],
        ),
        (
            ["stem/kernel", "s_stage_0_block_1_pw/kernel", "s_downsampling_1/kernel", "s_stage_1_block_0/kernel"],
            [0, 1, 1, 2],
        ),
        (["transformer_block/kernel", "transformer_block_1/kernel", "output_layer/kernel"], [1, 2, 3]),
        (["encoder/block_1/a", "decoder/block_1/a", "layer_normalization/gamma"], [1, 2, 3]),
    ],
)
def test_depth_goes_by_numbered_blocks(paths: list[str], expected: list[int]) -> None:
    found, head = finetuning.depths(paths)
    assert found == expected
    assert head == max(expected) + (paths[-1] in ("s_stage_1_block_0/kernel",))


def test_layer_decay_is_that_of_the_paper() -> None:
    model = _model()
    config = Config(layer_decay=0.5, learning_rate_factors="logits/bias=10")
    model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    finetuning.scale_learning_rates(model, config, None)
    model.optimizer.build(model.trainable_variables)
    before = [v.numpy() for v in model.trainable_variables]
    model.optimizer.apply([np.ones(v.shape, "float32") for v in model.trainable_variables])
    steps = {v.path: (b - v.numpy()).mean() for b, v in zip(before, model.trainable_variables, strict=True)}
    for path, step in steps.items():
        depth = {"block_1": 1, "block_2": 2}.get(path.split("/")[0], 3)
        expected = 0.5 ** (3 - depth) * (10 if path == "logits/bias" else 1)
        assert step == pytest.approx(expected, rel=1e-5), path
    assert finetuning.describe(model, config) == (
        "learning rate times logits/bias=10; times 0.125 before block_1, 0.5 in block_2, 1 behind"
    )


def test_layer_decay_needs_numbered_blocks() -> None:
    model = _network()
    model.compile("sgd")
    with pytest.raises(
        ConfigError, match=r"goes by numbered blocks.*Received: body/kernel, body/bias, head/kernel. Use"
    ):
        finetuning.scale_learning_rates(model, Config(layer_decay=0.5), None)


# On several replicas, and resumed.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, np.ndarray]]:
    """`<case>/<replicas>` -> name -> array, of `finetuning_worker`."""
    path = tmp_path_factory.mktemp("finetuning") / "out.npz"
    command = [sys.executable, "-m", "tests.finetuning_worker", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=GUARD_SECS)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, np.ndarray]] = {}
    for key, array in np.load(path).items():
        case, replicas, name = key.split("/", 2)
        found.setdefault(f"{case}/{replicas}", {})[name] = array
    return found


def _moved(state: dict[str, np.ndarray]) -> set[str]:
    return {n for n, a in state.items() if n.startswith("model/") and not np.array_equal(a, state[f"before/{n}"])}


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_what_is_frozen_keeps_its_bits_and_has_no_optimizer_state(trained: dict, replicas: int) -> None:
    state = trained[f"frozen/{replicas}"]
    assert _moved(state) == {f"model/{layer}/{name}" for layer in ("block_1", "logits") for name in ("kernel", "bias")}
    slots = [name for name in state if name.startswith("optimizer/")]
    assert any("block_1" in name for name in slots)
    assert not any("stem" in name or "block_0" in name for name in slots)


@pytest.mark.slow
def test_replicas_learn_what_one_learns(trained: dict) -> None:
    for case, many in [("frozen", "3"), ("factors", "2")]:
        alone, together = trained[f"{case}/1"], trained[f"{case}/{many}"]
        for name in (name for name in alone if name.startswith("model/")):
            np.testing.assert_allclose(together[name], alone[name], atol=1e-5, err_msg=f"{case} {many} {name}")


@pytest.mark.slow
def test_only_what_has_a_factor_above_0_moves(trained: dict) -> None:
    learning = [("block_0", "block_1", "logits"), ("kernel", "bias")]
    assert _moved(trained["factors/1"]) == {f"model/{layer}/{name}" for layer, name in itertools.product(*learning)}


@pytest.mark.slow
def test_layer_decay_holds_under_loss_scaling_and_xla(trained: dict) -> None:
    state = trained["decay/2"]
    steps = {
        n: np.abs(state[f"model/{n}/kernel"] - state[f"before/model/{n}/kernel"]).mean() for n in ("stem", "block_1")
    }
    assert 0 < steps["stem"] < steps["block_1"]
    np.testing.assert_array_equal(state["model/block_0/bias"], state["before/model/block_0/bias"])


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_bits(trained: dict) -> None:
    whole, resumed = trained["factors/2"], trained["factors/resumed"]
    for name, array in whole.items():
        if not name.startswith(("metrics/", "before/")):
            np.testing.assert_array_equal(resumed[name], array, err_msg=name)


@pytest.mark.slow
def test_another_head_on_trained_weights(trainer: Trainer, tmp_path: pathlib.Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    small = ["--model=cnn", "--model_options=filters=[8], units=16", "--global_batch_size=64"]
    trainer.run(f"--model_dir={first}", *small, "--mode=train", "--train_steps=10")
    flags = [f"--init_from={first}", "--init_fresh=logits/*", "--num_classes=12", "--freeze=conv2d*, batch_norm*"]
    flags += ["--learning_rate_factors=dense/*=0.1, logits/*=10", "--train_steps=20", "--optimizer=sgd"]
    done = trainer.run(f"--model_dir={second}", *small, *flags)
    assert "as initialised: logits/bias, logits/kernel" in done.stdout
    assert "parameters learn; learning rate times dense/*=0.1, logits/*=10" in done.stdout
    before, after = state_of(first), state_of(second)
    for name in (n for n in before if n.startswith("model/")):
        same = "conv2d" in name or "batch_norm" in name
        assert same == (before[name].shape == after[name].shape and np.array_equal(before[name], after[name])), name
    _serves_what_was_trained(second / "export", after)


def _serves_what_was_trained(export: pathlib.Path, state: dict[str, np.ndarray]) -> None:
    """Against the model built anew, with the weights of the checkpoint."""
    images = np.random.default_rng(0).integers(0, 17, (5, 8, 8, 1)).astype("uint8")
    served = tf.saved_model.load(str(export)).signatures["serving_default"]
    (argument,) = served.structured_input_signature[1]
    keras.utils.clear_session()
    spec = Spec(Array((8, 8, 1), "uint8"), Array((), "int32"), 12)
    model = models.find("cnn", {"filters": [8], "units": 16}).build(spec)
    for variable in model.weights:
        variable.assign(state[f"model/{variable.path}"])
    logits = served(**{argument: tf.constant(images)})["logits"].numpy()
    np.testing.assert_allclose(logits, model(images).numpy(), atol=1e-5)
