"""A headless Chromium that a test drives as a visitor does, over the DevTools protocol.

(https://chromedevtools.github.io/devtools-protocol/) A driver such as Playwright or Selenium would be the largest
package of the tests; of the protocol they need a handful of calls.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--remote-debugging-port=0", "--remote-allow-origins=*", "--window-size=1400,1000", "about:blank"),
)
PATIENCE = 120.0  # seconds, for a busy machine


def browser_or_skip() -> str:
    """The path of a Chromium; the test that asks is skipped, with the reason, where it cannot drive one."""
    pytest.importorskip("websockets", reason="websockets is not installed, which drives the browser")
    for path in filter(None, map(shutil.which, NAMES)):
        # some systems have a script of that name that only asks for an installation
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    pytest.skip("no Chromium is installed; apt-get install chromium lets this test run")


@contextlib.contextmanager
def open_browser(program: str, folder: Path) -> Iterator[Tab]:
    """A new browser with its profile in `folder`, and its only tab."""
    from websockets.sync.client import connect

    log = folder / "browser.log"
    with log.open("w") as stream:
        process = subprocess.Popen([program, f"--user-data-dir={folder / 'profile'}", *FLAGS], stderr=stream)
    try:
        port = _port(log, process)
        targets = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=PATIENCE))
        address = next(one["webSocketDebuggerUrl"] for one in targets if one["type"] == "page")
        with connect(address, max_size=None) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _port(log: Path, process: subprocess.Popen) -> int:
    """The port that the browser chose, as it says in its log."""
    for _ in range(int(PATIENCE / 0.1)):
        for line in log.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("DevTools listening on ws://"):
                return int(line.split("/")[2].rpartition(":")[2])
        assert process.poll() is None, f"the browser ended: {log.read_text('utf-8', errors='replace')[-2000:]}"
        time.sleep(0.1)
    raise TimeoutError(log.read_text("utf-8", errors="replace")[-2000:])


class Tab:
    """One page of the browser."""

    def __init__(self, socket: Any):
        self._socket, self._numbers = socket, itertools.count(1)
        self.requests: list[str] = []  # addresses that the page asked for
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": values}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE))
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def run(self, script: str) -> Any:
        """The value of an expression in JavaScript."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression as soon as it counts as true."""
        end = time.monotonic() + PATIENCE
        while not (value := self.run(script)):
            if time.monotonic() > end:
                raise TimeoutError(f"{script}; the page says: {self.run('document.body.innerText')}")
            time.sleep(0.1)
        return value

    def go(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def click(self, element: str, at: tuple[float, float] = (0.5, 0.5)) -> None:
        """Scroll to an element (an expression), wait until it lies still, and press the mouse at a relative place."""
        scroll = "e.scrollIntoView({behavior: 'instant', block: 'center'})"
        box = "(r => [r.x, r.y, r.width, r.height])(e.getBoundingClientRect())"
        before, found = None, ()
        while before != found:
            time.sleep(0.3)
            before, found = found, self.run(f"(e => {{{scroll}; return {box}}})({element})")
        x, y, width, height = found
        where = {"x": x + at[0] * width, "y": y + at[1] * height, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def type(self, element: str, text: str) -> None:
        self.click(element)
        self.call("Input.insertText", text=text)

    def drop(self, element: str, path: Path) -> None:
        """Drop a file on an element."""
        events = '["dragenter", "dragover", "drop"].map(name => new DragEvent(name, {dataTransfer, ...bubbling}))'
        self._transfer(element, path, events)

    def paste(self, element: str, path: Path) -> None:
        """Paste a file while an element has the focus."""
        self._transfer(element, path, '[new ClipboardEvent("paste", {clipboardData: dataTransfer, ...bubbling})]')

    def _transfer(self, element: str, path: Path, events: str) -> None:
        """Dispatch events (an expression of `dataTransfer` and `bubbling`) with a file to an element."""
        content = base64.b64encode(path.read_bytes()).decode()
        self.run(
            f"""(element => {{
                const bytes = Uint8Array.from(atob("{content}"), one => one.charCodeAt(0));
                const kind = "{path.suffix}" == ".png" ? "image/png" : "image/jpeg";
                const dataTransfer = new DataTransfer();
                dataTransfer.items.add(new File([bytes], "{path.name}", {{type: kind}}));
                const bubbling = {{bubbles: true, cancelable: true}};
                for (const event of {events}) element.dispatchEvent(event);
            }})({element})"""
        )
