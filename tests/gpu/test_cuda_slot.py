"""Slots of the CUDA backend in one process: order, time-outs and ends, without a server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from prometheus_client import CollectorRegistry  # noqa: E402 - after the check for torch

from topkd import kernels  # noqa: E402
from topkd._cuda_words import DeviceWords  # noqa: E402
from topkd._guard import Guard  # noqa: E402
from topkd._words import POISON, Words  # noqa: E402
from topkd.server import _logging  # noqa: E402
from topkd.server._execute import Executor  # noqa: E402
from topkd.server._queue import TurnQueue  # noqa: E402
from topkd.server._record import Recorder  # noqa: E402
from topkd.server._timeline import Timeline  # noqa: E402
from topkd.server.config import ServerLimits  # noqa: E402
from topkd.server.metrics import ServerMetrics  # noqa: E402
from topkd.v1 import selection_pb2  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
ROWS, WIDTH, K = 4, 20_000, 512
UNTOUCHED = -7
LONG = 1_000_000_000
"""Cycles that a stream is busy, about 0.5 s: far longer than a call takes, also where others keep the GPU busy."""


class Both:
    """The worker's side, and the caller's stream, on two mappings of one page."""

    def __init__(self, fd: int) -> None:
        from topkd.server._memory_cuda import CudaBackend

        self.backend = CudaBackend()
        self.backend.enter_thread()
        self.backend.warm()
        metrics = ServerMetrics(CollectorRegistry())
        self.recorder = Recorder(metrics)
        log = _logging.configure("error", "json", process="test")
        self.executor = Executor(self.backend, metrics, 1 << 20, log)
        self.theirs = Words(fd)
        self.timeline = Timeline(self.theirs, self._open, TurnQueue(), ServerLimits(), metrics, log)
        self.ours = Words(fd)
        self.device = DeviceWords(self.ours, Guard(fd, os.pidfd_open(os.getpid())), 0)
        self.stream = torch.cuda.Stream()
        self.value = 0
        self.scores = torch.randperm(ROWS * WIDTH, device="cuda").view(ROWS, WIDTH).float()
        self.want = torch.topk(self.scores, K).indices.sort(dim=1).values.to(torch.int32)
        for kernel in ("radix_wide", "torch"):  # what is cold would wait for the blocked stream
            kernels.select_topk(self.scores, K, order="index", ties="lowest", kernel=kernel)
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()

    def _open(self, words: Words, count: int) -> Any:
        return self.backend.open_slots(words, range(count), self.executor, self.recorder)

    def batch(self, out: Any, kernel: str) -> Any:
        options = {"order": "index", "ties": "lowest", "kernel": kernel, "out_indices": out}
        batch = self.executor.prepare([kernels.validate_select(self.scores, K, **options)], [""])
        self.executor.warm(batch)
        return batch

    def call(self, out: Any, kernel: str, cycles: int, timeout_ms: int) -> int:
        """Makes a call behind a busy stream; returns its done value."""
        self.value += 1
        batch = self.batch(out, kernel)
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)
            self.device.write_ready(self.stream.cuda_stream, 0, self.value)
        ordering = selection_pb2.Ordering(slot=0, ready=self.value, done=self.value, ready_timeout_ms=timeout_ms)
        self.timeline.accept(ordering, batch, 0)
        self.device.wait_done(self.stream.cuda_stream, 0, self.value)
        return self.value

    def fresh(self) -> Any:
        out = torch.full((ROWS, K), UNTOUCHED, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        return out


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    fd = os.memfd_create("words")
    os.ftruncate(fd, 4096)
    made = Both(fd)
    made.call(made.fresh(), "radix_wide", 1000, 5000)  # the first one makes the slots, their words and spare memory
    made.stream.synchronize()
    yield made
    made.timeline.close()
    torch.cuda.set_stream(torch.cuda.default_stream())
    os.close(fd)


@pytest.mark.parametrize("kernel", ["radix_wide", "torch"])
def test_a_call_is_in_the_streams_order(both: Both, kernel: str) -> None:
    failures = both.ours.failure(0).total
    for _ in range(3):
        out = both.fresh()
        both.call(out, kernel, LONG, 5000)
        assert not both.stream.query()  # the call waited for nothing
        with torch.cuda.stream(both.stream):
            copy = out.clone()
        both.stream.synchronize()
        assert torch.equal(copy, both.want)
    assert both.ours.failure(0).total == failures


@pytest.mark.parametrize("kernel", ["radix_wide", "torch"])
def test_a_late_call_writes_nothing_and_the_next_is_right(both: Both, kernel: str) -> None:
    before = both.ours.failure(0).total
    out, after = both.fresh(), both.fresh()
    value = both.call(out, kernel, LONG, 100)
    both.call(after, kernel, 1000, 5000)
    both.stream.synchronize()
    assert both.ours.failure(0) == (value, value, selection_pb2.ORDERED_FAILURE_READY_TIMEOUT, before + 1)
    assert bool((out == UNTOUCHED).all())
    assert torch.equal(after, both.want)
    assert both.timeline.settle(5)


def test_closing_lets_a_waiting_stream_go_and_writes_nothing(both: Both) -> None:
    out = both.fresh()
    both.call(out, "radix_wide", LONG, 5000)
    both.timeline.close()
    assert both.ours.done(0) == POISON
    both.stream.synchronize()
    assert bool((out == UNTOUCHED).all())
