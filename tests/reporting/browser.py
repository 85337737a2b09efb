"""Headless Chromium, spoken to by its DevTools protocol over two pipes: no driver and no port."""

import base64
import itertools
import json
import os
import selectors
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
# No host but this machine has a name, so that nothing leaves it.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe"),
)


def find_chromium() -> str:
    """Where none is installed: a failure under CI, which must not leave these tests out, and a skip elsewhere."""
    found = next(filter(None, map(shutil.which, (*NAMES, MAC))), None)
    if found is None:
        message = f"no Chromium on the PATH ({', '.join(NAMES)}); Debian: apt-get install chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(message)
    return found


class Browser:
    """One process with one page; `events` are all that it has reported."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # The browser reads from descriptor 3 and writes to 4; the shell puts them there without code after the fork.
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        self._log = (profile / "log.txt").open("wb")
        command = ["bash", "-c", shell, program, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        fds = (to_browser, from_browser)
        self._process = subprocess.Popen(command, pass_fds=fds, stdout=self._log, stderr=self._log)
        os.close(to_browser)
        os.close(from_browser)
        self.events: list[dict[str, Any]] = []
        self._numbers, self._rest, self._session = itertools.count(1), b"", None
        targets = self.send("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def open(self, file: Path, *, width: int, height: int = 800, dark: bool = False) -> None:
        """Load a file into a window of that size, a phone's below 600 pixels, in a light or dark setting."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", media="screen", features=[scheme])
        self.events.clear()
        self.send("Page.navigate", url=file.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def wait_for(self, method: str, seconds: float = 30) -> dict[str, Any]:
        """The first event of that name since the page was opened."""
        end = time.monotonic() + seconds
        while True:
            if found := [event for event in self.events if event.get("method") == method]:
                return found[0]
            self._receive(end)

    def evaluate(self, expression: str) -> Any:
        """The JSON value of a JavaScript expression in the page, whatever the page's own policy."""
        result = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, file: Path) -> None:
        """The whole page, not only the window."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        file.write_bytes(base64.b64decode(data))

    def requests(self) -> list[str]:
        """Addresses asked for since the page was opened."""
        return [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]

    def complaints(self) -> list[str]:
        """What the console has shown since then: errors, warnings and refusals of the policy."""
        kinds = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in kinds]

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number, end = next(self._numbers), time.monotonic() + 30
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            for i, event in enumerate(self.events):
                if event.get("id") == number:
                    del self.events[i]
                    assert "error" not in event, (method, event["error"])
                    return event["result"]
            self._receive(end)

    def close(self) -> None:
        os.close(self._write)  # the browser ends with its pipe
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._log.close()

    def _receive(self, end: float) -> None:
        """Wait for more from the browser."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._read, selectors.EVENT_READ)
            ready = selector.select(max(0, end - time.monotonic()))
        data = os.read(self._read, 1 << 20) if ready else b""
        if not data:
            raise AssertionError(f"the browser is silent; its output is in {self._log.name}")
        *messages, self._rest = (self._rest + data).split(b"\0")
        self.events += map(json.loads, messages)
