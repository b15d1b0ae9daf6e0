"""Layers that several of the built-in models use."""

import keras

PACKAGE = "trainer"


def depth_rates(rate: float, num_blocks: int) -> list[float]:
    """Rate of `StochasticDepth` for each block: from 0 in the first, linearly, to `rate` in the last."""
    return [rate * index / max(1, num_blocks - 1) for index in range(num_blocks)]


@keras.saving.register_keras_serializable(package=PACKAGE)
class StochasticDepth(keras.layers.Layer):
    """Drops a residual branch of whole examples in training, and scales the others so that the expectation stays.

    Huang et al. 2016, arXiv:1603.09382, with the scale in training instead of outside of it. Keras' Dropout with a
    noise_shape of (None, 1, 1) compares uniform numbers of the compute dtype with the rate: in bfloat16 they have steps
    of 1/128, so that a rate of 0.009, of the first blocks, drops 0.016. Here they are float32 in any precision.

    Args:
        rate: that a branch is dropped with, in [0, 1).
        seed: of the draws.
    """

    def __init__(self, rate: float, seed: int | None = None, **kwargs: object):
        super().__init__(**kwargs)
        if not 0 <= rate < 1:
            raise ValueError(f"the rate of stochastic depth must be in [0, 1). Received: {rate}")
        self.rate = rate
        self.seed = seed
        # Without draws there is no random state to keep.
        self.seed_generator = keras.random.SeedGenerator(seed) if rate else None
        self.supports_masking = True
        self.built = True

    def call(self, x: keras.KerasTensor, training: bool = False) -> keras.KerasTensor:
        """[B, ...] -> the same shape and dtype."""
        if not training or self.seed_generator is None:
            return x
        shape = (keras.ops.shape(x)[0], *[1] * (len(x.shape) - 1))
        kept = keras.random.uniform(shape, dtype="float32", seed=self.seed_generator) >= self.rate  # [B, 1, ...]
        return x * keras.ops.cast(kept, x.dtype) / (1.0 - self.rate)

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """As it came in."""
        return input_shape

    def get_config(self) -> dict:
        """What it is made again from."""
        return {**super().get_config(), "rate": self.rate, "seed": self.seed}
