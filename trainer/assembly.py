"""A run put together on its devices: plan, model, batches. What every mode needs of it."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from data.augment import numbers
from data.spec import Array
from trainer import (
    adapting,
    augmentation,
    backend,
    cluster,
    console,
    export,
    finetuning,
    inputs,
    internals,
    lint,
    models,
    optimizers,
    patterns,
    plan,
    refusals,
    replicated,
    run_dir,
    tasks,
)
from trainer.callbacks.clock import Clock
from trainer.config import FIELDS, Config, nearest
from trainer.errors import ConfigError
from trainer.options.field import default

# Options that say nothing once a model brings its own optimizer.
OPTIMIZER_OPTIONS = [name for name, field in FIELDS.items() if field.metadata["group"] == "optimizer"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass
class Assembly:
    """One run on its devices.

    origins: who said what of the options, as `flags.origins` has it. plan: steps and batches. replicated: the compiled
    model, its variables made on every replica.
    """

    config: Config
    clock: Clock
    source: models.ModelSource
    inputs: inputs.AnyInputs
    folder: run_dir.RunDir
    devices: cluster.Cluster
    origins: Mapping[str, Mapping[str, str]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = self.inputs.spec
        self._prepare = augmentation.prepare(self.config, self.spec)
        self.plan = plan.resolve(
            self.config,
            num_replicas=self.devices.num_replicas,
            num_train_examples=self.inputs.num_train_examples,
            num_eval_examples=self.inputs.num_eval_examples,
        )
        self.replicated = self._build()

    def _build(self) -> replicated.Replicated:
        """The compiled model, its variables made on every replica."""
        config, devices = self.config, self.devices
        keras.utils.clear_session()
        keras.utils.set_random_seed(config.seed)
        keras.config.set_dtype_policy(config.precision)
        with devices.scope():
            model = self.compiled_model()
        wants_xla = config.xla == "on" or (config.xla == "auto" and devices.kind == "gpu")
        if config.xla == "auto" and refusals.reason_against_xla(model, devices.num_replicas):
            wants_xla = False
        compiles = wants_xla or backend.always_compiles(config.backend)
        if config.compile_cache is not None and config.mode in inputs.TRAINING_MODES and not compiles:
            raise ConfigError(
                "compile_cache has no effect where XLA compiles nothing: without --xla=on TensorFlow runs steps on the "
                "CPU as they are. Leave it out or use --xla=on"
            )
        batch_spec = self.batch_spec(self.plan.per_replica_batch_size)
        built = replicated.Replicated(
            model,
            devices,
            batch_spec,
            xla=wants_xla,
            microbatches=config.microbatches,
            remat=patterns.split(config.remat),
            prepare=self._prepare,
        )
        if config.keep_best_checkpoints and config.mode in (*inputs.EVALUATING_MODES, inputs.PREFLIGHT):
            _refuse_unknown_metric(config.best_metric, internals.metric_names(model))
        return built

    def compiled_model(self) -> keras.Model:
        model = self.new_model()
        inputs = self.batch_spec(self.plan.per_replica_batch_size)[0]
        finetuning.freeze(model, self.config, inputs)
        brought = self.source.compile_args(self.spec)
        if "optimizer" in brought:
            self._refuse_optimizer_options()
        if augmentation.makes_shares(self.config) and brought.keys() & {"loss", "metrics"}:
            raise ConfigError(
                f"the model {self.config.model} brings its own loss or metrics, for labels as they are stored, and "
                "mixup, cutmix and label_smoothing make shares of classes of these. Leave one or the other out. "
                f"Received: {', '.join(brought)}"
            )
        if "loss" not in brought:
            self._check_output(model)
        model.compile(
            optimizer=brought.get("optimizer") or optimizers.build(self.config, self.plan.learning_rate),
            loss=brought["loss"] if "loss" in brought else tasks.loss(self.spec),
            # Weighted, so that the padding of the last evaluation batch, of weight 0, counts in none of them.
            weighted_metrics=brought["metrics"] if "metrics" in brought else tasks.metrics(self.spec),
            jit_compile=False,
        )
        finetuning.scale_learning_rates(model, self.config, inputs)
        return model

    def new_model(self) -> keras.Model:
        with internals.synchronized_anywhere():
            model = self.source.build(self.spec)
        if not isinstance(model, keras.Model):
            raise ConfigError(
                f"build of {self.config.model} must return a keras.Model. Received: {type(model).__name__}"
            )
        internals.use_statistics(model)
        return model

    def _check_output(self, model: keras.Model) -> None:
        outputs = getattr(model, "outputs", None) or []  # a subclassed model tells none before it is called
        own = internals.overrides(model, "compute_loss") or internals.overrides(model, "train_step")
        if len(outputs) == 1 and None not in outputs[0].shape[1:] and not own:
            tasks.check_output(outputs[0].shape[1:], self.spec)

    def _refuse_optimizer_options(self) -> None:
        given = [name for name in OPTIMIZER_OPTIONS if getattr(self.config, name) != default(FIELDS[name])]
        if given:
            raise ConfigError(
                f"the model {self.config.model} brings its own optimizer, so these have no effect; leave them out. "
                f"Received: {', '.join(given)}"
            )

    def batch_spec(self, batch: int) -> tuple:
        """(x, y) of `batch` examples as the model is trained on them, as Keras' symbolic tensors."""
        return _symbolic(self.spec.inputs, batch), _symbolic(augmentation.label(self.config, self.spec), batch)

    def stored_spec(self, batch: int) -> tuple:
        """(x, y) of `batch` examples as they are stored, and evaluated."""
        return _symbolic(self.spec.inputs, batch), _symbolic(self.spec.label, batch)

    def input_spec(self, batch: int) -> tuple:
        """`batch` examples as the input of training yields them, of which `prepared` makes (x, y)."""
        columns = sum(numbers.columns(augmentation.of(self.config)).values())
        drawn = (_symbolic(Array((columns,), "float32"), batch),) if columns else ()
        return *self.stored_spec(batch), *drawn

    def prepared(self, data: tuple) -> tuple:
        """(x, y) that the model is trained on, of what the input of training yields for one replica."""
        return data if self._prepare is None else self._prepare(data)

    def remarks(self) -> list[str]:
        """What a TPU takes badly of the model, where that was asked for or a TPU is there."""
        wanted = self.config.lint == "on" or (self.config.lint == "auto" and self.devices.kind == "tpu")
        if not wanted:
            return []
        with self.devices.scope():
            found = lint.lint(self.replicated.model, self.batch_spec(self.plan.per_replica_batch_size))
        return lint.grouped(found)

    def copy(self, model: keras.Model) -> keras.Model:
        """`model`, new and outside the strategy, with the weights of the one that is trained as they are now."""
        model(keras.tree.map_structure(lambda t: keras.ops.zeros(t.shape, t.dtype), self.batch_spec(1)[0]))
        model.set_weights(self.replicated.model.get_weights())
        return model

    def adapt(self) -> None:
        """Gives layers that adapt to the data its mean and variance, where no checkpoint has; see `adapting`.

        Raises:
            ConfigError: `adapt_examples` is given and no layer adapts, or one cannot.
        """
        trained, wanted = self.replicated.model, self.config.adapt_examples
        if wanted != FIELDS["adapt_examples"].default and not any(map(internals.adapts, internals.layers(trained))):
            raise ConfigError(
                f"adapt_examples has no effect on {self.config.model}, which has no Normalization layer that adapts to "
                f"the data; leave it out. Received: {wanted}"
            )
        places = adapting.waiting(trained)
        if not places:
            return
        count = min(wanted, self.inputs.num_train_examples)
        batches = inputs.first_examples(self.inputs, self.plan, count)
        adapting.adapt(trained, self.devices, self.copy(self.new_model()), places, batches)
        _log.info("normalises by mean and variance of %s training examples", f"{count:,}")

    def train_batches(self, start_step: int, seed: int) -> Iterable[Any]:
        def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return self.inputs.reseeded(seed).train_batches(self.plan, context, start_step)

        return self.devices.distribute(batches)

    def evaluate(self, goes_on: Callable[[], bool] = lambda: True) -> replicated.Logs | None:
        """Metrics over the evaluation split, each example counted once; None where `goes_on` said no."""
        with self.clock.measure("evaluation"):
            return self.replicated.evaluate(iter(self.eval_batches), self.plan.eval_loops(), goes_on)

    @functools.cached_property
    def eval_batches(self) -> Iterable[Any]:
        """The global batches of `(x, y, mask)` of the evaluation split, from its first record on at each `iter`."""

        def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return self.inputs.eval_batches(self.plan, context)

        return self.devices.distribute(batches)

    def export(self) -> str:
        """Exports a copy of the model made outside the strategy, so that it serves anywhere."""
        directory = self.folder.export_dir
        if self.devices.is_chief:
            with self.clock.measure("export"), self.replicated.averaged():
                export.save(self.copy(self.new_model()), self.spec, directory)
        return directory

    def summary(self, start_step: int) -> str:
        """What the console says before the work begins."""
        trains = self.config.mode in (*inputs.TRAINING_MODES, *inputs.TRYING_MODES)
        return console.start_up(
            dataset=self.inputs.describe(),
            reading=self.inputs.describe_reading(self.plan, self.devices.num_hosts) if trains else "",
            augmentation=augmentation.describe(self.config) if trains else "",
            model=f"{self.config.model}: {self.replicated.model.count_params():,} parameters, {self.config.precision}",
            fine_tuning=finetuning.describe(self.replicated.model, self.config),
            devices=self.devices.description,
            plan=self.plan,
            start_step=start_step,
            model_dir=self.folder.path,
            options=self.origins,
        )


def _symbolic(arrays: Array | Mapping[str, Array], batch: int) -> Any:
    if isinstance(arrays, Array):
        return keras.KerasTensor((batch, *arrays.shape), dtype=arrays.dtype)
    return {name: _symbolic(array, batch) for name, array in arrays.items()}


def _refuse_unknown_metric(name: str, known: Sequence[str]) -> None:
    if known and name not in known:
        raise ConfigError(
            f"best_metric must be a metric of the evaluation: {', '.join(known)}. "
            f"Received: {name!r}{nearest(name, known)}"
        )
