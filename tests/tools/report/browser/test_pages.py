"""Pages in a real browser: what people do with them, by hand, by keyboard, on any screen."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.hanging import SECONDS
from tests.support.processes import wait_until
from tests.tools.report.browser.conftest import Browser, Site
from tests.tools.report.browser.pages import LONG, WILD

pytestmark = pytest.mark.slow

PAGES = ("compare", "plan", "doctor")
TAB, ENTER, SPACE = "\ue004", "\ue007", " "
RIGHT, DOWN, END = "\ue014", "\ue015", "\ue010"

COLUMN = """
const table = document.querySelectorAll("table.sortable")[arguments[0]];
const place = [...table.tHead.rows[0].cells].findIndex((one) => one.textContent === arguments[1]);
return [...table.tBodies[0].rows].map((row) => row.cells[place].textContent.trim());
"""
HEADING = """
const table = document.querySelectorAll("table.sortable")[arguments[0]];
return [...table.tHead.rows[0].cells].find((one) => one.textContent === arguments[1]);
"""

CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgba = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
  return [r, g, b, a / 255];
};
const over = (top, below) => top.slice(0, 3).map((v, i) => v * top[3] + below[i] * (1 - top[3]));
const light = (rgb) => {
  const [r, g, b] = rgb.map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const groundOf = (element) => {
  const layers = [];
  for (let at = element; at; at = at.parentElement) layers.push(rgba(getComputedStyle(at).backgroundColor));
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
};
const poor = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  const said = walker.currentNode.textContent.trim();
  if (!said || element.closest("script, style, noscript, option, .unseen, .skip, [hidden]")) continue;
  if (!element.checkVisibility()) continue;
  const style = getComputedStyle(element);
  const ground = groundOf(element);
  const [a, b] = [light(over(rgba(element.closest("svg") ? style.fill : style.color), ground)), light(ground)];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) poor.push(`${said.slice(0, 40)}: ${ratio.toFixed(2)}`);
}
return poor;
"""


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_asked_for_and_nothing_complained_of(
    name: str, browser: Browser, site: Site
) -> None:
    browser.complaints()
    site.requests.clear()
    browser.show(f"{site.address}/{name}/")
    assert site.requests == [f"/{name}/"]
    names = browser.run(
        "return performance.getEntriesByType('resource').map((one) => one.name)"
    )
    assert [one for one in names if not one.startswith("data:")] == []
    assert browser.complaints() == []


def test_another_script_does_not_run(browser: Browser, site: Site) -> None:
    browser.show(f"{site.address}/compare/")
    browser.run(
        "const one = document.createElement('script');"
        "one.textContent = 'window.ran = true'; document.body.append(one);"
    )
    assert browser.run("return window.ran") is None
    assert any("Content Security Policy" in one for one in browser.complaints())


@pytest.mark.parametrize("name", ["compare", "plan"])
def test_wild_names_are_shown_as_they_are(
    name: str, browser: Browser, site: Site
) -> None:
    browser.show(f"{site.address}/{name}/")
    title = browser.run("return document.querySelector('h1').textContent")
    assert title.startswith(WILD.split(" ")[0])
    assert browser.run("return document.querySelectorAll('main b').length") == 0
    if name == "plan":
        options = "return [...document.querySelector('select').options].map((one) => one.text)"
        assert browser.run(options)[0].startswith(WILD.split(" ")[0])


def test_a_click_sorts_by_figures_up_and_down_dashes_last(
    browser: Browser, site: Site
) -> None:
    browser.show(f"{site.address}/plan/")
    table = browser.run(
        "return [...document.querySelectorAll('table.sortable')]"
        ".findIndex((one) => one.caption.textContent.startsWith('All'))"
    )
    assert browser.run(HEADING, table, "step").get_attribute("aria-sort") == "ascending"
    steps = ["50 ms", "80 ms", "100 ms", "200 ms", "300 ms", "~ 1 s"]
    assert browser.run(COLUMN, table, "step") == steps
    heading = browser.run(HEADING, table, "step")
    heading.find_element("tag name", "button").click()
    assert browser.run(COLUMN, table, "step") == steps[::-1]
    assert heading.get_attribute("aria-sort") == "descending"
    best = 0  # the first table; one machine exposes no communication
    exposed = browser.run(HEADING, best, "exposed")
    for _ in range(2):
        exposed.find_element("tag name", "button").click()
        assert browser.run(COLUMN, best, "exposed")[-1] == "-"
    samples = browser.run(HEADING, table, "samples/s")
    samples.find_element("tag name", "button").click()
    assert heading.get_attribute("aria-sort") is None
    classes = browser.run(HEADING, table, "consistency")
    classes.find_element("tag name", "button").click()
    words = browser.run(COLUMN, table, "consistency")
    assert words == sorted(words)


def test_the_keyboard_alone_reaches_and_does_everything(
    browser: Browser, site: Site
) -> None:
    browser.show(f"{site.address}/compare/")
    seen: list[str] = []
    what = (
        "const one = document.activeElement; const style = getComputedStyle(one);"
        "return [one.tagName, one.className.baseVal ?? one.className, one.textContent,"
        " style.outlineStyle !== 'none']"
    )
    for _ in range(40):
        browser.press(TAB)
        tag, name, text, outlined = browser.run(what)
        assert outlined, (tag, text[:40])
        seen.append(f"{tag} {name} {text.strip()[:20]}".lower())
        if text == "step":
            browser.press(ENTER, ENTER)
            assert browser.run(COLUMN, 0, "step") == ["50 ms", "40 ms", "30 ms"]
        if tag == "svg":
            break
    assert seen[0].startswith("a skip")
    for wanted in ("input", "button  method", "select", "svg"):
        assert any(one.startswith(wanted) for one in seen), (wanted, seen)


# ---- timelines ----

SIDES = """
return [...document.querySelectorAll("figure.timeline")].map((figure) => {
  const rects = [...figure.querySelectorAll("rect")];
  const right = Math.max(...rects.map((one) => one.x.baseVal.value + one.width.baseVal.value));
  return {
    what: figure.querySelector("figcaption").textContent,
    kinds: [...new Set(rects.map((one) => one.getAttribute("class")))].sort(),
    count: rects.length, right: Math.round(right),
    readout: figure.querySelector(".readout").textContent,
  };
});
"""


def sides(browser: Browser) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = browser.run(SIDES)
    return found


def test_two_steps_stand_side_by_side_on_one_scale(
    browser: Browser, site: Site
) -> None:
    browser.show(f"{site.address}/plan/")
    left, right = sides(browser)
    assert left["kinds"] == right["kinds"] == ["compute", "message", "wait"]
    assert left["count"] == 3 * 5
    assert left["what"].startswith("step 3 of 4, 300 ms")
    assert right["what"].startswith("step 3 of 4, 200 ms")
    assert right["right"] < 0.8 * left["right"]
    browser.driver.find_element("css selector", "input.same").click()
    left, right = sides(browser)
    assert abs(right["right"] - left["right"]) <= 2
    select = browser.driver.find_elements("css selector", "figure.timeline select")[1]
    select.send_keys("osp")
    assert sides(browser)[1]["what"].startswith("step 3 of 4, 100 ms")


def test_arrow_keys_go_through_a_timeline_and_a_table_says_the_same(
    browser: Browser, site: Site
) -> None:
    browser.show(f"{site.address}/plan/")
    browser.run("document.querySelector('.drawing svg').focus()")
    browser.press(RIGHT)
    assert sides(browser)[0]["readout"] == (
        "worker 0, compute: forward, from 0 s on, for 10 ms"
    )
    browser.press(RIGHT)
    assert ": backward, from 10 ms on, for 30 ms" in sides(browser)[0]["readout"]
    browser.press(DOWN)
    assert "wait: all-reduce, from 40 ms on" in sides(browser)[0]["readout"]
    browser.press(DOWN, END)
    said = sides(browser)[0]["readout"]
    assert said == ("worker 0, channel 0: all-reduce, 1 MB, from 40 ms on, for 260 ms")
    browser.driver.find_element("css selector", "figure.timeline summary").click()
    filled = "return document.querySelector('.events table') !== null"
    wait_until(lambda: browser.run(filled), SECONDS, "a table of events")
    rows = browser.run(
        "return [...document.querySelector('.events table').tBodies[0].rows]"
        ".map((row) => row.cells[2].textContent)"
    )
    assert len(rows) == 3 * 5
    assert rows[:3] == ["computes: forward", "computes: backward", "waits: all-reduce"]


def test_the_pointer_names_what_it_is_on(browser: Browser, site: Site) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    browser.show(f"{site.address}/plan/")
    wait = browser.driver.find_element("css selector", ".drawing rect.wait")
    ActionChains(browser.driver).move_to_element(wait).perform()
    assert "wait: all-reduce" in sides(browser)[0]["readout"]


# ---- everybody's screens ----

SHOWN = """
return [...document.querySelectorAll("picture")].map((one) => {
  const image = one.querySelector("img");
  if (!image.naturalWidth) return "nothing";
  return image.currentSrc === one.querySelector("source").srcset ? "dark" : "light";
});
"""


@pytest.mark.parametrize("name", PAGES)
def test_light_and_dark_can_be_read(name: str, browser: Browser, site: Site) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    browser.show(f"{site.address}/{name}/", scheme="dark")
    assert browser.run(ground) == "rgb(20, 24, 29)"
    assert browser.run(CONTRAST) == []
    assert browser.run(SHOWN).count("dark") == len(browser.run(SHOWN))
    browser.show(f"{site.address}/{name}/", scheme="light")
    assert browser.run(ground) == "rgb(255, 255, 255)"
    assert browser.run(CONTRAST) == []
    assert "dark" not in browser.run(SHOWN)


def test_the_check_of_contrasts_finds_a_poor_one(browser: Browser, site: Site) -> None:
    browser.show(f"{site.address}/plan/")
    browser.run("document.querySelector('.answer').style.color = '#999'")
    assert len(browser.run(CONTRAST)) >= 1


@pytest.mark.parametrize("name", PAGES)
def test_a_narrow_screen_shows_all_without_scrolling_sideways(
    name: str, browser: Browser, site: Site
) -> None:
    browser.show(f"{site.address}/{name}/", width=400)
    assert browser.run("return document.documentElement.scrollWidth") <= 400
    inside = """
    return [...document.querySelectorAll("main *")].filter((one) => {
      const box = one.getBoundingClientRect();
      return box.right > 401 && one.checkVisibility() && !one.closest(".wide") && !one.closest(".unseen");
    }).map((one) => one.outerHTML.slice(0, 80));
    """
    assert browser.run(inside) == []
    if name == "plan":
        assert LONG in browser.run("return document.body.textContent")


@pytest.mark.parametrize("name", PAGES)
def test_paper_is_light_and_has_no_switches(
    name: str, browser: Browser, site: Site
) -> None:
    browser.show(f"{site.address}/{name}/", scheme="dark", media="print")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") in (
        "rgb(255, 255, 255)",
        "rgba(0, 0, 0, 0)",
    )
    shown = "return [...document.querySelectorAll('.copy, nav')].filter((one) => one.checkVisibility()).length"
    assert browser.run(shown) == 0


@pytest.mark.parametrize("name", PAGES)
def test_those_who_listen_are_told_what_is_where(
    name: str, browser: Browser, site: Site
) -> None:
    browser.show(f"{site.address}/{name}/")
    faults = """
    const faults = [];
    const all = (what) => [...document.querySelectorAll(what)];
    for (const what of ["main", "header", "footer", "h1"]) if (all(what).length !== 1) faults.push(what);
    const ids = all("[id]").map((one) => one.id);
    if (new Set(ids).size !== ids.length) faults.push("ids");
    for (const one of all("section")) if (!document.getElementById(one.getAttribute("aria-labelledby"))) faults.push("section");
    for (const one of all("main > section table")) if (!one.caption && !one.closest(".events")) faults.push("caption");
    for (const one of all("svg[role], .wide")) if (!one.getAttribute("aria-label") && !one.querySelector("title")) faults.push(one.outerHTML.slice(0, 80));
    for (const one of all("img")) if (!one.alt) faults.push("alt");
    for (const one of all("select, input")) if (!one.labels.length) faults.push("label");
    for (const one of all("thead th")) if (one.scope !== "col") faults.push("scope");
    return faults;
    """
    assert browser.run(faults) == []


@pytest.mark.parametrize("name", PAGES)
def test_without_scripts_all_but_timelines_is_there(
    name: str, browser: Browser, site: Site
) -> None:
    browser.command("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.show(f"{site.address}/{name}/")
        text = browser.driver.find_element("tag name", "main").text
    finally:
        browser.command("Emulation.setScriptExecutionDisabled", value=False)
    assert len(text) > 500
    assert ("Timelines are drawn by a script" in text) == (name != "doctor")
