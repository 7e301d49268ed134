"""The report as a person meets it: opened in Chromium, hovered, zoomed, in light and dark, on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from buoy.view import history, report
from tests.view.browser import PROGRAM, Browser
from tests.view.folders import add_events, make_attempt, plan

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="Chromium is not installed: `apt-get install chromium`"
)

SCREENS = Path(__file__).parent.parent.parent / "bench" / "results" / "screens"
CHART = "document.querySelector('#whole [data-chart=memory]')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    make_attempt(folder / "cats", 2 * 3600.0)
    last = make_attempt(folder / "cats", 1800.0, first_step=28_000)
    add_events(
        last,
        plan(),
        {"kind": "remedy", "name": "checkpointing", "blocks": 12},
        {"kind": "retry", "what": "oom", "step": 28_100, "samples": 16, "smaller": 8},
    )
    (folder / "cats" / "micro-batches.jsonl").write_text('{"step": 28100, "samples": 8}\n')
    path = folder / "report.html"
    path.write_text(report.page(history.read(str(folder / "cats"))))
    return path


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("chromium"))
    started.open(page)
    yield started
    started.close()


def box(browser: Browser) -> tuple[float, float, float, float]:
    browser.value(f"{CHART}.scrollIntoView({{block: 'center'}})")
    rect = browser.value(f"(r => [r.x, r.y, r.width, r.height])({CHART}.getBoundingClientRect())")
    return rect[0], rect[1], rect[2], rect[3]


def test_nothing_leaves_the_page_and_nothing_goes_wrong_in_it(browser: Browser, page: Path) -> None:
    browser.screenshot(SCREENS / "report-light.png")

    assert browser.requests == [page.as_uri()]
    assert browser.errors == []


def test_hovering_tells_the_value_and_the_moment(browser: Browser) -> None:
    before = browser.value("document.querySelector('#whole figure span').textContent")
    x, y, wide, high = box(browser)
    browser.mouse("mouseMoved", x + wide / 4, y + high / 2)
    after = browser.value("document.querySelector('#whole figure span').textContent")

    assert after != before
    assert "GiB" in after
    assert "attempt 1, " in after


def test_dragging_zooms_and_a_double_click_shows_all_again(browser: Browser) -> None:
    still = browser.value(f"{CHART}.querySelector('g').getAttribute('transform')")
    reading = f"{CHART}.closest('figure').querySelector('span').textContent"
    x, y, wide, high = box(browser)
    browser.mouse("mousePressed", x + wide / 4, y + high / 2, clicks=1)
    browser.mouse("mouseMoved", x + wide / 2, y + high / 2, clicks=1)
    dragged = browser.value(reading)
    browser.mouse("mouseReleased", x + wide / 2, y + high / 2, clicks=1)
    after = browser.value(reading)
    cursor = browser.value(f"{CHART}.querySelector('.cursor').getAttribute('x1')")
    zoomed = browser.value(f"{CHART}.querySelector('g').getAttribute('transform')")
    axis = browser.value("document.querySelector('#whole .lives div + div').textContent")
    browser.screenshot(SCREENS / "report-zoomed.png")
    for clicks in (1, 2):
        browser.mouse("mousePressed", x + wide / 3, y + high / 2, clicks=clicks)
        browser.mouse("mouseReleased", x + wide / 3, y + high / 2, clicks=clicks)

    assert still is None
    assert "attempt 1, " in dragged  # the reading under the pointer, which is another after the zoom
    assert after.startswith("highest ") and cursor == "-9"
    assert "scale(3.9" in zoomed or "scale(4" in zoomed
    assert axis.startswith("attempt 1, 3") and "attempt 1, 1 h" in axis  # from where to where
    assert browser.value("document.querySelector('#whole .lives').textContent").startswith("attempt1: 2 h")
    assert browser.value("document.querySelector('#whole').classList.contains('zoomed')") is False


def test_a_chart_is_read_and_zoomed_by_keyboard(browser: Browser) -> None:
    reading = f"{CHART}.closest('figure').querySelector('span').textContent"
    transform = f"{CHART}.querySelector('g').getAttribute('transform')"

    def press(*keys: str) -> str:
        for key in keys:
            browser.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=key if len(key) == 1 else "")
            browser.send("Input.dispatchKeyEvent", type="keyUp", key=key)
        return str(browser.value(reading))

    browser.value(f"{CHART}.focus()")
    browser.screenshot(SCREENS / "report-keyboard.png")

    last = press("ArrowLeft")
    assert "attempt 2, 29 min" in last and "kernel-oom" in last  # it begins at the end, where people look
    assert "attempt 2, 29 min" in press("ArrowLeft") != last
    assert "attempt 1, 0 s" in press("Home")
    second = press("ArrowRight")
    assert press("+", "+") == second
    assert "scale(4" in browser.value(transform)
    assert press("Escape").startswith("highest ")
    assert "scale(1" in browser.value(transform)


def test_dark_is_dark_and_a_phone_needs_no_sideways_scrolling(browser: Browser) -> None:
    light = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    dark = browser.value("getComputedStyle(document.body).backgroundColor")
    browser.screenshot(SCREENS / "report-dark.png")
    browser.send(
        "Emulation.setDeviceMetricsOverride", width=360, height=780, deviceScaleFactor=2, mobile=True
    )
    browser.screenshot(SCREENS / "report-phone.png")

    assert light == "rgb(251, 252, 253)"
    assert dark == "rgb(17, 24, 31)"
    assert browser.value("document.documentElement.scrollWidth") <= 360


def test_without_javascript_it_is_a_still_picture(browser: Browser, page: Path) -> None:
    browser.send("Emulation.setScriptExecutionDisabled", value=True)
    browser.open(page)
    bare = browser.value(f"{CHART}.querySelector('.cursor') === null")
    height = browser.value(f"{CHART}.querySelector('.band').getBBox().height")
    browser.send("Emulation.setScriptExecutionDisabled", value=False)

    assert bare is True
    assert height > 10
