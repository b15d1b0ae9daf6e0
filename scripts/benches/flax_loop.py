"""The plain contender of `bench_backends`: built-in models in Flax, and the loop that a user of JAX would write."""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from scripts import bench_backends as bench
from scripts.benches.turns import Run

RESNET18_BLOCKS = (2, 2, 2, 2)


class Mlp(nn.Module):
    """`trainer.models.mlp`."""

    options: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] uint8 -> [B, NUM_CLASSES] float32."""
        x = (x.astype(jnp.float32) / 255.0).reshape(len(x), -1)
        for index, units in enumerate(self.options["units"]):
            x = nn.relu(nn.Dense(units, name=f"{index:02d}")(x))
        return nn.Dense(bench.NUM_CLASSES, name="logits")(x)


class Cnn(nn.Module):
    """`trainer.models.cnn` without batch norm and dropout."""

    options: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] uint8 -> [B, NUM_CLASSES] float32."""
        x = x.astype(jnp.float32) / 255.0
        for index, filters in enumerate(self.options["filters"]):
            x = nn.relu(nn.Conv(filters, (3, 3), name=f"{index:02d}")(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(128, name="hidden")(x.reshape(len(x), -1)))
        return nn.Dense(bench.NUM_CLASSES, name="logits")(x)


class ResNet18(nn.Module):
    """`trainer.models.resnet` of depth 18 with its small stem, in training."""

    options: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] uint8 -> [B, NUM_CLASSES] float32."""
        number = itertools.count()

        def convolved(x: jax.Array, filters: int, kernel: int, strides: int) -> jax.Array:
            name = f"{next(number):02d}"
            return nn.Conv(filters, (kernel, kernel), strides, use_bias=False, name=f"{name}_convolution")(x)

        def normalised(x: jax.Array) -> jax.Array:
            name = f"{next(number):02d}_norm"
            return nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=1e-5, name=name)(x)

        width = self.options["width"]
        x = x.astype(jnp.float32) / 255.0 * 2.0 - 1.0
        x = nn.relu(normalised(convolved(x, width, 3, 1)))
        for stage, blocks in enumerate(RESNET18_BLOCKS):
            filters = width * 2**stage
            for within in range(blocks):
                strides = 2 if stage and not within else 1
                inner = nn.relu(normalised(convolved(x, filters, 3, strides)))
                inner = normalised(convolved(inner, filters, 3, 1))
                shortcut = normalised(convolved(x, filters, 1, strides)) if x.shape[-1] != filters else x
                x = nn.relu(shortcut + inner)
        return nn.Dense(bench.NUM_CLASSES, name="logits")(jnp.mean(x, (1, 2)))


MODELS = {"mlp": Mlp, "cnn": Cnn, "resnet": ResNet18}


def plain(case: bench.Case, replicas: int, *, checked: bool) -> Run:
    """A jitted step that is given its state for good, batches as NumPy arrays, the loss read at the end of a loop."""
    if replicas > 1 and jax.config.jax_num_cpu_devices != replicas:
        jax.config.update("jax_num_cpu_devices", replicas)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    model = MODELS[case.model](case.options)
    optimizer = optax.sgd(case.learning_rate, momentum=bench.MOMENTUM)
    if checked:
        optimizer = optax.apply_if_finite(optimizer, max_consecutive_errors=10**6)
    variables = model.init(jax.random.key(0), jnp.zeros((1, *case.image), jnp.uint8))
    params, statistics = _with_kernels(variables["params"]), variables.get("batch_stats", {})
    state = (params, statistics, optimizer.init(params))
    if replicas > 1:
        state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))

    def step(state: Any, images: Any, labels: Any) -> tuple[Any, jax.Array]:
        params, statistics, slots = state

        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            variables = {"params": params, "batch_stats": statistics}
            logits, changed = model.apply(variables, images, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return losses.mean(), changed.get("batch_stats", {})

        (loss, new), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, slots = optimizer.update(gradients, slots)
        return (optax.apply_updates(params, updates), new, slots), loss

    step = jax.jit(step, donate_argnums=0)

    batches = bench.dataset(case, case.batch).as_numpy_iterator()
    apart = NamedSharding(mesh, PartitionSpec("data"))

    def run(steps: int) -> float:
        nonlocal state
        for _ in range(steps):
            batch = next(batches)
            if replicas > 1:
                batch = jax.device_put(batch, apart)
            state, loss = step(state, *batch)
        return float(loss)

    return run


def _with_kernels(params: dict[str, Any]) -> dict[str, Any]:
    """As in `bench_backends.kernels`; layers were named in the order in which they are made."""
    shapes = [layer["kernel"].shape for layer in params.values() if "kernel" in layer]
    kernels = bench.kernels(shapes)
    return {
        name: {part: jnp.asarray(next(kernels)) if part == "kernel" else array for part, array in layer.items()}
        for name, layer in params.items()
    }
