"""Runs what the trainer computes of batches, models and gradients, and stores it, to be compared over backends.

`python -m tests.backends.neutral_worker OUT.npz`, with KERAS_BACKEND. Keys are `<part>/<what>`. Weights, batches and
gradients are NumPy's, so that the backends are given the same.
"""

import contextlib
import pathlib
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops

from data.spec import Array, Spec
from tests.backends import neutral_models
from trainer import adapting, augmentation, backend, config, finetuning, internals, lint, optimizers, postmortem, tasks
from trainer.callbacks import Loop
from trainer.callbacks.profile import Profile
from trainer.optimizers.schedules import Schedule
from trainer.options.optimizer import SCHEDULES
from trainer.plan import LearningRate
from trainer.preflight import mixing

BATCH, CLASSES, STEPS = 8, 5, 6
IMAGES = Spec(Array((9, 12, 3), "uint8"), Array((), "int32"), CLASSES, "classification")
SPECS = {
    "classification": Spec(Array((4,), "float32"), Array((), "int32"), CLASSES, "classification"),
    "multi_label": Spec(Array((4,), "float32"), Array((3,), "int32", below=2), None, "multi_label"),
    "regression": Spec(Array((4,), "float32"), Array((), "float32"), None, "regression"),
    "language_model": Spec(Array((7,), "int32", below=11), Array((7,), "int32", below=11), None, "language_model"),
}
# Ours, those that do more than Keras' base class does for them, and one that scales losses.
OPTIMIZERS = ("lars", "lamb", "adamw", "muon", "sgd scaled")


def augmented() -> Iterator[tuple[str, Any]]:
    """Every operation at once, of uint8 and of float32 images."""
    wanted = {"flip": "both", "random_erasing": 0.5, "mixup": 0.4, "cutmix": 1.0, "label_smoothing": 0.1}
    settings = config.merge({"dataset": "d", "model_dir": "m", **wanted})
    generator = np.random.default_rng(0)
    columns = sum(augmentation.numbers.columns(augmentation.of(settings)).values())
    given = generator.random((BATCH, columns), np.float32)
    given[1::2, -4:] = given[::2, -4:]  # of a pair
    given[:, -3] = [0, 0, 1, 1, 0, 0, 1, 1]  # mixup and CutMix
    labels = generator.integers(0, CLASSES, BATCH).astype("int32")
    for dtype in ("uint8", "float32"):
        images = generator.integers(0, 256, (BATCH, 9, 12, 3)).astype(dtype)
        prepared = augmentation.prepare(settings, IMAGES)
        step = backend.part("functions").compiled(lambda *data, prepared=prepared: prepared(data))
        yield from zip((f"{dtype}/x", f"{dtype}/y"), step(images, labels, given), strict=True)


def learned() -> Iterator[tuple[str, Any]]:
    """Losses, metrics with padding, and outputs of every task."""
    for name, spec in SPECS.items():
        generator = np.random.default_rng(1)
        shape = (BATCH, *spec.label.shape)
        below = spec.num_classes or spec.label.below
        y = generator.integers(0, below, shape).astype("int32") if below else generator.normal(size=shape)
        y = y.astype(spec.label.dtype)
        if name == "language_model":
            y[:, -2:] = -1
        logits = (BATCH, tasks.num_outputs(spec)) if name != "language_model" else (*shape, tasks.num_outputs(spec))
        y_pred = generator.normal(size=logits).astype("float32")
        mask = np.array([1, 1, 1, 1, 1, 0, 0, 0], "float32")
        metrics = tasks.metrics(spec)

        def learn(y: Any, y_pred: Any, mask: Any, spec: Spec = spec, metrics: list = metrics) -> dict[str, Any]:
            with keras.StatelessScope():
                for metric in metrics:
                    metric.update_state(y, y_pred, sample_weight=mask)
                found = {metric.name: metric.result() for metric in metrics}
            return found | tasks.outputs(y_pred, spec) | {"loss": tasks.loss(spec)(y, y_pred)}

        for key, value in backend.part("functions").compiled(learn)(y, y_pred, mask).items():
            yield f"{name}/{key}", value


def schedules() -> Iterator[tuple[str, Any]]:
    """At each step of 1,000, and near the end of 1e9, which float32 cannot count."""
    for name in SCHEDULES:
        for scale in (1, 10**6):
            marks = (900 * scale,) if name == "wsd" else (300 * scale, 601 * scale)
            planned = LearningRate(
                name,
                0.3,
                train_steps=1000 * scale,
                warmup_steps=50 * scale,
                decay_steps=marks,
                decay_every_steps=120 * scale,
                decay_factor=0.5,
                decay_power=2.0,
                final_factor=0.01,
            )
            steps = np.arange(1000) if scale == 1 else 1000 * scale - np.arange(1, 100)
            yield f"{name}/{scale}", backend.part("functions").compiled(Schedule(planned))(steps.astype("int32"))


def optimized() -> Iterator[tuple[str, Any]]:
    """Weights after some steps, with decay, clipping, averages and learning rates of their own."""
    for name in OPTIMIZERS:
        keras.utils.clear_session()
        model = neutral_models.blocks()
        kind, _, scaled = name.partition(" ")
        settings = config.Config(
            optimizer=kind,
            learning_rate=0.01,
            weight_decay=0.01,
            global_clipnorm=0.5,
            ema_momentum=0.9,
            layer_decay=0.5,
        )
        optimizer = optimizers.build(settings, LearningRate("cosine", 0.01, 10, warmup_steps=2))
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
        finetuning.scale_learning_rates(model, settings, None)
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
        generator, apply = np.random.default_rng(2), neutral_models.applying(optimizer)
        for _ in range(STEPS):
            apply([generator.normal(size=v.shape).astype("float32") for v in model.trainable_variables])
        for variable in (*model.trainable_variables, *optimizer.variables):
            if keras.backend.is_float_dtype(variable.dtype):
                yield f"{name}/{variable.path}", variable.value


def adapted() -> Iterator[tuple[str, Any]]:
    """Mean and variance of layers; what is said of one behind weights."""
    import tensorflow as tf

    generator = np.random.default_rng(3)
    x, y = (generator.normal(1e4, 3.0, (50, 3)).astype("float32"), generator.normal(5, 2, (50, 1)).astype("float32"))
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    devices: Any = types.SimpleNamespace(scope=contextlib.nullcontext)
    for behind_weights in (False, True):
        made = [neutral_models.normalised(behind_weights) for _ in range(2)]
        for model in made:
            internals.use_statistics(model)
        model, copy = made
        try:
            adapting.adapt(model, devices, copy, adapting.waiting(model), batches)
        except config.ConfigError as error:
            yield "refused", str(error)
            continue
        for variable in model.non_trainable_variables:
            yield variable.path, variable.value
        yield "answers", model(x[:4], training=False)


def examined() -> Iterator[tuple[str, Any]]:
    """What a post-mortem finds: of the forward pass, of the backward pass, of nothing."""
    x, y = np.random.default_rng(4).uniform(0.5, 1.0, (2, 4)).astype("float32"), np.ones((2, 1), "float32")
    records = [postmortem.Record("shard", row) for row in range(len(x))]
    for kind, value in (("log", -1.0), ("sqrt", 0.0)):
        x[1] = value
        keras.utils.clear_session()
        found = postmortem.examine(neutral_models.bad_at(kind), [(x, y)], records, {}, step=7, learning_rate=0.1)
        yield f"{kind}/{value}/first", str(found.first)
        yield f"{kind}/{value}/suspects", str(found.suspects)
        yield f"{kind}/{value}/norms", np.array(list(found.gradient_norms.values()))
        yield f"{kind}/{value}/loss", np.array(found.loss)


def remarked() -> Iterator[tuple[str, Any]]:
    """Lint, and which layer mixes examples."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = neutral_models.padded()
    keras.config.set_dtype_policy("float32")
    model.compile("sgd", "mse", jit_compile=False)
    spec = (keras.KerasTensor((12, 8, 8, 6), name="image"), keras.KerasTensor((12, 3)))
    yield "lint", "\n".join(lint.grouped(lint.lint(model, spec)))
    for mixes in (False, True):
        yield f"mixes/{mixes}", str(mixing.mixes_examples(neutral_models.mixing(mixes), keras.KerasTensor((2, 4))))


def profiled() -> Iterator[tuple[str, Any]]:
    """First steps of the loops in a profile of steps 10 to 29."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    work = backend.part("functions").compiled(lambda x: ops.matmul(x, x))
    with tempfile.TemporaryDirectory() as folder:
        made = Profile(f"{folder}/tensorboard", steps=(10, 30), requested=lambda: False, start_step=0)
        for begin in range(0, 40, 10):
            made.on_loop_begin(begin)
            ops.convert_to_numpy(work(np.ones((64, 64), "float32")))
            made.on_loop_end(Loop(begin, begin + 10, 0.01, 0.0, {}, 0.1, first=False))
        made.on_end()
        [file] = pathlib.Path(folder).glob("tensorboard/plugins/profile/*/*.xplane.pb")
        planes = xplane_pb2.XSpace.FromString(file.read_bytes()).planes
    steps = []
    for plane in planes:
        for event in (event for line in plane.lines for event in line.events):
            if plane.event_metadata[event.metadata_id].name == "train":
                stats = {plane.stat_metadata[stat.metadata_id].name: stat for stat in event.stats}
                steps.append(stats["step_num"].int64_value or stats["step_num"].uint64_value)
    yield "steps", np.array(sorted(steps))


PARTS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    function.__name__: function
    for function in (
        augmented,
        learned,
        schedules,
        optimized,
        adapted,
        examined,
        remarked,
        profiled,
        neutral_models.remat,
    )
}


def found() -> dict[str, np.ndarray]:
    """Of all parts."""
    arrays = {}
    for part, function in PARTS.items():
        for name, value in function():
            arrays[f"{part}/{name}"] = np.array(value if isinstance(value, str) else ops.convert_to_numpy(value))
    return arrays


if __name__ == "__main__":
    np.savez(sys.argv[1], **found())
