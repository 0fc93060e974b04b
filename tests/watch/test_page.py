"""The status page in a real browser: whole without JavaScript, live with it, in both colour schemes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.e2e import processes
from tests.e2e.servers import Running
from tests.e2e.test_fleet import Fleet
from tests.watch.browser import opened
from tests.watch.live import Load

pytestmark = pytest.mark.watch

LIVE_MS = 15_000


def address(server: Running | Fleet) -> str:
    return f"http://127.0.0.1:{server.metrics_port}/"


def has_run(page: Page) -> bool:
    return page.locator("tbody tr").count() >= 4


def requests_card(page: Page) -> str:
    return page.locator(".cards div", has_text="Requests").first.inner_text()


def test_without_javascript_everything_is_there(browser: Browser, busy: Running) -> None:
    with opened(browser, address(busy), java_script_enabled=False) as (page, troubles):
        processes.wait_until(lambda: page.reload() and has_run(page), 60, "kernels have run")
        assert page.title() == "topkd"
        assert page.locator("#status").inner_text() == "serving"
        text = page.locator("main").inner_text()
        for expected in ("Requests", "Rows", "Queue", "Sessions", "Plans", "Kernels", "Workers", "by their client"):
            assert expected in text
        row = page.locator("tbody tr", has_text="torch").first.inner_text()
        assert len(re.findall(r"[\d.]+ (?:µs|ms|s)", row)) == 2, row  # p50 and p99
        assert page.locator(".chart svg path").count() == 3
        assert page.locator(".chart svg path").first.get_attribute("d")
        assert page.locator("noscript meta[http-equiv=refresh], head meta[http-equiv=refresh]").count() == 1
        assert troubles == []


def test_with_javascript_it_lives(browser: Browser, busy: Running) -> None:
    with opened(browser, address(busy)) as (page, troubles):
        page.wait_for_selector(".chart canvas", timeout=LIVE_MS)
        assert page.locator(".chart canvas").count() == 2
        assert page.locator(".chart > svg").count() == 0
        first = page.locator("#data").text_content(), requests_card(page)
        page.wait_for_function(
            "before => document.querySelector('.cards div').innerText !== before", arg=first[1], timeout=60_000
        )
        assert page.locator("#stale").is_hidden()
        pixels = "box => box.querySelector('canvas').getContext('2d').getImageData(0, 0, 600, 150)"
        drawn = f"{pixels}.data.some(part => part)"
        assert page.locator(".chart").first.evaluate(drawn), "the chart's canvas is empty"
        assert troubles == []


def test_the_pointer_reads_the_chart(browser: Browser, busy: Running) -> None:
    with opened(browser, address(busy)) as (page, _):
        page.wait_for_selector(".chart canvas", timeout=LIVE_MS)
        box = page.locator("[data-chart=times] .u-over").bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] / 2)
        legend = "document.querySelector('[data-chart=times] .u-legend').innerText"
        page.wait_for_function(f"() => /p50.*[0-9].*(µs|ms)/s.test({legend})", timeout=30_000)


def test_colours_follow_the_readers_system(browser: Browser, busy: Running) -> None:
    def grounds(scheme: str) -> tuple[str, str]:
        with opened(browser, address(busy), color_scheme=scheme) as (page, _):
            style = "name => getComputedStyle(document.body)[name]"
            return page.evaluate(style, "backgroundColor"), page.evaluate(style, "color")

    light, dark = grounds("light"), grounds("dark")
    assert sum(map(int, re.findall(r"\d+", light[0]))) > 3 * 200
    assert sum(map(int, re.findall(r"\d+", dark[0]))) < 3 * 60
    assert light[1] != dark[1]


def test_it_fits_a_phone(browser: Browser, busy: Running) -> None:
    with opened(browser, address(busy), viewport={"width": 380, "height": 800}) as (page, troubles):
        page.wait_for_selector(".chart canvas", timeout=LIVE_MS)
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        assert troubles == []


def test_scripts_from_elsewhere_and_inline_are_refused(browser: Browser, busy: Running) -> None:
    with opened(browser, address(busy)) as (page, troubles):
        page.evaluate(
            """() => { const script = document.createElement('script'); script.textContent = 'window.evil = 1';
            document.body.append(script); }"""
        )
        assert page.evaluate("window.evil") is None
        assert any("Content Security Policy" in text for text in troubles)


def test_a_fleet_has_a_section_for_each_device_and_an_end_is_seen(browser: Browser, folder: Path) -> None:
    server = Fleet(folder / "fleet").start()
    try:
        with Load(server.socket_dir / "cpu-1"), opened(browser, address(server)) as (page, troubles):
            page.wait_for_function("() => document.querySelectorAll('section.device').length === 2", timeout=60_000)
            page.wait_for_function("() => document.querySelectorAll('#rest-1 tbody tr').length >= 4", timeout=90_000)
            assert page.locator("#rest-0 tbody tr").count() == 0
            assert page.locator("#status").inner_text() == "serving"
            assert troubles == []
            server.stop()
            page.wait_for_selector("#stale:visible", timeout=30_000)
            assert "has not answered since" in page.locator("#stale").inner_text()
    finally:
        server.stop()
