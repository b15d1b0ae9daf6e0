"""Google Compute Engine's notice that this VM will be taken away, from its metadata server. Imports no TensorFlow.

Two keys of instance/ tell it: `preempted` turns TRUE about 30 s before the end, `maintenance-event` turns
TERMINATE_ON_HOST_MAINTENANCE a minute (VMs with accelerators: up to an hour) before it, for VMs that have asked before.
MIGRATE_ON_HOST_MAINTENANCE keeps the VM alive. Each key is watched by a long poll that returns when its value changes.
https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice

Nothing here may hurt a run: errors are tried again with back-off, a silent server costs a sleeping thread.
"""

import contextlib
import http.client
import logging
import os
import pathlib
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping

PREEMPTION = "preemption notice"
MAINTENANCE = "maintenance notice TERMINATE_ON_HOST_MAINTENANCE"
_HOST = "metadata.google.internal"
_HOST_VARIABLE = "GCE_METADATA_HOST"  # the one that Google's own libraries read: host or host:port
_PRODUCT_NAME = "/sys/class/dmi/id/product_name"
_PRODUCTS = ("Google Compute Engine", "Google")
_POLL_SECS = 60  # after which the server answers though nothing has changed
_PATIENCE_SECS = 10.0  # beyond that, for an answer that does not come
_MIN_INTERVAL_SECS = 1.0  # between two polls of a server that does not wait
_MAX_BACKOFF_SECS = 60.0
_MAX_BYTES = 256

_log = logging.getLogger(__name__)


def start(
    on_notice: Callable[[str], None], environ: Mapping[str, str] = os.environ, product_name: str = _PRODUCT_NAME
) -> bool:
    """Watches for notices in daemon threads; False where there is no metadata server to ask.

    Args:
      on_notice: called with PREEMPTION or MAINTENANCE, once each, in one of those threads.
      environ: GCE_METADATA_HOST names another server, and then it is asked on any machine.
      product_name: the file in which Linux tells what the machine is.
    """
    host = environ[_HOST_VARIABLE] if environ.get(_HOST_VARIABLE) else _HOST if _on_gce(product_name) else None
    if host is None:
        return False
    for key, value, notice in (
        ("preempted", "TRUE", PREEMPTION),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", MAINTENANCE),
    ):
        arguments = (host, key, value, lambda notice=notice: on_notice(notice))
        threading.Thread(target=_watch, args=arguments, name=f"metadata-{key}", daemon=True).start()
    return True


def _on_gce(product_name: str) -> bool:
    with contextlib.suppress(OSError):
        return pathlib.Path(product_name).read_text(errors="replace").strip() in _PRODUCTS
    return False


def _watch(host: str, key: str, awaited: str, on_notice: Callable[[], None]) -> None:
    """Returns once the key has the value. A notice of maintenance that stands from the start is not followed:

    it can stand for an hour, and a supervised run that stopped for it would come back and stop again until the end.
    SIGTERM still tells when the VM really goes.
    """
    etag: str | None = None
    backoff = _MIN_INTERVAL_SECS
    while True:
        asked_at = time.monotonic()
        try:
            value, new_etag = _ask(host, key, etag)
        except (OSError, http.client.HTTPException, ValueError) as error:
            _log.debug("metadata server %s: %s: %s; asked again in %g s", host, key, error, backoff)
            time.sleep(backoff)
            backoff = min(2 * backoff, _MAX_BACKOFF_SECS)
            continue
        backoff = _MIN_INTERVAL_SECS
        if value == awaited and etag is None and key == "maintenance-event":
            _log.warning(
                "This VM will be stopped for maintenance, by a notice older than this run; going on until then."
            )
        elif value == awaited:
            return on_notice()
        etag = new_etag
        time.sleep(max(0.0, asked_at + _MIN_INTERVAL_SECS - time.monotonic()))


def _ask(host: str, key: str, etag: str | None) -> tuple[str, str]:
    """Value and ETag of a key: at once without an ETag, else when it is another one or after _POLL_SECS.

    Raises:
      OSError, HTTPException, ValueError: no answer, or one of no use.
    """
    query = {} if not etag else {"wait_for_change": "true", "timeout_sec": str(_POLL_SECS), "last_etag": etag}
    path = f"/computeMetadata/v1/instance/{key}?{urllib.parse.urlencode(query)}".rstrip("?")
    # http.client knows no proxies: one would tell of another machine, if of any.
    connection = http.client.HTTPConnection(host, timeout=(_POLL_SECS if query else 0) + _PATIENCE_SECS)
    with contextlib.closing(connection):
        connection.request("GET", path, headers={"Metadata-Flavor": "Google"})
        response = connection.getresponse()
        body = response.read(_MAX_BYTES).decode("ascii").strip()
        if response.status != http.client.OK:
            raise ValueError(f"HTTP status {response.status}")
        return body, response.headers["ETag"] or ""
