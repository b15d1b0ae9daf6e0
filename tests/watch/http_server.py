"""An HTTP server on a loopback port that answers what a test tells it to."""

from __future__ import annotations

import dataclasses
import http.server
import threading
import typing
from collections.abc import Callable


@dataclasses.dataclass
class Request:
    """What was asked."""

    method: str
    path: str  # with the query
    headers: typing.Mapping[str, str]
    body: bytes


Answer = tuple[int, dict[str, str], bytes]  # status, headers, body


class HttpServer:
    """Answers every request with what `answer` returns for it, which may take its time.

    Attributes:
      requests: in the order of arrival.
      address: host:port.
    """

    def __init__(self, answer: Callable[[Request], Answer]):
        self.requests: list[Request] = []
        self.closed = threading.Event()
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                length = int(self.headers["Content-Length"] or 0)
                request = Request(self.command, self.path, self.headers, self.rfile.read(length))
                server.requests.append(request)
                status, headers, body = answer(request)
                self.send_response(status)
                for name, value in (headers | {"Content-Length": str(len(body))}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815 (the name is http.server's)

            def log_message(self, format: str, *args: typing.Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, request: typing.Any, client_address: typing.Any) -> None:
                pass  # a client that gave up

        self._server = Server(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> HttpServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closed.set()  # for an `answer` that waits
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
