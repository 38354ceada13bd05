"""Chromium without a window, driven through the pipe of its DevTools protocol: nothing but the browser is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe"),
)


class Browser:
    """One browser with one page. Messages end in a zero byte: ours on its descriptor 3, its own on 4."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self.folder = tempfile.mkdtemp(prefix="chromium-")
        theirs_in, self.out = os.pipe()
        self.inp, theirs_out = os.pipe()
        # A shell puts the pipes where the browser expects them; above 9 none is in the other's way.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
        command = ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "bash", CHROMIUM, *FLAGS]
        self.process = subprocess.Popen(
            [*command, f"--user-data-dir={self.folder}", "about:blank"],
            pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        self.buffer, self.last, self.session = b"", 0, None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def close(self) -> None:
        """End the browser."""
        os.close(self.out)
        os.close(self.inp)
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            if not select.select([self.inp], [], [], max(0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            got = os.read(self.inp, 1 << 16)
            if not got:
                raise RuntimeError("the browser has ended")
            self.buffer += got
        text, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(text)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command and its result; what happens meanwhile goes to `events`."""
        self.last += 1
        message: dict[str, Any] = {"id": self.last, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (got := self._read(60)).get("id") != self.last:
            self.events.append(got)
        assert "error" not in got, got["error"]
        return got["result"]

    # -- pages
    def size(self, width: int, height: int, dark: bool = False, phone: bool = False) -> None:
        """The window, and what the user prefers."""
        scale = 2 if phone else 1
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> float:
        """Load a file; the seconds until it is there and drawn."""
        self.events.clear()
        start = time.monotonic()
        self.send("Page.navigate", url=page.as_uri())
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._read(60))
        self.wait()
        return time.monotonic() - start

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        got = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in got, got["exceptionDetails"]
        return got["result"].get("value")

    def errors(self) -> list[str]:
        """What went wrong in the page since it was opened."""
        bad = []
        for e in self.events:
            if e.get("method") == "Runtime.exceptionThrown":
                bad.append(json.dumps(e["params"]["exceptionDetails"])[:2000])
            elif e.get("method") == "Log.entryAdded" and e["params"]["entry"]["level"] == "error":
                bad.append(e["params"]["entry"]["text"])
        return bad

    def requests(self) -> list[str]:
        """Addresses that the page asked for, besides its own."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return asked[1:]

    def wait(self) -> None:
        """Until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def screenshot(self, path: Path) -> None:
        """What is seen."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


def open_page(browser: Browser, page: Path) -> None:
    """Open a page of a file: within 2 s, without errors or requests, and a slider answers within 100 ms."""
    seconds = browser.open(page)
    assert browser.errors() == [] and browser.requests() == []
    assert seconds < 2, f"{page.name} took {seconds:.2f} s to open"
    took = browser.run(
        """[...document.querySelectorAll("input[type=range]")].map((e) => {
             const start = performance.now();
             e.value = e.max; e.dispatchEvent(new Event("input")); keepdim.view.canvas.paint();
             const middle = performance.now();
             e.value = e.max / 2; e.dispatchEvent(new Event("input")); keepdim.view.canvas.paint();
             return Math.min(middle - start, performance.now() - middle); })"""
    )
    assert max(took, default=0) < 100, f"{page.name}: a slider took {max(took):.0f} ms"
