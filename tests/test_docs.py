"""What the documentation says can be done as it says: links lead somewhere, options exist, code runs as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from buoy.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOR_NEWCOMERS = ["README.md", "docs/start.md", "docs/questions/pytorch-crashes.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?<![\w./-])buoy (check|demo|report|ckpt|notebook|plan|run|runs|top|why)\b([^`\n#]*)")

THEIRS = """
import torch
from torch import nn
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
loss_fn = nn.CrossEntropyLoss()
validate = lambda model: 0.5
"""


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def code(page: Path, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.S)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.S)):
        address, _, anchor = link.partition("#")
        if "://" in address:
            continue
        target = (page.parent / address) if address else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_commands_have_the_options_that_pages_name(capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[str, str] = {}
    wrong = []
    for page in PAGES:
        for verb, rest in COMMAND.findall(page.read_text()):
            ours = rest.partition(" -- ")[0]  # what follows is the person's own command
            words = [verb, *re.findall(r"^ (\w+)", ours)] if verb in ("ckpt", "runs") else [verb]
            for option in re.findall(r"(?<=\s)--[a-z][a-z-]*", ours):
                key = " ".join(words)
                if key not in helps:
                    with pytest.raises(SystemExit):
                        main([*words, "--help"])
                    helps[key] = capsys.readouterr().out
                if option not in helps[key]:
                    wrong.append(f"{named(page)}: buoy {verb} {option}")

    assert wrong == []


def test_code_for_newcomers_runs_as_written(tmp_path: Path) -> None:
    """Blocks about PyTorch, with a person's own model and loader around them; the drive is a folder here."""
    (tmp_path / "drive").mkdir()
    blocks = [block for page in FOR_NEWCOMERS for block in code(ROOT / page, "python")]
    blocks = [block for block in blocks if "buoy.Run(" in block]
    script = "import buoy\n"
    for number, block in enumerate(blocks):
        block = block.replace("runs/cats", f"runs/{number}").replace("/content/drive/MyDrive", "drive")
        block = re.sub(r"from google.colab import drive\n|drive.mount\(.*\)\n", "", block)
        script += (
            f"names = {{}}\nexec({THEIRS!r}, names)\nexec('import buoy', names)\nexec({block!r}, names)\n"
        )
        script += "names['run'].finish()\nprint(names['run'].step)\n"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    steps = done.stdout.split()
    assert len(steps) == len(blocks) == 4
    assert sorted(steps) == ["0", "40", "40", "40"]  # one block only opens a run; ten epochs of four batches
