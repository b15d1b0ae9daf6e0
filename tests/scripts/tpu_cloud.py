"""The Cloud TPU API v2 on a loopback port, as far as the real gcloud asks for it, with VMs that are directories.

    with TpuCloud(directory) as cloud:
        subprocess.run(["gcloud", ...], env=os.environ | cloud.environ())

The real gcloud creates, lists and deletes nodes and queued resources here. Its ssh, scp and `storage cp` need machines
and buckets: `environ` puts a `gcloud` in PATH that runs these on this machine, in the home directory of that very node,
and hands all else to the real one, or, where that is not wanted (it takes most of a second), asks the API itself. A
node that is created anew has an empty home. `python3` there is a stand-in that installs nothing: it makes an
environment whose trainer does what `plan` says, and writes down how it was called.
"""

from __future__ import annotations

import http.server
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import typing
import urllib.parse

PROJECT, ZONE = "test-project", "us-central1-a"
_NAME = re.compile(rf"/v2/(projects/{PROJECT}/locations/{ZONE}/(nodes|queuedResources))(?:/([^/]+))?")

_GCLOUD = """#!{python}
import json, os, pathlib, shutil, subprocess, sys, urllib.error, urllib.request

def ask(method, path, body=None):
    request = urllib.request.Request({url!r} + "v2/projects/{project}/locations/{zone}/" + path, method=method)
    request.data = body and json.dumps(body).encode()
    with urllib.request.build_opener(urllib.request.ProxyHandler({{}})).open(request) as answer:
        return json.load(answer)

def over_ssh(verb, plain, options):
    name, _, target = plain[-1].partition(":")
    node = ask("GET", "nodes/" + name)
    if node["state"] != "READY":
        return 255
    home = root / "homes" / node["id"]
    if verb == "scp":
        shutil.copy(plain[0], home / target)
        return 0
    environ = os.environ | {{"HOME": str(home), "PATH": str(root / "vm") + ":" + os.environ["PATH"]}}
    return subprocess.run(["bash", "-c", options["command"]], cwd=home, env=environ).returncode

def change(kind, verb, plain, options):
    kind = {{"tpu-vm": "nodes", "queued-resources": "queuedResources"}}[kind]
    if verb == "list":
        print(json.dumps(ask("GET", kind)[kind]))
    elif verb == "describe":
        print(json.dumps(ask("GET", kind + "/" + plain[0])))
    elif verb == "delete":
        ask("DELETE", kind + "/" + plain[0])
    else:
        node = {{"acceleratorType": options["accelerator-type"]}}
        name, body = "nodeId", node
        if kind == "queuedResources":
            name, body = "queuedResourceId", {{"tpu": {{"nodeSpec": [{{"nodeId": options["node-id"], "node": node}}]}}}}
            body |= {{"spot": {{}}}} if "spot" in options else {{}}
        ask("POST", f"{{kind}}?{{name}}={{plain[0]}}", body)

root = pathlib.Path({root!r})
words = sys.argv[1:]
if words[:2] == ["storage", "cp"]:
    shutil.copy(root / "bucket" / words[2].removeprefix("gs://"), words[3])
    sys.exit()
kind, verb, *rest = words[2:]
plain = [word for word in rest if not word.startswith("--")]
options = dict(word[2:].partition("=")[::2] for word in rest if word.startswith("--"))
if verb in ("ssh", "scp"):
    sys.exit(over_ssh(verb, plain, options))
if {gcloud!r}:
    os.execv({gcloud!r}, [{gcloud!r}, *words])
try:
    change(kind, verb, plain, options)
except urllib.error.HTTPError as error:
    sys.exit(error.read().decode())
"""
# On the VM: `python3 -m pip install uv`, `uv venv`, then the environment's python.
_PYTHON3 = """#!/bin/bash
mkdir -p "$HOME/.local/bin" && cp {root}/uv "$HOME/.local/bin/uv"
"""
_UV = """#!/bin/bash
mkdir -p .venv/bin && cp {root}/python .venv/bin/python
"""
_PYTHON = """#!{python}
import json, os, pathlib, signal, sys
words = sys.argv[1:]
root = pathlib.Path({root!r})
if words[:2] == ["-m", "pip"]:
    with open(root / "pip.jsonl", "a") as file:
        file.write(json.dumps(words[2:]) + "\\n")
elif words[:1] == ["-c"]:
    print("/wheels/libtpu.so")
elif words[:2] != ["-m", "trainer.main"]:
    os.execv({python!r}, [{python!r}, *words])
else:
    plan = json.loads((root / "plan.json").read_text())
    (root / "plan.json").write_text(json.dumps(plan[1:]))
    print("trainer: step 7", flush=True)
    with open(root / "starts.jsonl", "a") as file:
        file.write(json.dumps({{"flags": words[2:], "environ": dict(os.environ)}}) + "\\n")
    if plan[0] is None:
        with open(root / "end") as fifo:  # blocks until the test says the exit code, or the VM dies
            plan[0] = int(fifo.read())
    sys.exit(plan[0])
"""


class TpuCloud:
    """Serves until closed.

    Attributes:
        nodes, requests: what exists, by name, as the API tells of it.
        calls: (method, collection) of what changed something, or was to.
        looks: how often nodes have been listed.
        refusal: HTTP status of every create from now on; None for none.
        request_state: state that a new queued resource ends in; ACTIVE brings a node.
    """

    def __init__(self, directory: pathlib.Path, *, real_gcloud: bool):
        self.root = directory
        self._gcloud = shutil.which("gcloud") if real_gcloud else None
        self.nodes: dict[str, dict] = {}
        self.requests: dict[str, dict] = {}
        self.calls: list[tuple[str, str]] = []
        self.looks = 0
        self.refusal: int | None = None
        self.request_state = "ACTIVE"
        self._ids = map(str, itertools.count(1))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> TpuCloud:
        programs = {"bin/gcloud": _GCLOUD, "vm/python3": _PYTHON3, "uv": _UV, "python": _PYTHON}
        where = {"root": str(self.root), "python": sys.executable, "url": self.url, "project": PROJECT, "zone": ZONE}
        for name, source in programs.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source.format(gcloud=self._gcloud, **where))
            path.chmod(0o755)
        (self.root / "bucket/code").mkdir(parents=True)
        os.mkfifo(self.root / "end")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.nodes):
            self._kill(name)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def environ(self) -> dict[str, str]:
        """For a process that shall take this for Google's."""
        return {
            "PATH": f"{self.root}/bin:{self.root}/vm:{os.environ['PATH']}",
            "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU": self.url,
            "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
            "CLOUDSDK_CONFIG": str(self.root / "gcloud"),
            "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false",  # seconds, on a machine that is not Google's
            "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
            "CLOUDSDK_CORE_DISABLE_USAGE_REPORTING": "1",
            "CLOUDSDK_CORE_PROJECT": PROJECT,
        }

    def plan(self, *codes: int | None) -> None:
        """Exit codes of the trainer's next starts; None for one that runs until `end`."""
        (self.root / "plan.json").write_text(json.dumps(codes))

    def end(self, code: int) -> None:
        """Ends the trainer that runs."""
        (self.root / "end").write_text(str(code))

    def written(self, name: str) -> list[typing.Any]:
        """What the stand-ins have written down: `starts` of the trainer, calls of `pip`."""
        path = self.root / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def preempt(self, name: str) -> None:
        """Takes a node away, with all that runs there."""
        self._kill(name)
        self.nodes[name]["state"] = "PREEMPTED"
        if name in self.requests:
            self.requests[name]["state"] = {"state": "SUSPENDED"}

    def on_vm(self, name: str, action: str) -> str:
        """What `on_tpu_vm` says by hand."""
        program = self.root / "homes" / self.nodes[name]["id"] / name / "scripts/on_tpu_vm"
        return subprocess.run([program, action], check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout

    def _kill(self, name: str) -> None:
        for pid in self.root.glob(f"homes/{self.nodes[name]['id']}/*/run/pid"):
            _kill_tree(int(pid.read_text()))

    def answer(self, method: str, path: str, body: dict) -> tuple[int, typing.Any]:
        """Status and JSON for a request of gcloud's."""
        url = urllib.parse.urlsplit(path)
        match = _NAME.fullmatch(url.path)
        if not match:
            return 404, {"error": {"code": 404, "message": f"no {path}"}}
        parent, collection, name = match.groups()
        found = self.nodes if collection == "nodes" else self.requests
        if method == "POST":
            return self._create(parent, collection, urllib.parse.parse_qs(url.query), body)
        if name is None:
            self.looks += collection == "nodes"
            return 200, {collection: list(found.values())}
        if name not in found:
            return 404, {"error": {"code": 404, "message": f"no {path}"}}
        if method == "DELETE":
            self.calls.append((method, collection))
            if name in self.nodes:
                self._kill(name)
                del self.nodes[name]
            self.requests.pop(name, None)
            return 200, _done(parent)
        return 200, found[name]

    def _create(self, parent: str, collection: str, query: dict, body: dict) -> tuple[int, typing.Any]:
        self.calls.append(("POST", collection))
        if self.refusal is not None:
            return self.refusal, {"error": {"code": self.refusal, "message": "refused, as asked for"}}
        [name] = query["nodeId" if collection == "nodes" else "queuedResourceId"]
        if name in self.nodes or name in self.requests:
            return 409, {"error": {"code": 409, "message": f"{name} exists"}}
        if collection == "nodes":
            self._add_node(parent, name, body)
            return 200, _done(parent)
        self.requests[name] = {**body, "name": f"{parent}/{name}", "state": {"state": self.request_state}}
        if self.request_state == "FAILED":
            self.requests[name]["state"]["failedData"] = {"error": {"message": "no quota, as asked for"}}
        if self.request_state == "ACTIVE":
            [node] = body["tpu"]["nodeSpec"]
            self._add_node(parent.replace("queuedResources", "nodes"), node["nodeId"], node["node"])
        return 200, _done(parent)

    def _add_node(self, parent: str, name: str, body: dict) -> None:
        node = {**body, "name": f"{parent}/{name}", "state": "READY", "id": next(self._ids)}
        (self.root / "homes" / node["id"]).mkdir(parents=True)
        self.nodes[name] = node


def _handler(cloud: TpuCloud) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def _answer(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = cloud.answer(self.command, self.path, json.loads(text or "{}"))
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, format: str, *args: typing.Any) -> None:
            pass

    return Handler


def _done(parent: str) -> dict:
    return {"name": f"{parent.rpartition('/')[0]}/operations/1", "done": True, "response": {}}


def _kill_tree(pid: int) -> None:
    """As a VM that goes: the process and all below it, whatever groups they are in."""
    for child in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = child.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == pid:  # its session
            try:
                os.kill(int(child.parent.name), signal.SIGKILL)
            except ProcessLookupError:
                continue
