"""Programs for the compiler, lowered as preflight lowers a train step: by TensorFlow, for one of several replicas."""

import dataclasses
from collections.abc import Callable

import pytest
import tensorflow as tf

from trainer.preflight import compilation

REPLICAS = 8
BATCH, INPUTS, OUTPUTS = 32, 20, 1000
GUARD_SECS = 300  # ends a compilation that hangs; no test depends on how long one takes


@pytest.fixture(scope="session")
def compiler(tmp_path_factory):
    """XLA:TPU in the environment of this Python, with a cache of its own."""
    return compilation.find(None, GUARD_SECS, tmp_path_factory.mktemp("cache"))


def lower(step: Callable, *specs: tf.TensorSpec) -> bytes:
    """The HLO module of a function of tensors."""
    function = tf.function(step, jit_compile=True, autograph=False)
    return function.experimental_get_compiler_ir(*specs)(stage="hlo_serialized")


@pytest.fixture(scope="session")
def train_step() -> bytes:
    """One step of a linear classifier with momentum: all-reduced gradients, four variables that are updated."""
    kernel = tf.Variable(tf.zeros((INPUTS, OUTPUTS)))
    bias = tf.Variable(tf.zeros((OUTPUTS,)))
    momenta = [tf.Variable(tf.zeros_like(variable)) for variable in (kernel, bias)]

    def step(features, labels):
        with tf.GradientTape() as tape:
            logits = features @ kernel + bias
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, [kernel, bias])
        for key, (gradient, momentum, variable) in enumerate(zip(gradients, momenta, [kernel, bias], strict=True)):
            momentum.assign(0.9 * momentum + all_reduce(gradient, key))
            variable.assign_sub(0.1 * momentum)
        return loss

    return lower(step, tf.TensorSpec((BATCH, INPUTS)), tf.TensorSpec((BATCH,), tf.int32))


def all_reduce(tensor: tf.Tensor, key: int) -> tf.Tensor:
    return tf.raw_ops.CollectiveReduceV2(
        input=tensor,
        group_size=REPLICAS,
        group_key=1,
        instance_key=key,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
    )


@pytest.fixture
def without_python(compiler):
    """The same compiler where nothing can be started: it answers from its cache only."""
    return dataclasses.replace(compiler, python="/no/such/python")
