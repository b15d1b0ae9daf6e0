"""Google Cloud Storage on loopback, for TensorFlow's own gs:// client, as a process: `python -m tests.gcs_server`.

TensorFlow knows no other endpoint than Google's, but libcurl honours proxies. So this is an HTTP CONNECT proxy that
ends TLS itself, with a certificate of a CA that only the process under test trusts. `tests/gcs.py` starts it.

    port          CONNECT www.googleapis.com:443 and the like: the storage API (JSON, uploads, downloads)
    control port  plain HTTP: /objects, /object, /faults, /log

A fault (JSON) hits requests whose method and path match its patterns, `times` times, or for ever where that is null,
all of them or a `share`:
    {"code": 503}                answers so
    {"drop": "request"}          takes half of the request's body and closes the connection
    {"drop": "response"}         does what is asked, sends half of the answer and closes the connection
    {"lose": true}               answers an upload or a copy as if it had been kept
    {"delay_secs": 0.1}          waits, then does what is asked
"""

from __future__ import annotations

import argparse
import http.server
import json
import pathlib
import re
import ssl
import threading
import time
import urllib.parse

from tests.gcs_store import Blob, Fault, StorageError, Store, Upload

_CHUNK = 256 * 1024  # what Google keeps of an upload that breaks off is a multiple of this
_HIDDEN = ("/token", "/oauth2/")


class Api(http.server.BaseHTTPRequestHandler):
    """The storage API behind TLS."""

    protocol_version = "HTTP/1.1"
    # Headers and body are two packets; without this the second waits 40 ms for the client's delayed acknowledgement.
    disable_nagle_algorithm = True
    store: Store
    page_size: int

    def answer_request(self) -> None:
        """Answers one request of any method."""
        url = urllib.parse.urlsplit(self.path)
        query = {key: values[0] for key, values in urllib.parse.parse_qs(url.query, keep_blank_values=True).items()}
        hidden = url.path.startswith(_HIDDEN)
        path = urllib.parse.unquote(self.path)
        fault = None if hidden else self.store.fault(self.command, path)
        body = self._body()
        with self.store.lock:
            entry = {"method": self.command, "path": path, "bytes": len(body), "is_hurt": fault is not None}
            self.store.log.append(entry)
        if fault is not None and fault.delay_secs:
            time.sleep(fault.delay_secs)
        if fault is not None and fault.drop == "request":
            self._keep_half(query, body)
            self._close()
            return
        try:
            if fault is not None and fault.code is not None:
                raise StorageError(fault.code, fault.message)
            code, headers, answer = self._answer(url.path, query, body)
            if fault is not None and fault.lose and code == 200:
                self._lose(json.loads(answer))
        except StorageError as error:
            code, headers = error.code, {}
            answer = json.dumps({"error": {"code": error.code, "message": str(error)}}).encode()
        self._send(code, headers, answer, half=fault is not None and fault.drop == "response")

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = answer_request  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the control port has the log."""

    def _body(self) -> bytes:
        # TensorFlow's uploads are chunked and have a Content-Length besides.
        if "chunked" not in (self.headers.get("Transfer-Encoding") or "").lower():
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = bytearray()
        while size := int(self.rfile.readline().split(b";")[0] or b"0", 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return bytes(body)

    def _send(self, code: int, headers: dict[str, str], body: bytes, *, half: bool) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if half else body)
        if half:
            self._close()

    def _close(self) -> None:
        self.wfile.flush()
        self.close_connection = True

    def _answer(self, path: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if path.startswith(_HIDDEN):
            token = {"access_token": "loopback", "expires_in": 3600, "token_type": "Bearer"}
            return 200, {"Content-Type": "application/json"}, json.dumps(token).encode()
        if match := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path):
            return self._upload(match[1], query, body)
        if match := re.fullmatch(r"/storage/v1/b/([^/]+)(?:/(.*))?", path):
            return self._json_api(match[1], match[2] or "", query)
        bucket, _, name = path.lstrip("/").partition("/")
        return self._download(self.store.get(bucket, urllib.parse.unquote(name)))

    def _json_api(self, bucket: str, rest: str, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if bucket not in self.store.buckets:
            raise StorageError(404, f"The specified bucket does not exist: {bucket}")
        if rest == "":
            return _json({"kind": "storage#bucket", "name": bucket, "location": "US-CENTRAL1"})
        if rest == "storageLayout":
            return _json({"bucket": bucket, "hierarchicalNamespace": {"enabled": False}})
        if rest == "o":
            return _json(self.store.list(bucket, query, self.page_size))
        parts = [urllib.parse.unquote(part) for part in rest.split("/")]
        if len(parts) == 7 and parts[2] == "rewriteTo":
            self.store.put(parts[4], parts[6], self.store.get(bucket, parts[1]).data, query)
            return _json({"kind": "storage#rewriteResponse", "done": True, "resource": self._metadata(*parts[4:7:2])})
        if len(parts) != 2 or parts[0] != "o":
            raise StorageError(404, f"Not Found: {rest}")
        if self.command == "DELETE":
            self.store.delete(bucket, parts[1], query)
            return 204, {}, b""
        if query.get("alt") == "media":
            return self._download(self.store.get(bucket, parts[1]))
        return _json(self._metadata(bucket, parts[1]))

    def _metadata(self, bucket: str, name: str) -> dict[str, str]:
        return self.store.metadata(bucket, name)

    def _upload(self, bucket: str, query: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if query.get("uploadType") == "media":
            self.store.put(bucket, query["name"], body, query)
            return _json(self._metadata(bucket, query["name"]))
        if self.command == "POST":
            if bucket not in self.store.buckets:
                raise StorageError(404, f"The specified bucket does not exist: {bucket}")
            with self.store.lock:
                upload_id = f"upload-{len(self.store.uploads)}"
                self.store.uploads[upload_id] = Upload(bucket, query["name"], query)
            where = (
                f"https://www.googleapis.com/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload_id}"
            )
            return 200, {"Location": where}, b""
        upload = self.store.uploads.get(query.get("upload_id", ""))
        if upload is None:
            raise StorageError(410, "The upload is unknown")
        return self._continue_upload(upload, self.headers.get("Content-Range"), body)

    def _continue_upload(
        self, upload: Upload, content_range: str | None, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """`bytes A-B/TOTAL` brings a chunk, `bytes */TOTAL` asks how far it is; TOTAL may be `*`."""
        match = re.fullmatch(r"bytes (?:\*|(\d+)-\d+)/(\d+|\*)", content_range or f"bytes 0-{len(body)}/{len(body)}")
        if match is None:
            raise StorageError(400, f"Content-Range: {content_range}")
        if match[1] is not None:
            if int(match[1]) > len(upload.data):
                raise StorageError(503, f"{len(upload.data)} bytes are here, the chunk begins at {match[1]}")
            del upload.data[int(match[1]) :]
            upload.data += body
        if match[2] != "*" and len(upload.data) == int(match[2]):
            self.store.put(upload.bucket, upload.name, bytes(upload.data), upload.query)
            return _json(self._metadata(upload.bucket, upload.name))
        return 308, {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}, b""

    def _keep_half(self, query: dict[str, str], body: bytes) -> None:
        upload = self.store.uploads.get(query.get("upload_id", ""))
        match = re.match(r"bytes (\d+)-", self.headers.get("Content-Range") or "")
        if upload is not None and match is not None:
            del upload.data[int(match[1]) :]
            upload.data += body[: len(body) // 2 // _CHUNK * _CHUNK]

    def _lose(self, answer: dict) -> None:
        kept = answer.get("resource", answer)
        self.store.delete(kept["bucket"], kept["name"], {})

    def _download(self, blob: Blob) -> tuple[int, dict[str, str], bytes]:
        headers = {"x-goog-generation": str(blob.generation)}
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None:
            return 200, headers, blob.data
        first, last = int(match[1]), min(int(match[2] or len(blob.data)), len(blob.data) - 1)
        if first >= len(blob.data):
            raise StorageError(416, f"{len(blob.data)} bytes are here")
        return 206, headers | {"Content-Range": f"bytes {first}-{last}/{len(blob.data)}"}, blob.data[first : last + 1]


def _json(answer: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()


def _proxy(api: type[Api], tls: ssl.SSLContext) -> type[http.server.BaseHTTPRequestHandler]:
    """What takes CONNECT, ends TLS and hands what is inside to `api`."""

    class Proxy(http.server.BaseHTTPRequestHandler):
        disable_nagle_algorithm = True

        def do_CONNECT(self) -> None:
            self.send_response(200, "Connection established")
            self.end_headers()
            self.wfile.flush()
            self.close_connection = True
            try:
                with tls.wrap_socket(self.connection, server_side=True) as inside:
                    api(inside, self.client_address, self.server)
            except OSError:
                pass  # the process under test was killed, or hung up

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Proxy


def _control(store: Store) -> type[http.server.BaseHTTPRequestHandler]:
    """What tests ask and tell."""

    class Control(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url, query = self._asked()
            with store.lock:
                if url.path == "/objects":
                    sizes = {name: len(blob.data) for name, blob in store.buckets[query["bucket"]].items()}
                    self._reply(200, json.dumps(sizes).encode())
                elif url.path == "/log":
                    self._reply(200, json.dumps(store.log).encode())
                else:
                    try:
                        self._reply(200, store.get(query["bucket"], query["name"]).data)
                    except StorageError as error:
                        self._reply(error.code, str(error).encode())

        def do_PUT(self) -> None:
            url, query = self._asked()
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with store.lock:
                if url.path == "/faults":
                    store.faults[:] = [Fault(**fault) for fault in json.loads(body)]
                else:
                    store.put(query["bucket"], query["name"], body, {})
            self._reply(200, b"")

        def do_DELETE(self) -> None:
            _, query = self._asked()
            store.delete(query["bucket"], query["name"], {})
            self._reply(200, b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _asked(self) -> tuple[urllib.parse.SplitResult, dict[str, str]]:
            url = urllib.parse.urlsplit(self.path)
            return url, {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}

        def _reply(self, code: int, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Control


def main() -> None:
    """Serves until killed; prints both ports as JSON once it listens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--certificate", required=True, help="PEM with certificate and key for Google's hosts")
    parser.add_argument("--bucket", action="append", required=True)
    parser.add_argument("--directory", type=pathlib.Path, help="keeps the objects there")
    parser.add_argument("--page_size", type=int, default=1000, help="entries of a listing's page")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    store = Store(options.bucket, options.directory)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(options.certificate)
    api = type("BoundApi", (Api,), {"store": store, "page_size": options.page_size})
    control = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _control(store))
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", options.port), _proxy(api, tls))
    proxy.daemon_threads = control.daemon_threads = True
    threading.Thread(target=control.serve_forever, daemon=True).start()
    print(json.dumps({"port": proxy.server_address[1], "control": control.server_address[1]}), flush=True)
    proxy.serve_forever()


if __name__ == "__main__":
    main()
