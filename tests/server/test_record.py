from __future__ import annotations

import statistics
import threading
import time

from prometheus_client import CollectorRegistry

from topkd.server._execute import Batch, Call
from topkd.server._record import Recorder
from topkd.server.metrics import ServerMetrics


def noted(count: int) -> tuple[CollectorRegistry, Recorder]:
    """A recorder with notes of requests and batches that are not in the metrics yet."""
    registry = CollectorRegistry()
    metrics = ServerMetrics(registry)
    recorder = Recorder(metrics)
    seconds, succeeded = metrics.request_seconds.labels("SelectTopK"), metrics.requests.labels("SelectTopK", "OK")
    batch = Batch(
        ["items[0]."], [Call("torch", metrics.kernel_seconds.labels("torch", "float32", "<=64"))], 2, 8, 4, False
    )
    for _ in range(count):
        recorder.request(seconds, succeeded, 1_000)
        recorder.batch(10, batch, [500], 20)
    return registry, recorder


def test_a_flush_puts_every_note_into_the_metrics_once() -> None:
    registry, recorder = noted(100)
    for _ in range(2):
        recorder.flush()
        assert registry.get_sample_value("topkd_requests_total", {"method": "SelectTopK", "code": "OK"}) == 100
        assert registry.get_sample_value("topkd_rows_total") == 200
        labels = {"kernel": "torch", "dtype": "float32", "k": "<=64"}
        assert registry.get_sample_value("topkd_kernel_seconds_count", labels) == 100


def test_a_call_that_comes_during_a_flush_gets_the_interpreter_soon() -> None:
    _, recorder = noted(8000)
    flushing = threading.Thread(target=recorder.flush)
    flushing.start()
    waits = []
    while flushing.is_alive():
        started = time.perf_counter()
        time.sleep(0.001)  # as a handler waits for its device
        waits.append(time.perf_counter() - started - 0.001)
    flushing.join()
    assert len(waits) > 20
    assert statistics.median(waits) < 0.0025  # a thread that computes keeps the interpreter for 0.005 s
