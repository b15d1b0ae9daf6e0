"""A Cloud TPU API v1 on a loopback port, for the real cloud-tpu-client to look TPU nodes up in.

It answers what that client asks: the discovery document and `projects.locations.nodes.get`. To a process that has it as
HTTP proxy it is also the metadata server that tells a VM its project and zone (cloud-tpu-client has the host of that
server built in). The discovery document names no OAuth scopes: a service-account key then signs its own tokens, and no
token endpoint is needed.

    with TpuApi({"my-tpu": Node("READY", ("127.0.0.1", 8470))}) as api:
        subprocess.run(..., env=os.environ | api.environ(tmp_path))
"""

from __future__ import annotations

import dataclasses
import http.server
import json
import pathlib
import re
import threading
import typing
import urllib.parse
from collections.abc import Mapping

import rsa  # comes with oauth2client, which comes with cloud-tpu-client

PROJECT, ZONE = "test-project", "us-central2-b"
_METADATA = {"project/project-id": PROJECT, "instance/zone": f"projects/1/zones/{ZONE}"}
_GET_NODE = {
    "id": "tpu.projects.locations.nodes.get",
    "httpMethod": "GET",
    "path": "v1/{+name}",
    "parameterOrder": ["name"],
    "parameters": {"name": {"type": "string", "location": "path", "required": True}},
    "response": {"$ref": "Node"},
}


@dataclasses.dataclass(frozen=True)
class Node:
    """What the API tells of one node: its state, the address of its worker where it has one, and of what kind it is."""

    state: str
    worker: tuple[str, int] | None = None
    kind: str | None = None
    version: str | None = None
    health: str | None = None
    health_description: str | None = None
    symptoms: tuple[str, ...] = ()


# A node that stays as it is, or one for each look (an HTTP status where that fails), of which the last one stays.
Nodes = dict[str, Node | list[Node | int]]


class TpuApi:
    """Serves `nodes` of project PROJECT, zone ZONE until closed; they may change meanwhile.

    A node named '403' or '503' gets that answer.

    As the metadata server of a TPU VM it also tells `attributes` of the instance.

    Attributes:
      url: of the server.
      asked: names ('projects/…/nodes/…') that were looked up, in order.
    """

    def __init__(self, nodes: Nodes, attributes: Mapping[str, str] | None = None):
        self.nodes = nodes
        self.attributes = {f"instance/attributes/{name}": text for name, text in (attributes or {}).items()}
        self.asked: list[str] = []
        api = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, answer = api._answer(urllib.parse.urlsplit(self.path).path)
                body = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: typing.Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> TpuApi:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environ(self, directory: pathlib.Path) -> dict[str, str]:
        """Environment that points cloud-tpu-client here, with a new key of no worth anywhere else in `directory`."""
        key = directory / "service-account.json"
        _, private = rsa.newkeys(512)  # the shortest that can sign SHA-256
        key.write_text(
            json.dumps(
                {
                    "type": "service_account",
                    "client_email": "tests@localhost",
                    "client_id": "1",
                    "private_key_id": "1",
                    "private_key": private.save_pkcs1().decode(),
                }
            )
        )
        return {"TPU_API_DISCOVERY_URL": self.url + "discovery", "GOOGLE_APPLICATION_CREDENTIALS": str(key)}

    def _answer(self, path: str) -> tuple[int, typing.Any]:
        if path == "/discovery":
            return 200, self._discovery_document()
        if match := re.fullmatch(r"/computeMetadata/v1/(.+)", path):
            told = _METADATA | self.attributes
            return (200, told[match[1]]) if match[1] in told else (404, "")
        if not (match := re.fullmatch(r"/v1/(projects/([^/]+)/locations/([^/]+)/nodes/([^/]+))", path)):
            return 404, ""
        self.asked.append(match[1])
        name = match[4]
        if name.isdecimal():
            return int(name), {"error": {"code": int(name), "message": "as asked for"}}
        if (match[2], match[3]) != (PROJECT, ZONE) or name not in self.nodes:
            return 404, {"error": {"code": 404, "message": f"Resource '{match[1]}' was not found"}}
        node = self._next(name)
        if isinstance(node, int):
            return node, {"error": {"code": node, "message": "as asked for"}}
        description: dict[str, typing.Any] = {"name": match[1], "state": node.state}
        if node.worker:
            description["networkEndpoints"] = [{"ipAddress": node.worker[0], "port": node.worker[1]}]
        if node.symptoms:
            description["symptoms"] = [{"symptomType": symptom, "details": "on worker 0"} for symptom in node.symptoms]
        told = {
            "acceleratorType": node.kind,
            "tensorflowVersion": node.version,
            "health": node.health,
            "healthDescription": node.health_description,
        }
        return 200, description | {name: value for name, value in told.items() if value is not None}

    def _next(self, name: str) -> Node | int:
        node = self.nodes[name]
        if not isinstance(node, list):
            return node
        return node.pop(0) if len(node) > 1 else node[0]

    def _discovery_document(self) -> dict[str, typing.Any]:
        nodes = {"methods": {"get": _GET_NODE}}
        return {
            "name": "tpu",
            "version": "v1",
            "rootUrl": self.url,
            "servicePath": "",
            "batchPath": "batch",
            "auth": {"oauth2": {"scopes": {}}},
            "schemas": {"Node": {"id": "Node", "type": "object"}},
            "resources": {"projects": {"resources": {"locations": {"resources": {"nodes": nodes}}}}},
        }
