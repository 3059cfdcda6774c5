"""A real browser without a window, for tests of pages.

It is driven through its debugging pipe: JSON messages that end with a zero byte, on its file descriptors 3
(to it) and 4 (from it). Where no Chromium is installed, `FOUND` is None and such tests are skipped.
"""

import base64
import fcntl
import io
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((path for path in map(shutil.which, NAMES) if path), None)
MISSING = f"no browser here; looked for {', '.join(NAMES)}"
_QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")

_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page of a browser without a window."""

    def __init__(self, profile: Path) -> None:
        (out, to_it), (from_it, back) = os.pipe(), os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (out, back)]  # not 3 or 4 themselves
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", *_QUIET]
        where = [f"--user-data-dir={profile}", "--window-size=1000,1200", "about:blank"]
        start = [sys.executable, "-c", _START, *map(str, high), str(FOUND), *options, *where]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(start, pass_fds=high, start_new_session=True, **quiet)  # type: ignore[call-overload]
        for end in (out, back, *high):
            os.close(end)
        self.to_it, self.from_it = to_it, from_it
        self.buffer, self.events, self.numbers, self.session = b"", list[Any](), itertools.count(1), ""
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        target = {"targetId": pages[0]["targetId"], "flatten": True}
        self.session = self.call("Target.attachToTarget", **target)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; what happens meanwhile goes to `events`."""
        number = next(self.numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_it, json.dumps(message).encode() + b"\0")
        while (answer := self.next()).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def next(self) -> dict[str, Any]:
        """The next message, which comes within some seconds or not at all."""
        ends = time.monotonic() + 30
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.from_it], [], [], max(ends - time.monotonic(), 0))
            piece = os.read(self.from_it, 1 << 16) if ready else b""
            assert piece, f"the browser said nothing; its exit code is {self.process.poll()}"
            self.buffer += piece
        message, self.buffer = self.buffer.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, address: str) -> None:
        """Show a page as it is at first, with the mouse in its corner."""
        self.events.clear()
        self.call("Page.navigate", url=address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self.next())
        self.mouse("mouseMoved", 1, 1)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def middle(self, selector: str) -> tuple[float, float]:
        """Where the middle of an element is in the window, after scrolling it there."""
        self.ask(f"document.querySelector('{selector}').scrollIntoView({{block: 'nearest'}})")
        box = self.ask(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def point_at(self, selector: str) -> None:
        self.mouse("mouseMoved", *self.middle(selector))

    def click(self, selector: str) -> None:
        where = self.middle(selector)
        self.mouse("mouseMoved", *where)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, *where, button="left", clickCount=1)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def tap(self, selector: str) -> None:
        x, y = self.middle(selector)
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def wait(self, expression: str, seconds: float = 30) -> None:
        """Until an expression in the page is true."""
        ends = time.monotonic() + seconds
        while not self.ask(expression):
            assert time.monotonic() < ends, f"never came: {expression}"
            time.sleep(0.02)

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def picture(self) -> np.ndarray:
        """The window as numbers (height, width, 3) from 0 to 255."""
        image = np.asarray(matplotlib.image.imread(io.BytesIO(self.screenshot()), format="png"))
        return np.round(255 * image[:, :, :3]).astype(int)

    def close(self) -> None:
        try:
            self.session = ""
            self.call("Browser.close")
            self.process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for end in (self.to_it, self.from_it):
            os.close(end)
