"""The optimizer, its learning rate, and what happens to gradients."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from trainer.options.field import option

_ADAM = {"beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-7}

# What `optimizer_options` can set, with the default: of each optimizer what Keras' constructor takes, but for what has
# an option of its own. Ours differ from Keras' in two: momentum of sgd, which is 0 there, and the layers that muon
# leaves to Adam, to which the output belongs as well as embeddings (https://kellerjordan.github.io/posts/muon/).
# Left out: relative_step of adafactor, which changes nothing (Keras takes the smaller of learning rate and 1/sqrt(step)
# either way), and ScheduleFreeAdamW, whose weights are to be evaluated at another point than where Keras leaves them.
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = types.MappingProxyType(
    {
        "sgd": {"momentum": 0.9, "nesterov": False},
        "adam": {**_ADAM, "amsgrad": False},
        "adamw": {**_ADAM, "amsgrad": False},
        "adamax": _ADAM,
        "nadam": _ADAM,
        "adadelta": {"rho": 0.95, "epsilon": 1e-7},
        "adafactor": {"beta_2_decay": -0.8, "epsilon_1": 1e-30, "epsilon_2": 1e-3, "clip_threshold": 1.0},
        "adagrad": {"initial_accumulator_value": 0.1, "epsilon": 1e-7},
        "ftrl": {
            "learning_rate_power": -0.5,
            "initial_accumulator_value": 0.1,
            "l1_regularization_strength": 0.0,
            "l2_regularization_strength": 0.0,
            "l2_shrinkage_regularization_strength": 0.0,
            "beta": 0.0,
        },
        "lamb": _ADAM,
        "lars": {"momentum": 0.9, "trust_coefficient": 0.001, "epsilon": 0.0},
        "lion": {"beta_1": 0.9, "beta_2": 0.99},
        "muon": {
            "adam_beta_1": 0.9,
            "adam_beta_2": 0.999,
            "adam_lr_ratio": 1.0,
            "epsilon": 1e-7,
            "momentum": 0.95,
            "nesterov": True,
            "ns_steps": 5,
            "muon_a": 3.4445,
            "muon_b": -4.775,
            "muon_c": 2.0315,
            "rms_rate": 0.2,
            "exclude_embeddings": True,
            "exclude_layers": ("logits",),
        },
        "rmsprop": {"rho": 0.9, "momentum": 0.0, "epsilon": 1e-7, "centered": False},
    }
)
LAYERWISE = ("lamb", "lars")  # scale the step of each variable by its norm

# The form of the learning rate after the warm-up -> the options that it needs, and others that it uses.
SCHEDULES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = types.MappingProxyType(
    {
        "constant": ((), ()),
        "cosine": ((), ("final_learning_rate_factor",)),
        "polynomial": ((), ("final_learning_rate_factor", "decay_power")),
        "exponential": (("decay_every", "decay_factor"), ()),
        "step": (("decay_at", "decay_factor"), ()),
        "rsqrt": (("warmup",), ()),
        "wsd": (("decay_at",), ("final_learning_rate_factor",)),
    }
)

# Shrinking a bias or the scale of a norm towards zero is not regularisation (He et al. 2019, arXiv:1812.01187).
# Positions and the class token of a transformer are offsets too, and usually left out; embeddings of tokens are not.
NO_DECAY = "*bias, *gamma, *beta, *scale, */position_embedding, */position_embedding/embeddings, */class_token"


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """The optimizer, its learning rate, and what happens to gradients."""

    optimizer: str = option(
        "adamw",
        "optimizer: those of Keras, and lars for large batches; lamb and lars scale the step of each variable by its "
        "norm",
        group="optimizer",
        choices=tuple(OPTIMIZERS),
    )
    optimizer_options: Mapping[str, Any] = option(
        {},
        "options of the optimizer as TOML, such as 'momentum=0.95, nesterov=true', named as Keras names them; "
        "momentum of sgd is 0.9 where it is not given",
        group="optimizer",
    )
    learning_rate: float = option(1e-3, "peak learning rate, after warm-up", group="optimizer", above=0)
    learning_rate_batch_size: int | None = option(
        None,
        "batch that learning_rate is meant for, which is then scaled to global_batch_size; default: it is not scaled",
        group="optimizer",
        minimum=1,
    )
    learning_rate_scaling: str = option(
        "linear",
        "how it is scaled: in proportion to the batch, or to its square root",
        group="optimizer",
        choices=("linear", "sqrt"),
    )
    schedule: str = option(
        "cosine",
        "what becomes of the learning rate after the warm-up: cosine and polynomial end at "
        "final_learning_rate_factor with the training, exponential is multiplied by decay_factor every decay_every, "
        "step at each decay_at, rsqrt falls as 1/sqrt(step), wsd (warm-up, stable, decay) stays until decay_at and "
        "then falls linearly",
        group="optimizer",
        choices=tuple(SCHEDULES),
    )
    warmup: str | None = option(
        None,
        "duration of a linear warm-up from 0: '500 steps', '5 epochs', '1e6 examples', or '5%' of the training",
        group="optimizer",
    )
    decay_at: str | None = option(
        None,
        "when a schedule decays, from the start of training: of step one or more with commas between, '30 epochs, 60 "
        "epochs'; of wsd one, '90%'",
        group="optimizer",
    )
    decay_every: str | None = option(
        None, "duration in which exponential multiplies once by decay_factor, '2.4 epochs'", group="optimizer"
    )
    decay_factor: float | None = option(
        None, "what exponential and step multiply the learning rate by", group="optimizer", above=0, below=1
    )
    decay_power: float = option(1.0, "power of polynomial; 1 is linear", group="optimizer", above=0)
    final_learning_rate_factor: float = option(
        0.0,
        "learning rate at the end of cosine, polynomial and wsd, as a part of its peak",
        group="optimizer",
        minimum=0,
        below=1,
    )
    weight_decay: float = option(
        0.0,
        "decoupled weight decay, multiplied by the learning rate; in lamb and lars a part of what the norm of a "
        "variable scales",
        group="optimizer",
        minimum=0,
    )
    no_decay: str = option(
        NO_DECAY,
        "variables that weight_decay leaves out and lamb and lars do not scale: patterns of names with commas between, "
        "as of init_fresh",
        group="optimizer",
    )
    clipnorm: float | None = option(None, "clip each gradient to this norm", group="optimizer", above=0)
    global_clipnorm: float | None = option(None, "clip all gradients to this joint norm", group="optimizer", above=0)
    clipvalue: float | None = option(None, "clip gradient entries to +-this value", group="optimizer", above=0)
    ema_momentum: float | None = option(
        None,
        "keep a moving average of the weights, this much of it at each step, and evaluate and export that: 0.9999; "
        "it begins with the weights after the first step",
        group="optimizer",
        above=0,
        below=1,
    )
