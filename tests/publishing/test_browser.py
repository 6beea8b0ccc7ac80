"""The page in a real browser: it draws, it is quiet, it asks nobody, and what strangers wrote stays text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sdpa_repro.publishing.page import page
from tests.publishing.browser import Page, chromium, installed
from tests.publishing.sections import FAULT, crashing, failing, healthy, hostile, last_row_wrong

PROGRAM = installed()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here: apt-get install chromium"),
]

COLOURS = """(() => {
  const canvas = document.querySelector(SELECTOR);
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3]) seen.add(data.slice(at, at + 3).join());
  return [...seen];
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert PROGRAM is not None
    with chromium(PROGRAM) as tab:
        if tab is None:
            pytest.skip(f"{PROGRAM} is installed but does not start here")
        yield tab


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of one explained failure with a file preloaded."""
    path = tmp_path_factory.mktemp("page") / "one.html"
    path.write_text(page([failing(preloaded=(FAULT,))]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page of a failure, a healthy call, a crash, a hostile dump and an unreadable file."""
    path = tmp_path_factory.mktemp("page") / "several.html"
    long = replace(failing(), heat=last_row_wrong(rows=401))
    text = page([long, healthy(), crashing(), hostile()], {"<img src=x onerror=window.pwned=1>": "not a dump"})
    path.write_text(text, encoding="utf-8")
    return path


def colours(browser: Page, selector: str) -> set[str]:
    return set(browser.value(COLOURS.replace("SELECTOR", repr(selector))))


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_draws_without_a_complaint_a_request_or_a_sideways_scroll(
    browser: Page, several: Path, width: int, scheme: str
) -> None:
    browser.open(several, width=width, scheme=scheme)
    assert browser.complaints() == []
    assert {url for url in browser.requests() if not url.startswith("data:")} == {several.resolve().as_uri()}
    assert browser.value("document.scrollingElement.scrollWidth") <= width
    ground = browser.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(ground) > 600) == (scheme == "light")
    for selector in ("canvas.overview", "canvas.detail", "canvas.mask"):
        assert len(colours(browser, selector)) > 3, selector


def test_hostile_texts_stay_texts(browser: Page, several: Path) -> None:
    browser.open(several)
    browser.value("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert browser.value("typeof window.pwned") == "undefined"
    assert browser.value("document.images.length") == 0
    assert browser.value("document.querySelectorAll('script:not([type])').length") == 1
    assert "</script><img src=x" in browser.value("document.body.innerText")


def test_a_script_that_gets_into_the_page_does_not_run(browser: Page, one: Path) -> None:
    browser.open(one)
    browser.value("""(() => {
      const added = document.createElement("script");
      added.textContent = "window.pwned = 1";
      document.body.append(added);
      document.body.insertAdjacentHTML("beforeend", "<b id=trap onclick='window.pwned = 1'>x</b>");
      document.getElementById("trap").click();
    })()""")
    assert browser.value("typeof window.pwned") == "undefined"


def test_wrong_rows_are_found_with_a_button_and_with_keys(browser: Page, one: Path) -> None:
    browser.open(one)
    said = "document.querySelector('.readout').textContent"
    assert browser.value(said).startswith("head 0, query row 64, row 0 of tile 2: about 5")
    assert browser.value(said).endswith("× the threshold: WRONG")
    browser.value("document.querySelector('canvas.detail').focus()")
    browser.press("ArrowLeft")
    assert "query row 63" in browser.value(said)
    assert browser.value(said).endswith("right")
    browser.press("n")
    assert "query row 64" in browser.value(said)
    browser.press("Home")
    assert browser.value(said).endswith("query row 0, row 0 of tile 0: fully masked: not judged")
    browser.value("document.querySelector('[data-row]').click()")
    assert "query row 64" in browser.value(said)


def test_the_tile_grid_is_a_choice(browser: Page, one: Path) -> None:
    browser.open(one)
    pressed = "document.querySelector('[data-tile][aria-pressed=true]').dataset.tile"
    assert browser.value(pressed) == "32"
    before = browser.value("document.querySelector('canvas.detail').toDataURL()")
    browser.value("document.querySelector('[data-tile=\"16\"]').click()")
    assert browser.value(pressed) == "16"
    assert browser.value("document.querySelector('canvas.detail').toDataURL()") != before
    assert "row 0 of tile 4" in browser.value("document.querySelector('.readout').textContent")


def test_the_script_can_be_copied_without_a_clipboard(browser: Page, one: Path) -> None:
    browser.open(one)
    button = "document.querySelector('.tall [data-copy]')"
    browser.value("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    browser.value("document.execCommand = () => false")
    browser.value(f"{button}.click()")
    assert browser.value(f"{button}.textContent") == "Selected: press Ctrl+C"
    assert browser.value("getSelection().toString()").startswith("import torch")
    assert browser.complaints() == []


def test_everything_that_acts_can_be_reached_with_the_keyboard(browser: Page, one: Path) -> None:
    browser.open(one)
    acting = "button, a[href], summary, canvas.detail, .scroll, pre"
    assert browser.value(f"[...document.querySelectorAll('{acting}')].every(one => one.tabIndex >= 0)") is True
    unnamed = "[...document.querySelectorAll('canvas, svg[role=img]')].filter(one => !one.getAttribute('aria-label'))"
    assert browser.value(f"{unnamed}.length") == 0


def test_it_prints_on_white_with_everything_open(browser: Page, one: Path) -> None:
    browser.open(one, scheme="dark")
    browser.value("dispatchEvent(new Event('beforeprint'))")
    assert browser.value("[...document.querySelectorAll('details')].every(one => one.open)") is True
    card = "getComputedStyle(document.querySelector('.card')).backgroundColor"
    assert browser.value(card) == "rgb(255, 255, 255)"
    browser.value("dispatchEvent(new Event('afterprint'))")
    assert browser.value(card) != "rgb(255, 255, 255)"
