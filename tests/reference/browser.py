"""A headless Chromium, driven through chromedriver with nothing but the standard library."""

from __future__ import annotations

import base64
import http.client
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = "no chromium with chromedriver is installed (Debian: apt install chromium chromium-driver)"

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip


class Browser:
    """A window with an empty profile, while the scope lasts."""

    def __enter__(self) -> Self:
        assert CHROMIUM is not None, MISSING
        assert DRIVER is not None, MISSING
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._driver = subprocess.Popen(
            [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            self._port = self._read_port()
            self._session = ""
            flags = [*_FLAGS, f"--user-data-dir={self._profile.name}", "--window-size=1280,1600"]
            options = {"binary": CHROMIUM, "args": flags}
            asked = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": asked}})
            self._session = f"/session/{made['sessionId']}"
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", self._session)
        finally:
            self._stop()

    def _stop(self) -> None:
        self._driver.terminate()
        self._driver.wait(20)
        assert self._driver.stdout is not None
        self._driver.stdout.close()
        self._profile.cleanup()

    def _read_port(self) -> int:
        assert self._driver.stdout is not None
        for line in self._driver.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                return int(found[1])
        raise RuntimeError("chromedriver didn't start")

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        try:
            content = None if method != "POST" else json.dumps(body or {})
            connection.request(method, path, content, {"Content-Type": "application/json"})
            value = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(value, dict) and "error" in value:
            raise RuntimeError(f"{method} {path}: {value['error']}: {value['message']}")
        return value

    def emulate(self, width: int, *, dark: bool, height: int = 1600) -> None:
        """A screen of this size (narrow: a phone's), whose owner prefers this scheme."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        media = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        for command, params in (("setDeviceMetricsOverride", screen), ("setEmulatedMedia", media)):
            asked = {"cmd": f"Emulation.{command}", "params": params}
            self._ask("POST", self._session + "/goog/cdp/execute", asked)

    def open(self, url: str) -> None:
        """Loads a page."""
        self._ask("POST", self._session + "/url", {"url": url})

    def run(self, script: str, *arguments: object) -> Any:
        """What a function with this body returns in the page."""
        return self._ask("POST", self._session + "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self, selector: str) -> str:
        """The text of the first element that matches, as it is in the document."""
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def _element(self, selector: str) -> str:
        found = self._ask("POST", self._session + "/element", {"using": "css selector", "value": selector})
        return f"{self._session}/element/{found[_ELEMENT]}"

    def click(self, selector: str) -> None:
        """Clicks where a user would."""
        self._ask("POST", self._element(selector) + "/click")

    def type(self, selector: str, text: str) -> None:
        """Types into a field, after what it has."""
        self._ask("POST", self._element(selector) + "/value", {"text": text})

    def fill(self, selector: str, text: str) -> None:
        """Types into a field instead of what it has."""
        self._ask("POST", self._element(selector) + "/clear")
        self.type(selector, text)

    def role(self, selector: str) -> tuple[str, str]:
        """An element's role and name, as assistive technology has them."""
        at = self._element(selector)
        return self._ask("GET", at + "/computedrole"), self._ask("GET", at + "/computedlabel")

    def log(self) -> list[str]:
        """What the console got since the last call: errors of scripts, refused loads."""
        return [entry["message"] for entry in self._ask("POST", self._session + "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as a PNG."""
        path.write_bytes(base64.b64decode(self._ask("GET", self._session + "/screenshot")))

    def wait(self, condition: Callable[[], Any], what: str, seconds: float = 30) -> Any:
        """Waits until the condition holds; returns it."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds} s")
            time.sleep(0.05)
        return found
