"""Draws the dashboard's panels without Grafana: a page made from its JSON and from what Prometheus answers.

For pictures: it shows titles, places, units, queries and data as the JSON has them, and none of Grafana's own looks.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import threading
from collections.abc import Iterator
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

from tests.watch.dashboard import DASHBOARD, expression
from tests.watch.live import Prometheus
from topkd.server import _status_words as words

CELL = 38
"""Height of one unit of Grafana's grid in pixels."""
_HIDDEN = ("__name__", "job")


def legend(text: str, metric: dict[str, str]) -> str:
    """Words a series as Grafana would."""
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: metric.get(match[1], ""), text).strip()


def wording(unit: str, value: float) -> str:
    """Words a number of a unit."""
    if unit == "s":
        return words.age(value) if value >= 60 else words.seconds(value)
    if unit in ("bytes", "Bps"):
        return words.bytes_of(value) + ("/s" if unit == "Bps" else "")
    if unit == "percentunit":
        return f"{value:.0%}"
    return words.count(value) if value == int(value) else words.rate(value)


def series(panel: dict[str, Any], prometheus: Prometheus, seconds: int) -> dict[str, Any]:
    """Returns what a panel's queries gave: times before now, and a line for each series."""
    lines: dict[str, dict[float, float | None]] = {}
    times: set[float] = set()
    for target in panel["targets"]:
        for found in prometheus.query_range(expression(target["expr"]), seconds):
            values = {time: None if text == "NaN" else float(text) for time, text in found["values"]}
            lines[legend(target["legendFormat"], found["metric"])] = values
            times |= values.keys()
    order = sorted(times)
    newest = order[-1] if order else 0.0
    columns = [[values.get(time) for time in order] for values in lines.values()]
    log = panel["fieldConfig"]["defaults"].get("custom", {}).get("scaleDistribution", {}).get("type") == "log"
    return {
        "columns": [[time - newest for time in order], *columns],
        "names": list(lines),
        "unit": panel["fieldConfig"]["defaults"].get("unit", "short"),
        "log": log,
    }


def heat(panel: dict[str, Any], prometheus: Prometheus, seconds: int) -> dict[str, Any]:
    """Returns a heat map's cells: a row for each bucket, the calls in it alone."""
    found = prometheus.query_range(expression(panel["targets"][0]["expr"]), seconds)
    rows = sorted((float(each["metric"]["le"]), [float(value) for _, value in each["values"]]) for each in found)
    cells = [upper[1] if place == 0 else _less(upper[1], rows[place - 1][1]) for place, upper in enumerate(rows)]
    labels = [words.seconds(bound) if not math.isinf(bound) else "> 1 s" for bound, _ in rows]
    return {"cells": cells, "labels": labels}


def _less(upper: list[float], lower: list[float]) -> list[float]:
    return [max(0.0, one - other) for one, other in zip(upper, lower, strict=False)]


def table(panel: dict[str, Any], prometheus: Prometheus) -> str:
    """Returns a table's HTML."""
    rows = [sample["metric"] for sample in prometheus.query(expression(panel["targets"][0]["expr"]))]
    names = sorted({name for row in rows for name in row} - set(_HIDDEN))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(row.get(n, ''))}</td>" for n in names) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def render(prometheus: Prometheus, seconds: int) -> str:
    """Returns the page."""
    parts, data = [], {}
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        place = (
            f"left:{grid['x'] / 24:.4%};width:calc({grid['w'] / 24:.4%} - 8px);"
            f"top:{grid['y'] * CELL}px;height:{grid['h'] * CELL - 8}px"
        )
        title = escape(panel["title"])
        if panel["type"] == "row":
            parts.append(f'<h2 style="{place}">{title}</h2>')
            continue
        content = ""
        if panel["type"] == "stat":
            samples = prometheus.query(expression(panel["targets"][0]["expr"]))
            unit = panel["fieldConfig"]["defaults"]["unit"]
            content = f"<strong>{escape(wording(unit, float(samples[0]['value'][1])))}</strong>"
        elif panel["type"] == "table":
            content = table(panel, prometheus)
        else:
            kind = heat if panel["type"] == "heatmap" else series
            data[panel["id"]] = kind(panel, prometheus, seconds)
        caption = f"<figcaption>{title}</figcaption>"
        parts.append(f'<figure style="{place}" data-panel="{panel["id"]}">{caption}{content}</figure>')
    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in DASHBOARD["panels"]) * CELL
    text = json.dumps(data).replace("<", "\\u003c")
    page = Path(__file__).with_name("panels.html").read_text()
    return page.replace("HEIGHT", str(bottom)).replace("PARTS", "".join(parts)).replace("DATA", text)


@contextlib.contextmanager
def served(prometheus: Prometheus, seconds: int) -> Iterator[str]:
    """Serves the page on loopback; yields its address."""
    static = resources.files("topkd.server") / "static"
    files = {f"/{name}": (static / name).read_bytes() for name in ("uplot.js", "uplot.css")}
    files["/"] = render(prometheus, seconds).encode()
    kinds = {"js": "text/javascript", "css": "text/css"}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files.get(self.path, b"")
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", kinds.get(self.path.rpartition(".")[2], "text/html; charset=utf-8"))
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
