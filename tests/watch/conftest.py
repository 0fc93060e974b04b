"""Servers under load and a Prometheus that scrapes them, for the tests of what operators see."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.servers import Running
from tests.e2e.test_fleet import Fleet
from tests.watch import tools

collect_ignore_glob = ["test_*.py"] if tools.missing() else []  # tests/conftest.py prints why

if not tools.missing():
    from playwright.sync_api import Browser

    from tests.watch.browser import chromium
    from tests.watch.live import Load, Prometheus

SCRAPES = 12
"""Seconds of load that Prometheus has seen before a test asks it."""


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """A directory whose path is short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="topkd-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def busy(folder: Path) -> Iterator[Running]:
    """A server on the CPU with engines at work: see tests/watch/load.py."""
    server = Running(folder / "s", flags={"cpu-threads": 1}, limits={"queue": 8}).start()
    try:
        with Load(server.socket_dir):
            yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def busy_fleet(folder: Path) -> Iterator[Fleet]:
    """A server of two devices, an engine at work on the second."""
    server = Fleet(folder / "busy").start()
    try:
        with Load(server.socket_dir / "cpu-1", engines=1):
            yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def prometheus(folder: Path, busy: Running, busy_fleet: Fleet) -> Iterator[Prometheus]:
    """A Prometheus with the project's rules that scrapes both busy servers every second."""
    with Prometheus(folder / "p", busy.metrics_port, busy_fleet.metrics_port) as running:
        running.wait_for_scrapes(SCRAPES)
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Headless Chromium."""
    with chromium() as running:
        yield running
