"""Headless Chromium, driven by the DevTools protocol over two pipes: no more than the tests of a page need."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ARGUMENTS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync", "about:blank",
)  # fmt: skip


class Browser:
    """One tab. `errors`: what it wrote to its console as errors, and exceptions that nobody caught."""

    def __init__(self, read: int, write: int) -> None:
        self._read, self._write, self._data = read, write, b""
        self._numbers, self._session, self.errors = itertools.count(1), None, []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params):
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self):
        while b"\0" not in self._data:
            ready, _, _ = select.select([self._read], [], [], 20)
            part = os.read(self._read, 1 << 16) if ready else b""
            assert part, "the browser says nothing"
            self._data += part
        message, _, self._data = self._data.partition(b"\0")
        return json.loads(message)

    def _note(self, event) -> None:
        params = event.get("params", {})
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"])
        elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"])
        elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(params["args"])

    def open(self, url: str) -> None:
        self.do("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, script: str):
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 15):
        """What the script gives, once that is true."""
        end = time.monotonic() + seconds
        while not (found := self.evaluate(script)):
            assert time.monotonic() < end, f"it did not happen: {script}; errors: {self.errors}"
            time.sleep(0.02)
        return found

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")

    def press(self, key: str, **how) -> None:
        for kind in ("keyDown", "keyUp"):
            self.do("Input.dispatchKeyEvent", type=kind, key=key, code=key, **(how if kind == "keyDown" else {}))

    def write(self, text: str) -> None:
        """Into what has the focus."""
        self.do("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)

    def prefer(self, scheme: str) -> None:
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.do("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path):
    """folder: for its profile."""
    their_read, write = os.pipe()
    read, their_write = os.pipe()

    def place() -> None:  # the protocol is at 3 and 4
        high = os.dup2(their_read, 100), os.dup2(their_write, 101)
        for number, each in enumerate(high, 3):
            os.dup2(each, number)

    command = [CHROMIUM, *ARGUMENTS[:-1], f"--user-data-dir={folder}", ARGUMENTS[-1]]
    process = subprocess.Popen(
        command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=os.environ | {"HOME": str(folder)},
    )  # fmt: skip
    os.close(their_read)
    os.close(their_write)
    try:
        yield Browser(read, write)
    finally:
        os.close(write)  # it ends then
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(read)
