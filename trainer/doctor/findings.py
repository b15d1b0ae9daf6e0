"""What the doctor looks at (`Case`), a look at it (`Check`), and what a look finds (`Finding`)."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from trainer.config import TPU_OF_THIS_ENVIRONMENT, Config
from trainer.errors import EXIT_RETRY
from trainer.hardware import LOCAL

Status = Literal["pass", "warn", "fail", "skipped"]
# Each names the TPU of a bare --tpu, the first that is set (hardware.py).
NAMES_OF_TPU = ("TPU_CONFIG", "TPU_NAME", "KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS")
# How the word of a probe begins that was killed at its time limit.
NO_ANSWER = "no answer"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        status: pass; warn: a run works, but not as its user may think; fail: a run would end there; skipped: not known.
        name: of what was looked at.
        what: was found there.
        remedy: what to do about it; empty where nothing has to be done, or where `what` says it.
        retryable: of a failure, whether the same command may succeed later.
        facts: what checks of the second round want to know, see `Case`.
    """

    status: Status
    name: str
    what: str
    remedy: str = ""
    retryable: bool = False
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is looked at.

    Attributes:
        config: of the run that is to be.
        environ: environment variables as the user has set them.
        root: directory that stands for this machine's `/`.
        facts: what the first round has found out, where it has: "tensorflow" (version, it imports and computes), "gpus"
            and "tpus" (numbers of devices it sees), "zone", "project" (of this VM), "on_google_cloud" (whether the
            metadata server answers), "node_type", "node_version", "node_workers" ((host, port) each).
    """

    config: Config
    environ: Mapping[str, str]
    root: str = "/"
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def wants_own_chips(self) -> bool:
        """Whether --tpu means the chips of this machine, whether there are any or not."""
        if self.config.tpu == TPU_OF_THIS_ENVIRONMENT:
            return self.is_jax or not any(self.environ.get(name) for name in NAMES_OF_TPU)
        return self.config.tpu == LOCAL

    @property
    def is_jax(self) -> bool:
        """Whether the run is to compute with JAX."""
        return self.config.backend == "jax"

    @property
    def extra(self) -> str:
        """The extra of setup.cfg for this run, as far as flags tell."""
        prefix, kind = ("jax-", "jax") if self.is_jax else ("", "cpu")
        return f"{prefix}tpu" if self.wants_own_chips else kind


@dataclasses.dataclass(frozen=True)
class Check:
    """One look.

    Attributes:
        group: part of the report.
        name: of the line that says that the look did not come to its end.
        probe: yields findings; runs in a process of its own, and may import anything, hang, or crash.
        limit_secs: when that process is killed.
        unfinished: what it means that the probe was killed or has crashed, given how it ended.
    """

    group: str
    name: str
    probe: Callable[[Case], Iterable[Finding]]
    limit_secs: float
    unfinished: Callable[[str], Finding] | None = None

    def broken_off(self, how: str) -> Finding:
        """The finding where the probe has not come to its end."""
        if self.unfinished is not None:
            return self.unfinished(how)
        return failed(self.name, how, "Run the doctor again. If it stays, tell us")


def passed(name: str, what: str, **facts: Any) -> Finding:
    """All is well."""
    return Finding("pass", name, what, facts=facts)


def warned(name: str, what: str, remedy: str, **facts: Any) -> Finding:
    """A run works, but not as its user may think."""
    return Finding("warn", name, what, remedy, facts=facts)


def failed(name: str, what: str, remedy: str, *, retryable: bool = False) -> Finding:
    """A run would end there."""
    return Finding("fail", name, what, remedy, retryable)


def skipped(name: str, why: str) -> Finding:
    """Not looked at, or not to be known here."""
    return Finding("skipped", name, why)


def refused(name: str, error: Exception) -> Finding:
    """A run would end with this error, whose message says what to do."""
    return Finding("fail", name, str(error), retryable=getattr(error, "exit_code", None) == EXIT_RETRY)
