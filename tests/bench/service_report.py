"""The figures of the service: what goes into the record, the table and the plot. Knows no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

Found = Mapping[str, Any]
"""What `service_mode` measured."""

KEYS = (
    "lane_minus_local_us",
    "lane_in_graph_minus_local_us",
    "host_lane_us",
    "stream_over_echo",
    "unary_over_echo",
    "batch64_over_one",
)
NO_MPS = "no_mps"
GOALS = {
    "lane_minus_local_us": {"p50": 5.0, "p99": 10.0},
    "lane_in_graph_minus_local_us": {"p50": 8.0},
    "stream_over_echo": 1.15,
    "unary_over_echo": 1.15,
    "batch64_over_one": 1.5,
}
"""Under MPS on an H200."""

_BAR = 48


def summary(found: Found) -> dict[str, Any]:
    """Returns the figures by `KEYS`, None where one makes no sense, and all else under `details`."""
    lane = found["lanes"][0]
    figures: dict[str, Any] = {
        "lane_minus_local_us": lane["lane_minus_local_us"],
        "lane_in_graph_minus_local_us": lane.get("lane_in_graph_minus_local_us"),
        "host_lane_us": lane["host_lane_us"]["p50"],
    }
    for key in ("stream_over_echo", "unary_over_echo", "batch64_over_one"):
        figures[key] = round(found[key], 3)
    figures["details"] = {key: value for key, value in found.items() if key not in KEYS}
    return figures


def record(
    found: Mapping[str, Found], about: Mapping[str, str], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the record: the figures under MPS (or of the only mode), and those without it under `no_mps`.

    Args:
        found: figures by mode, `mps` and `no_mps`, or one called otherwise.
        about: what is said of the run.
        before: a record whose figures are kept for a mode that was not measured now, with what is said of their run.
    """
    kept = dict(before or {})
    without = kept.pop(NO_MPS, None)
    whole = kept or dict(about) | dict.fromkeys(KEYS)
    for mode, figures in found.items():
        if mode == NO_MPS:
            without = dict(about) | summary(figures)
        else:
            whole = dict(about) | summary(figures)
    return whole if without is None else whole | {NO_MPS: without}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['p50']:.2f} (p99 {value['p99']:.2f})"
    return "-" if value is None else f"{value:.2f}"


def table(found: Mapping[str, Found]) -> Iterator[str]:
    """Yields lines: the figures that have goals, each lane, calls, load."""
    modes = list(found)
    yield f"{'figure':<32} {'goal':>16} " + " ".join(f"{mode:>22}" for mode in modes)
    summaries = {mode: summary(figures) for mode, figures in found.items()}
    for key in KEYS:
        goal = GOALS.get(key)
        goal_text = ", ".join(f"{name} {most:g}" for name, most in goal.items()) if isinstance(goal, dict) else goal
        values = " ".join(f"{_text(summaries[mode][key]):>22}" for mode in modes)
        yield f"{key:<32} {goal_text or '':>16} {values}"
    for mode, figures in found.items():
        yield f"{mode}: us a call of a lane"
        yield from _lane_lines(figures["lanes"])
        yield f"{mode}: us of remote calls, medians (single ones less the device's time, batches whole)"
        calls = figures["calls_us"]
        yield "  " + ", ".join(f"{name.replace('_', ' ')} {us:.0f}" for name, us in calls.items())
        if "failed" in figures:
            yield f"{mode}: {figures['failed']}: not all was measured"
        for name in ("rate", "soak", "kills"):
            if name in figures:
                yield f"{mode}: {name}: " + ", ".join(f"{key} {value}" for key, value in figures[name].items())


def _lane_lines(lanes: list[Found]) -> Iterator[str]:
    names = (
        "shape",
        "kernel",
        "mode",
        "alone",
        "lane-local",
        "p99",
        "graph-local",
        "lane",
        "in graph",
        "host",
        "in a row",
        "alone",
        "peer",
    )
    widths = (24, 15, 7, 7, 10, 7, 11, 7, 8, 7, 8, 7, 7)
    yield "  " + " ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    for lane in lanes:
        graph = lane.get("lane_in_graph_minus_local_us", {})
        values = (
            lane["kernel_us"],
            lane["lane_minus_local_us"]["p50"],
            lane["lane_minus_local_us"]["p99"],
            graph.get("p50"),
            lane.get("lane_us"),
            lane.get("lane_in_graph_us"),
            lane["host_lane_us"]["p50"],
            lane.get("lane_in_a_row_us"),
            lane.get("kernel_in_a_row_us"),
            lane.get("best_public_us"),
        )
        cells = (lane["shape"], lane["kernel"], lane["mode"], *("-" if v is None else f"{v:.2f}" for v in values))
        yield "  " + " ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))


def plot(found: Mapping[str, Found]) -> Iterator[str]:
    """Yields a plot of what one call takes by every way, in us on a scale of powers."""
    ways: dict[str, float] = {}
    for mode, figures in found.items():
        lane, calls = figures["lanes"][-1], figures["calls_us"]
        ways[f"{lane['shape']} in process"] = lane["kernel_us"]
        for name in ("lane_in_graph_us", "lane_us"):
            if name in lane:
                ways[f"{mode} {name.removesuffix('_us').replace('_', ' ')}"] = lane[name]
        ways[f"{mode} lane from the host"] = lane["host_lane_us"]["p50"]
        for name in ("stream_echo", "stream_plan", "unary_echo", "unary_plan"):
            ways[f"{mode} {name.replace('_', ' ')}"] = calls[name]
    most = max(ways.values())
    least = max(min(1.0, *ways.values()), most * 1e-4)
    for way, us in ways.items():
        share = math.log(max(us, least) / least) / max(math.log(most / least), 1e-9)
        yield f"{way:>34} {'#' * max(1, round(share * _BAR)):<{_BAR}} {us:.1f} us"
