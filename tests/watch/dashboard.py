"""The dashboard as these tests and the screenshots read it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.watch.live import ROOT

FILE = ROOT / "deploy/grafana/topkd.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ROWS = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
SHOWN = {
    "$__rate_interval": "15s",
    "$__range": "30s",
    "$__interval": "5s",
    "$job": ".*",
    "$instance": ".*",
    "$device": ".*",
}
"""What Grafana would put in place of its variables, with "All" chosen and a scrape a second."""


def expression(text: str, **chosen: str) -> str:
    """Returns a query with its variables replaced; `instance` and others may be chosen."""
    for name, value in {**SHOWN, **{f"${name}": value for name, value in chosen.items()}}.items():
        text = text.replace(name, value)
    assert "$" not in text, f"a variable is not known: {text}"
    return text


def targets() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every panel's queries, with names for people."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']}/{target['refId']}", target
