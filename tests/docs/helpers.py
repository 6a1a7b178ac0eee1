"""A headless Chromium, spoken to by its DevTools protocol over two pipes: no driver, no port, no package.

Owns the process of the browser, and one page in it. Messages are JSON that ends with a zero byte; the browser reads
file descriptor 3 and writes 4 (``--remote-debugging-pipe``).
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
TIMEOUT_S = 60.0

_AS_3_AND_4 = """
import fcntl, os, sys
pipes = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3]]
for number, pipe in zip((3, 4), pipes):
    os.dup2(pipe, number, inheritable=True)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A program that becomes another, with two of its file descriptors as 3 and 4."""


def find_browser() -> str | None:
    """The path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page of a browser that is started with it, and ends with ``close``.

    Attributes:
        complaints: what the console of the present page said at level error, exceptions, and requests that failed.
    """

    def __init__(self, browser: str, profile: Path) -> None:
        to_browser, from_test = os.pipe()
        to_test, from_browser = os.pipe()
        self._write, self._read = from_test, to_test
        command = [browser, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _AS_3_AND_4, str(to_browser), str(from_browser), *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._buffer = 0, b""
        self.complaints: list[str] = []
        self._events: list[str] = []
        self._session = ""
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End the browser. Calling it again does nothing."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            os.close(self._write)
            os.close(self._read)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result.

        Raises:
            RuntimeError: the browser answers with an error.
            TimeoutError: it does not answer.
        """
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            found = self._receive()
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result

    def open(self, url: str) -> None:
        """Load a page, and wait until it has loaded and its scripts of the first moment have run."""
        self.complaints.clear()
        self._events.clear()
        self.send("Page.navigate", url=url)
        deadline = time.monotonic() + TIMEOUT_S
        while "Page.loadEventFired" not in self._events:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} has not loaded in {TIMEOUT_S:.0f} s")
            self._receive()
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression; of a promise, what it resolves to.

        Raises:
            RuntimeError: it throws.
        """
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, script: str, what: str) -> Any:
        """Wait until an expression is truthy, and return it.

        Raises:
            TimeoutError: it never is; with ``what`` was waited for.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := self.run(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {TIMEOUT_S:.0f} s for {what}")
            time.sleep(0.05)
        return value

    def resize(self, width: int, height: int) -> None:
        """The size of the window, in CSS pixels; below 600 it is a phone's."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        """What the system's setting is: ``"light"`` or ``"dark"``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        """What is to be seen now, as a PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], TIMEOUT_S)
            chunk = os.read(self._read, 1 << 16) if ready else b""
            if not chunk:
                raise TimeoutError(f"the browser said nothing for {TIMEOUT_S:.0f} s, or ended")
            self._buffer += chunk
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self._note(message["method"], message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._events.append(method)
        if method == "Runtime.exceptionThrown":
            self.complaints.append(f"exception: {params['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.complaints.append(f"console: {params['args']}")
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("http://127.0.0.1", "data:", "blob:", "about:")):
                self.complaints.append(f"asks another host: {url}")
