"""The hosts of a TPU slice on which each runs a process: what `workers` reads on GKE, a TPU VM asks its server for."""

import dataclasses
import logging
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping

from trainer.errors import RetryError
from trainer.hardware import LOCAL, Target
from trainer.watchdog import Watchdog
from trainer.workers import HOSTS, SLICES, Workers, check_one_slice, workers_of_hosts

_SKIPPED = "TPU_SKIP_MDS_QUERY"  # of libtpu: whether to leave the metadata server alone
_HOST = "GCE_METADATA_IP"  # as JAX reads it; the name of the server otherwise
_ATTRIBUTES = "http://{}/computeMetadata/v1/instance/attributes/{}"

_log = logging.getLogger(__name__)


def locate(target: Target, *, timeout_secs: float, environ: Mapping[str, str] = os.environ) -> Target:
    """`target` with all hosts of the slice, which on a TPU VM the metadata server knows.

    Args:
        target: of `hardware.resolve`; returned as it is unless this machine's own chips are asked for.
        timeout_secs: how long to wait for the metadata server, in seconds.
        environ: environment variables.

    Raises:
        ConfigError: what the server says contradicts itself, or tells of several slices.
        RetryError: the server does not answer.
    """
    if target.tpu != LOCAL or target.workers is not None or environ.get(HOSTS) or environ.get(_SKIPPED):
        return target
    watchdog = Watchdog(timeout_secs)
    watchdog.waiting_for = "the metadata server to name the hosts of this TPU slice"
    workers = watchdog.run(lambda: _of_metadata(environ.get(_HOST) or "metadata.google.internal", timeout_secs))
    return dataclasses.replace(target, workers=workers)


def _of_metadata(host: str, timeout_secs: float) -> Workers | None:
    endpoints = _ask(host, "worker-network-endpoints", timeout_secs)
    if endpoints is None:
        _log.info("no metadata server names other hosts of a TPU slice: this one trains alone")
        return None
    for line in (_ask(host, "tpu-env", timeout_secs) or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == SLICES:
            check_one_slice(value.strip(" '"))
    # Hosts, or name:index:address of each: https://github.com/jax-ml/jax, clusters/cloud_tpu_cluster.py
    names = [endpoint.strip().split(":")[-1] for endpoint in endpoints.split(",")]
    return workers_of_hosts(names, _ask(host, "agent-worker-number", timeout_secs) or "", "the metadata server")


def _ask(host: str, attribute: str, timeout_secs: float) -> str | None:
    """An attribute of this VM; None without a server or without the attribute."""
    request = urllib.request.Request(_ATTRIBUTES.format(host, attribute), headers={"Metadata-Flavor": "Google"})
    try:
        # No proxy: it would ask for itself.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=timeout_secs) as answer:
            return answer.read().decode().strip()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise RetryError(f"The metadata server does not tell {attribute}: {error}. Run again") from error
    except OSError as error:  # URLError is one, and a server that falls silent another
        reason = getattr(error, "reason", error)
        if isinstance(reason, socket.gaierror | ConnectionRefusedError):  # not on Google Cloud
            return None
        raise RetryError(f"The metadata server does not tell {attribute}: {reason}. Run again") from error
