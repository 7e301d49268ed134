"""What a report tells of the machine it was made on: nothing that its owner would not pass on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buoy.view import history, report
from buoy.view.history import without_places
from tests.view.folders import add_events, make_attempt

ABOUT = {"hostname": "alices-laptop", "cwd": "/home/alice/thesis"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "resume from /home/alice/thesis/runs/cats/checkpoints/step-30",
            "resume from runs/cats/checkpoints/step-30",
        ),
        ("`/home/alice/data/a b`", "`~/data/a b`"),
        ("it ran on host alices-laptop, this is another", "it ran on one host, this is another"),
        ("saved to /mnt/alice/disk/cats/best.pt, 3 s before", "saved to .../cats/best.pt, 3 s before"),
        ("/proc/12/stat and /dev/shm", "/proc/12/stat and /dev/shm"),
        ("12.0 MiB/s, 1/2 of it; train.py:3", "12.0 MiB/s, 1/2 of it; train.py:3"),
        ("/root is full", "~ is full"),
    ],
)
def test_homes_hosts_and_absolute_paths_are_taken_out_of_words(text: str, told: str) -> None:
    assert without_places(text, ABOUT) == told


def test_neither_page_nor_numbers_hold_a_place_of_the_machine(tmp_path: Path) -> None:
    """Wherever it may come from: the verdict's advice, a warning, a retention's words, a plan's source."""
    run = tmp_path / "cats"
    folder = make_attempt(run, 30.0)
    place = "/home/secret-place/runs/cats/checkpoints/step-900"
    verdict = json.loads((folder / "verdict.json").read_text())
    verdict["cause"]["next"] = [f"resume from {place}, saved 3 s before the end"]
    verdict["where"]["file"] = "/home/secret-place/train.py"
    verdict["where"]["cell"] = 'In [7] train(secret="plan for the next paper")'
    (folder / "verdict.json").write_text(json.dumps(verdict))
    add_events(
        folder,
        {"kind": "warning", "alarm": "mirror", "text": f"cannot copy to mirror {place} on secret-host"},
        {"kind": "retention", "text": f"no room in {place}"},
        {"kind": "plan", "source": f"{place}/train.py:build", "answers": []},
    )
    read = history.read(str(run))

    for text in (report.page(read), json.dumps(report.as_json(read))):
        assert "secret" not in text
        assert str(tmp_path) not in text
        assert "step-900" in text
        assert "In [7]" in text
        assert "train(" not in text
