"""What buoy shows in notebooks, in a page with JupyterLab's own style, light and dark, in Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from buoy.flight.attempt import find_attempt
from buoy.view.cards import lines_html, verdict_card
from buoy.view.findings import check
from buoy.view.top import lines, state
from tests.view.browser import PROGRAM, Browser
from tests.view.folders import make_attempt
from tests.view.test_in_a_browser import SCREENS

nbconvert = pytest.importorskip("nbconvert", reason="nbconvert is not installed")
nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="Chromium is not installed: `apt-get install chromium`"
)

# The least contrast between a word and what is behind it (WCAG): parents' grounds and opacities are mixed in.
LEAST_CONTRAST = """
(() => {
  const parts = (colour) => { const n = colour.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const linear = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ground = (e) => e ? over(parts(getComputedStyle(e).backgroundColor), ground(e.parentElement)) : [255, 255, 255];
  const shown = (e) => e ? Number(getComputedStyle(e).opacity) * shown(e.parentElement) : 1;
  let least = 99, word = "";
  for (const e of document.querySelectorAll(".jp-OutputArea-output *")) {
    const own = [...e.childNodes].filter((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own.length) continue;
    const behind = ground(e), ink = parts(getComputedStyle(e).color);
    const [a, b] = [light(over([...ink.slice(0, 3), ink[3] * shown(e)], behind)), light(behind)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < least) { least = (a + 0.05) / (b + 0.05); word = own[0].textContent.trim(); }
  }
  return [least, word];
})()
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("cards")
    attempt = make_attempt(folder / "cats", 120.0)
    now = lines(state(find_attempt(str(folder / "cats"))))
    script = folder / "train.py"
    script.write_text("import torch\ntorch.save(modle.state_dict(), 'model.pt')\nx = torch.range(1, 2)\n")
    verdict = json.loads((attempt / "verdict.json").read_text())
    return {
        "%load_ext buoy": verdict_card(verdict),
        "%buoy top": lines_html("\n".join(now)),
        "train()": lines_html("\n".join(now), boxed=True),
        "%buoy check": check(script)._repr_html_(),
    }


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_columns_stand_and_every_word_can_be_read(
    browser: Browser, outputs: dict[str, str], theme: str, tmp_path: Path
) -> None:
    cells = [
        nbformat.v4.new_code_cell(
            code, outputs=[nbformat.v4.new_output("display_data", data={"text/html": html})]
        )
        for code, html in outputs.items()
    ]
    exporter = nbconvert.HTMLExporter(theme=theme, template_name="lab", mathjax_url="", require_js_url="")
    page = tmp_path / "notebook.html"
    page.write_text(exporter.from_notebook_node(nbformat.v4.new_notebook(cells=cells))[0])
    browser.open(page)
    browser.screenshot(SCREENS / f"notebook-{theme}.png")

    fonts = browser.value(
        "[...document.querySelectorAll('.jp-OutputArea-output pre')].map((e) => getComputedStyle(e).font)"
    )
    least, word = browser.value(LEAST_CONTRAST)
    ground = browser.value("getComputedStyle(document.body).backgroundColor")

    assert len(fonts) == 2 and all("monospace" in font for font in fonts)
    assert least >= 4.5, word
    assert (ground == "rgb(255, 255, 255)") == (theme == "light")
