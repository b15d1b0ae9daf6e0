"""Whether TensorFlow, and JAX, can be used at all. Abort or hang end the process of the probe, and no other."""

import importlib.util
import re
from collections.abc import Iterator

from trainer import diagnose
from trainer.doctor import accelerator, packages
from trainer.doctor.findings import NO_ANSWER, Case, Finding, failed, passed, skipped
from trainer.errors import ConfigError


def computes(case: Case) -> Iterator[Finding]:
    """Whether TensorFlow can be imported and computes, with XLA too; abort and hang end with this probe's process."""
    if importlib.util.find_spec("tensorflow") is None:
        yield skipped("TensorFlow", "it is not installed")
        return
    try:
        packages.check_packages(wants_tpu=False)
    except ConfigError:
        yield skipped("TensorFlow", "not imported: with this libtpu it aborts")
        return
    import tensorflow as tf

    kinds = [device.device_type for device in tf.config.list_physical_devices()]
    gpus, tpus = kinds.count("GPU"), sum(kind.startswith("TPU") for kind in kinds)
    # Only the first compilation reads XLA_FLAGS and TF_XLA_FLAGS.
    with tf.device("CPU:0"):
        tf.function(lambda x: x + 1, jit_compile=True)(tf.constant(1.0))
    seen = f"sees {gpus} GPUs, {tpus} TPU devices" if gpus or tpus else "sees no GPU and no TPU"
    what = f"{tf.__version__} imports, computes, {seen}"
    devices = {} if case.is_jax else {"gpus": gpus, "tpus": tpus}
    yield passed("TensorFlow", what, tensorflow=tf.__version__, **devices)


def computes_unfinished(how: str) -> Finding:
    """What it means that the probe above was killed or has died."""
    remedy = "Run python -c 'import tensorflow' to see all of it, and install the extra of this hardware anew"
    if flags := re.search(r"Unknown flags? in (\w+)", how):
        remedy = f"Take what it does not know out of {flags[1]}"
    elif "not available in this library" in how:
        remedy = "pip install 'libtpu>=0.0.14,<0.0.32'"
    elif packages.version_of("tensorflow-tpu") and how.startswith(NO_ANSWER):
        remedy = (
            "Off Google Cloud, set TPU_SKIP_MDS_QUERY=1: tensorflow-tpu waits for the metadata server when imported"
        )
    return failed("TensorFlow", f"it cannot be used: {how}", remedy)


def computes_jax(case: Case) -> Iterator[Finding]:
    """Whether JAX can be imported, sees what the run asks for, and computes there."""
    if not case.is_jax:
        yield skipped("JAX", "the run computes with TensorFlow")
        return
    if not all(map(importlib.util.find_spec, ("jax", "jaxlib"))):
        yield skipped("JAX", "it is not installed")
        return
    try:
        target = accelerator.resolve(case)
    except ConfigError:
        yield skipped("JAX", "what to compute on is not known: see target")
        return
    import jax

    from trainer.backends.jax import visible

    if target.tpu is not None and target.workers is not None:
        # The chips of a slice come up on all of its hosts together.
        yield passed("JAX", f"{jax.__version__} imports; its TPU comes up once all {len(target.workers.addresses)} run")
        return
    visible.choose(target)
    with diagnose.explained("JAX cannot use what is asked for"):
        devices = jax.local_devices()
    visible.check(target, devices)
    jax.jit(lambda x: x + 1)(1.0).block_until_ready()
    kind = devices[0].platform
    what = f"{jax.__version__} imports, computes on {len(devices)} {kind.upper()} device(s): {devices[0].device_kind}"
    yield passed("JAX", what, **{f"{kind}s": len(devices)} if kind != "cpu" else {})


def computes_jax_unfinished(how: str) -> Finding:
    """What it means that the probe above was killed or has died."""
    remedy = "Run python -c 'import jax; jax.devices()' to see all of it, and install the extra of this hardware anew"
    if flags := re.search(r"Unknown flags? in (\w+)", how):
        remedy = f"Take what it does not know out of {flags[1]}"
    elif how.startswith(NO_ANSWER):
        remedy = (
            "A TPU that stays silent waits for the other hosts of its slice, which run nothing yet, or for "
            "a metadata server: off Google Cloud, set TPU_SKIP_MDS_QUERY=1"
        )
    return failed("JAX", f"it cannot be used: {how}", remedy)
