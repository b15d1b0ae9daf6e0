"""A TPU that is named, as the Cloud TPU API tells of it: looked up, and waited for until it can be connected to.

A node that becomes READY or healthy by itself is waited for. One that does not (a preempted node never comes back) is
an error at once: waiting would be silence where somebody has to create it again, and the same command then goes on.
States, health and symptoms: https://cloud.google.com/tpu/docs/reference/rest/v1/projects.locations.nodes
"""

import dataclasses
import http
import logging
import typing
import urllib.error
from collections.abc import Mapping

from trainer import diagnose
from trainer.errors import ConfigError, RetryError, TrainerError
from trainer.hardware import Target
from trainer.watchdog import Watchdog

READY = "READY"
_HEALTHY = ("HEALTHY", "HEALTH_UNSPECIFIED", None)

_RECREATE = (
    "delete it, create it again (`scripts/launch tpu-vm supervise` does both), and run the same command, which goes on"
)
# What a state that does not become READY by itself means, and what to do.
_LOST = {
    "PREEMPTED": f"It was taken away and never comes back: {_RECREATE}",
    "TERMINATED": f"It was taken away and never comes back: {_RECREATE}",
    "STOPPED": "Start it (`gcloud compute tpus tpu-vm start`) and run again",
    "STOPPING": "Somebody stops it; start it (`gcloud compute tpus tpu-vm start`) and run again",
    "DELETING": f"Somebody deletes it: {_RECREATE}",
    "HIDING": f"It was deleted: {_RECREATE}",
    "HIDDEN": f"It was deleted: {_RECREATE}",
}
# What a READY node that is not healthy waits for, and what to do if that takes too long.
_ILL = {
    "UNHEALTHY_MAINTENANCE": "maintenance of its host, which ends by itself",
    "UNHEALTHY_TENSORFLOW": f"its TensorFlow server, which does not answer; if it stays so, {_RECREATE}",
    "TIMEOUT": f"its host, which does not answer; if it stays so, {_RECREATE}",
}

_FIRST_PAUSE_SECS = 1.0
_MAX_PAUSE_SECS = 10.0  # a TPU takes minutes to come up, and each look is two requests
_PROGRESS_SECS = 30.0  # between two lines of a state that does not change
_MAX_FAILURES = 4  # looks in a row without an answer

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Node:
    """What the API tells of a node at one moment."""

    state: str  # READY, CREATING, PREEMPTED, ...
    health: str | None  # HEALTHY, UNHEALTHY_MAINTENANCE, ...; told of a READY one
    health_description: str
    symptoms: tuple[str, ...]  # 'OUT_OF_MEMORY: ...', the API's own record of what went wrong there
    workers: tuple[tuple[str, int], ...]  # (host, port) of each
    accelerator_type: str | None
    version: str | None  # of TensorFlow there

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is known against it."""
        return self.health in _HEALTHY

    @property
    def is_usable(self) -> bool:
        """Whether it can be connected to now."""
        return self.state == READY and self.is_healthy and bool(self.workers)

    @property
    def trouble(self) -> str:
        """Its state where it is not usable, with all that the API tells of why."""
        if self.state != READY:
            return f"{self.state}, not READY"
        if self.is_healthy:
            return "READY, without the address of a worker"
        told = [f"READY but {self.health}", self.health_description, *self.symptoms]
        return "; ".join(filter(None, told))

    @property
    def remedy(self) -> str:
        """What its user does about `trouble`."""
        if self.state != READY:
            return _LOST.get(self.state, "Wait until it is READY and run again")
        waits_for = _ILL.get(self.health or "", f"its health; if it stays so, {_RECREATE}")
        return f"It waits for {waits_for}"


def where(target: Target) -> str:
    """The node of `target` for messages."""
    place = f"project {target.project or 'of this VM'}, zone {target.zone or 'of this VM'}"
    return f"TPU {target.tpu} ({place}; {target.source})"


class Lookup:
    """Asks the API for one node."""

    def __init__(self, target: Target):
        """Finds out project and zone, from the metadata server where they are not given, which may hang.

        Raises:
            ConfigError: there is no metadata server.
        """
        from cloud_tpu_client import Client

        self.what = where(target)
        try:
            self._client = Client(target.tpu, target.zone, target.project)
        except Exception as error:  # whatever urllib lets through
            raise lookup_error(error, self.what) from error

    def ask(self) -> Node:
        """Takes one look.

        Raises:
            ConfigError: no such node, no permission, no credentials, a proxy in between.
            RetryError: the API cannot be reached, or answers with an error that may pass.
        """
        try:
            # Its public methods ask again for each of state, health and addresses: each of another moment. setup.cfg
            # names its version exactly.
            told = self._client._fetch_cloud_tpu_metadata()
        except Exception as error:  # the client lets those of oauth2client, httplib2 and its own through
            raise lookup_error(error, self.what) from error
        return _node(told)


def _node(told: Mapping[str, typing.Any]) -> Node:
    endpoints = told.get("networkEndpoints", [])
    symptoms = (
        f"{s.get('symptomType')}: {s.get('details', '')} ({s.get('createTime', '')})" for s in told.get("symptoms", [])
    )
    return Node(
        state=told.get("state", "STATE_UNSPECIFIED"),
        health=told.get("health"),
        health_description=told.get("healthDescription", ""),
        symptoms=tuple(symptoms),
        workers=tuple((endpoint["ipAddress"], int(endpoint["port"])) for endpoint in endpoints),
        accelerator_type=told.get("acceleratorType"),
        version=told.get("tensorflowVersion"),
    )


def wait_until_usable(target: Target, watchdog: Watchdog) -> Node:
    """The node of `target`, once it is READY and healthy; says now and then what it waits for. Runs under `watchdog`.

    Raises:
        ConfigError: no such node, or it may not be looked up.
        RetryError: the node is gone for good, or stopped; or the API gives no answer several times in a row.
    """
    what = where(target)
    watchdog.waiting_for = f"the Cloud TPU API to describe {what}"
    if not (target.zone and target.project):
        watchdog.waiting_for += ", or the metadata server to name project and zone"
    lookup = Lookup(target)
    progress, failures, pause_secs = _Progress(watchdog), 0, _FIRST_PAUSE_SECS
    while True:
        try:
            node = lookup.ask()
        except RetryError as error:
            failures += 1
            if failures == _MAX_FAILURES:
                raise
            progress.tell(str(error))
        else:
            failures = 0
            if node.is_usable:
                return node
            if node.state in _LOST:
                raise RetryError(f"{what} is {node.trouble}. {node.remedy}.")
            watchdog.waiting_for = f"{what}, which is {node.trouble}"
            progress.tell(f"waiting for {what}, which is {node.trouble}")
        watchdog.pause(pause_secs)
        pause_secs = min(2 * pause_secs, _MAX_PAUSE_SECS)


class _Progress:
    """Lines about a wait: one for each new state, and one now and then while it lasts."""

    def __init__(self, watchdog: Watchdog):
        self._watchdog = watchdog
        self._told, self._told_at = "", 0.0

    def tell(self, message: str) -> None:
        """Logs `message`, with how long the wait is and may become."""
        elapsed = self._watchdog.elapsed_secs
        if message == self._told and elapsed - self._told_at < _PROGRESS_SECS:
            return
        self._told, self._told_at = message, elapsed
        _log.info("%s; %.0f s of at most %g s", message, elapsed, self._watchdog.timeout_secs)


def lookup_error(error: Exception, what: str) -> TrainerError:
    """Sorts a failed look-up into what another try can and cannot mend."""
    # cloud-tpu-client wraps errors of the API in ValueError with advice of its own: the cause is in its context.
    cause = error.__context__ or error
    reason = f"{type(cause).__name__}: {diagnose.short(cause)}"
    if isinstance(error, urllib.error.URLError):  # urllib is what it asks the metadata server with
        return ConfigError(
            f"Cannot look up {what}: no metadata server tells this machine's project and zone. "
            f"Give --tpu_project and --tpu_zone. {reason}"
        )
    status = _status(cause)
    if status == http.HTTPStatus.NOT_FOUND:
        return ConfigError(f"{what} does not exist. Check the name, --tpu_zone and --tpu_project.")
    if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        return ConfigError(f"No permission to look up {what}. Ask for the role roles/tpu.viewer. {reason}")
    if status == http.HTTPStatus.BAD_REQUEST:
        return ConfigError(f"The Cloud TPU API refuses to look up {what}. {reason}")
    if "Credentials" in type(cause).__name__:
        return ConfigError(
            f"Cannot look up {what} without credentials. Run `gcloud auth application-default login`, or set "
            f"GOOGLE_APPLICATION_CREDENTIALS. {reason}"
        )
    if type(cause).__name__ == "ProxiesUnavailableError":  # of httplib2, whatever no_proxy says
        return ConfigError(
            f"Cannot look up {what} through a proxy. Install PySocks, or unset http_proxy and https_proxy."
        )
    return RetryError(f"Cannot look up {what} now. {reason}")


def _status(cause: BaseException) -> int | None:
    """HTTP status of an error of googleapiclient's."""
    status = getattr(getattr(cause, "resp", None), "status", None)
    return None if status is None else int(status)
