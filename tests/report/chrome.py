"""A real browser without a screen, over the pipe of its DevTools protocol: no driver and no port.

https://chromedevtools.github.io/devtools-protocol/
"""

import collections
import json
import os
import pathlib
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any, Self

import pytest

from tests.conftest import GUARD_SECS

_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Neither a sandbox, which containers forbid, nor anything that the browser would look up for itself.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-pipe",
)


def path() -> str:
    """The browser; skips where there is none, but in CI, where that would go unnoticed."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None and os.environ.get("CI"):
        pytest.fail("there is no Chromium: apt-get install chromium")
    if found is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    return found


class Chrome:
    """The browser with one page. `with` it."""

    def __init__(self, profile: pathlib.Path):
        self._profile = profile
        self._count = 0
        self.events: list[dict] = []  # all that it has told

    def __enter__(self) -> Self:
        to_browser, from_browser = os.pipe(), os.pipe()
        # The browser reads from its descriptor 3 and writes to 4.
        shell = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        command = ["bash", "-c", shell, "chrome", path(), *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(to_browser[0], from_browser[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        self._write, self._read = os.fdopen(to_browser[1], "wb"), os.fdopen(from_browser[0], "rb")
        self._session: str | None = None
        pages = self.call("Target.getTargets")["targetInfos"]
        [page] = [target["targetId"] for target in pages if target["type"] == "page"]
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._write.close()
        self._read.close()
        self._process.terminate()
        self._process.wait(GUARD_SECS)

    def call(self, method: str, **params: Any) -> dict:
        """One command and its answer; what is told meanwhile is kept in `events`."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while "id" not in (answer := self._next()):
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict:
        content = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "the browser has ended"
            content += byte
        return json.loads(content)

    def open(self, url: str, *, width: int, media: Mapping[str, str] | None = None) -> None:
        """Opens a page and waits until it is there."""
        features = [{"name": name, "value": value} for name, value in (media or {}).items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600
        )
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not self.told("Page.loadEventFired"):
            self.events.append(self._next())

    def told(self, method: str) -> list[dict]:
        """The events of one kind."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def complaints(self) -> list[str]:
        """What the console shows: errors of scripts, and what the page's policy has refused."""
        self.run("0")  # what was told before has arrived
        kinds = ("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled")
        return [json.dumps(event) for kind in kinds for event in self.told(kind)]

    def requests(self) -> collections.Counter[str]:
        """What was asked for, by scheme."""
        urls = [event["request"]["url"] for event in self.told("Network.requestWillBeSent")]
        return collections.Counter(url.partition(":")[0] for url in urls)
