"""Compiles lowered programs for TPU slices: in a process of its own, within a time limit, from a cache where known.

`compiler.py` is that process. It runs in the environment of the extra `preflight`, which need not be this one;
`verdict.py` reads what it leaves.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
from typing import Any

from trainer.errors import ConfigError
from trainer.preflight import compiler, verdict
from trainer.preflight.slices import Slice
from trainer.preflight.verdict import Collective, Compiled, Memory, Parameter, Refusal

__all__ = ["Collective", "Compiled", "Compiler", "Memory", "Parameter", "Refusal", "find"]

# What the same compiler would say again of the same program. All else may depend on this machine.
_LASTING = ("oom", "unsupported")
_VERSIONS_SECS = 60.0  # to start a Python and read the versions of three packages
_ARGUMENTS_OF_PRODUCTS = re.compile(
    rb"(\n.\n\x06grad_y\x12.(?:true|false))(\n.\n\x06grad_x\x12.(?:true|false))", re.DOTALL
)
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Compiler:
    """XLA:TPU in the environment of `python`. Made by `find`; several threads may use it at once."""

    python: str
    versions: dict[str, str]  # of jax, jaxlib, libtpu
    timeout_secs: float  # for one compilation
    cache_dir: pathlib.Path
    scratch_dir: str | None = None  # of programs while they are compiled; None: the system's

    def compile(self, program: bytes, target: Slice) -> Compiled | Refusal:
        """Compiles a `Lowered.program` for `target.num_replicas` replicas, or finds the result in the cache."""
        entry = self.cache_dir / f"{self._key(program, target)}.json"
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # what is cut off is compiled again
            return _from_json(json.loads(entry.read_text()))
        result = self._run(program, target)
        if isinstance(result, Compiled) or result.kind in _LASTING:
            _write(entry, result)
        return result

    def _key(self, program: bytes, target: Slice) -> str:
        """All that the result depends on; the two files stand for how the compiler is asked and read."""
        parts = (
            _in_one_order(program),
            json.dumps([target.topology, target.host_bounds, target.chip.chip_config, target.num_replicas]).encode(),
            json.dumps(self.versions, sort_keys=True).encode(),
            *(pathlib.Path(path).read_bytes() for path in (compiler.__file__, verdict.__file__)),
        )
        return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()

    def _run(self, program: bytes, target: Slice) -> Compiled | Refusal:
        with tempfile.TemporaryDirectory(prefix="preflight-", dir=self.scratch_dir) as name:
            directory = pathlib.Path(name)
            (directory / compiler.PROGRAM).write_bytes(program)
            arguments = {
                "directory": directory,
                "topology": target.topology,
                "host_bounds": ",".join(map(str, target.host_bounds)),
                "chip_config": target.chip.chip_config,
                "num_replicas": target.num_replicas,
                "parent": os.getpid(),
            }
            flags = [f"--{name}={value}" for name, value in arguments.items()]
            log = directory / "log.txt"
            code = _call([self.python, "-P", compiler.__file__, *flags], log, self.timeout_secs)
            text = log.read_text(errors="replace")
            return self._read(directory, text) if code == 0 else self._death(code, text)

    def _read(self, directory: pathlib.Path, log: str) -> Compiled | Refusal:
        result = json.loads((directory / compiler.RESULT).read_text())
        if "error" in result:
            return verdict.refusal(result["error"], log)
        try:
            if "moved" in result:
                raise compiler.MovedError(result["moved"])
            return verdict.read(result["compiled"], (directory / compiler.MODULE).read_text(), log)
        except compiler.MovedError as error:
            return Refusal("moved", f"{error}. Written for {_listed(compiler.VERSIONS)}; got {_listed(self.versions)}")

    def _death(self, code: int | None, log: str) -> Refusal:
        """Why the process ended with `code`; None: it ran out of time."""
        if code is None:
            return Refusal("timeout", f"not compiled within --preflight_timeout_secs={self.timeout_secs:g}")
        if code == -signal.SIGKILL:
            return Refusal("crash", "the compiler was killed (SIGKILL), most likely for want of memory on this machine")
        last_line = (log.strip().splitlines() or ["it said nothing"])[-1]
        return verdict.last_words(log) or Refusal("crash", f"the compiler ended with exit code {code}: {last_line}")


def find(python: str | None, timeout_secs: float, cache_dir: pathlib.Path | None = None) -> Compiler:
    """The compiler in the environment of `python`.

    Args:
        python: path of a Python that has the extra `preflight`; None: this one.
        timeout_secs: after which a compilation is given up.
        cache_dir: where results are kept; None: the user's cache, where the XDG base directory specification has it.

    Raises:
        ConfigError: there is no such Python, or it has not exactly the packages that `compiler.py` was written for.
    """
    python = python or sys.executable
    try:
        done = subprocess.run(
            [python, "-P", compiler.__file__, "--versions"],
            capture_output=True,
            text=True,
            timeout=_VERSIONS_SECS,
        )
        installed = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise ConfigError(
            "preflight needs a Python of 3.11 or later that has the extra `preflight`. "
            f"Received: --preflight_python={python} ({error})"
        ) from error
    if installed != compiler.VERSIONS:
        raise ConfigError(
            f"preflight compiles with {_listed(compiler.VERSIONS)} exactly: pip install '.[preflight]'. tensorflow-tpu "
            "needs another libtpu: beside it, install them into an environment of their own and name its Python with "
            f"--preflight_python. Received: {python} with {_listed(installed)}"
        )
    return Compiler(python, installed, timeout_secs, cache_dir or _default_cache_dir())


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())


def _default_cache_dir() -> pathlib.Path:
    # https://specifications.freedesktop.org/basedir-spec/latest/: an empty variable counts as unset.
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(home, "keras-tpu-trainer", "preflight")


def _in_one_order(program: bytes) -> bytes:
    """`program` with grad_x before grad_y: TensorFlow serializes these attributes of its products in random order.

    Nothing else was seen to differ from one process to another, and what is missed here costs a compilation, no more.
    The bytes are entries of FrontendAttributes.map, https://github.com/openxla/xla/blob/main/xla/xla_data.proto.
    """
    return _ARGUMENTS_OF_PRODUCTS.sub(rb"\2\1", program)


def _call(command: list[str], log: pathlib.Path, timeout_secs: float) -> int | None:
    """Exit code of `command`, or None where it took too long. However this ends, it leaves no process behind."""
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
        )
    try:
        return process.wait(timeout_secs)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _write(entry: pathlib.Path, result: Compiled | Refusal) -> None:
    """Keeps a result; as a whole or not at all, for others may read and write the same entry."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=entry.parent, prefix=".", delete=False) as stream:
            json.dump(dataclasses.asdict(result), stream)
        os.replace(stream.name, entry)
    except OSError as error:
        _log.warning("cannot keep what the compiler said for the next time: %s", error)


def _from_json(fields: dict[str, Any]) -> Compiled | Refusal:
    if "kind" in fields:
        return Refusal(**fields | {"largest": tuple(fields["largest"])})
    nested = {
        "memory": Memory(**fields["memory"]),
        "parameters": tuple(Parameter(**parameter) for parameter in fields["parameters"]),
        "collectives": tuple(Collective(**collective) for collective in fields["collectives"]),
    }
    return Compiled(**fields | nested)
