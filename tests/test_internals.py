"""Says which private name of Keras has moved, when a version changes; what they do is tested in test_replicated.py."""

import inspect

import keras
import pytest
import tensorflow as tf
from keras.src import losses
from keras.src.backend.common import masking, stateless_scope
from keras.src.backend.tensorflow import numpy as keras_numpy
from keras.src.backend.tensorflow import optimizer as tensorflow_optimizer
from keras.src.backend.tensorflow import trainer as tensorflow_trainer
from keras.src.random import seed_generator
from tensorflow.python.distribute import mirrored_run

PRIVATE = [
    (keras.Model, "_symbolic_build"),
    (keras.Model, "_compute_loss"),
    (keras.Model, "_flatten_layers"),
    (keras.optimizers.Optimizer, "_all_reduce_sum_gradients"),
    (keras.optimizers.Optimizer, "_get_variable_index"),
    (keras.optimizers.Optimizer, "_backend_update_step"),
    (keras.Variable, "_direct_assign"),
    (keras_numpy, "argmax"),
    (stateless_scope, "get_stateless_scope"),
    (tf.GradientTape, "_push_tape"),
    (keras.optimizers.Optimizer, "_use_weight_decay"),
    (keras.optimizers.Optimizer, "_var_key"),
    (losses.loss, "scale_loss_for_distribution"),
    (losses.loss, "unscale_loss_for_distribution"),
    (masking, "get_keras_mask"),
    (masking, "set_keras_mask"),
    (seed_generator, "global_seed_generator"),
    (seed_generator.SeedGenerator, "next"),
    (mirrored_run, "_MirroredReplicaContext"),
    (keras.layers.Layer, "__call__"),
]


@pytest.mark.parametrize(("owner", "name"), PRIVATE, ids=[name for _, name in PRIVATE])
def test_private_name_is_still_there(owner: object, name: str) -> None:
    assert hasattr(owner, name), f"Keras {keras.__version__} has no {owner}.{name}: see trainer/internals.py"


def test_compiled_model_has_its_loss_tracker() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert isinstance(model._loss_tracker, keras.metrics.Mean)
    assert hasattr(model.layers[0], "_non_trainable_variables")
    assert hasattr(model.layers[0], "_trainable_variables")
    assert hasattr(model.layers[0], "_seed_generators")
    assert isinstance(model.layers[0]._call_has_training_arg, bool)
    assert hasattr(model.optimizer, "_trainable_variables")
    assert isinstance(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()).initial_scale, float)


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        # Where these calls stand is what our replacements rely on.
        (tensorflow_trainer.TensorFlowTrainer.train_step, "loss_module.unscale_loss_for_distribution("),
        (tensorflow_trainer.TensorFlowTrainer.train_step, "self.optimizer.apply_gradients("),
        (keras.optimizers.Optimizer.apply_gradients, "self.apply("),
        (tensorflow_optimizer.TFOptimizer._backend_update_step, "self._all_reduce_sum_gradients("),
        (tensorflow_optimizer.TFOptimizer._distributed_tf_update_step, "self.update_step("),
        (keras.optimizers.Optimizer._backend_apply_gradients, "self._backend_update_step("),
        (keras.ops.argmax, "backend.numpy.argmax("),
        (tensorflow_optimizer.TFOptimizer._apply_weight_decay, "self.learning_rate"),
        (keras.optimizers.Optimizer._backend_apply_gradients, "self._apply_weight_decay("),
        (keras.optimizers.Optimizer.learning_rate.fget, "self._get_current_learning_rate("),
        (losses.loss.reduce_values, "scale_loss_for_distribution("),
    ],
)
def test_keras_still_goes_through_what_we_replace(function: object, calls: str) -> None:
    assert calls in inspect.getsource(function), (
        f"Keras {keras.__version__} changed {function}: see trainer/internals.py"
    )
