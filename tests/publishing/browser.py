"""A headless Chromium spoken to over two pipes (Chrome DevTools Protocol), for the tests of the HTML page."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 90.0
"""For one answer: a busy machine with two cores takes its time."""

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
)


def installed() -> str | None:
    """Path of a Chromium, None where there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. Everything that the browser says about it is kept in `events`."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._number, self._buffer = read, write, 0, b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") != self._number:
                self.events.append(answer)
                continue
            assert "error" not in answer, f"{method}: {answer['error']}"
            return dict(answer["result"])

    def open(self, path: Path, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Load a file at a size, in a colour scheme, with an empty list of events, and wait until it is drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + SECONDS
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            assert time.monotonic() < deadline, "the page did not load"
            self.events.append(self._receive())
        drawn = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))"
        assert self.value(drawn) is True

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """One key on what has the focus."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def picture(self, path: Path, full: bool = True) -> None:
        """A screenshot as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Exceptions and console messages of any level since the page was opened."""
        said = []
        for event in self.events:
            method, told = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                said.append(json.dumps(told["exceptionDetails"])[:500])
            elif method == "Runtime.consoleAPICalled":
                said.append(json.dumps(told["args"])[:500])
            elif method == "Log.entryAdded":
                said.append(told["entry"]["text"])
        return said

    def requests(self) -> list[str]:
        """Addresses asked for since the page was opened."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [told["request"]["url"] for told in sent]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def chromium(program: str) -> Iterator[Page | None]:
    """A browser with an empty profile and one tab, None when it does not start; killed with its children at the end."""
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    profile = tempfile.mkdtemp(prefix="sdpa-repro-browser-")
    command = [program, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    start = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
    process = subprocess.Popen(
        ["bash", "-c", start, str(to_browser), str(from_browser), *command],
        pass_fds=(to_browser, from_browser),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": profile},
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        try:
            page = Page(to_us, from_us)
        except (AssertionError, OSError):  # some machines forbid what a browser needs
            page = None
        yield page
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        os.close(to_us)
        os.close(from_us)
        shutil.rmtree(profile, ignore_errors=True)
