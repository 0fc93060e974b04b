"""The status page: what it reads, how it words it, and how its port answers. Browsers: tests/watch/test_page.py."""

from __future__ import annotations

import http.client
import json
import math
import re
import time
from html import unescape
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tests.server.harness import ServerProcess, Session, inline, select
from topkd.server import _status_words as words
from topkd.server._status_page import render
from topkd.server._status_readings import History, quantile
from topkd.server.metrics import LATENCY_BUCKETS, ServerMetrics

BOUNDS = (1.0, 2.0, 4.0, math.inf)
NASTY = """<script>alert(1)</script>"'&lt;"""


def history(*metrics: ServerMetrics, readings: int = 1) -> History:
    """Returns the history of registries read together."""

    class Together(Collector):
        def collect(self) -> Any:
            for each in metrics:
                yield from each.registry.collect()

    registry = CollectorRegistry()
    registry.register(Together())
    found = History(registry)
    for _ in range(readings):
        found.read()
    return found


def served(name: str = "a device") -> ServerMetrics:
    """Returns a server's metrics as they are when it is warm."""
    metrics = ServerMetrics(CollectorRegistry())
    metrics.prepare_front(16, "1.2.3")
    metrics.set_device({"backend": 1, "name": name, "uuid": "CPU", "compute_capability": "", "memory_bytes": 1 << 30})
    metrics.ready.set(1)
    metrics.request_seconds.labels("SelectTopK")
    return metrics


def text_of(page: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_quantiles_are_those_of_prometheus() -> None:
    assert quantile(BOUNDS, (), (0, 10, 10, 10), 0.5) == 1.5
    assert quantile(BOUNDS, (), (10, 10, 10, 10), 0.99) == pytest.approx(0.99)
    assert quantile(BOUNDS, (5, 5, 5, 5), (5, 5, 15, 15), 0.5) == 3.0
    assert quantile(BOUNDS, (), (0, 0, 0, 10), 0.5) == math.inf
    assert quantile(BOUNDS, (5, 5, 5, 5), (5, 5, 5, 5), 0.5) is None
    assert quantile(BOUNDS, (), (), 0.5) is None


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_a_quantile_lies_in_a_bucket_that_took_something(taken: list[int], part: float) -> None:
    counts = [float(sum(taken[: place + 1])) for place in range(4)]
    found = quantile(BOUNDS, (), counts, part)
    if not counts[-1]:
        assert found is None
        return
    assert found is not None
    place = next(place for place, bound in enumerate(BOUNDS) if found <= bound)
    assert taken[place] > 0
    if not math.isinf(found):
        assert counts[place] >= part * counts[-1] - 1e-6


def test_numbers_are_worded_for_people() -> None:
    assert [words.seconds(value) for value in (None, 0.0, 4.56e-6, 1.5e-4, 0.0123, 0.5, 2.0, math.inf)] == [
        "–", "0 µs", "4.56 µs", "150 µs", "12.3 ms", "500 ms", "2.00 s", "> 1 s",
    ]  # fmt: skip
    assert [words.count(value) for value in (0, 12345, 999_999, 1_234_567)] == ["0", "12,345", "999,999", "1.23 M"]
    assert [words.rate(value) for value in (None, 0.0, 0.256, 99.96, 12_345)] == ["–", "0", "0.26", "100", "12.3 k"]
    assert [words.bytes_of(value) for value in (0, 1023, 1536, 5 << 40)] == ["0 B", "1023 B", "1.50 KiB", "5.00 TiB"]
    assert [words.age(value) for value in (-1, 59, 61, 3600, 90_000)] == [
        "0 s",
        "59 s",
        "1 min",
        "1 h 0 min",
        "1 d 1 h",
    ]


def test_the_page_of_a_server_that_starts() -> None:
    page = render(History(CollectorRegistry()))
    assert "No figures yet" in text_of(page)
    assert "no figures" in text_of(page)


def test_the_page_says_what_the_metrics_say() -> None:
    metrics = served()
    found = history(metrics)
    for _ in range(99):
        metrics.kernel_seconds.labels("radix_wide", "bfloat16", "<=2048").observe(12e-6)
    metrics.kernel_seconds.labels("torch", "float32", ">4096").observe(5.0)
    metrics.sessions.labels("unix").set(3)
    metrics.plans.set(7)
    metrics.region_bytes.labels("cuda_ipc").set(3 << 30)
    metrics.regions.labels("cuda_ipc").set(2)
    metrics.queued.set(5)
    metrics.queue_fill.set(0.9)
    found.read()
    page = text_of(render(found))
    low = max(bound for bound in LATENCY_BUCKETS if bound < 12e-6)
    high = min(bound for bound in LATENCY_BUCKETS if bound >= 12e-6)
    assert f"radix_wide bfloat16 ≤ 2048 {words.rate(0)}" not in page, "it ran between two readings"
    assert words.seconds(low + (high - low) * 0.5) in page
    assert "torch float32 > 4096" in page
    assert "> 1 s" in page
    for expected in ("Sessions 3 of 16", "Plans 7 2 regions, 3.00 GiB", "Queue 5 fullest 90% of its bound"):
        assert expected in page
    assert "A session's queue is 90% full." in page
    assert "topkd 1.2.3" in page
    assert "serving" in page


def test_idle_kernels_keep_their_figures() -> None:
    metrics = served()
    metrics.kernel_seconds.labels("torch", "float32", "<=64").observe(1e-3)
    page = render(history(metrics, readings=3))
    assert re.search(r"<tr class=idle><th[^>]*>torch<", page)
    assert "No kernel has run yet." in text_of(render(history(served())))


def test_what_needs_attention_is_said() -> None:
    metrics = served()
    metrics.compiles.labels("cluster", "start").inc(9)
    assert 'class="notes"' not in render(history(metrics))
    metrics.compiles.labels("cluster", "ready").inc(2)
    metrics.fallbacks.labels("torch", "unsupported").inc(1234)
    metrics.worker_crashes.inc()
    metrics.ready.set(0)
    page = text_of(render(history(metrics)))
    for expected in (
        "Kernels compiled while serving, for which calls waited: 2.",
        "Calls that torch served for want of a faster kernel: 1,234.",
        "Workers that ended without being told to: 1.",
        "No session can attach",
        "not serving",
    ):
        assert expected in page


def test_lanes_are_told_apart_by_how_their_calls_are_noticed() -> None:
    metrics = served()
    metrics.lanes.labels("polled").set(2)
    metrics.lanes.labels("armed").set(3)
    metrics.lane_calls.labels("polled", "finished").inc(40)
    metrics.lane_calls.labels("polled", "failed").inc(5)
    metrics.lane_calls.labels("armed", "finished").inc(12_345)
    metrics.lane_calls.labels("armed", "failed").inc(0)
    metrics.lane_dry.inc(6)
    metrics.lane_disarmed.inc(7)
    metrics.ordered.labels("ready_timeout").inc(8)
    page = text_of(render(history(metrics)))
    assert (
        "Lanes open, armed 3 open, polled 2 calls, armed 12,345 of them failed, armed 0 "
        "calls, polled 45 of them failed, polled 5 armed, ran dry 6 armed, disarmed 7 "
        "Order and streams ordered, ready timeout 8 streams of calls 0"
    ) in page


def test_every_text_is_escaped() -> None:
    metrics = served(NASTY)
    metrics.kernel_seconds.labels(NASTY, NASTY, NASTY).observe(1e-3)
    metrics.workers.labels(NASTY).set(1)
    metrics.region_bytes.labels(NASTY).set(1)
    metrics.sessions_ended.labels("unix", NASTY).inc()
    metrics.lanes.labels(NASTY).set(1)
    metrics.lane_calls.labels(NASTY, "finished").inc()
    metrics.fallbacks.labels(NASTY, "no_code").inc()
    page = render(history(metrics, readings=2))
    assert "alert(1)" in page
    assert "<script>alert" not in page
    assert page.count("<script") == 3
    assert page.count("</script>") == 3


def test_each_device_has_a_section() -> None:
    class Fleet(Collector):
        def collect(self) -> Any:
            for device, ready in (("GPU-1", 1.0), ("GPU-2", 0.0)):
                for family in served(f"card {device}").registry.collect():
                    merged = Metric(family.name, family.documentation, family.type)
                    for sample in family.samples:
                        value = ready if sample.name == "topkd_ready" else sample.value
                        merged.add_sample(sample.name, {**sample.labels, "device": device}, value)
                    yield merged
            up = Metric("topkd_device_up", "", "gauge")
            up.add_sample("topkd_device_up", {"device": "GPU-3"}, 0.0)
            yield up

    registry = CollectorRegistry()
    registry.register(Fleet())
    found = History(registry)
    found.read()
    page = render(found)
    assert page.count('<section class="device"') == 3
    assert "1 of 3 serving" in text_of(page)
    assert all(name in text_of(page) for name in ("card GPU-1", "card GPU-2", "GPU-3"))
    data = json.loads(re.findall(r'<script type="application/json" id="data">(.*)</script>', page)[0])
    assert set(data) == {"0", "1", "2"}


def test_a_collector_that_fails_leaves_an_old_page() -> None:
    registry = CollectorRegistry()
    found = history(served())
    assert "serving" in text_of(render(found))
    found._read_at -= 60
    assert "no figures" in text_of(render(found))
    assert History(registry).age() == math.inf


# The port


def ask(front: ServerProcess, path: str, method: str = "GET") -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", front.serving["metrics_port"], timeout=10)
    connection.request(method, path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/static/status.css", "/static/status.js", "/static/uplot.js", "/none"]
)
def test_every_answer_has_the_security_headers(front: ServerProcess, path: str) -> None:
    answer, body = ask(front, path)
    assert answer.status == (404 if path == "/none" else 200)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["Server"] == "topkd"
    head, nothing = ask(front, path, "HEAD")
    assert (head.status, nothing) == (answer.status, b"")
    assert body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed_over_the_port(front: ServerProcess, method: str) -> None:
    answer, _ = ask(front, "/", method)
    assert answer.status == 405
    assert answer.headers["Allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/static/../metrics.py", "/static/uplot.LICENSE", "/static/", "/metrics/x"])
def test_only_what_is_listed_is_served(front: ServerProcess, path: str) -> None:
    assert ask(front, path)[0].status == 404


def test_the_page_of_a_live_server(front: ServerProcess) -> None:
    with Session(front) as session:
        session.select(select(input=inline(np.ones((1, 8), dtype=np.float32)), k=1))
        page = ""
        for _ in range(50):
            page = text_of(ask(front, "/")[1].decode())
            if re.search(r"torch float32 ≤ 64 (?!0 )", page):
                break
            time.sleep(0.2)
        assert re.search(r"torch float32 ≤ 64 (?!0 )", page), page
        assert "of 6" in page  # max_sessions
