"""The status page in a real browser: its numbers are those of /metrics, and it is readable by anybody anywhere."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from tests.cache_server.harness import ServerProcess, wait_until
from tests.operator import browser
from tests.operator.conftest import Watched, http_url
from tests.operator.test_figures import sample

pytestmark = pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))
DESKTOP, PHONE = (1280, 1600), (390, 2600)
PAGE = Path("cache_server/status_page.html")


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    with browser.chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


def shown(chrome: Chrome, url: str, size: tuple[int, int] = DESKTOP, scheme: str = "light") -> Chrome:
    """The page, after its first answer."""
    browser.console(chrome)
    browser.look(chrome, url, width=size[0], height=size[1], scheme=scheme)
    WebDriverWait(chrome, 20).until(lambda driver: driver.find_element(By.ID, "state").text in ("ready", "draining"))
    return chrome


def figures(chrome: Chrome) -> dict[str, str]:
    """What stands on the page, as text."""
    elements = chrome.find_elements(By.CSS_SELECTOR, "[data-figure]")
    return {str(element.get_attribute("data-figure")): element.text for element in elements}


def test_the_numbers_are_those_of_metrics(chrome: Chrome, watched: Watched) -> None:
    """Every figure on the page, as a person reads it."""
    page = shown(chrome, watched.url)
    text = watched.get("/metrics")
    on_page = {name: int(said.replace(",", "")) for name, said in figures(page).items()}

    assert on_page == {
        "lookups": sample(text, "prefixd_lookups_total", outcome="hit")
        + sample(text, "prefixd_lookups_total", outcome="miss"),
        "lookups_hit": sample(text, "prefixd_lookups_total", outcome="hit"),
        "lookups_missed": sample(text, "prefixd_lookups_total", outcome="miss"),
        "lookup_hit_blocks": sample(text, "prefixd_lookup_blocks_total", outcome="hit"),
        "lookup_asked_blocks": sample(text, "prefixd_lookup_blocks_total", outcome="hit")
        + sample(text, "prefixd_lookup_blocks_total", outcome="miss"),
        "evicted_blocks_capacity": sample(text, "prefixd_evicted_blocks_total", cause="capacity"),
        "evicted_blocks_recut": sample(text, "prefixd_evicted_blocks_total", cause="recut"),
        "evicted_blocks_unsettled": sample(text, "prefixd_evicted_blocks_total", cause="unsettled"),
    }
    assert on_page["lookup_hit_blocks"] == 6, "positive control"
    assert page.find_element(By.ID, "rate").text == "42.9 %"
    stored = page.find_element(By.ID, "stored").get_attribute("data-value")
    assert float(str(stored)) == sample(text, "prefixd_memory_stored_bytes")
    saved = page.find_element(By.CSS_SELECTOR, "[data-bytes=commits_stored_bytes]").get_attribute("data-value")
    assert float(str(saved)) == sample(text, "prefixd_stored_bytes_total")


def test_the_tables_say_who_and_what(chrome: Chrome, watched: Watched) -> None:
    """Namespace, clients, operations, the slowest of them."""
    page = shown(chrome, watched.url)
    rows = {
        name: [row.text for row in page.find_elements(By.CSS_SELECTOR, f"#{name} tr")[1:]]
        for name in ("namespaces", "sessions", "operations", "slowest", "warnings")
    }

    assert len(rows["namespaces"]) == 1
    assert "a namespace" in rows["namespaces"][0]
    assert len(rows["sessions"]) == 3
    assert sum("mapped" in row for row in rows["sessions"]) == 1
    assert any(row.startswith("lookup 4 ") for row in rows["operations"])
    assert len(rows["slowest"]) == 10
    assert rows["warnings"] == ["none"]


def test_nothing_goes_wrong_and_nothing_comes_from_elsewhere(chrome: Chrome, watched: Watched) -> None:
    """An empty console over several refreshes; every request goes to this server."""
    page = shown(chrome, watched.url)
    before = page.execute_script("return performance.getEntriesByType('resource').length")
    wait_until(
        lambda: page.execute_script("return performance.getEntriesByType('resource').length") >= before + 2,
        "the page refreshes itself",
    )
    addresses = page.execute_script("return performance.getEntriesByType('resource').map((one) => one.name)")

    assert browser.console(page) == []
    assert {re.sub(r"\?.*", "", address) for address in addresses} == {f"{watched.url}/status.json"}
    page.execute_script("console.error('positive control')")
    assert len(browser.console(page)) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_it_fits_and_can_be_read(
    chrome: Chrome, watched: Watched, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    """No sideways scrolling of the page, and text that stands out from what is behind it (WCAG AA: 4.5)."""
    page = shown(chrome, watched.url, size, scheme)
    shots = Path(os.environ.get("PREFIXD_TEST_SCREENSHOTS", tmp_path))
    assert page.save_screenshot(str(shots / f"status-{size[0]}-{scheme}.png"))

    assert page.execute_script("return document.documentElement.scrollWidth") <= size[0]
    contrasts = page.execute_script(CONTRASTS)
    assert len(contrasts) > 40
    assert [said for said in contrasts if said[1] < 4.5] == []
    is_dark = page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 24)"
    assert is_dark == (scheme == "dark")


# [text, contrast] of every element that has text of its own.
CONTRASTS = """
const parts = (color) => color.match(/[0-9.]+/g).map(Number);
const light = (color) => {
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = parts(color).map((v) => linear(v / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  for (let one = element; one; one = one.parentElement) {
    const color = getComputedStyle(one).backgroundColor;
    if (parts(color).length < 4 || parts(color)[3] > 0) return color;
  }
  return "rgb(255, 255, 255)";
};
return [...document.querySelectorAll("body *")].filter((element) =>
  [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()) &&
  !["SCRIPT", "STYLE"].includes(element.tagName)
).map((element) => {
  const style = getComputedStyle(element);
  const fore = light(element instanceof SVGElement ? style.fill : style.color), back = light(behind(element));
  return [element.textContent.slice(0, 40), (Math.max(fore, back) + 0.05) / (Math.min(fore, back) + 0.05)];
});
"""


def test_it_can_be_read_without_colour(chrome: Chrome, watched: Watched) -> None:
    """The two lines of a chart differ in their dashes, the state is a word, the bar has its numbers beside it."""
    page = shown(chrome, watched.url)
    dashes = page.execute_script(
        "return ['one', 'two'].map((name) => "
        "getComputedStyle(document.querySelector('#flow-chart .' + name)).strokeDasharray)"
    )

    assert dashes[0] == "none"
    assert dashes[1] != "none"
    assert page.find_element(By.ID, "state").text == "ready"
    assert "of 256 MiB stored" in page.find_element(By.ID, "memory").text


def test_charts_have_their_scale(chrome: Chrome, watched: Watched) -> None:
    """0 to 100 % whatever was measured; throughput up to a round number."""
    page = shown(chrome, watched.url)
    scales = page.execute_script(
        "return ['rate-chart', 'flow-chart'].map((id) => "
        "[...document.querySelectorAll('#' + id + ' text')].slice(0, 3).map((one) => Number(one.textContent)))"
    )

    assert scales[0] == [0, 50, 100]
    assert scales[1] == [0, scales[1][2] / 2, scales[1][2]]
    assert scales[1][2] in {scale * 10**power for scale in (0.5, 1, 5) for power in range(6)}


def test_a_server_that_is_gone_is_said_to_be_gone(chrome: Chrome, tmp_path: Path) -> None:
    """The page stays, with the last figures and since when nothing came."""
    with ServerProcess(tmp_path, "256MiB", "--http", "127.0.0.1:0") as server:
        page = shown(chrome, http_url(server))
        assert server.stop() == 0
    state: Any = page.find_element(By.ID, "state")
    wait_until(lambda: state.text.startswith("no answer for"), "the page notices", 15)

    assert state.get_attribute("class") == "state bad"
    assert "up" in page.find_element(By.ID, "about").text


def test_the_page_has_no_address_in_it() -> None:
    """But for the name of SVG's namespace, which nobody fetches."""
    addresses = set(re.findall(r"https?://[^\"' ]+", PAGE.read_text()))

    assert addresses == {"http://www.w3.org/2000/svg"}
