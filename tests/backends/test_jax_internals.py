"""Says which private name of Keras on JAX has moved, when a version changes; what they do is tested elsewhere."""

import inspect

import keras
import pytest
from keras.src.backend.jax import nn
from keras.src.backend.jax import trainer as jax_trainer
from keras.src.layers.normalization import batch_normalization
from keras.src.optimizers import base_optimizer
from keras.src.random import seed_generator


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn, "moments"),
        (nn, "_can_use_flash_attention"),
        (seed_generator.SeedGenerator, "next"),
        (keras.StatelessScope, "add_update"),
        (keras.StatelessScope, "get_current_value"),
        (base_optimizer.BaseOptimizer, "stateless_apply"),
        (keras.optimizers.LossScaleOptimizer, "stateless_apply"),
    ],
)
def test_private_name_is_still_there(owner: object, name: str) -> None:
    assert hasattr(owner, name), f"Keras {keras.__version__} has no {owner}.{name}: see backends/jax/internals.py"


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        # Where these stand is what our replacements rely on.
        (jax_trainer.JAXTrainer.train_step, "def train_step(self, state, data)"),
        (jax_trainer.JAXTrainer.train_step, "self.optimizer.stateless_apply("),
        (jax_trainer.JAXTrainer.test_step, "def test_step(self, state, data)"),
        (batch_normalization.BatchNormalization.__init__, 'backend.backend() != "tensorflow"'),
        (batch_normalization.BatchNormalization._moments, "synchronized=self.synchronized"),
        (base_optimizer.BaseOptimizer.stateless_apply, "self.apply("),
        (nn.moments, "synchronized"),
        (nn.dot_product_attention, "_can_use_flash_attention("),
    ],
)
def test_keras_still_goes_through_what_we_replace(function: object, calls: str) -> None:
    assert calls in inspect.getsource(function), (
        f"Keras {keras.__version__} changed {function}: see trainer/backends/jax/internals.py"
    )
