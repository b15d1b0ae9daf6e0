"""Compiles one lowered program with XLA:TPU for a topology that need not be there, and writes down what came of it.

Run by path, by the Python that has the extra `preflight`: it imports nothing of `trainer` and no TensorFlow. All
private names of jax and jaxlib that preflight needs are here. `compilation.py` starts it and `verdict.py` reads what it
leaves: `result.json` in the directory of the program, with one of

    compiled    sizes in bytes, FLOPs, bytes accessed; and `module.txt` beside it, the program after all optimisation
    error       what XLA says of the program
    moved       what jax or libtpu no longer has, or does otherwise

All three are exit code 0; any other means that the process has died.
"""

import argparse
import ctypes
import importlib
import json
import operator
import os
import pathlib
import resource
import signal
import sys
import time
from importlib import metadata
from typing import Any

# What this file and verdict.py were written for. setup.cfg pins the same.
VERSIONS = {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"}
PROGRAM, RESULT, MODULE = "program", "result.json", "module.txt"
# How MLIR's bytecode begins (https://mlir.llvm.org/docs/BytecodeFormat/), and no HloModuleProto does.
_BYTECODE = b"ML\xefR"
# Module, and the name within it.
_PRIVATE = {
    "get_topology_desc": ("jax.experimental.topologies", "get_topology_desc"),
    "hlo_to_stablehlo": ("jaxlib._jax", "mlir.hlo_to_stablehlo"),
    "deserialize": ("jaxlib.mlir.dialects.stablehlo", "deserialize_portable_artifact"),
    "make_ir_context": ("jax._src.interpreters.mlir", "make_ir_context"),
    "ir": ("jax._src.lib.mlir", "ir"),
    "CompileOptions": ("jax._src.lib", "xla_client.CompileOptions"),
    "DeviceAssignment": ("jax._src.lib", "xla_client.DeviceAssignment"),
    "DeviceList": ("jax._src.lib", "xla_client.DeviceList"),
}
_PREFIXES = ("JAX_", "XLA_", "TPU_", "LIBTPU_", "PJRT_", "MEGASCALE_")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # jax itself must not look for a TPU
    "TPU_SKIP_MDS_QUERY": "1",  # nor libtpu for Google Cloud's metadata server
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # takes no lock: a training run may hold the chips of this machine
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # any: without one libtpu warns
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_LOG_DIR": "disabled",  # else it writes to /tmp/tpu_logs
    "TPU_MIN_LOG_LEVEL": "0",  # its log, on stderr, says what its API does not
    "TPU_STDERR_LOG_LEVEL": "0",
}


class MovedError(Exception):
    """jax or libtpu is not what this was written for."""


def main() -> None:
    """Compiles what the arguments name. With `--versions` alone it prints which packages are there."""
    if sys.argv[1:] == ["--versions"]:
        print(json.dumps(versions()))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--directory", required=True, type=pathlib.Path, help=f"has {PROGRAM}, gets {RESULT}, {MODULE}")
    parser.add_argument("--topology", required=True, help="v5e:2x4")
    parser.add_argument("--host_bounds", required=True, help="chips of a host along three axes: 2,4,1")
    parser.add_argument("--chip_config", required=True, help="default or megacore")
    parser.add_argument("--num_replicas", required=True, type=int)
    parser.add_argument("--parent", required=True, type=int, help="process whose death ends this one")
    args = parser.parse_args()
    _be_no_trouble(args.parent)
    _set_environment()
    (args.directory / RESULT).write_text(json.dumps(_result(args)))


def versions() -> dict[str, str]:
    """Installed versions of the packages in VERSIONS; the empty string where one is missing."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = ""
    return found


def _be_no_trouble(parent: int) -> None:
    """Dies with its parent, is the first to go where memory runs out, and leaves no core file where libtpu aborts."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    if os.getppid() != parent:  # it has died before the call above
        sys.exit(1)


def _set_environment() -> None:
    """Leaves nothing of what directs jax and libtpu in a training run: the same program gives the same answer."""
    for name in [name for name in os.environ if name.startswith(_PREFIXES)]:
        del os.environ[name]
    os.environ.update(_ENVIRONMENT)


def _result(args: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    try:
        executable = _compile(args)
        sizes = executable.get_compiled_memory_stats()
        costs = {"flops": 0.0, "bytes accessed": 0.0} | executable.cost_analysis()  # XLA leaves out what is zero
        (args.directory / MODULE).write_text(executable.hlo_modules()[0].to_string())
        compiled = {
            "arguments": sizes.argument_size_in_bytes,
            "outputs": sizes.output_size_in_bytes,
            "aliased": sizes.alias_size_in_bytes,
            "temporaries": sizes.temp_size_in_bytes,
            "code": sizes.generated_code_size_in_bytes,
            "flops": costs["flops"],
            "bytes_accessed": costs["bytes accessed"],
            "seconds": time.monotonic() - start,
            "versions": versions(),
        }
        return {"compiled": compiled}
    except (MovedError, AttributeError, TypeError, KeyError) as error:
        return {"moved": f"{type(error).__name__}: {error}"}
    except Exception as error:  # jax and MLIR share no base class; the text tells what it is
        return {"error": str(error)}


def _compile(args: argparse.Namespace) -> Any:
    """The executable of the program, which no device has to load.

    TensorFlow's, in HLO, is that of one replica, of which there are as many as devices. JAX' is one of all devices,
    in StableHLO, of which each runs a partition.
    """
    import numpy

    jax = _private_names()
    devices = _devices(jax["get_topology_desc"], args)
    program = (args.directory / PROGRAM).read_bytes()
    of_all = program.startswith(_BYTECODE)
    ids = numpy.array([device.id for device in devices])
    options = jax["CompileOptions"]()
    options.num_replicas, options.num_partitions = (1, len(devices)) if of_all else (len(devices), 1)
    options.executable_build_options.use_spmd_partitioning = of_all
    options.executable_build_options.use_shardy_partitioner = of_all
    options.device_assignment = jax["DeviceAssignment"].create(ids.reshape(options.num_replicas, -1))
    with jax["make_ir_context"]() as context:
        module = jax["deserialize"](context, program) if of_all else _of_one(program, jax)
        return devices[0].client.compile(module, executable_devices=jax["DeviceList"](devices), compile_options=options)


def _of_one(program: bytes, jax: dict[str, Any]) -> Any:
    """TensorFlow's program as StableHLO."""
    module = jax["ir"].Module.parse(jax["hlo_to_stablehlo"](program))
    _drop_copies(module, jax["ir"])
    return module


def _private_names() -> dict[str, Any]:
    """What _PRIVATE names, or MovedError with the first that is not there."""
    found = {}
    for key, (module, name) in _PRIVATE.items():
        try:
            found[key] = operator.attrgetter(name)(importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise MovedError(f"{module}.{name} is not there any more ({error})") from error
    return found


def _devices(get_topology_desc: Any, args: argparse.Namespace) -> tuple[Any, ...]:
    """The devices of the slice, as many as there are replicas."""
    try:
        topology = get_topology_desc(
            platform="tpu",
            topology_name=args.topology,
            chip_config_name=args.chip_config,
            chips_per_host_bounds=[int(size) for size in args.host_bounds.split(",")],
        )
    except RuntimeError as error:  # jax.errors.JaxRuntimeError
        raise MovedError(f"libtpu has no topology {args.topology} ({error})") from error
    devices = tuple(topology.devices)
    if len(devices) != args.num_replicas:
        raise MovedError(f"{args.topology} has {len(devices)} devices where {args.num_replicas} were expected")
    return devices


def _drop_copies(module: Any, ir: Any) -> None:
    """Replaces each `mhlo.copy` by its operand: tf2xla copies what it updates, and StableHLO has no such operation.

    That loses nothing of which output is written over which argument: attributes of the arguments
    (tf.aliasing_output) say that.
    """
    copies = []

    def visit(operation: Any) -> Any:
        if operation.name == "mhlo.copy":
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for operation in copies:
        operation.results[0].replace_all_uses_with(operation.operands[0])
        operation.operation.erase()


if __name__ == "__main__":
    main()
