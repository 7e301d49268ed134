"""A real headless Chromium, driven over its own DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp", reason="aiohttp is not installed")
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
]  # fmt: skip


class Browser:
    """One page. `requests` and `errors` collect what it asked for and what went wrong in it."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [PROGRAM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        port = folder / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not port.exists() or len(port.read_text().splitlines()) < 2:
            assert time.monotonic() < deadline, "chromium did not start"
            time.sleep(0.05)
        self._loop.run_until_complete(self._connect(int(port.read_text().splitlines()[0])))

    async def _connect(self, port: int) -> None:
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            page = next(target for target in await answer.json() if target["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self._send(f"{domain}.enable")

    async def _send(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        await self._socket.send_json({"id": number, "method": method, "params": values})
        while True:
            message = json.loads((await asyncio.wait_for(self._socket.receive(), 60)).data)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]  # type: ignore[no-any-return]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        values = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests += [] if values["request"]["url"] == "about:blank" else [values["request"]["url"]]
        elif message.get("method") == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(values["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(values["exceptionDetails"].get("exception")))

    def send(self, method: str, **values: Any) -> dict[str, Any]:
        """A command of the protocol and its answer."""
        return self._loop.run_until_complete(self._send(method, **values))

    def open(self, path: Path) -> None:
        """Load a page and wait until it is there."""
        # By way of an empty page: else the old one, still there for a moment, passes for the new one.
        for address, protocol in (("about:blank", "about:"), (path.as_uri(), "file:")):
            self.send("Page.navigate", url=address)
            deadline = time.monotonic() + 30
            while self.value("document.readyState + location.protocol") != "complete" + protocol:
                assert time.monotonic() < deadline, "the page did not load"
                time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript gives."""
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """One event of the pointer."""
        held = "left" if kind != "mouseMoved" or clicks else "none"
        where = {"x": x, "y": y, "button": held, "buttons": int(held == "left"), "clickCount": clicks}
        self.send("Input.dispatchMouseEvent", type=kind, **where)

    def screenshot(self, path: Path) -> None:
        """The page as a picture."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self._loop.run_until_complete(self._session.close())
        self._process.kill()
        self._process.wait()
        self._loop.close()
