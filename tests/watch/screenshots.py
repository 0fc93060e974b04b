"""Makes the pictures of the documentation: `python -m tests.watch.screenshots FOLDER` (`make screenshots`).

The status page of a server on the CPU under load (tests/watch/load.py), light and dark, and the panels of the Grafana
dashboard with what a live Prometheus has of that server. Grafana itself is not there: the panels are drawn by
tests/watch/panels.py from the dashboard's JSON.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser

from tests.e2e.servers import Running
from tests.watch import panels
from tests.watch.browser import chromium, opened
from tests.watch.dashboard import DASHBOARD
from tests.watch.live import Load, Prometheus

LOAD_SECONDS = 75
SIZE = {"width": 1120, "height": 900}


def shoot_page(browser: Browser, address: str, scheme: str, file: Path) -> None:
    """Takes the status page once its charts are drawn."""
    with opened(browser, address, color_scheme=scheme, viewport=SIZE) as (page, troubles):
        page.wait_for_selector(".chart canvas")
        page.wait_for_timeout(4000)
        page.screenshot(path=file, full_page=True)
    if troubles:
        raise RuntimeError(f"the page has troubles: {troubles}")


def shoot_panels(browser: Browser, prometheus: Prometheus, file: Path) -> None:
    """Takes the panels of the dashboard's first rows: service, kernels, lanes."""
    rows = [panel for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    clip = {"x": 0, "y": 0, "width": SIZE["width"], "height": 12 + panels.CELL * rows[3]["gridPos"]["y"]}
    with panels.served(prometheus, LOAD_SECONDS) as host, opened(browser, host, viewport=SIZE) as (page, troubles):
        page.wait_for_selector("body[data-drawn]")
        page.screenshot(path=file, full_page=True, clip=clip)
    if troubles:
        raise RuntimeError(f"the panels have troubles: {troubles}")


def main(target: Path) -> None:
    """Starts everything, waits for some load, takes the pictures."""
    folder = Path(tempfile.mkdtemp(prefix="topkd-"))
    server = Running(folder / "s", flags={"cpu-threads": 1}).start()
    monitoring = Prometheus(folder / "p", server.metrics_port)
    try:
        with Load(server.socket_dir), monitoring as prometheus, chromium() as browser:
            prometheus.wait_for_scrapes(5)
            time.sleep(LOAD_SECONDS)
            address = f"http://127.0.0.1:{server.metrics_port}/"
            for scheme in ("light", "dark"):
                shoot_page(browser, address, scheme, target / f"status-{scheme}.png")
            shoot_panels(browser, prometheus, target / "dashboard.png")
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
