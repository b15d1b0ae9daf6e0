"""`--mode=parity`: does the run learn the same on one and on several replicas, with and without XLA."""

import dataclasses
import json
import logging
import math
from collections.abc import Callable
from typing import Any

from trainer import cluster, comparison, console, logs, plan, run_dir
from trainer.assembly import Assembly
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.modes.parity_cases import Parity

DEFAULT_REPLICAS = 2

_log = logging.getLogger(__name__)


def compare_replicas(
    config: Config,
    make: Callable[[Config, cluster.Cluster], Assembly],
    clusters: tuple[cluster.Cluster, cluster.Cluster],
    folder: run_dir.RunDir,
) -> None:
    """Trains a few steps in every case, says what differs and why, and writes it to `parity.json`.

    Args:
        config: of the run; other precision and XLA are tried too.
        make: puts a run together on devices.
        clusters: one replica, and several.
        folder: of the run; nothing else is written there.

    Raises:
        ConfigError: the batch does not divide, something differs that should not, or is refused on several replicas or
            by XLA; names the first.
    """
    # Said at once: it is no finding, and a run on one replica would come before it.
    plan.resolve(config, num_replicas=clusters[1].num_replicas, num_train_examples=0, num_eval_examples=0)
    # It takes the many functions that are traced here, each a model of its own, for one that is traced again and again.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    asked = [f"--tpu={config.tpu}"] if config.tpu else []
    _log.info("%s", console.table(_summary(config, clusters[1].num_replicas, asked)))
    found = Parity(config, make, clusters)
    found.go()
    folder.write(run_dir.PARITY, json.dumps(_to_json(found), indent=2) + "\n")
    if found.compared:
        _log.log(logs.RESULT, "%s", console.columns(_rows(found)))
    notes = [("by nature" if finding.inherent else "WRONG", str(finding)) for finding in found.findings]
    notes += [("not compared", reason) for reason in found.skipped]
    _log.log(logs.RESULT, "%s", console.table([*notes, ("more", folder.file(run_dir.PARITY))]))
    faults = [finding for finding in found.findings if not finding.inherent]
    if faults:
        more = f" (and {len(faults) - 1} more, see above)" if len(faults) > 1 else ""
        raise ConfigError(f"parity does not hold: {faults[0]}{more}")
    _log.log(logs.RESULT, "parity holds%s", ", but for what differs by nature" if found.findings else "")


def _summary(config: Config, num_replicas: int, asked: list[str]) -> list[tuple[str, str]]:
    instead = f", not on {', '.join(asked)}" if asked else ""
    return [
        ("dataset", config.dataset),
        ("model", f"{config.model}, {config.precision}"),
        ("devices", f"virtual replicas on this machine's CPU, whatever else it has{instead}"),
        (
            "compared",
            f"1 and {num_replicas} replicas, {config.parity_steps} step(s) of {config.global_batch_size} examples",
        ),
    ]


def _rows(found: Parity) -> list[list[str]]:
    """How far apart each case is from the first, at worst; `!` where that is more than rounding."""
    steps = found.config.parity_steps
    head = ["relative difference, at worst", *comparison.KINDS]
    rows = []
    for case, differences in found.compared.items():
        for step in sorted({1, steps}):
            at = [d for d in differences if d.step == step]
            worst = [max((d for d in at if d.kind == k), key=_excess, default=None) for k in comparison.KINDS]
            name = f"{found.reference.case} - {case}, after {step}"
            rows.append([name, *("-" if d is None else f"{d.value:.1e}{'' if d.agrees else ' !'}" for d in worst)])
    return [head, *rows]


def _excess(difference: comparison.Difference) -> tuple[float, float]:
    return difference.value / difference.allowed, difference.value


def _to_json(found: Parity) -> dict[str, Any]:
    wrong = any(not finding.inherent for finding in found.findings)
    return {
        "verdict": "wrong" if wrong else "differs by nature" if found.findings else "agrees",
        "findings": [dataclasses.asdict(finding) for finding in found.findings],
        "not_compared": found.skipped,
        "compared": [
            {
                "one": str(found.reference.case),
                "other": str(case),
                "differences": [_difference(difference) for difference in differences],
            }
            for case, differences in found.compared.items()
        ],
    }


def _difference(difference: comparison.Difference) -> dict[str, Any]:
    values = dataclasses.asdict(difference) | {"agrees": difference.agrees}
    # JSON has no word for infinity.
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
