"""A TPU VM, or a pod of them, as gcloud commands: what creates it, tells of it, runs something on it, deletes it.

A pod is driven from its first VM, worker 0. A queued resource and its node have the same name.
gcloud: https://cloud.google.com/sdk/gcloud/reference/compute/tpus
"""

import dataclasses
import json
import shlex
from typing import Any

from scripts.launchers.actions import Actions
from trainer.errors import RetryError
from trainer.preflight.slices import Slice

READY = "READY"
_GCLOUD = ("gcloud", "compute", "tpus")
_NODES, _REQUESTS = "tpu-vm", "queued-resources"
# A node in one of these never comes back; nor does a request, and what it was given for.
_LOST_NODES = ("PREEMPTED", "TERMINATED")
_LOST_REQUESTS = ("SUSPENDED", "FAILED")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What is to be created, or was.

    slice: None where no command needs it.
    runtime_version: Cloud's name of the image.
    """

    name: str
    zone: str
    project: str | None = None
    slice: Slice | None = None
    runtime_version: str = ""
    queued: bool = False
    spot: bool = False
    valid_until: str | None = None
    service_account: str | None = None
    network: str | None = None
    subnetwork: str | None = None
    internal_ips: bool = False

    @property
    def is_pod(self) -> bool:
        """Whether it has several VMs."""
        return self.slice is not None and self.slice.num_hosts > 1

    @property
    def accelerator_type(self) -> str:
        """Cloud's name of its slice."""
        if self.slice is None:
            raise ValueError("a machine that is to be created needs a slice")
        chip = self.slice.chip
        return f"{chip.cloud_name}-{self.slice.num_chips * chip.counts}"

    def create(self) -> list[str]:
        """Creates it at once, or fails where there is no capacity; queued, it asks for it and does not wait."""
        what = [f"--accelerator-type={self.accelerator_type}"]
        what += [f"--{option}={value}" for option, value in self._given().items()]
        what += ["--spot"] if self.spot else []
        what += ["--internal-ips"] if self.internal_ips else []
        if not self.queued:
            return self._command(_NODES, "create", self.name, f"--version={self.runtime_version}", *what)
        what += [f"--valid-until-duration={self.valid_until}"] if self.valid_until else []
        which = [f"--node-id={self.name}", f"--runtime-version={self.runtime_version}"]
        return self._command(_REQUESTS, "create", self.name, *which, *what)

    def delete(self, *, queued: bool) -> list[str]:
        """Deletes the node; with `queued` the request too, whatever has become of it."""
        if queued:
            return self._command(_REQUESTS, "delete", self.name, "--force", "--quiet")
        return self._command(_NODES, "delete", self.name, "--quiet")

    def list_all(self, *, queued: bool) -> list[str]:
        """Prints name and state of every node, or request, of the zone, as JSON."""
        return self._command(_REQUESTS if queued else _NODES, "list", "--format=json(name,state)")

    def describe_request(self) -> list[str]:
        """Prints all that is known of the request."""
        return self._command(_REQUESTS, "describe", self.name)

    def ssh(self, line: str) -> list[str]:
        """Runs a line of shell on it, in the home directory."""
        return self._command(_NODES, "ssh", self.name, "--worker=0", "--quiet", f"--command={line}")

    def scp(self, source: str, target: str) -> list[str]:
        """Copies a file to it; `target` from the home directory."""
        return self._command(_NODES, "scp", source, f"{self.name}:{target}", "--worker=0", "--quiet")

    def _given(self) -> dict[str, str]:
        given = {"service-account": self.service_account, "network": self.network, "subnetwork": self.subnetwork}
        return {option: value for option, value in given.items() if value}

    def _command(self, kind: str, verb: str, *words: str) -> list[str]:
        place = [f"--zone={self.zone}", *([f"--project={self.project}"] if self.project else [])]
        return [*_GCLOUD, kind, verb, *words, *place]


@dataclasses.dataclass(frozen=True)
class Found:
    """What there is of a machine: the states of its node and of its request for one, None where there is none."""

    node: str | None
    request: str | None

    @property
    def exists(self) -> bool:
        """Whether there is anything to be deleted."""
        return self.node is not None or self.request is not None

    @property
    def is_lost(self) -> bool:
        """Whether what there is never becomes READY."""
        return self.node in _LOST_NODES or self.request in _LOST_REQUESTS

    def __str__(self) -> str:
        told = {"TPU VM": self.node, "queued resource": self.request}
        return " and ".join(f"{what} ({state})" for what, state in told.items() if state) or "nothing"


def look(machine: Machine, actions: Actions) -> Found:
    """Asks gcloud what there is.

    Raises:
        RetryError: gcloud fails.
    """
    return Found(node_state(machine, actions), request_state(machine, actions))


def node_state(machine: Machine, actions: Actions) -> str | None:
    """State of the node; see `look`."""
    entry = _entry(machine, actions, queued=False)
    return None if entry is None else str(entry["state"])


def request_state(machine: Machine, actions: Actions) -> str | None:
    """State of the queued resource; see `look`."""
    entry = _entry(machine, actions, queued=True)
    return None if entry is None else str(entry["state"]["state"])


def _entry(machine: Machine, actions: Actions, *, queued: bool) -> dict[str, Any] | None:
    """What gcloud tells of one; from a list, so that `not there` and `no answer` are two things."""
    command = machine.list_all(queued=queued)
    answer = actions.query(command)
    if answer is None:
        raise RetryError(f"gcloud tells nothing of what there is; its own words are above. Ran: {shlex.join(command)}")
    named = [entry for entry in json.loads(answer) if entry["name"].rpartition("/")[2] == machine.name]
    return named[0] if named else None
