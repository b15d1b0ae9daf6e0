"""ResNet v1.5 (He et al. 2015, arXiv:1512.03385), with the variants that published recipes use.

v1.5 halves the image in the 3x3 convolution of a block, not in the 1x1 before it. Blocks are single layers named
`block_00`, `block_01`, ..., so that what goes by layer names takes them whole.
"""

import dataclasses
import functools
from typing import Any

import keras

from data.spec import Spec
from trainer.models import _blocks, _inputs

# Blocks of each stage, and whether they are bottlenecks; table 1 of arXiv:1512.03385.
STAGES = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
STEMS = ("imagenet", "deep", "small")
EXPANSION = 4  # channels that leave a bottleneck over those within
# Small random logits to begin with (Goyal et al. 2017, arXiv:1706.02677, section 5.1).
LOGITS_STDDEV = 0.01


@dataclasses.dataclass(frozen=True)
class Options:
    """depth: 18, 34, 50, 101 or 152; width: channels of the first stage, doubled by each further one; stem: imagenet
    (7x7, then pooling: a quarter of height and width), deep (three 3x3 in its place) or small (one 3x3 at full size,
    for images such as 32 x 32); pooled_shortcuts: average before the 1x1 of a shortcut that halves; with stem=deep
    ResNet-D (He et al. 2018, arXiv:1812.01187); zero_gamma: each block begins as the identity (arXiv:1706.02677);
    stochastic_depth: rate of dropping the last block's branch, less in those before; batch_norm_momentum,
    batch_norm_epsilon: of the moving statistics, and beside the variance; synchronized: statistics of the global batch
    instead of each replica's share."""

    depth: int = 50
    width: int = 64
    stem: str = "imagenet"
    pooled_shortcuts: bool = False
    zero_gamma: bool = True
    stochastic_depth: float = 0.0
    batch_norm_momentum: float = 0.9
    batch_norm_epsilon: float = 1e-5
    synchronized: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (("depth", self.depth, tuple(STAGES)), ("stem", self.stem, STEMS)):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(str, known))}. Received: {value!r}")


def build(options: Options, spec: Spec) -> keras.Model:
    """[B, H, W, C] image -> [B, num_classes] float32 logits.

    Raises:
        ValueError: the data is not one image, or a rate is out of range.
    """
    image, x = _inputs.image_input(spec)
    normalise = functools.partial(
        keras.layers.BatchNormalization,
        momentum=options.batch_norm_momentum,
        epsilon=options.batch_norm_epsilon,
        synchronized=options.synchronized,
    )
    x = _stem(keras.layers.Rescaling(2.0, offset=-1.0)(x), options, normalise)
    blocks_of_stage, bottleneck = STAGES[options.depth]
    rates = iter(enumerate(_blocks.depth_rates(options.stochastic_depth, sum(blocks_of_stage))))
    for stage, num_blocks in enumerate(blocks_of_stage):
        for within in range(num_blocks):
            index, rate = next(rates)
            x = ResidualBlock(
                options.width * 2**stage,
                strides=2 if stage and not within else 1,
                bottleneck=bottleneck,
                pooled_shortcut=options.pooled_shortcuts,
                zero_gamma=options.zero_gamma,
                stochastic_depth=rate,
                batch_norm=normalise.keywords,
                name=f"block_{index:02d}",
            )(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)  # [B, D]
    initializer = keras.initializers.RandomNormal(stddev=LOGITS_STDDEV)
    return keras.Model(image, _inputs.logits(x, spec, initializer), name=f"resnet{options.depth}")


def _stem(x: keras.KerasTensor, options: Options, normalise: Any) -> keras.KerasTensor:
    """[B, H, W, C] -> [B, H/4, W/4, width], or [B, H, W, width] of the small one."""
    first = {"imagenet": [(options.width, 7, 2)], "small": [(options.width, 3, 1)]}
    deep = [(options.width // 2, 3, 2), (options.width // 2, 3, 1), (options.width, 3, 1)]
    for index, (filters, kernel, strides) in enumerate(first.get(options.stem, deep)):
        x = convolution(filters, kernel, strides, name=f"stem_convolution_{index}")(x)
        x = normalise(name=f"stem_norm_{index}")(x)
        x = keras.layers.Activation("relu", name=f"stem_relu_{index}")(x)
    if options.stem == "small":
        return x
    return keras.layers.MaxPooling2D(3, strides=2, padding="same", name="stem_pool")(x)


def convolution(filters: int, kernel: int, strides: int = 1, **kwargs: Any) -> keras.layers.Conv2D:
    """Without a bias, which the norm behind it would take away; initialised as in arXiv:1502.01852."""
    return keras.layers.Conv2D(
        filters, kernel, strides, padding="same", use_bias=False, kernel_initializer="he_normal", **kwargs
    )


@keras.saving.register_keras_serializable(package=_blocks.PACKAGE)
class ResidualBlock(keras.layers.Layer):
    """A residual block: two 3x3 convolutions, or as a bottleneck 1x1, 3x3 and 1x1 of four times the channels.

    Args:
        filters: channels within.
        strides: of the first 3x3, and of the shortcut.
        bottleneck: which of the two.
        pooled_shortcut: the shortcut averages, then convolves by 1x1, instead of passing over three pixels of four.
        zero_gamma: the last norm begins with a scale of 0.
        stochastic_depth: rate of dropping the branch.
        batch_norm: arguments of `keras.layers.BatchNormalization`.
    """

    def __init__(
        self,
        filters: int,
        *,
        strides: int = 1,
        bottleneck: bool,
        pooled_shortcut: bool = False,
        zero_gamma: bool = True,
        stochastic_depth: float = 0.0,
        batch_norm: dict[str, Any],
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.settings: dict[str, Any] = {
            "filters": filters,
            "strides": strides,
            "bottleneck": bottleneck,
            "pooled_shortcut": pooled_shortcut,
            "zero_gamma": zero_gamma,
            "stochastic_depth": stochastic_depth,
            "batch_norm": batch_norm,
        }
        self.out_filters = filters * EXPANSION if bottleneck else filters
        sizes = [(filters, 3, strides), (filters, 3, 1)]
        if bottleneck:
            sizes = [(filters, 1, 1), (filters, 3, strides), (self.out_filters, 1, 1)]
        inner: dict[str, Any] = {"dtype": self.dtype_policy}
        self.convolutions = [convolution(*size, name=f"convolution_{i}", **inner) for i, size in enumerate(sizes)]
        gammas = ["ones"] * (len(sizes) - 1) + ["zeros" if zero_gamma else "ones"]
        self.norms = [
            keras.layers.BatchNormalization(gamma_initializer=gamma, name=f"norm_{i}", **batch_norm, **inner)
            for i, gamma in enumerate(gammas)
        ]
        self.drop = _blocks.StochasticDepth(stochastic_depth, name="stochastic_depth", **inner)
        self.shortcut: list[keras.layers.Layer] = []

    def build(self, input_shape: tuple) -> None:
        """Makes what depends on the number of channels that come in: the shortcut."""
        strides = self.settings["strides"]
        inner: dict[str, Any] = {"dtype": self.dtype_policy}
        if strides != 1 or input_shape[-1] != self.out_filters:
            pools = self.settings["pooled_shortcut"] and strides != 1
            if pools:
                self.shortcut.append(keras.layers.AveragePooling2D(strides, padding="same", **inner))
            self.shortcut += [
                convolution(self.out_filters, 1, 1 if pools else strides, name="shortcut_convolution", **inner),
                keras.layers.BatchNormalization(name="shortcut_norm", **self.settings["batch_norm"], **inner),
            ]
        branch = [layer for pair in zip(self.convolutions, self.norms, strict=True) for layer in pair]
        for path in (branch, self.shortcut):
            shape = input_shape
            for layer in path:
                layer.build(shape)
                shape = layer.compute_output_shape(shape)

    def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
        """[B, H, W, C] -> [B, H / strides, W / strides, out_filters]."""
        shortcut = x
        for layer in self.shortcut:
            shortcut = layer(shortcut)
        for convolve, normalise in zip(self.convolutions, self.norms, strict=True):
            x = normalise(convolve(x))
            if normalise is not self.norms[-1]:
                x = keras.ops.relu(x)
        return keras.ops.relu(shortcut + self.drop(x))

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """As of `call`."""
        shape = input_shape
        for convolve in self.convolutions:
            shape = convolve.compute_output_shape(shape)
        return shape

    def get_config(self) -> dict[str, Any]:
        """What it is made again from."""
        return {**super().get_config(), **self.settings}
