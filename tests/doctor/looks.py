"""Looks that need TensorFlow, or libraries that do not stand beside it, in a process of their own: `look` runs them.

One process imports TensorFlow, once; the doctor's runner forks it for each look, before TensorFlow has begun anything.
Cold, it does not: as with the doctor itself, each look then imports what it needs.
"""

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tests.conftest import GUARD_SECS, ROOT, clean_environ
from trainer import config
from trainer.doctor import runner
from trainer.doctor.findings import Case, Check, Finding

LIMIT_SECS = 120.0


def case(*, environ: Mapping[str, str] | None = None, root: str = "/", facts: Any = None, **options: Any) -> Case:
    """A case of `--mode=doctor` with these options."""
    return Case(config.merge({"mode": "doctor", **options}), environ or {}, root, facts or {})


@dataclasses.dataclass(frozen=True)
class Look:
    """A look to be taken.

    probe: "module.function" of trainer.doctor.
    options, facts, environ, root: of its case; environ beside that of the process.
    """

    probe: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    root: str = "/"


def look(
    looks: Mapping[str, Look], environ: Mapping[str, str], directory: pathlib.Path, *, cold: bool = False
) -> dict[str, list[Finding]]:
    """What each look finds, by its name; `environ` is added to that of the process."""
    file = directory / "looks.json"
    file.write_text(json.dumps({name: dataclasses.asdict(look) for name, look in looks.items()}))
    done = subprocess.run(
        [sys.executable, "-m", "tests.doctor.looks", file, *(["cold"] if cold else [])],
        cwd=ROOT,
        env=clean_environ() | dict(environ),
        capture_output=True,
        text=True,
        timeout=GUARD_SECS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: [Finding(**finding) for finding in findings] for name, findings in found.items()}


def main(file: str, *how: str) -> None:
    """Takes the looks of a file, one after the other."""
    if not how:
        importlib.import_module("trainer.assembly")
    found = {}
    for name, fields in json.loads(pathlib.Path(file).read_text()).items():
        wanted = Look(**fields)
        facts = {"tensorflow": "2.20.0", **wanted.facts}
        environ = {**os.environ, **wanted.environ}
        found[name] = _found(wanted, case(environ=environ, root=wanted.root, facts=facts, **wanted.options))
    print(json.dumps(found))


def _found(wanted: Look, examined: Case) -> Sequence[dict]:
    module, _, function = wanted.probe.partition(".")
    probe = getattr(importlib.import_module(f"trainer.doctor.{module}"), function)
    results = runner.run([Check("", wanted.probe, probe, LIMIT_SECS)], examined)
    return [dataclasses.asdict(finding) for _, finding in results]


if __name__ == "__main__":
    main(*sys.argv[1:])
