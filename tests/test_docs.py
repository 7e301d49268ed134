"""What the documentation says can be done as it says: links lead somewhere, options exist, code runs as written."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import buoy
from buoy.cli import main
from buoy.cli.explain import _sections
from buoy.cli.explain import page as explained
from buoy.lint import rules
from buoy.verdict.advice import FINISHED, LEFT, NOT_BEGUN, UNSAVED
from buoy.verdict.causes import IN_ORDER

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOR_NEWCOMERS = ["README.md", "docs/start.md", "docs/questions/pytorch-crashes.md"]
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(
    r"(?<![\w./-])buoy (check|demo|explain|report|ckpt|notebook|plan|run|runs|top|why)\b([^`\n#]*)"
)
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PUBLIC = {*buoy.__all__, "Guard"}
STORIES = {FINISHED, LEFT, NOT_BEGUN, UNSAVED}
CAUSES = STORIES | {
    judge.__name__.removeprefix("judge_").replace("_", "-")
    for judge in IN_ORDER
    if judge.__name__
    not in ("judge_relayed", "judge_child", "judge_damaged")  # other proofs of causes listed
}
EXPLAIN = re.compile(r"`buoy explain ([^`]+)`")

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install` would put on a machine."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=ROOT, check=True
    )
    (built,) = folder.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


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
            # What follows is the person's own command.
            ours = re.split(r" -- | \w+\.py" if verb == "run" else " -- ", rest)[0]
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
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=400
    )

    assert done.returncode == 0, done.stderr
    steps = done.stdout.split()
    assert len(steps) == len(blocks) == 4
    assert sorted(steps) == ["0", "40", "40", "40"]  # one block only opens a run; ten epochs of four batches


def texts(path: Path) -> list[str]:
    """Every string of a module that a person may read: no docstring, unless it is that of a public name."""
    tree = ast.parse(path.read_text())
    private = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            private.add(id(node.value))
    for node in tree.body:
        if (
            isinstance(node, ast.FunctionDef | ast.ClassDef)
            and node.name in PUBLIC
            and ast.get_docstring(node)
        ):
            private.discard(id(node.body[0].value))  # type: ignore[attr-defined]
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in private
    ]


def test_no_message_names_a_file_that_only_a_checkout_has() -> None:
    named_files = [
        f"{path.relative_to(ROOT)}: {text[:100]}"
        for path in SOURCES
        for text in texts(path)
        if "docs/" in text
    ]

    assert named_files == []


def test_what_messages_and_pages_say_to_explain_can_be_explained() -> None:
    for path in [*SOURCES, *PAGES]:
        for topic in EXPLAIN.findall(path.read_text()):
            assert "{" in topic or "\\" in topic or explained(topic), f"{path}: buoy explain {topic}"


@pytest.mark.parametrize("cause", sorted(CAUSES))
def test_every_cause_of_death_has_a_section_and_its_evidence(cause: str) -> None:
    """The four that are no end of a process have their evidence in words, not in the table."""
    text = explained(cause)

    assert "What to do: " in text and ("## Evidence" in text) == (cause not in STORIES)


def test_every_section_is_about_a_cause_and_no_two_topics_have_one_name() -> None:
    names = [rules.rule(code).name for code in rules.all_codes()]
    guides = [path.stem for path in (ROOT / "docs").glob("*.md")]

    assert set(_sections()) == CAUSES
    assert len({*names, *CAUSES, *guides}) == len(names) + len(CAUSES) + len(guides)


@pytest.mark.parametrize("topic", ["BY401", "by401", "kept-graph", "kernel-oom", "checkpoints"])
def test_the_wheel_explains_without_a_checkout(topic: str, wheel: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "buoy", "explain", topic],
        cwd=wheel, env={**os.environ, "PYTHONPATH": str(wheel)}, capture_output=True, text=True,
    )  # fmt: skip

    assert done.stdout.startswith("# ") and done.stderr == "" and "<!--" not in done.stdout
    assert str(wheel) in subprocess.run(
        [sys.executable, "-c", "import buoy.cli.explain as e; print(e._folder())"],
        cwd=wheel, env={**os.environ, "PYTHONPATH": str(wheel)}, capture_output=True, text=True,
    ).stdout  # fmt: skip


def test_a_topic_that_is_not_there_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "kernel-omm"]) == 2

    assert "did you mean `buoy explain kernel-oom`?" in capsys.readouterr().err


def test_without_a_topic_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0

    shown = capsys.readouterr().out
    assert all(word in shown for word in [*rules.all_codes(), *CAUSES, "checkpoints"])
