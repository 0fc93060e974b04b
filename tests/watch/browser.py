"""Headless Chromium, Debian's, that reaches nothing but loopback."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

FLAGS = (
    "--no-sandbox",  # the tests run as root in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Starts it; the context manager ends it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def opened(browser: Browser, address: str, **options: Any) -> Iterator[tuple[Page, list[str]]]:
    """Opens a page in a profile of its own.

    Yields:
        The page, and what went wrong on it so far: errors of scripts, of the console, and requests to other hosts.
    """
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
    page.on("console", lambda each: troubles.append(each.text) if each.type in ("error", "warning") else None)
    page.on("request", lambda each: None if each.url.startswith((address, "data:")) else troubles.append(each.url))
    try:
        page.goto(address)
        yield page, troubles
    finally:
        context.close()
