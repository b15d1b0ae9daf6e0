"""What a Kubernetes API server answers to kubectl, on loopback: discovery, and objects that its schemas accept.

An object with an unknown field or a value of the wrong type is refused, as by a real server told to be strict.
"""

import contextlib
import functools
import http.server
import json
import pathlib
import threading
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate

# The oldest version of Kubernetes whose podFailurePolicy and JobSet host names are stable, and the newest known.
VERSIONS = ("1.31", "1.37")
_JOB_SET_SCHEMA = pathlib.Path(__file__).parent / "jobset_v1alpha2.json"
_KINDS = {  # plural -> (API, kind)
    "pods": ("v1", "Pod"),
    "configmaps": ("v1", "ConfigMap"),
    "jobs": ("batch/v1", "Job"),
    "cronjobs": ("batch/v1", "CronJob"),
    "jobsets": ("jobset.x-k8s.io/v1alpha2", "JobSet"),
}
_APIS = sorted({api for api, _ in _KINDS.values()})


def check(item: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError where no API server would take `item`."""
    if item["kind"] != "JobSet":
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)
        return
    jsonschema.validate(item, _job_set_schema())
    for job in item["spec"]["replicatedJobs"]:
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, **job["template"]})


@functools.cache
def _job_set_schema() -> dict[str, Any]:
    return _strict(json.loads(_JOB_SET_SCHEMA.read_text()))


def _strict(node: Any) -> Any:
    """The schema without room for unknown fields."""
    if isinstance(node, list):
        return [_strict(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if isinstance(node.get("properties"), dict) else {}
    return {**closed, **{name: _strict(value) for name, value in node.items()}}


class Server(http.server.ThreadingHTTPServer):
    """Holds objects by their path."""

    daemon_threads = True

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextlib.contextmanager
def serving() -> Iterator[Server]:
    """A server in a thread."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if found := _discovery(path) or self.server.objects.get(path):
            return self.answer(200, found)
        plural = path.rpartition("/")[2]
        if plural not in _KINDS:
            return self.refuse(404, "NotFound", path)
        api, kind = _KINDS[plural]
        items = [item for at, item in self.server.objects.items() if at.startswith(f"{path}/")]
        return self.answer(200, {"apiVersion": api, "kind": f"{kind}List", "metadata": {}, "items": items})

    def do_POST(self) -> None:
        self.store(self.body(), self.path.partition("?")[0], 201)

    def do_PATCH(self) -> None:
        path = self.path.partition("?")[0]
        assert self.headers["Content-Type"] == "application/merge-patch+json"
        self.store(_merged(self.server.objects[path], self.body()), path.rpartition("/")[0], 200)

    def do_DELETE(self) -> None:
        self.body()
        del self.server.objects[self.path.partition("?")[0]]
        self.answer(200, {"apiVersion": "v1", "kind": "Status", "status": "Success"})

    def body(self) -> dict[str, Any]:
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def store(self, item: dict[str, Any], path: str, code: int) -> None:
        try:
            check(item)
        except jsonschema.ValidationError as error:
            return self.refuse(422, "Invalid", f"{list(error.path)}: {error.message}")
        self.server.objects[f"{path}/{item['metadata']['name']}"] = item
        return self.answer(code, item)

    def refuse(self, code: int, reason: str, message: str) -> None:
        status = {"status": "Failure", "reason": reason, "message": message, "code": code}
        self.answer(code, {"apiVersion": "v1", "kind": "Status", **status})

    def answer(self, code: int, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _merged(old: Any, patch: Any) -> Any:
    """RFC 7386."""
    if not isinstance(patch, dict):
        return patch
    old = old if isinstance(old, dict) else {}
    kept = {name: value for name, value in old.items() if name not in patch}
    return {**kept, **{name: _merged(old.get(name), value) for name, value in patch.items() if value is not None}}


def _root(api: str) -> str:
    return f"api/{api}" if "/" not in api else f"apis/{api}"


def _discovery(path: str) -> dict[str, Any] | None:
    if path == "/version":
        major, minor = VERSIONS[0].split(".")
        return {"major": major, "minor": minor, "gitVersion": f"v{VERSIONS[0]}.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [_group(api) for api in _APIS if "/" in api]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    if path == "/openapi/v3":
        return {"paths": {_root(api): {"serverRelativeURL": f"/openapi/v3/{_root(api)}"} for api in _APIS}}
    for api in _APIS:
        if path == f"/{_root(api)}":
            return {"kind": "APIResourceList", "groupVersion": api, "resources": _resources(api)}
        if path == f"/openapi/v3/{_root(api)}":
            return _openapi(api)
    return None


def _group(api: str) -> dict[str, Any]:
    name, _, version = api.partition("/")
    only = {"groupVersion": api, "version": version}
    return {"name": name, "versions": [only], "preferredVersion": only}


def _resources(api: str) -> list[dict[str, Any]]:
    verbs = ["create", "delete", "get", "list", "patch"]
    return [
        {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for plural, (its_api, kind) in _KINDS.items()
        if its_api == api
    ]


def _openapi(api: str) -> dict[str, Any]:
    """As much as tells kubectl that the server itself looks for unknown fields."""
    group, _, version = api.rpartition("/")
    paths = {
        f"/{_root(api)}/namespaces/{{namespace}}/{plural}/{{name}}": {
            "patch": {
                "parameters": [{"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}],
                "x-kubernetes-group-version-kind": {"group": group, "version": version, "kind": kind},
                "responses": {},
            }
        }
        for plural, (its_api, kind) in _KINDS.items()
        if its_api == api
    }
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": version}, "paths": paths}
