"""The page in a real browser: nothing fetched, nothing wrong, nothing wider than the screen, charts that answer."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_layout(opened, built, width, scheme):
    page = opened(built, width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    sizes = page.evaluate("""[...document.querySelectorAll('[data-chart]')].map(place => {
        const box = place.querySelector('svg')?.getBoundingClientRect() ?? {width: 0, height: 0, right: 0};
        return [place.dataset.chart, box.width, box.height, box.right, place.querySelectorAll('path,text').length]})""")
    assert len(sizes) >= 15
    for name, wide, high, right, marks in sizes:
        assert min(wide / 200, high / 80, marks / 5) > 1, name
        assert right <= width, name
    back, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    assert (back == "rgb(17, 19, 22)") == (scheme == "dark")
    label = page.locator("[data-chart=pareto] text").first
    assert label.evaluate("e => getComputedStyle(e).fill") != back
    assert ink != back


@pytest.mark.parametrize("width", [1280, 390])
def test_the_first_screen_holds_the_recommendation(opened, built, width):
    page = opened(built, width)
    for part in ("h1", ".lead", ".sure", "[data-chart=pareto]"):
        assert page.locator(part).bounding_box()["y"] < 844, part
    assert page.locator("h1").inner_text().startswith("performer-relu")


@pytest.mark.parametrize("chart", ["pareto", "peak_memory", "classes", "confusion-0", "attention-error"])
def test_tooltips(opened, built, chart):
    page = opened(built)
    mark = page.locator(f"[data-chart={chart}] g.mark-symbol path, [data-chart={chart}] g.mark-rect path").last
    mark.scroll_into_view_if_needed()
    box = mark.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tooltip = page.locator("#vg-tooltip-element.visible")
    tooltip.wait_for(timeout=5_000)
    assert "variant" in tooltip.inner_text() or "predicted" in tooltip.inner_text()


def test_a_hidden_point_of_a_curve_answers_too(opened, built):
    page = opened(built)
    point = page.locator("[data-chart=learning-train-loss] g.mark-symbol path").nth(20)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#vg-tooltip-element.visible").wait_for(timeout=5_000)


@pytest.mark.parametrize("width", [1280, 390])
def test_hostile_names_stay_text(opened, hostile, width):
    page = opened(hostile, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.scripts.length") == 3
    assert "<script>alert(1)</script>" in page.locator("body").inner_text()
    assert "<script>alert(1)" in page.locator("[data-chart=classes]").text_content()


def test_print_is_light(opened, built):
    page = opened(built, scheme="dark", media="print")
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--paper').trim()") == "#FFFFFF"
    assert len(page.pdf()) > 10_000
