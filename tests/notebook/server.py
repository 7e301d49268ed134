"""A real Jupyter server and a notebook open in it, spoken to as a browser does: REST and one websocket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.notebook.kernels import shown_by
from tests.processes import PATIENCE, wait_until

pytest.importorskip("jupyter_server", reason="jupyter_server is not installed")
websocket = pytest.importorskip("websocket", reason="websocket-client is not installed")


class Server:
    """`jupyter server` in a folder of its own; `group`: the memory cgroup that it and its kernels live in."""

    def __init__(self, folder: Path, group: Path) -> None:
        settings = folder / "server"  # nothing of this machine's own Jupyter is read or written
        environment = {
            **os.environ,
            "IPYTHONDIR": str(folder / "ipython"),
            **{f"JUPYTER_{name}_DIR": str(settings / name) for name in ("CONFIG", "DATA", "RUNTIME")},
            "JUPYTER_PREFER_ENV_PATH": "1",
        }
        self._token = uuid.uuid4().hex
        command = [
            *(sys.executable, "-m", "jupyter_server", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={folder}"),
            f"--IdentityProvider.token={self._token}",
        ]
        self._log = (folder / "server.log").open("wb")
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=self._log,
            stderr=self._log,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
        )
        self._group = group
        try:
            notices = settings / "RUNTIME"
            found = wait_until(lambda: list(notices.glob("jpserver-*.json")), "the server's own notice")
            self._port = int(wait_until(lambda: _json(found[0]), "the server's port")["port"])
            wait_until(self._answers, "the server's first answer")
        except BaseException:
            self.end()
            raise

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """One REST request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/api/{path}",
            data=json.dumps(body).encode() if body is not None else None,
            headers={"Authorization": f"token {self._token}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)

    def open(self, notebook: str) -> Notebook:
        """Open a notebook: the server starts its kernel."""
        made = self.ask(
            "sessions",
            {"path": notebook, "name": notebook, "type": "notebook", "kernel": {"name": "python3"}},
        )
        kernel = made["kernel"]["id"]
        return Notebook(f"ws://127.0.0.1:{self._port}/api/kernels/{kernel}/channels?token={self._token}")

    def end(self) -> None:
        """Shut down, and wait until nothing of it is left in the group."""
        self._process.terminate()
        self._process.wait(PATIENCE)
        self._log.close()
        wait_until(lambda: not (self._group / "cgroup.procs").read_text().strip(), "the group to be empty")

    def _answers(self) -> bool:
        try:
            return bool(self.ask("status"))
        except OSError:
            return False


class Notebook:
    """The browser's end: cells are sent, and what they show is collected."""

    def __init__(self, address: str) -> None:
        self._address, self._session = address, uuid.uuid4().hex
        self._connect()

    def start(self, code: str) -> str:
        """Send a cell and do not wait."""
        sent = uuid.uuid4().hex
        header = {
            "msg_id": sent, "msg_type": "execute_request", "session": self._session,
            "username": "", "version": "5.3", "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip
        content = {
            "code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False,
        }  # fmt: skip
        message = {
            "channel": "shell", "header": header, "parent_header": {}, "metadata": {}, "content": content,
            "buffers": [],
        }  # fmt: skip
        self._socket.send(json.dumps(message))
        return sent

    def run(self, code: str) -> list[dict[str, Any]]:
        """Run a cell to its end: the messages that a front end would show, with their kind."""
        return shown_by(self.start(code), lambda: json.loads(self._socket.recv()))

    def wait_for_restart(self) -> None:
        """Until the server says that it restarts the kernel by itself; then connect anew, as JupyterLab does."""
        while True:
            message = json.loads(self._socket.recv())
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "restarting":
                break
        self.close()
        self._connect()

    def close(self) -> None:
        """Close the page; the kernel goes on."""
        self._socket.close()

    def _connect(self) -> None:
        self._socket = websocket.create_connection(
            f"{self._address}&session_id={self._session}", timeout=PATIENCE
        )


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None
