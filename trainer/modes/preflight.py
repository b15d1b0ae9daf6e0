"""`--mode=preflight`: the steps of a training run compiled for TPU slices, before a TPU is paid for."""

import dataclasses
import functools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from trainer import backend, cluster, console, export, inputs, internals, logs, run_dir
from trainer.assembly import Assembly
from trainer.config import Config
from trainer.errors import ConfigError, TrainerError
from trainer.lowered import Lowered, LoweringError, Obstacle, untraceable
from trainer.preflight import compilation, estimate, mixing, report, search, slices

# Compilations a slice in search of the largest batch: of slices that are named, and in a survey of the common ones.
_PROBES, _PROBES_OF_SURVEY = 5, 0

Assemble = Callable[[Config, cluster.Cluster], Assembly]

_log = logging.getLogger(__name__)


class Steps:
    """The steps of a run on `num_replicas` replicas that need not be there, lowered for any share of the batch."""

    def __init__(self, config: Config, assemble: Assemble, num_replicas: int):
        self._lowering = backend.part("lowering")
        self.run = assemble(config, self._lowering.cluster_of(num_replicas))
        self.batch = self.run.plan.per_replica_batch_size
        self.train = functools.cache(self._train)

    def _train(self, batch: int) -> Lowered | Obstacle:
        """The train step on `batch` examples a replica."""
        return self._lowered(self._lowering.train_step, self.run.input_spec(batch))

    def evaluation(self) -> Lowered | Obstacle:
        """The evaluation step."""
        mask = keras.KerasTensor((self.batch,), "float32")
        return self._lowered(self._lowering.test_step, (*self.run.stored_spec(self.batch), mask))

    def export(self) -> Lowered | Obstacle:
        """What an export serves."""
        serve, signature = export.serving(self.run.replicated.model, self.run.spec, self.batch)
        return self._lowered(self._lowering.function, serve, tuple(signature))

    def _lowered(self, lower: Callable[..., Lowered], *args: Any) -> Lowered | Obstacle:
        try:
            return lower(self.run.replicated.engine, self.run.replicated.variables(), *args)
        except LoweringError as error:
            return error.obstacle


def preflight(
    config: Config, assemble: Assemble, read: inputs.AnyInputs, folder: run_dir.RunDir, scratch_dir: str
) -> None:
    """Compiles the steps of `config` for its slices, says what it found, and writes it to `preflight.json`.

    Args:
        config: of the run.
        assemble: puts a run together on devices.
        read: what the run would read.
        folder: of the run; nothing else is written there.
        scratch_dir: for programs while they are compiled.

    Raises:
        ConfigError: no compiler is there; a slice that was named, or every one of the common ones, is not for this run.
    """
    compiler = compilation.find(config.preflight_python, config.preflight_timeout_secs)
    compiler = dataclasses.replace(compiler, scratch_dir=scratch_dir)
    named = _named(config)
    wanted = named or slices.common(config.global_batch_size, config.backend)
    # A TPU compiles anyway, and without being told.
    config = dataclasses.replace(config, xla="auto")
    probes = config.preflight_probes
    if probes is None:
        probes = _PROBES if named else _PROBES_OF_SURVEY
    examiner = Examiner(compiler, probes, read.num_train_examples, config.microbatches, _unit(config))
    findings: dict[str, report.Finding] = {}
    remarks: list[tuple[str, str]] = []
    others: dict[str, str] = {}
    copies = 0.0
    for num_replicas in dict.fromkeys(target.num_replicas for target in wanted):
        of_size = [target for target in wanted if target.num_replicas == num_replicas]
        steps = _steps(config, assemble, num_replicas)
        if isinstance(steps, Obstacle):
            batch = config.global_batch_size // num_replicas
            findings |= {target.name: report.Finding(target, batch, (), steps) for target in of_size}
            continue
        if not others:
            _log.info("%s", console.table(_about(steps.run)))
            remarks, others = _remarks(steps), _other_programs(steps)
            copies = _optimizer_copies(steps.run.replicated.model)
        findings |= {target.name: examiner.examine(steps, target) for target in of_size}
    in_order = [findings[target.name] for target in wanted]
    _tell(config, folder, in_order, remarks, others, optimizer_copies=copies)
    failed = [f"{finding.slice.name}: {report.problem(finding)}" for finding in in_order if not finding.fits]
    if not named and len(failed) < len(in_order):  # of a survey: some slice will do
        failed = []
    if others.get("evaluation"):
        failed.append(f"evaluation: {others['evaluation']}")
    if failed:
        raise ConfigError("\n  ".join(["the run would fail on", *failed]))


def _named(config: Config) -> list[slices.Slice]:
    """The slices of a list with commas, each once; none where none was asked for."""
    if config.slice is None:
        return []
    names = dict.fromkeys(filter(None, (part.strip() for part in config.slice.split(","))))
    named = [slices.parse(name) for name in names or [config.slice]]
    for target in named:
        if not target.chip.runs(config.backend):
            raise ConfigError(
                f"TensorFlow does not run on {target.chip.name}, JAX does: --backend=jax. "
                f"Received: --slice={target.name}"
            )
    return named


def _steps(config: Config, assemble: Assemble, num_replicas: int) -> Steps | Obstacle:
    try:
        return Steps(config, assemble, num_replicas)
    except TrainerError:
        raise
    except Exception as error:  # whatever the user's model raises while it is built
        return untraceable(error)


@dataclasses.dataclass(frozen=True)
class Examiner:
    """Asks the compiler about one slice after the other.

    probes: how many compilations a slice the search of the largest batch may take.
    num_examples: a batch larger than the training split has no sense.
    microbatches: parts of a replica's batch. unit: what its size must be a multiple of.
    """

    compiler: compilation.Compiler
    probes: int
    num_examples: int
    microbatches: int
    unit: int

    def examine(self, steps: Steps, target: slices.Slice) -> report.Finding:
        """What is known of the run on `target`."""
        lowered = steps.train(steps.batch)
        if isinstance(lowered, Obstacle):
            return report.Finding(target, steps.batch, (), lowered)
        outcome = self._outcome(lowered, target, steps.batch)
        if isinstance(outcome, compilation.Compiled) and self.microbatches > 1:
            outcome = estimate.of_all_parts(outcome, self.microbatches, steps.run.replicated.num_bytes())
        finding = report.Finding(target, steps.batch, lowered.parameters, outcome)
        if isinstance(outcome, compilation.Compiled):
            expected = estimate.estimate(outcome, target, steps.batch)
            finding = dataclasses.replace(finding, estimate=expected)
        elif isinstance(outcome, Obstacle) or outcome.kind != "oom":
            return finding
        if not self.probes:
            return finding
        largest = search.largest(  # in units
            _probe(steps.batch // self.unit, outcome),
            capacity=target.chip.hbm_bytes,
            limit=max(steps.batch, self.num_examples // target.num_replicas) // self.unit,
            probes=self.probes,
            probe=lambda size: self._try(steps, target, size),
        )
        fits, refused = (None if size is None else size * self.unit for size in (largest.fits, largest.refused))
        return dataclasses.replace(finding, largest=search.Largest(fits, refused))

    def _try(self, steps: Steps, target: slices.Slice, size: int) -> search.Probe:
        batch = size * self.unit
        lowered = steps.train(batch)
        if isinstance(lowered, Obstacle):
            return search.Probe(size, False, None)
        return _probe(size, self._outcome(lowered, target, batch))

    def _outcome(self, lowered: Lowered, target: slices.Slice, batch: int) -> report.Outcome:
        _log.info("%s: compiling %s examples a replica", target.name, f"{batch:,}")
        outcome = self.compiler.compile(lowered.program, target)
        _log.info("%s: %s", target.name, report.said(outcome))
        if isinstance(outcome, compilation.Refusal) and outcome.kind == "unsupported":
            return lowered.obstacle(outcome.message, outcome.op_name, outcome.operation) or outcome
        return outcome


def _unit(config: Config) -> int:
    """A replica's batch is a multiple of this: it is computed in parts, and mixed in pairs."""
    return math.lcm(config.microbatches, 2 if config.mixup or config.cutmix else 1)


def _probe(batch: int, outcome: report.Outcome) -> search.Probe:
    if isinstance(outcome, compilation.Compiled):
        return search.Probe(batch, True, outcome.memory.peak)
    return search.Probe(batch, False, outcome.used_bytes if isinstance(outcome, compilation.Refusal) else None)


def _about(run: Assembly) -> list[tuple[str, str]]:
    model = run.replicated.model
    trained = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    return [
        ("dataset", run.inputs.describe()),
        (
            "model",
            f"{run.config.model}: {model.count_params():,} parameters, {trained:,} trained, {run.config.precision}",
        ),
        ("batch", f"{run.plan.global_batch_size:,}"),
    ]


def _optimizer_copies(model: keras.Model) -> float:
    """How many times the size of the trained weights optimizers keep."""
    kept = [variable for optimizer in internals.optimizers(model) for variable in optimizer.variables]
    sizes = [sum(math.prod(variable.shape) for variable in held) for held in (kept, model.trainable_variables)]
    return sizes[0] / max(1, sizes[1])


def _remarks(steps: Steps) -> list[tuple[str, str]]:
    """What the lint has to say of the model."""
    run = steps.run
    found = [("look at", remark) for remark in run.remarks()]
    lowered = steps.train(steps.batch)
    if isinstance(lowered, Obstacle):
        return found
    found += [("look at", remark) for remark in lowered.remarks()]
    # A model with functions of the host in it is not run here: they may print, write or wait.
    if run.config.lint != "off":
        mixed = mixing.mixes_examples(run.replicated.model, run.batch_spec(steps.batch)[0])
        found += [("look at", mixed)] if mixed else []
    return found


def _other_programs(steps: Steps) -> dict[str, str]:
    """Evaluation and export -> what keeps them from being compiled, "" where nothing is known to."""
    of_training = steps.train(steps.batch)
    found = {}
    for name, lowered in (("evaluation", steps.evaluation()), ("export", steps.export())):
        obstacle = lowered if isinstance(lowered, Obstacle) else None
        same = isinstance(of_training, Obstacle) and obstacle and obstacle.is_like(of_training)
        found[name] = "the same as training" if same else str(obstacle or "")
    return found


def _tell(
    config: Config,
    folder: run_dir.RunDir,
    findings: Sequence[report.Finding],
    remarks: Sequence[tuple[str, str]],
    others: Mapping[str, str],
    *,
    optimizer_copies: float,
) -> None:
    """Tables on the console, and `preflight.json`."""
    measured = folder.read(run_dir.INPUT_PROFILE)
    pipeline = json.loads(measured)["stages"][-1]["examples_per_sec"] if measured else None
    notes = [
        *remarks,
        *((name, f"cannot be compiled: {why}" if why else "lowers for XLA") for name, why in others.items()),
    ]
    notes += report.about_input(findings, pipeline)
    if too_large := [f for f in findings if isinstance(f.outcome, compilation.Refusal) and f.outcome.kind == "oom"]:
        remedies = report.remedies(
            too_large, precision=config.precision, optimizer_copies=optimizer_copies, backend=config.backend
        )
        notes.append(("memory", remedies))
    if any(finding.fits for finding in findings):
        notes += [("note", text) for text in report.NOT_COVERED]
    circumstances = {
        "model": config.model,
        "precision": config.precision,
        "remarks": [": ".join(note) for note in notes],
    }
    folder.write(run_dir.PREFLIGHT, json.dumps(report.to_json(findings, circumstances), indent=2) + "\n")
    _log.log(logs.RESULT, "%s", console.columns(report.rows(findings)))
    if details := report.details(findings):
        _log.log(logs.RESULT, "%s", console.columns(details))
    _log.log(logs.RESULT, "%s", console.table([*notes, ("preflight", folder.file(run_dir.PREFLIGHT))]))
