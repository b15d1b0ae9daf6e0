"""The cases of `--mode=parity`: what is run, what with what compared, and what is tried where two runs differ."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from data.errors import DataError
from trainer import backend, cluster, comparison, internals, parity, refusals
from trainer.assembly import Assembly
from trainer.config import Config
from trainer.errors import RetryError
from trainer.modes.parity_run import ParityRun, Share

# A change of the last bit of what weights are rounded to where they are computed with.
_LAST_BIT = {"float32": 2.0**-23, "mixed_float16": 2.0**-10, "mixed_bfloat16": 2.0**-7}

_QUIET = ", in float32 and with dropout and batch norm inert"
# Examples of each share that go through the layers one by one.
_ROWS = 4
# Of reading data, and worth another try.
_STORAGE = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)

_log = logging.getLogger(__name__)

Weights = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A run to observe. quiet: in float32, and with the layers inert that differ by nature."""

    num_replicas: int
    xla: bool
    quiet: bool = False

    def __str__(self) -> str:
        replicas = f"{self.num_replicas} replica{'s' if self.num_replicas > 1 else ''}"
        return f"{replicas}{', XLA' if self.xla else ''}"


@dataclasses.dataclass(frozen=True)
class Reference:
    """What others are compared with: a run on one replica, and the same with weights that are nudged.

    start, end: weights and state. All others begin with the first and are evaluated with the second.
    repeated: how the same run differs when it is made again. against_xla: why several replicas cannot be compiled, if
    they cannot.
    """

    case: Case
    start: Weights
    end: Weights
    observed: comparison.Observed
    nudged: comparison.Observed
    repeated: list[comparison.Difference]
    nature: parity.Nature
    against_xla: str | None


@dataclasses.dataclass
class Parity:
    """Compares runs of `config`; what it finds is in the attributes.

    make: puts a run together. clusters: one replica, and several. compared: how each case differs from the first.
    skipped: what could not be compared, and why.
    """

    config: Config
    make: Callable[[Config, cluster.Cluster], Assembly]
    clusters: tuple[cluster.Cluster, cluster.Cluster]
    compared: dict[Case, list[comparison.Difference]] = dataclasses.field(default_factory=dict)
    findings: list[parity.Finding] = dataclasses.field(default_factory=list)
    skipped: list[str] = dataclasses.field(default_factory=list)

    def go(self) -> None:
        """Compares every case with the first, and asks why where one differs."""
        if comparison.apart(self.reference.repeated, step=1):
            self._find(parity.of_repeating(self.reference.repeated, self._passes()))
            self.skipped.append("any other run: the one on 1 replica does not even repeat itself")
            return
        _, *others = [Case(devices.num_replicas, xla) for xla in self._kinds for devices in self.clusters]
        for case in others:
            if reason := self._reason_against(case):
                self.skipped.append(f"{case}: {reason}")
                continue
            differences = self._differences(self.reference, case)
            if differences is not None:
                self.compared[case] = differences
                self._explain(case, differences)

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Without and with XLA, what of it there is."""
        if backend.always_compiles(self.config.backend):
            return (True,)
        return {"auto": (False, True), "off": (False,), "on": (True,)}[self.config.xla]

    def _reason_against(self, case: Case) -> str | None:
        if not case.xla or case.num_replicas == 1 or len(self._kinds) == 1:
            return None
        for simpler in (Case(1, xla=True), Case(case.num_replicas, xla=False)):
            if simpler not in self.compared:
                return f"the run on {simpler} fails already"
        return self.reference.against_xla

    # Observing.

    @functools.cached_property
    def reference(self) -> Reference:
        """The run as its options say, on one replica."""
        return self._observe_first(Case(1, xla=self._kinds[0]))

    @functools.cached_property
    def _quiet_reference(self) -> Reference:
        reference = self.reference
        if reference.nature.is_quiet:
            return reference
        return self._observe_first(dataclasses.replace(reference.case, quiet=True))

    def _open(self, case: Case) -> ParityRun:
        precision = "float32" if case.quiet else self.config.precision
        config = dataclasses.replace(self.config, precision=precision)
        if not backend.always_compiles(config.backend):
            config = dataclasses.replace(config, xla="on" if case.xla else "off")
        run = self.make(config, self.clusters[case.num_replicas > 1])
        return ParityRun(run, self.config.parity_steps, quiet=case.quiet)

    def _observe_first(self, case: Case) -> Reference:
        _log.info("running on %s%s", case, _QUIET if case.quiet else "")
        run = self._open(case)
        start = run.weights()
        observed = run.observe(start, None)
        end = run.weights()
        last_bit = _LAST_BIT[run.precision]
        again = run.observe(start, end)
        repeated = comparison.compare(observed, observed, again, steps=self.config.parity_steps, precision="float32")
        nudged = run.observe(_nudged(start, last_bit), _nudged(end, last_bit))
        against = refusals.reason_against_xla(run.model, self.clusters[1].num_replicas)
        return Reference(case, start, end, observed, nudged, repeated, _nature(run), against)

    def _differences(self, reference: Reference, case: Case) -> list[comparison.Difference] | None:
        """How `case` differs; None where it cannot be run, which is a finding."""
        _log.info("running on %s%s", case, _QUIET if case.quiet else "")
        try:
            run = self._open(case)
            self._check_start(reference.start, run.weights())
            observed = run.observe(reference.start, reference.end)
        except (RetryError, DataError, *_STORAGE):
            raise
        except Exception as error:  # whatever the code of the user's model raises on these devices, and not on one
            self._find(parity.refused(str(case), case.xla, error))
            return None
        steps, precision = self.config.parity_steps, run.precision
        return comparison.compare(reference.observed, reference.nudged, observed, steps=steps, precision=precision)

    def _check_start(self, wanted: Weights, found: Weights) -> None:
        other = [name for name in {**wanted, **found} if name not in found or name not in wanted]
        other = other or [name for name in wanted if not np.array_equal(wanted[name], found[name])]
        if other:
            remedy = "Let nothing but keras' initializers, or keras.random with a seed, decide in build"
            self._find(parity.Finding("each build has other initial weights", tuple(sorted(other)), remedy))

    # Explaining.

    def _find(self, *findings: parity.Finding) -> None:
        self.findings += [finding for finding in findings if finding not in self.findings]

    def _explain(self, case: Case, given: list[comparison.Difference]) -> None:
        differs = bool(comparison.apart(given))
        if not differs and self.config.precision == "float32":
            return
        # In less than float32 a fault may pass for rounding.
        nature, quiet = self.reference.nature, given
        if not nature.is_quiet:
            found = self._differences(self._quiet_reference, dataclasses.replace(case, quiet=True))
            if found is None:
                return
            quiet = found
        self._find(*self._faults(case, quiet))
        if differs and not (self.findings and self._is_both(case)):
            agrees = not comparison.apart(quiet)
            self._find(*parity.by_nature(nature, given, num_replicas=case.num_replicas, quiet_agrees=agrees))

    def _is_both(self, case: Case) -> bool:
        """Whether XLA and the number of replicas may be why `case` differs; each alone has been compared before."""
        return case.num_replicas > 1 and case.xla != self.reference.case.xla

    def _faults(self, case: Case, quiet: list[comparison.Difference]) -> list[parity.Finding]:
        known = any(not finding.inherent for finding in self.findings)
        if not comparison.apart(quiet) or (known and self._is_both(case)):
            return []
        if case.num_replicas > 1 and case.xla == self.reference.case.xla:
            return parity.of_replicas(quiet, self._passes(), case.num_replicas)
        one, _, batch = self._open_one(_ROWS)
        plain, compiled = (one.forward(self.reference.start, [batch], xla=xla) for xla in (False, True))
        return [parity.of_xla(quiet, plain, compiled)]

    def _open_one(self, most_rows: int | None) -> tuple[ParityRun, list[Share], Share]:
        """A quiet run on one replica, examples for it in shares, and all of them."""
        one = self._open(Case(1, xla=self._kinds[0], quiet=True))
        shares = one.shares(self.clusters[1].num_replicas, most_rows=most_rows)
        return one, shares, keras.tree.map_structure(lambda *parts: np.concatenate(parts), *shares)

    def _passes(self) -> parity.Passes:
        """The same examples through the layers, in one go and shared."""
        try:
            return self._passes_of(_ROWS)
        except (tf.errors.InvalidArgumentError, ValueError):  # a model, or its loss, may ask for more examples
            return self._passes_of(None)

    def _passes_of(self, most_rows: int | None) -> parity.Passes:
        start = self.reference.start
        one, shares, batch = self._open_one(most_rows)
        whole, again = one.forward(start, [batch]), one.forward(start, [batch])
        alone = parity.together([one.forward(start, [share]) for share in shares])
        many = self._open(Case(len(shares), xla=self._kinds[0], quiet=True))
        return parity.Passes(whole, again, alone, many.forward(start, shares), one.noisy)


def _nature(run: ParityRun) -> parity.Nature:
    model = run.model
    return parity.Nature(
        tuple(layer.name for layer in internals.random_layers(model)),
        tuple(
            layer.name
            for layer in internals.layers(model)
            if isinstance(layer, keras.layers.BatchNormalization) and layer.trainable and not layer.synchronized
        ),
        run.precision,
    )


def _nudged(weights: Weights, last_bit: float) -> Weights:
    """`weights` moved by their last bit, up or down at random."""
    generator = np.random.default_rng(0)

    def nudge(array: np.ndarray) -> np.ndarray:
        if not np.issubdtype(array.dtype, np.floating):
            return array
        return (array * (1.0 + last_bit * generator.choice([-1.0, 1.0], array.shape))).astype(array.dtype)

    return {name: nudge(array) for name, array in weights.items()}
