"""Credentials for gs:// and the Cloud TPU API, and the metadata server that has them on Google Cloud."""

import http.client
import json
import os
import pathlib
import urllib.error
import urllib.request
from collections.abc import Iterator

from trainer import hardware
from trainer.doctor import locations
from trainer.doctor.findings import Case, Finding, failed, passed, skipped
from trainer.errors import ConfigError

# Where both TensorFlow and cloud-tpu-client look, below CLOUDSDK_CONFIG or ~/.config/gcloud.
_WELL_KNOWN = "application_default_credentials.json"
# Members of the two kinds that TensorFlow's client takes (google_auth_provider.cc), and what these kinds are called.
_KINDS = {"refresh_token": "of a user", "private_key": "of a service account"}
_METADATA_HOST = "metadata.google.internal"
_METADATA_SECS = 3.0


def credentials(case: Case) -> Iterator[Finding]:
    """The file of credentials: there, of a kind that TensorFlow takes."""
    if not needs_google(case):
        yield skipped("credentials", "nothing on gs:// and no TPU by name: none are needed")
        return
    path = case.environ.get("GOOGLE_APPLICATION_CREDENTIALS")
    home = case.environ.get("CLOUDSDK_CONFIG") or os.path.join(case.environ.get("HOME", "/root"), ".config/gcloud")
    file = pathlib.Path(path or os.path.join(home, _WELL_KNOWN))
    if not file.exists():
        if path:
            yield failed("credentials", f"GOOGLE_APPLICATION_CREDENTIALS names no file: {path}", locations.LOGIN)
        else:
            yield skipped("credentials", f"no {file}: those of the machine's service account, if it has one")
        return
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        yield failed("credentials", f"{file} cannot be read: {error}", locations.LOGIN)
        return
    members = content if isinstance(content, dict) else {}
    kind = next((kind for member, kind in _KINDS.items() if member in members), None)
    if kind is None:
        kind = members.get("type", "unknown")
        yield failed(
            "credentials", f"{file} is of type {kind}, which TensorFlow's gs:// client does not take", locations.LOGIN
        )
        return
    yield passed("credentials", f"{file}, {kind}")


def metadata_server(case: Case) -> Iterator[Finding]:
    """Whether this is a machine of Google Cloud, and where it is."""
    host = case.environ.get("GCE_METADATA_HOST") or _METADATA_HOST
    try:
        zone = _ask(host, "instance/zone").rpartition("/")[2]
        project = _ask(host, "project/project-id")
    except (OSError, http.client.HTTPException) as error:
        yield metadata_unfinished(str(getattr(error, "reason", error)))
        return
    yield passed("metadata", f"zone {zone}, project {project}", zone=zone, project=project, on_google_cloud=True)


def metadata_unfinished(how: str) -> Finding:
    """No answer: this is no machine of Google Cloud, or one that may not ask."""
    return skipped("metadata", f"no metadata server answers ({how}): not a machine of Google Cloud")


def needs_google(case: Case) -> bool:
    """Whether the run meets anything that asks for credentials."""
    try:
        target = hardware.resolve(tpu=case.config.tpu, environ=case.environ, root=case.root)
        by_name = target.tpu not in (None, hardware.LOCAL) and not target.addresses
    except ConfigError:  # another check says so
        by_name = False
    return by_name or any(place.is_remote for place in locations.of(case))


def _ask(host: str, what: str) -> str:
    request = urllib.request.Request(f"http://{host}/computeMetadata/v1/{what}", headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=_METADATA_SECS) as answer:
        return answer.read().decode()
