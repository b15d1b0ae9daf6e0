"""One run of `--mode=parity`: a few steps from given weights, and what it can be compared by."""

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer import comparison, internals, parity, precision
from trainer.assembly import Assembly
from trainer.errors import ConfigError
from trainer.replicated import GRADIENT_NORM, MODEL, Replicated

# Of the last batch of the evaluation; the rest is padding, so that a replica has a share of nothing else.
_REAL_EXAMPLES = 1

Share = tuple[Any, np.ndarray]  # (x, y)


# Of gradients, which are compared themselves; those of precision are of each replica's own share.
_NOT_COMPARED = (GRADIENT_NORM, *precision.NAMES)


@dataclasses.dataclass
class ParityRun:
    """A run to observe for `steps` steps.

    quiet: the layers that differ by nature are made inert; noisy: names of those that draw random numbers all the same.
    """

    run: Assembly
    steps: int
    quiet: bool

    def __post_init__(self) -> None:
        self._trained: Replicated = self.run.replicated
        left = internals.make_inert(self.model) if self.quiet else []
        self.noisy = tuple(layer.name for layer in left)
        self._gradients = self._trained.engine.keep_gradients()
        self._start = self._trained.state()

    @property
    def model(self) -> keras.Model:
        """As it is trained."""
        return self._trained.model

    @property
    def precision(self) -> str:
        """Of the run, which may not be that of the options."""
        return self.run.config.precision

    def weights(self) -> dict[str, np.ndarray]:
        """The model's arrays of now, by name."""
        return {name: array for name, array in self._trained.state().items() if name.startswith(MODEL)}

    def observe(
        self, weights: Mapping[str, np.ndarray], evaluated: Mapping[str, np.ndarray] | None
    ) -> comparison.Observed:
        """Trains from `weights`, and evaluates with the weights `evaluated`, or those trained."""
        self._trained.load_state(self._start | dict(weights))
        self._trained.reset_metrics()
        iterator = iter(self.run.train_batches(0, self.run.config.seed))
        first = self._steps(iterator, 1, 0)
        last = self._steps(iterator, self.steps - 1, 1) if self.steps > 1 else first
        self._trained.check_integer_state()
        if evaluated is not None:
            self._trained.load_state(evaluated)
        return comparison.Observed(
            {name.removeprefix(MODEL): array for name, array in weights.items()}, first, last, self._evaluate()
        )

    def _steps(self, iterator: Iterator, steps: int, done: int) -> comparison.Snapshot:
        trained = self._trained.run_train_loop(iterator, steps)
        if trained.halted_at is not None:
            raise ConfigError(
                f"loss or gradients of step {done + trained.halted_at} are not finite, so there is nothing to compare. "
                "Run --mode=train, which says where they become so"
            )
        arrays = {name.removeprefix(MODEL): array for name, array in self.weights().items()}
        trainable = {variable.path for variable in self._trained.model.trainable_variables}
        return comparison.Snapshot(
            {name: value for name, value in trained.logs.items() if name not in _NOT_COMPARED},
            self._gradients(),
            {name: array for name, array in arrays.items() if name.partition("#")[0] in trainable},
            {name: array for name, array in arrays.items() if name.partition("#")[0] not in trainable},
        )

    def _evaluate(self) -> dict[str, float]:
        config, plan = self.run.config, self.run.plan
        if config.eval_split not in self.run.inputs.dataset.splits:
            return {}

        def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return self.run.inputs.eval_batches(plan, context).enumerate().map(padded)

        def padded(index: tf.Tensor, batch: tuple) -> tuple:
            step, share = index // plan.num_replicas, index % plan.num_replicas
            rows = share * plan.per_replica_batch_size + tf.range(plan.per_replica_batch_size, dtype=tf.int64)
            is_real = (step < self.steps - 1) | (rows < _REAL_EXAMPLES)
            return *batch[:-1], batch[-1] * tf.cast(is_real, batch[-1].dtype)

        distributed = self.run.devices.distribute(batches)
        return self._trained.evaluate(iter(distributed), [(0, self.steps)]) or {}

    def shares(self, num_shares: int, *, most_rows: int | None) -> list[Share]:
        """The first examples of each replica's share of the first batch, or all of them; of a run on one replica."""
        batches = self.run.inputs.train_batches(self.run.plan, tf.distribute.InputContext(), 0)
        batch = keras.tree.map_structure(np.asarray, self.run.prepared(next(batches.as_numpy_iterator())))
        size = self.run.plan.global_batch_size // num_shares
        rows = min(size, most_rows or size)
        return [
            keras.tree.map_structure(lambda a, at=at: a[at : at + rows], batch)
            for at in range(0, size * num_shares, size)
        ]

    def forward(self, weights: Mapping[str, np.ndarray], batch: Sequence[Share], *, xla: bool = False) -> parity.Pass:
        """A forward pass in training over one share on each replica; compiled on one replica only."""
        model = self.model
        is_own = internals.overrides(model, "train_step") is not None  # only it knows the loss
        names: list[str] = []  # of one replica, the same on all
        here = threading.local()  # TensorFlow runs replicas by turns, each in a thread

        def note(layer: keras.layers.Layer, output: Any) -> None:
            name = f"{layer.name} ({type(layer).__name__})"
            here.noted += [(name, tensor) for tensor in keras.tree.flatten(output) if len(tensor.shape)]

        def on_replica(share: Share) -> list[Any]:
            here.noted = []
            x, y = share
            y_pred = model(x, training=True)
            noted = [*here.noted, *((parity.OUTPUT, tensor) for tensor in keras.tree.flatten(y_pred))]
            loss = 0.0 if is_own else internals.compute_loss(model, x, y, y_pred)
            names[:] = [name for name, _ in noted]
            return [keras.ops.cast(loss, "float32"), *(tensor for _, tensor in noted)]

        self._trained.load_state(self._start | dict(weights))
        with internals.watching_layers(note):
            found = self._trained.engine.run(on_replica, batch, xla=xla)
        return parity.together(
            [
                parity.Pass(tuple(zip(names, outputs, strict=True)), None if is_own else float(loss))
                for loss, *outputs in found
            ]
        )
