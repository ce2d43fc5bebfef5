"""The page in a real browser: no console errors, hover, legend, themes, phone, hostile content, 100,000
steps.
"""

from __future__ import annotations

import shutil
import time

import pytest

from slipstream.metrics.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="the browser tests need the playwright package"
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: the browser tests are an extra"
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, tmp_path):
    contexts, complaints = [], []

    def go(runs, width=1280, scheme="light"):
        out = write_report(runs, tmp_path / "page.html")
        context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on(
            "request",
            lambda request: complaints.append(request.url) if request.url.startswith("http") else None,
        )
        began = time.perf_counter()
        tab.goto(out.as_uri())
        tab.wait_for_function("document.readyState === 'complete'")
        tab.seconds_to_open = time.perf_counter() - began
        return tab

    yield go
    for context in contexts:
        context.close()
    assert complaints == []


def hover(tab, selector):
    box = tab.locator(selector).first
    box.scroll_into_view_if_needed()
    place = box.bounding_box()
    tab.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)


def test_hover_legend_smoothing_and_zoom(open_page, make_run):
    tab = open_page([make_run()])
    hover(tab, "#loss figure svg")
    assert "training" in tab.locator("#tip").inner_text()
    lines = "#loss figure:first-of-type svg path"
    before = tab.locator(lines).count()
    tab.locator("#loss .legend button").first.click()
    assert tab.locator(lines).count() == before - 1
    tab.locator("#loss .legend button").first.click()
    assert tab.locator(lines).count() == before
    drawn = tab.locator(lines).first.get_attribute("d")
    tab.locator("#loss input[type=range]").first.fill("0.9")
    assert tab.locator(lines).first.get_attribute("d") != drawn
    tab.locator("#loss button", has_text="log x").first.click()
    assert tab.locator("#loss button", has_text="log x").first.get_attribute("aria-pressed") == "true"


def test_timeline_tells_stage_group_microbatch_and_version(open_page, make_run):
    tab = open_page([make_run()])
    hover(tab, "#timeline figure svg rect")
    text = tab.locator("#tip").inner_text()
    for word in ("stage", "group", "microbatch", "version"):
        assert word in text
    bars = tab.locator("#timeline figure >> nth=0 >> svg rect")
    before = bars.count()
    tab.locator("#timeline .legend button", has_text="predicted").first.click()
    assert 0 < bars.count() < before
    tab.locator("#timeline button", has_text="zoom in").first.click()
    hover(tab, "#timeline figure >> nth=1 >> svg rect")
    assert "delay" in tab.locator("#tip").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_differ_and_the_button_switches(open_page, make_run, scheme):
    tab = open_page([make_run()], scheme=scheme)
    colour = "getComputedStyle(document.body).backgroundColor"
    before = tab.evaluate(colour)
    assert (sum(map(int, before[4:-1].split(","))) > 384) == (scheme == "light")
    tab.locator("#theme").click()
    assert tab.evaluate(colour) != before


def test_a_phone_needs_no_sideways_scrolling(open_page, make_run):
    tab = open_page(
        [make_run("first"), make_run("second-with-a-rather-long-name-of-a-run-folder")], width=360
    )
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


def test_hostile_content_does_not_run(open_page, make_run):
    attack = "</script><script>window.owned=1</script><img src=x onerror='window.owned=1'>"
    folder = make_run(
        f"r<img src=x onerror=window.owned=1>{'x'}",
        extra=[{"event": "sample", "step": 1, "prompt": attack, "text": attack}],
        environment={attack: attack},
    )
    tab = open_page([folder, make_run("other")])
    hover(tab, "#loss figure svg")
    assert tab.evaluate("window.owned") is None
    assert attack in tab.locator("#samples pre").first.inner_text()


@pytest.mark.parametrize("steps", [0, 1, 100_000])
def test_empty_short_and_long_runs_open(open_page, make_run, steps):
    tab = open_page([make_run(steps=steps, stages=8, finish=False)])
    assert tab.locator("h2").count() >= 2


@pytest.mark.bench
def test_a_long_run_opens_quickly(open_page, make_run):
    assert open_page([make_run(steps=100_000, stages=8, finish=False)]).seconds_to_open < 3.0
