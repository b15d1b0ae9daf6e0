"""Every name that Keras keeps private, and every way around what Keras does; nothing else touches them.

Those that are for one backend only stand in `backends/*/internals.py`.

`tests/test_internals.py` names what has moved when a version changes. The supported ranges stand in setup.cfg.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import ops
from keras.src import losses as keras_losses
from keras.src.backend.common import masking as keras_masking
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.random import seed_generator as keras_seed_generator


def build(model: keras.Model, batch_spec: tuple) -> None:
    """Creates every variable of model, optimizers and metrics from static shapes, under the strategy's scope.

    `fit` of Keras would eat the first batch for it.
    """
    model._symbolic_build(data_batch=batch_spec)
    use_statistics(model)  # of layers too that a model makes only when it is built
    for optimizer in optimizers(model):
        if not optimizer.built:
            optimizer.build(model.trainable_variables)


def global_seed() -> keras.Variable:
    """State of the random numbers that are drawn without a generator; Keras keeps it outside of any model."""
    return keras_seed_generator.global_seed_generator().state


def test_step(model: keras.Model, data: tuple) -> None:
    """Evaluates `(x, y, mask)`, mask [b] float32 with 0 for padding, so that each real example counts once."""
    if overrides(model, "test_step"):
        model.test_step(data)
        return
    x, y, mask = data
    y_pred = model(x, training=False)
    real = ops.sum(mask)
    # Keras divides by the batch size; these weights make it the mean over the real examples, whatever the rank of the
    # loss, and leave regularisation losses alone.
    weights = mask * ops.divide_no_nan(ops.cast(ops.shape(mask)[0], mask.dtype), real)
    loss = model._compute_loss(x, y, y_pred, weights, training=False)
    model._loss_tracker.update_state(loss, sample_weight=real)
    model.compute_metrics(x, y, y_pred, sample_weight=mask)


def outputs(model: keras.Model, x: Any) -> list:
    """What the model makes of `x` in evaluation, in full precision: the host knows no halves."""
    made = keras.tree.flatten(model(x, training=False))
    halves = ("bfloat16", "float16")
    return [ops.cast(y, "float32") if keras.backend.standardize_dtype(y.dtype) in halves else y for y in made]


def compute_loss(model: keras.Model, x: Any, y: Any, y_pred: Any) -> Any:
    """The loss of a training step."""
    return model._compute_loss(x, y, y_pred, None, training=True)


def note_loss(model: keras.Model, loss: Any, *, examples: Any) -> None:
    """Adds the loss of a training step over `examples`, a number or a tensor, to the mean that Keras reports.

    As `update_state` does, which takes a dozen operations for it.
    """
    tracker = model._loss_tracker
    if len(loss.shape):
        tracker.update_state(loss, sample_weight=examples)
        return
    examples = ops.cast(examples, tracker.count.dtype)
    tracker.total.assign_add(ops.cast(loss, tracker.total.dtype) * examples)
    tracker.count.assign_add(examples)


def assign_at_once(variable: keras.Variable, value: Any) -> None:
    """Within a scope that keeps assignments to itself too."""
    variable._direct_assign(value)


def only_asks_for_shapes() -> bool:
    """Whether what runs now runs on symbols, of which only shapes and dtypes are known."""
    return in_symbolic_scope()


@contextlib.contextmanager
def watching_layers(
    note: Callable[[keras.layers.Layer, Any], Any],
    *,
    begin: Callable[[keras.layers.Layer], None] = lambda layer: None,
    nested: bool = False,
) -> Iterator[None]:
    """Tells `note` of each layer and its output, and `begin` before, in the order of their calls.

    Of those that have no layers in them only, unless `nested`. What `note` returns, unless None, is then the output.
    """
    call = keras.layers.Layer.__call__

    def noted_call(self: keras.layers.Layer, *args: Any, **kwargs: Any) -> Any:
        if not nested and list(self._flatten_layers(include_self=False)):
            return call(self, *args, **kwargs)
        begin(self)
        output = call(self, *args, **kwargs)
        replaced = note(self, output)
        return output if replaced is None else keras.tree.map_structure(_masked_as, replaced, output)

    keras.layers.Layer.__call__ = noted_call
    try:
        yield
    finally:
        keras.layers.Layer.__call__ = call


def _masked_as(tensor: Any, other: Any) -> Any:
    if tensor is not other and (mask := keras_masking.get_keras_mask(other)) is not None:
        keras_masking.set_keras_mask(tensor, mask)
    return tensor


def watch_gradients(optimizer: keras.optimizers.Optimizer, note: Callable[[Sequence, Sequence], None]) -> None:
    """Tells `note(gradients, variables)`, on each replica, of its own gradients before they are averaged."""
    apply = optimizer.apply

    def noted(gradients: Sequence, trainable_variables: Sequence | None = None) -> None:
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        note(gradients, inner._trainable_variables if trainable_variables is None else trainable_variables)
        apply(gradients, trainable_variables)

    optimizer.apply = noted


def scale_learning_rates(
    optimizer: keras.optimizers.Optimizer, factors: Sequence[tuple[keras.Variable, float]]
) -> None:
    """Multiplies the learning rate of each variable, of its update and of its decoupled weight decay, by its factor.

    Keras has one learning rate an optimizer. Its `MultiOptimizer` has several, but clips each part by its own norm and
    tells no learning rate. What is 1 is not multiplied, so that it changes no bit.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    factor_of = {inner._var_key(variable): factor for variable, factor in factors}
    update_step, decay = inner.update_step, inner._apply_weight_decay
    rate = inner._get_current_learning_rate
    decaying = 1.0

    def times(value: Any, factor: float) -> Any:
        return value if factor == 1.0 else value * factor

    def scaled_update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        update_step(gradient, variable, times(learning_rate, factor_of[inner._var_key(variable)]))

    def scaled_decay(variables: Sequence) -> None:
        nonlocal decaying
        # Keras takes the learning rate from the optimizer here, once for all: so the variables of one factor at a time.
        groups: dict[float, list] = {}
        for variable in variables:
            groups.setdefault(factor_of[inner._var_key(variable)], []).append(variable)
        for factor, group in groups.items():
            decaying = factor
            decay(group)
        decaying = 1.0

    inner.update_step = scaled_update_step
    inner._apply_weight_decay = scaled_decay
    inner._get_current_learning_rate = lambda: times(rate(), decaying)


def slot(optimizer: keras.optimizers.Optimizer, slots: Sequence[keras.Variable], variable: Any) -> keras.Variable:
    """Which of `slots`, made one a variable, is that of `variable` as an `update_step` is given it."""
    return slots[optimizer._get_variable_index(variable)]


def is_decayed(optimizer: keras.optimizers.Optimizer, variable: Any) -> bool:
    """Whether `exclude_from_weight_decay` leaves in `variable`, as an `update_step` is given it."""
    return optimizer._use_weight_decay(variable)


def scale(optimizer: keras.optimizers.Optimizer) -> Any:
    """What multiplies the loss and divides its gradients: of mixed float16 a tensor, float32; else a float."""
    dynamic = getattr(optimizer, "dynamic_scale", None)
    return float(optimizer.loss_scale_factor or 1.0) if dynamic is None else ops.convert_to_tensor(dynamic.value)


def scales(optimizer: keras.optimizers.Optimizer) -> bool:
    """Whether it scales the loss, as mixed float16 wants it."""
    return hasattr(optimizer, "dynamic_scale")


def half_precision(model: keras.Model) -> list[tuple[keras.Variable, str]]:
    """Trainable variables of layers that compute in float16 or bfloat16, each with that dtype."""
    found = [(v, layer.compute_dtype) for layer in layers(model) for v in layer._trainable_variables]
    return [(variable, dtype) for variable, dtype in found if dtype in ("float16", "bfloat16")]


def loss_total(model: keras.Model) -> keras.Variable | None:
    """Sum of the losses of all steps since the last reset, which Keras' own `train_step` adds to."""
    tracker = getattr(model, "_loss_tracker", None)
    return None if tracker is None else tracker.total


@contextlib.contextmanager
def as_if_alone() -> Iterator[None]:
    """While a step is traced, Keras does not scale losses by the number of replicas.

    Keras scales only what passes through its own reductions, and expects a SUM of gradients; a loss function that
    returns a scalar, or a `compute_loss` or `train_step` of the user's own, is then wrong by a factor of N, silently.
    """
    module = keras_losses.loss
    names = ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    saved = {name: getattr(module, name) for name in names}
    for name in names:
        setattr(module, name, lambda value: value)
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(module, name, function)


def no_autocast() -> contextlib.AbstractContextManager:
    """Where variables give their values in full precision, also within the call of a layer that computes in half."""
    return keras_variables.AutocastScope(None)


def autocast_of_now() -> Callable[[], contextlib.AbstractContextManager]:
    """Makes the scope in which variables give their values as they do now, for code that runs later."""
    scope = keras_variables.get_autocast_scope()
    return functools.partial(keras_variables.AutocastScope, scope.dtype if scope else None)


def averages(model: keras.Model) -> list[tuple[keras.Variable, keras.Variable]]:
    """Weights of which an optimizer keeps a moving average (`use_ema`), each with its average."""
    pairs = []
    for optimizer in optimizers(model):
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if inner.use_ema:
            held = zip(inner._trainable_variables, inner._model_variables_moving_average, strict=True)
            pairs += [(variable, average) for variable, average in held if average is not None]
    return pairs


def optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The model's optimizer, then any others it holds (a GAN's second one)."""
    held = [model.optimizer, *(v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer))]
    return list({id(o): o for o in held if o is not None}.values())


def layers(model: keras.Model) -> list[keras.layers.Layer]:
    """The model and all its layers, at any depth."""
    return list(model._flatten_layers())


def random_layers(model: keras.Model) -> list[keras.layers.Layer]:
    """Those that draw random numbers by Keras' generators: dropout and the like."""
    return [layer for layer in layers(model) if layer._seed_generators]


def make_inert(model: keras.Model) -> list[keras.layers.Layer]:
    """Lets layers that draw random numbers, and batch norm, act in training as they do outside of it, for good.

    Returns those that draw them there too.
    """
    normalising = [layer for layer in layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    chosen = [*random_layers(model), *normalising]
    for layer in chosen:
        if layer._call_has_training_arg:
            layer.call = functools.partial(_call_outside_training, layer.call)
    return [layer for layer in chosen if not layer._call_has_training_arg]


def _call_outside_training(call: Callable, *args: Any, **kwargs: Any) -> Any:
    return call(*args, **{**kwargs, "training": False})


@contextlib.contextmanager
def synchronized_anywhere() -> Iterator[None]:
    """Where batch norm can be made with `synchronized=True` on any backend; Keras refuses it but on TensorFlow."""
    norm = keras.layers.BatchNormalization
    made = norm.__init__

    def make(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.synchronized = synchronized

    norm.__init__ = make
    try:
        yield
    finally:
        norm.__init__ = made


def adapts(layer: keras.layers.Layer) -> bool:
    """Whether it normalises by statistics of the data, which are weights that no step changes."""
    return isinstance(layer, keras.layers.Normalization) and layer.input_mean is None


def use_statistics(model: keras.Model) -> None:
    """Lets layers that adapt compute with their weights, as they are at each call.

    Keras makes constants of these weights when the layer is built or adapted, and computes with those: what a
    checkpoint or `set_weights` puts into the weights later would change nothing, and nobody would be told. (Made while
    a model without a graph is built, they cannot even be used when it is called.)
    """
    for layer in filter(adapts, layers(model)):
        if "call" not in vars(layer):
            layer.call = functools.partial(_call_with_statistics, layer, layer.call)


def _call_with_statistics(layer: keras.layers.Normalization, call: Callable, inputs: Any) -> Any:
    layer.finalize_state()  # the constants anew, of the weights on this device
    return call(inputs)


def step_state(model: keras.Model) -> list[keras.Variable]:
    """What steps update and no aggregation keeps alike: statistics, counters, random state; not frozen weights."""
    held = [layer for layer in layers(model) if not adapts(layer)]
    found = [v for layer in held for v in layer._non_trainable_variables if v.aggregation == "none"]
    found += [generator.state for layer in held for generator in layer._seed_generators]
    return list({id(v): v for v in [*found, global_seed()]}.values())


def float_state(model: keras.Model) -> list[keras.Variable]:
    """The part of `step_state` that can be averaged: batch norm's statistics and the like.

    Frozen batch norm does not update them, and an average over three replicas would, in the last bit.
    """
    norms = [layer for layer in layers(model) if isinstance(layer, keras.layers.BatchNormalization)]
    frozen = {id(v) for layer in norms if not layer.trainable for v in layer.variables}
    return [v for v in step_state(model) if keras.backend.is_float_dtype(v.dtype) and id(v) not in frozen]


def overrides(model: keras.Model, method: str) -> str | None:
    """Name of the class that replaces a method of `keras.Model`, if one does."""
    replaced = getattr(type(model), method) is not getattr(keras.Model, method)
    return type(model).__name__ if replaced else None


def metric_names(model: keras.Model) -> list[str]:
    """Of what an evaluation tells; nothing where a `test_step` of the model's own decides it."""
    if overrides(model, "test_step"):
        return []
    return [inner.name for outer in model.metrics for inner in getattr(outer, "metrics", [outer])]


def metrics_result(model: keras.Model) -> dict[str, Any]:
    """What the metrics come to, by name; of one whose result is a dict each part, as Keras' `fit` has it."""
    found: dict[str, Any] = {}
    for name, value in model.get_metrics_result().items():
        found |= value if isinstance(value, dict) else {name: value}
    return found


def means(model: keras.Model) -> list[keras.metrics.Mean]:
    """All metrics that are means, those given to `compile` among them."""
    metrics = [inner for outer in model.metrics for inner in (outer, *getattr(outer, "metrics", []))]
    return list({id(m): m for m in metrics if isinstance(m, keras.metrics.Mean)}.values())
