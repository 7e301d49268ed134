"""`buoy report`, `buoy top` and `buoy runs` on run folders made with the recorder's own writers, whole and damaged."""

from __future__ import annotations

import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from buoy.checkpoint.store import Store
from buoy.cli import main
from buoy.view import cards, chart, history, report
from buoy.view.chart import charts
from tests.processes import buoy
from tests.view.folders import GIB, make_attempt


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "cats"
    make_attempt(run, 4 * 3600.0)
    make_attempt(run, 8 * 3600.0, first_step=50_000)
    return run


class Page(HTMLParser):
    """Collects tags, so that a page is judged by what a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_twelve_hours_fit_on_a_page_of_300_kilobytes(long_run: Path) -> None:
    text = report.page(history.read(str(long_run)))

    assert len(text.encode()) <= 300_000
    assert text.count("<svg") >= 8  # memory, GPU, step time, disk: the whole run and the last ten minutes


def test_no_request_can_leave_the_page(long_run: Path) -> None:
    page = Page(report.page(history.read(str(long_run))))

    loading = [attrs for _, attrs in page.tags if "src" in attrs or "href" in attrs or "srcset" in attrs]
    policy = next(attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs)

    assert not loading
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "unsafe-inline'; script-src 'sha256-" in policy  # styles may be inline, scripts only this one


def test_the_spike_that_killed_the_run_is_kept(long_run: Path) -> None:
    read = history.read(str(long_run))
    whole = next(chart for chart in charts(chart.whole(read)) if chart.id == "memory")

    assert max(high for value in whole.values if value for high in value) == 12 * GIB - 1


def test_the_page_holds_no_secret_of_the_attempt(long_run: Path) -> None:
    text = report.page(history.read(str(long_run)))

    assert "secret" not in text
    assert "api-key" not in text
    assert "Tesla T4" in text


def test_json_gives_the_numbers_of_the_page(long_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(long_run), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    embedded = re.search(r'id="data">(.*?)</script>', report.page(history.read(str(long_run))))

    assert embedded is not None
    assert told["schema"] == "buoy.report/1"
    assert json.loads(embedded.group(1)) == told["timelines"]


def test_checkpoints_warnings_and_deaths_are_marked(long_run: Path) -> None:
    marks = chart.marks(chart.whole(history.read(str(long_run))))

    assert {mark["kind"] for mark in marks} == {"save", "warning", "death"}
    assert [mark["attempt"] for mark in marks if mark["kind"] == "death"] == [1, 2]


def test_a_name_that_is_a_script_is_only_a_name(tmp_path: Path) -> None:
    run = tmp_path / "evil"
    folder = make_attempt(run, 30.0, name="<script>alert(1)</script>")
    verdict = json.loads((folder / "verdict.json").read_text())
    verdict["cause"]["claim"]["text"] = "</script><script>alert(2)</script>"
    (folder / "verdict.json").write_text(json.dumps(verdict))
    events = (folder / "events.jsonl").read_text()
    (folder / "events.jsonl").write_text(events.replace("RAM will be", "</script><script>alert(3)"))

    page = Page(report.page(history.read(str(run))))

    assert [tag for tag, _ in page.tags].count("script") == 2


def _damage_torn(folder: Path) -> None:
    for path in folder.glob("*.jsonl"):
        path.write_bytes(path.read_bytes()[:-7] + b"\x00\xff\xfe")


def _damage_none(folder: Path) -> None:
    for path in [*folder.glob("samples-*"), folder / "minutes.jsonl"]:
        path.unlink()


def _damage_one_sample(folder: Path) -> None:
    (folder / "minutes.jsonl").unlink()
    first, *others = sorted(folder.glob("samples-*"))
    first.write_text("".join(first.read_text().splitlines(keepends=True)[:2]))
    for path in others:
        path.unlink()


def _damage_clock(folder: Path) -> None:
    for path in folder.glob("samples-*"):
        lines = path.read_text().splitlines()
        rows = [json.loads(line) for line in lines[1:]]
        for number, row in enumerate(rows[len(rows) // 2 :]):
            row[1] -= 86_400 + number
        path.write_text("\n".join([lines[0], *map(json.dumps, rows)]) + "\n")


def _damage_types(folder: Path) -> None:
    (folder / "attempt.json").write_text('{"t": "soon", "limits": [1], "wall": {}, "time_limit": "x"}')
    (folder / "verdict.json").write_text('{"cause": 3, "where": [], "mechanism": "no", "attempt": null}')
    (folder / "events.jsonl").write_text('{"kind": 1}\n[]\n{"kind": "save", "t": "x", "step": {}}\nnull\n')
    with open(sorted(folder.glob("samples-*"))[0], "a") as file:
        file.write(json.dumps([None] * 24) + "\n" + json.dumps([1e308, "x", True] + [[]] * 21) + "\n")


def _damage_attempt_json(folder: Path) -> None:
    (folder / "attempt.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [_damage_torn, _damage_none, _damage_one_sample, _damage_clock, _damage_types, _damage_attempt_json],
)
def test_a_damaged_folder_gives_a_page_that_says_what_is_missing(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    run = tmp_path / "cats"
    damage(make_attempt(run, 120.0))

    assert main(["report", str(run)]) == 0
    text = (run / "report.html").read_text()
    assert main(["top", str(run), "--once"]) == 0
    assert main(["runs", str(tmp_path)]) == 0

    assert text.endswith("</html>\n")
    if damage in (_damage_none, _damage_attempt_json):
        assert "What is missing" in text


def test_far_too_many_samples_are_read_from_the_end_and_said(tmp_path: Path) -> None:
    run = tmp_path / "cats"
    folder = make_attempt(run, 30.0)
    path = sorted(folder.glob("samples-*"))[-1]
    header, *rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(header + b"".join(rows) * (40_000_000 // sum(map(len, rows))))

    text = report.page(history.read(str(run)))

    assert "only the newest were read" in text


def test_a_run_without_an_attempt_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_attempt(tmp_path / "cats", 5.0)
    for path in sorted((tmp_path / "cats" / "attempts").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()

    assert main(["report", str(tmp_path / "cats")]) == 2
    assert "no attempt" in capsys.readouterr().err


def test_top_shows_limits_and_the_last_checkpoints(
    long_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", str(long_run), "--once"]) == 0
    text = capsys.readouterr().out
    assert main(["top", str(long_run), "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)

    assert "RAM" in text and "of 12.0 GiB" in text and "kernel-oom" in text
    assert {item["name"] for item in told["resources"]} == {"RAM", "VRAM", "disk"}
    assert told["step_seconds"] == pytest.approx(0.25, rel=0.2)


def test_removing_an_unfinished_run_with_checkpoints_needs_yes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "cats"
    make_attempt(run, 5.0)
    saver = Store(str(run)).saver(say=print, event=lambda kind, **values: None)
    saver.save({"best": {"loss": 0.5}}, {"step": 7, "finished": False}, lambda value: None, wait=True)
    saver.close()
    for path in run.rglob("*"):
        os.utime(path, (1e9, 1e9))  # long ago: nobody writes it any more

    assert main(["runs", "rm", str(run)]) == 2
    assert "step 7" in capsys.readouterr().err
    assert run.is_dir()

    assert main(["runs", "rm", str(run), "--yes"]) == 0
    assert not run.exists()
    assert "1 attempt, 1 checkpoint)" in capsys.readouterr().err


def test_removing_without_a_terminal_says_that_nobody_can_be_asked(tmp_path: Path) -> None:
    make_attempt(tmp_path / "cats", 5.0)

    piped = buoy("runs", "rm", str(tmp_path / "cats"), input="y\n")

    assert piped.returncode == 2
    assert "no terminal to ask on: nothing was removed" in piped.stderr
    assert "1 attempt, no checkpoints), without a terminal" in piped.stderr
    assert "--yes` removes it without asking" in piped.stderr
    assert (tmp_path / "cats").is_dir()


def test_where_there_is_no_run_the_hint_fits_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    assert [main([verb]) for verb in ("top", "report", "why")] == [2, 2, 2]
    hints = {line for line in capsys.readouterr().err.splitlines() if "hint:" in line}
    assert hints == {"  hint: name its folder, as in `runs/train`; `buoy run -- python train.py` makes one"}


def test_removing_refuses_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()

    assert main(["runs", "rm", str(tmp_path / "thesis"), "--yes"]) == 2
    assert (tmp_path / "thesis").is_dir()


def test_every_verdict_is_on_the_page_the_older_ones_folded(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "cats"
    for number in range(9):
        folder = make_attempt(run, 1.0, first_step=60 * number)
        claim = {"text": f"ValueError number {number}", "grade": "certain", "evidence": []}
        told = {"run": str(run), "attempt": number + 1, "cause": {"id": "python-exception", "claim": claim}}
        (folder / "verdict.json").write_text(json.dumps(told))
    text = report.page(history.read(str(run)))
    shown, _, folded = text.partition("<details>")

    assert all(f"ValueError number {number}" in shown for number in (6, 7, 8))
    assert all(f"ValueError number {number}" in folded for number in range(6))
    assert "6 earlier verdicts" in folded and "ValueError number 5" not in shown


def test_verdicts_of_hundreds_of_attempts_still_fit_on_the_page() -> None:
    long = {"text": "x" * 390, "grade": "likely", "evidence": [{"text": "y" * 100, "source": "s"}] * 4}
    told = [{"attempt": number, "cause": {"id": "killed", "claim": long}} for number in range(1, 401)]
    text = cards.cards(told)

    assert len(text.encode()) < 100_000
    assert "attempt 380" in text and "before these" in text


def test_the_steps_of_an_attempt_are_its_own(tmp_path: Path) -> None:
    """One that went on from step 60 to step 120 did 60."""
    run = tmp_path / "runs" / "cats"
    folder = make_attempt(run, 1.0, first_step=117)
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "training", "t": 2000.0, "run": ".", "step": 60, "left": 0}) + "\n")
    life = history.read(str(run)).lives[-1]

    assert life.last["step"] == 120 and life.steps_done == 60
    assert any("of its 60 steps no 2 s" in note for note in life.missing)


def test_half_a_character_in_a_page_is_replaced_and_its_size_is_still_known(tmp_path: Path) -> None:
    size = report.write(str(tmp_path / "page.html"), "a\udcffb")

    assert (tmp_path / "page.html").read_bytes() == b"a?b" and size == 3
