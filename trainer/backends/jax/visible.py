"""Which devices JAX may take: decided before it looks, for it cannot let go of any."""

import glob
import importlib.util
import logging
import os
from collections.abc import Sequence

import jax

from trainer import diagnose
from trainer.errors import ConfigError
from trainer.hardware import Target

# Where an NVIDIA GPU shows itself, on Linux and in WSL, and who would drive it. As JAX looks itself.
_GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg")
_GPU_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_GPU_NAMES = {"gpu", "cuda"}  # in JAX_PLATFORMS

_log = logging.getLogger(__name__)


def choose(target: Target) -> None:
    """Tells JAX the platforms that `target` means, and how many devices of each.

    Raises:
        ConfigError: JAX_PLATFORMS says otherwise, or JAX is in use already.
    """
    named, text = _named(), os.environ.get("JAX_PLATFORMS")
    if any(jax.config.values[name] for name in ("jax_debug_nans", "jax_debug_infs")):
        raise ConfigError(
            "JAX_DEBUG_NANS and JAX_DEBUG_INFS end a run at the first number that is not finite, in means of nothing "
            "too, where --on_nonfinite examines the step, saves, and says whose fault it is. Unset them"
        )
    if target.tpu is not None and named and "tpu" not in named:
        raise ConfigError(f"JAX_PLATFORMS={text} keeps JAX from the TPU. Unset it. Received: {target.source}")
    if target.tpu is None and named and not named & {"cpu", *_GPU_NAMES}:
        raise ConfigError(f"JAX_PLATFORMS={text} without --tpu leaves nothing to train on. Unset it, or add --tpu")
    with diagnose.explained("Cannot set up the devices"):
        if target.tpu is not None:
            jax.config.update("jax_platforms", "tpu,cpu")
        elif named & _GPU_NAMES or (not named and _has_gpus()):
            jax.config.update("jax_platforms", "cuda,cpu")
            if target.replicas is not None:  # else JAX takes the memory of all
                jax.config.update("jax_cuda_visible_devices", ",".join(map(str, range(target.replicas))))
        else:
            use_cpus(target.replicas or 1)


def use_cpus(count: int) -> None:
    """Makes `count` virtual devices of the CPU, and hides all others."""
    with diagnose.explained("Cannot set up --replicas"):
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")


def check(target: Target, devices: Sequence[jax.Device]) -> None:
    """Looks at the devices of this process: JAX passes over some platforms that are not there without a word.

    Raises:
        ConfigError: they are not what was asked for.
    """
    wanted = "tpu" if target.tpu is not None else "gpu" if _GPU_NAMES & _named() else devices[0].platform
    if devices[0].platform != wanted:
        source = target.source if target.tpu is not None else f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}"
        raise ConfigError(
            f"JAX {jax.__version__} has no {wanted.upper()} here, and {source} asks for one. Install the extra "
            f"`jax-{wanted}`, or leave that out. Received devices: {', '.join(map(str, devices))}"
        )
    if target.replicas is not None and target.replicas > len(devices):
        raise ConfigError(
            f"--replicas={target.replicas}, and this machine has {len(devices)} GPU(s), each one replica. Lower "
            "--replicas, or set JAX_PLATFORMS=cpu to train on virtual CPU replicas."
        )


def memory_note(kind: str) -> str:
    """What JAX takes of the memory of GPUs, for the description of a cluster."""
    # https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    if kind != "gpu" or os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        return ""
    share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)
    return f", {share:.0%} of their memory taken at once (XLA_PYTHON_CLIENT_PREALLOCATE=false: as needed)"


def _named() -> set[str]:
    return {name.strip() for name in os.environ.get("JAX_PLATFORMS", "").split(",") if name.strip()}


def _has_gpus() -> bool:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not any(map(glob.glob, _GPU_FILES)):
        return False
    if any(map(importlib.util.find_spec, _GPU_PLUGINS)):
        return True
    _log.warning("this machine has a GPU, and JAX has no CUDA here: the CPU trains. Install the extra `jax-gpu`")
    return False
