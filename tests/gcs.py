"""Google Cloud Storage on loopback for tests: starts `tests/gcs_server.py`, and says how a process finds it.

    with gcs.serve(tmp_path) as storage:
        storage.set_faults(gcs.Fault(code=503, times=3, path="checkpoints"))
        subprocess.run([...], env=os.environ | storage.environ())
        storage.read("run/config.json")

Only child processes use it: TensorFlow reads the environment when it first meets gs://.
"""

import contextlib
import dataclasses
import json
import pathlib
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest

from tests.gcs_store import Fault

__all__ = ["BUCKET", "NO_BUCKETS_GET", "Fault", "Gcs", "gcs", "serve"]

BUCKET = "loopback-bucket"
# A role on objects, roles/storage.objectAdmin, does not include storage.buckets.get: a run needs none.
NO_BUCKETS_GET = Fault(code=403, times=None, path=rf"^/storage/v1/b/{BUCKET}(\?.*)?$")
_ROOT = pathlib.Path(__file__).parent.parent
_HOSTS = ("www.googleapis.com", "storage.googleapis.com", "oauth2.googleapis.com", "*.googleapis.com")
_GUARD_SECS = 60


@dataclasses.dataclass(frozen=True)
class Gcs:
    """A running server. Names of objects are without the bucket.

    Attributes:
        url: of its bucket, `gs://...`.
        port, control: of the proxy and of the control server on 127.0.0.1.
        ca: PEM of the CA that its certificate is of.
    """

    url: str
    port: int
    control: int
    ca: pathlib.Path

    def environ(self, *, max_retries: int = 2) -> dict[str, str]:
        """For a process that shall take this for Google's; each request is tried again `max_retries` times."""
        return {
            "https_proxy": f"http://127.0.0.1:{self.port}",
            # gRPC takes the proxy too, and hangs, unless it is told not to.
            "no_proxy": "127.0.0.1,localhost",
            "CURL_CA_BUNDLE": str(self.ca),
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "loopback",
            "GCS_RETRY_CONFIG_MAX_RETRIES": str(max_retries),
            "GCS_RETRY_CONFIG_INIT_DELAY_TIME_US": "10000",
        }

    def objects(self) -> dict[str, int]:
        """Bytes of every object by name."""
        return json.loads(self._ask("GET", "objects"))

    def read(self, name: str) -> bytes:
        """The content of an object; KeyError where there is none."""
        try:
            return self._ask("GET", "object", name)
        except urllib.error.HTTPError as error:
            raise KeyError(name) from error

    def write(self, name: str, content: bytes) -> None:
        """Puts an object there."""
        self._ask("PUT", "object", name, content)

    def remove(self, name: str) -> None:
        """Removes an object."""
        self._ask("DELETE", "object", name)

    def set_faults(self, *faults: Fault) -> None:
        """What goes wrong from now on; nothing any more, if nothing is named."""
        self._ask("PUT", "faults", content=json.dumps([dataclasses.asdict(fault) for fault in faults]).encode())

    def log(self) -> list[dict]:
        """Every request so far: method, path (unquoted, with its query), bytes of its body, is_hurt: by a fault."""
        return json.loads(self._ask("GET", "log"))

    def _ask(self, method: str, what: str, name: str = "", content: bytes | None = None) -> bytes:
        query = urllib.parse.urlencode({"bucket": BUCKET, "name": name})
        request = urllib.request.Request(f"http://127.0.0.1:{self.control}/{what}?{query}", data=content, method=method)
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, timeout=_GUARD_SECS) as answer:
            return answer.read()


@contextlib.contextmanager
def serve(directory: pathlib.Path, *, keep: pathlib.Path | None = None, page_size: int = 1000) -> Iterator[Gcs]:
    """A server until the block ends.

    Args:
        directory: for its CA and certificate.
        keep: where its objects lie, so that a later server has them; in memory only by default.
        page_size: entries of a listing's page.
    """
    ca, certificate = _certificates(directory)
    command = [sys.executable, "-m", "tests.gcs_server", f"--certificate={certificate}", f"--bucket={BUCKET}"]
    command += [f"--page_size={page_size}"] + ([f"--directory={keep}"] if keep else [])
    process = subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())
        yield Gcs(f"gs://{BUCKET}", ports["port"], ports["control"], ca)
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gcs]:
    """An empty bucket. Import it where it is used: `from tests.gcs import gcs`."""
    with serve(tmp_path_factory.mktemp("gcs")) as server:
        yield server


def _certificates(directory: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Makes a CA, and a certificate with its key for Google's hosts; both are worth nothing elsewhere."""
    ca, key, leaf, request, names = (directory / name for name in ("ca.pem", "ca.key", "leaf.pem", "leaf.csr", "names"))
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names.write_text("subjectAltName=" + ",".join(f"DNS:{host}" for host in _HOSTS))
    authority = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
    for command in (
        ["req", "-x509", *new_key, "-days", "30", "-keyout", key, "-out", ca, "-subj", "/CN=loopback CA", *authority],
        ["req", *new_key, "-keyout", f"{leaf}.key", "-out", request, "-subj", f"/CN={_HOSTS[0]}"],
        ["x509", "-req", "-in", request, "-CA", ca, "-CAkey", key, "-CAcreateserial", "-days", "30", "-extfile", names]
        + ["-out", leaf],
    ):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True, timeout=_GUARD_SECS)
    leaf.write_text(leaf.read_text() + pathlib.Path(f"{leaf}.key").read_text())
    return ca, leaf
