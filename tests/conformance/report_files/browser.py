"""A headless Chromium, spoken to over a pipe in the DevTools protocol; no library needed.

As a command it takes the pictures of docs/reports.md, from one element of a page to another:

    python tests/conformance/report_files/browser.py PAGE.html FIRST LAST PICTURE.png
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--remote-debugging-pipe",
    "--no-sandbox",  # containers and root have none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
)


def chromium() -> str | None:
    """The path of the first one that is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page at a time. What the page logs, and what it raises, is kept in `complaints`."""

    def __init__(self, path: str, profile: Path) -> None:
        ours_read, theirs_write = os.pipe()
        theirs_read, ours_write = os.pipe()

        def at_3_and_4() -> None:  # where the protocol expects its pipe
            high = [os.dup(theirs_read), os.dup(theirs_write)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [path, *_FLAGS, f"--user-data-dir={profile}"],
            preexec_fn=at_3_and_4,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_read)
        os.close(theirs_write)
        self._read = os.fdopen(ours_read, "rb")
        self._write = os.fdopen(ours_write, "wb")
        self._rest, self._last, self._session = b"", 0, ""
        self._events: list[dict[str, Any]] = []
        self.complaints: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol; returns its result."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])

    def open(self, url: str, width: int = 1280, height: int = 900) -> None:
        """Load a page in a window of this size, and wait until it is there."""
        self.complaints.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._events.clear()
        self.ask("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self._events):
            self._next()

    def value(self, expression: str) -> Any:
        """Of an expression of JavaScript, in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def paper(self) -> bytes:
        """The page as PDF, with the style for print."""
        return base64.b64decode(self.ask("Page.printToPDF", preferCSSPageSize=True)["data"])

    def picture(self, first: str, last: str) -> bytes:
        """A PNG of the page's width, from the top of one element to the bottom of another."""
        top = self.value(f"document.querySelector({first!r}).getBoundingClientRect().top")
        bottom = self.value(f"document.querySelector({last!r}).getBoundingClientRect().bottom")
        width = self.value("innerWidth")
        clip = {"x": 0, "y": top, "width": width, "height": bottom - top, "scale": 1}
        taken = self.ask("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    def close(self) -> None:
        self._write.close()
        self._read.close()
        self._process.terminate()
        self._process.wait(30)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read.fileno(), 1 << 16)
            assert part, "the browser ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        message = dict(json.loads(line))
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif method in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(json.dumps(parameters))
        if method is not None:
            self._events.append(message)
        return message


def _take(page: str, first: str, last: str, picture: str) -> None:
    if not Path(page).is_file():
        sys.exit(f"no page {page}; write it first: kdtr gate ... --html {page}")
    path = chromium()
    if path is None:
        sys.exit(f"no browser: none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(path, Path(profile))
        browser.open(Path(page).resolve().as_uri(), width=1060)
        Path(picture).write_bytes(browser.picture(first, last))
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 5:
        sys.exit("usage: browser.py PAGE.html FIRST LAST PICTURE.png")
    _take(*sys.argv[1:])
