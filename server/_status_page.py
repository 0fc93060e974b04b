"""The status page: HTML made here, whole without JavaScript; a script on it fetches it again and draws two charts.

Every text is escaped, whatever it comes from.
"""

import json
import time
from collections.abc import Iterable, Sequence
from html import escape

from ._status_device import DeviceView, KernelRow
from ._status_readings import EVERY_S, Figures, History
from ._status_words import age, bytes_of, count, rate, seconds

__all__ = ["render"]

_SPARK = 96, 22
"""Width and height of a small chart."""


def render(history: History) -> str:
    """Returns the page."""
    views = [DeviceView(name, *found, history.bounds) for name, found in history.newest().items()]
    late = history.age() > 3 * EVERY_S + 3
    charts = {f"{place}": view.charts() for place, view in enumerate(views)}
    data = json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c")
    body = "".join(_device(view, place, alone=len(views) == 1) for place, view in enumerate(views))
    if not views:
        body = '<p class="empty">No figures yet: the server is starting.</p>'
    return _PAGE.format(
        refresh=int(EVERY_S * 2.5),
        status=_status(views, late=late),
        body=body,
        footer=_footer(views),
        data=data,
    )


def _status(views: Sequence[DeviceView], *, late: bool) -> str:
    if late or not views:
        return _pill("no figures", good=False)
    well = sum(view.serving for view in views)
    if well in (0, len(views)):
        return _pill("serving" if well else "not serving", good=well > 0)
    return _pill(f"{well} of {len(views)} serving", good=False)


def _pill(text: str, *, good: bool) -> str:
    return f'<span class="pill {"good" if good else "bad"}">{text}</span>'


def _footer(views: Sequence[DeviceView]) -> str:
    build = next((view.build for view in views if view.build), {})
    words = [f"{name} {build[name]}" for name in ("python", "grpc") if name in build]
    return escape(" · ".join([f"topkd {build.get('version', '')}".strip(), *words]))


def _device(view: DeviceView, place: int, *, alone: bool) -> str:
    info = view.info
    name = info.get("name") or view.name or "device"
    pill = "" if alone else _pill("serving" if view.serving else "not serving", good=view.serving)
    start = view.figures.total("topkd_start_time_seconds")
    details = [info.get("uuid", view.name)]
    if memory := view.figures.total("topkd_device_memory_bytes"):
        details.append(f"{bytes_of(memory)} of memory")
    if info.get("compute_capability"):
        details.append(f"compute capability {info['compute_capability']}")
    if info.get("backend") == "cuda":
        details.append("MPS" if view.figures.total("topkd_mps_active") else "no MPS")
    if start:
        details.append(f"up {age(time.time() - start)}")
    notes = "".join(f"<li>{escape(text)}</li>" for text in view.attention())
    return "".join(
        (
            f'<section class="device" aria-label="{escape(name)}"><div class="live" id="top-{place}">',
            f'<h2>{escape(name)} {pill}</h2><p class="details">{escape(" · ".join(filter(None, details)))}</p>',
            f'<ul class="notes">{notes}</ul>' if notes else "",
            _cards(view),
            "</div>",
            _charts(view, place),
            f'<div class="live" id="rest-{place}">{_kernels(view.kernels())}{_lifecycle(view)}</div></section>',
        )
    )


def _cards(view: DeviceView) -> str:
    total = view.figures.total
    sessions, bound = total("topkd_sessions"), total("topkd_max_sessions")
    mapped = bytes_of(total("topkd_region_bytes"))
    cards = (
        ("Requests", rate(view.rate("requests")), "a second"),
        ("Rows", rate(view.rate("rows")), f"a second, {bytes_of(view.rate('bytes') or 0)}/s"),
        ("In the handler", seconds(view.handler(0.5)), f"p99 {seconds(view.handler(0.99))}"),
        ("Queue", count(total("topkd_queued_requests")), f"fullest {total('topkd_queue_fill_ratio'):.0%} of its bound"),
        ("Sessions", count(sessions), f"of {count(bound)}"),
        ("Plans", count(total("topkd_plans")), f"{count(total('topkd_regions'))} regions, {mapped}"),
    )
    items = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{escape(value)}<small>{escape(below)}</small></dd></div>"
        for title, value, below in cards
    )
    return f'<dl class="cards">{items}</dl>'


def _charts(view: DeviceView, place: int) -> str:
    """Two charts: drawn here as they stand, drawn anew by the script where there is one."""
    charts = view.charts()
    pictures = (
        ("requests", "Requests a second", (charts["requests"],), rate),
        ("times", "Device time of a kernel call, p50 and p99", (charts["p50"], charts["p99"]), seconds),
    )
    figures = "".join(
        f'<figure><figcaption>{title}</figcaption><div class="chart" data-chart="{name}" data-device="{place}">'
        f"{_lines(series, 560, 120)}<p>from 0 to {escape(word(_highest(series)))}</p></div></figure>"
        for name, title, series, word in pictures
    )
    return f'<div class="charts">{figures}</div>'


def _highest(series: Iterable[Sequence[float | None]]) -> float:
    return max((value for line in series for value in line if value is not None), default=0.0)


def _lines(series: Iterable[Sequence[float | None]], width: int, height: int) -> str:
    """Draws lines from 0 to their highest value; gaps where there is none."""
    every = list(series)
    top = _highest(every) or 1.0
    paths = "".join(
        f'<path class="line{place}" d="{_path(line, width, height, top)}"/>' for place, line in enumerate(every)
    )
    box = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" preserveAspectRatio="none"'
    return f'<svg {box} aria-hidden="true">{paths}</svg>'


def _path(line: Sequence[float | None], width: int, height: int, top: float) -> str:
    step = width / max(len(line) - 1, 1)
    commands, pen = [], "M"
    for place, value in enumerate(line):
        if value is None or value > top:
            pen = "M"
            continue
        commands.append(f"{pen}{place * step:.1f} {height - 1.5 - (height - 3) * value / top:.1f}")
        pen = "L"
    return "".join(commands)


def _kernels(rows: Sequence[KernelRow]) -> str:
    if not rows:
        return '<h3>Kernels</h3><p class="empty">No kernel has run yet.</p>'
    words = "".join(f'<th scope="col">{text}</th>' for text in ("Kernel", "dtype", "k"))
    numbers = "".join(f'<th scope="col" class="n">{text}</th>' for text in ("Calls/s", "p50", "p99", "Calls"))
    head = f'{words}{numbers}<th scope="col">p50, last minutes</th>'
    body = "".join(_kernel(row) for row in rows)
    return (
        f'<h3>Kernels</h3><div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        '<p class="hint">Device time in the last minute; dimmed where nothing ran in it: since the start.</p>'
    )


def _kernel(row: KernelRow) -> str:
    kernel, dtype, k = row.key
    k = k.replace("<=", "\N{LESS-THAN OR EQUAL TO} ").replace(">", "> ")
    words = f'<th scope="row">{escape(kernel)}</th><td>{escape(dtype)}</td><td>{escape(k)}</td>'
    numbers = (rate(row.rate), seconds(row.p50), seconds(row.p99), count(row.calls))
    cells = "".join(f'<td class="n">{escape(text)}</td>' for text in numbers)
    spark = _lines([[None if value is None else min(value, 1.0) for value in row.recent]], *_SPARK)
    return f'<tr{" class=idle" if row.idle else ""}>{words}{cells}<td class="spark">{spark}</td></tr>'


def _lifecycle(view: DeviceView) -> str:
    figures = view.figures
    regions = [
        (memory, f"{count(figures.total('topkd_regions', memory=memory))} regions, {bytes_of(size)}")
        for memory, size in figures.by("topkd_region_bytes", "memory").items()
    ]
    processes = [
        (process, f"{bytes_of(size)}, {age(figures.total('topkd_process_cpu_seconds_total', process=process))} CPU")
        for process, size in figures.by("topkd_process_resident_bytes", "process").items()
    ]
    counters = (
        ("attached", figures.total("topkd_attaches_total", outcome="attached")),
        ("of them after a loss", figures.total("topkd_reattaches_total")),
        ("refused", figures.total("topkd_attaches_total", outcome="refused")),
    )
    open_now = [(f"open, {transport}", each) for transport, each in figures.by("topkd_sessions", "transport").items()]
    outcomes = figures.by("topkd_ordered_calls_total", "outcome").items()
    ordered = [(f"ordered, {outcome.replace('_', ' ')}", each) for outcome, each in outcomes]
    ended = figures.by("topkd_sessions_ended_total", "cause").items()
    groups = (
        ("Sessions", _counted((*open_now, *counters))),
        ("Sessions ended", _counted((_CAUSES.get(cause, cause), value) for cause, value in ended)),
        ("Lanes", _counted(_lanes(figures))),
        ("Order and streams", _counted((*ordered, ("streams of calls", figures.total("topkd_streams"))))),
        ("Workers", _counted(figures.by("topkd_workers", "state").items())),
        ("Memory shared", regions or [("none", "")]),
        ("Processes", processes),
    )
    return f'<div class="groups">{"".join(_group(title, pairs) for title, pairs in groups if pairs)}</div>'


def _lanes(figures: Figures) -> list[tuple[str, float]]:
    """Returns what is said of lanes: those open and their calls by mode; of armed ones, what kept calls waiting."""
    found = [(f"open, {mode}", value) for mode, value in figures.by("topkd_lanes", "mode").items()]
    for mode, calls in figures.by("topkd_lane_calls_total", "mode").items():
        found += [(f"calls, {mode}", calls)]
        found += [(f"of them failed, {mode}", figures.total("topkd_lane_calls_total", mode=mode, outcome="failed"))]
    found += [("armed, ran dry", figures.total("topkd_lane_dry_total"))]
    return [*found, ("armed, disarmed", figures.total("topkd_lane_disarmed_total"))]


_CAUSES = {
    "detached": "by their client",
    "client_gone": "client gone",
    "worker_lost": "worker lost",
    "drained": "server drained",
}


def _counted(pairs: Iterable[tuple[str, float]]) -> list[tuple[str, str]]:
    return [(name, count(value)) for name, value in pairs]


def _group(title: str, pairs: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return f"<div><h3>{title}</h3><dl>{items}</dl></div>"


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>topkd</title>
<noscript><meta http-equiv="refresh" content="{refresh}"></noscript>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="static/uplot.css">
<link rel="stylesheet" href="static/status.css">
<script src="static/uplot.js" defer></script>
<script src="static/status.js" defer></script>
</head>
<body>
<header><h1>topkd</h1><div class="live" id="status">{status}</div><nav><a href="metrics">metrics</a></nav></header>
<p class="stale" id="stale" hidden>The server has not answered since <time></time>.</p>
<main>{body}</main>
<footer class="live" id="footer">{footer}</footer>
<script type="application/json" id="data">{data}</script>
</body>
</html>
"""
