"""The pages in a real browser: nothing fetched, nothing wrong, nothing wider than the screen, charts that answer."""

from __future__ import annotations

import pytest

WIDE = """[...document.querySelectorAll('.scroll')].filter(one => one.scrollWidth > one.clientWidth).length"""
SIZES = """[...document.querySelectorAll('[data-chart]')].map(place => {
    const box = place.querySelector('svg')?.getBoundingClientRect() ?? {width: 0, height: 0, right: 0};
    return [place.dataset.chart, box.width, box.height, box.right, place.querySelectorAll('path,text').length]})"""


def check_charts(page, width, count):
    sizes = page.evaluate(SIZES)
    assert len(sizes) >= count
    for name, wide, high, right, marks in sizes:
        assert min(wide / 200, high / 80, marks / 5) > 1, name
        assert right <= width, name


def hover(page, selector):
    mark = page.locator(selector)
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for(timeout=5_000)
    return tooltip.inner_text()


def test_a_study(opened, built):
    page = opened(built.page.parent)
    check_charts(page, 1280, 15)
    for part in ("h1", ".answer", ".pill", "[data-chart=pareto]"):  # the recommendation is on the first screen
        assert page.locator(part).first.bounding_box()["y"] < 844, part
    assert page.locator("h1").inner_text().startswith("performer-relu")
    for detail in page.locator("details").all():
        detail.evaluate("one => one.open = true")
    assert page.evaluate(WIDE) == 0  # every table fits the page, its details too
    lines = page.locator("#results table").first.locator("td .pill").evaluate_all("all => all.map(e => e.offsetHeight)")
    assert max(lines) < 30  # a verdict is one line
    assert "variant" in hover(page, "[data-chart=pareto] g.mark-symbol path >> nth=-1")
    assert "predicted" in hover(page, "[data-chart=confusion-0] g.mark-rect path >> nth=-1")
    assert "lowest seed" in hover(page, "[data-chart=learning-train-loss] g.mark-symbol path >> nth=20")  # hidden


def test_a_study_in_the_dark_on_a_phone(opened, built):
    page = opened(built.page.parent, 390, "dark")
    check_charts(page, 390, 15)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 19, 22)"
    label = page.locator("[data-chart=pareto] text").first
    assert label.evaluate("e => getComputedStyle(e).fill") != "rgb(17, 19, 22)"
    page.emulate_media(media="print", color_scheme="dark")  # paper is white
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()") == "#FFFFFF"
    assert len(page.pdf()) > 10_000


def test_hostile_names_stay_text(opened, hostile):
    page = opened(hostile)
    assert page.evaluate("document.scripts.length") == 3
    assert "<script>alert(1)</script>" in page.locator("body").inner_text()
    assert "<script>alert(1)" in page.locator("[data-chart=classes]").text_content()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_search(opened, searched, width):
    page = opened(searched.page.parent, width)
    check_charts(page, width, 5)
    assert page.evaluate(WIDE) == 0
    assert page.evaluate("document.scripts.length") == 3
    assert "<script>alert(3)" in page.locator("body").inner_text()


def test_a_conversion(opened, converted):
    page = opened(converted.page.parent)
    check_charts(page, 1280, 5)
    assert page.locator(".strip span").count() == 4
