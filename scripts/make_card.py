"""Draws docs/images/card.png: the card of a training that a memory limit really killed (Linux as root, Chromium).

    $ python scripts/make_card.py

A training whose history keeps the graph of every step runs under `buoy run` in a memory group of its own until the
kernel kills it; the card is drawn from the verdict.json that this leaves.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from buoy.cli.demo import Session
from buoy.view.cards import verdict_card

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "card.png"
LIMIT_MIB = 700
TRAINING = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1000, 2000), nn.ReLU(), nn.Linear(2000, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for step in range(100_000):
    images = torch.randn(64, 1000)
    loss = model(images).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    history.append(model(images))  # keeps the graph of every step
"""
PAGE = "<!doctype html><meta charset='utf-8'><body style='margin:16px;background:#fff;color:#1f2328'>{card}</body>"


def main() -> int:
    """Kill, judge, draw."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("error: no Chromium\nhint: apt-get install chromium")
    session = Session(LIMIT_MIB)
    if not session.is_real:
        sys.exit(
            "error: no memory group can be made here\nhint: run as root where control groups can be written"
        )
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "train.py").write_text(TRAINING)
        path = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        command = ["buoy", "run", "--run", "runs/cats", "train.py"]
        subprocess.run(command, cwd=here, env=path, preexec_fn=session.enter, check=False)
        session.close()
        text = next((here / "runs").rglob("verdict.json")).read_text()
        verdict = json.loads(text.replace(sys.executable, "python"))  # no path of this machine in the picture
        (here / "card.html").write_text(PAGE.format(card=verdict_card(verdict)))
        PICTURE.parent.mkdir(exist_ok=True)
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=860,470",
             "--force-device-scale-factor=1.5", f"--screenshot={PICTURE}", (here / "card.html").as_uri()],
            check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
    print(PICTURE, verdict["cause"]["id"], verdict["cause"]["claim"]["grade"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
