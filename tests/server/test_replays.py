"""Batches that come again: captured once, then run as a whole; what the backend makes of it is a stand-in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from topkd.kernels import validate_select
from topkd.server import _execute
from topkd.server._execute import Batch, Executor
from topkd.server._memory_host import HostBackend
from topkd.server.metrics import ServerMetrics


class Replaying(HostBackend):
    """A backend that keeps the runs that it captures, and counts their replays."""

    def __init__(self) -> None:
        super().__init__(1)
        self.captured = 0
        self.replayed = 0
        self.refuses = False

    def capture(self, runs: Sequence[Callable[[], object]]) -> Any:
        if self.refuses:
            raise RuntimeError("not now")
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            for run in runs:
                run()

        return replay


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Replaying:
    monkeypatch.setattr(_execute.kernels, "only_enqueues", lambda request: True)
    return Replaying()


class Log:
    """Keeps the events of warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning(self, event: str, **_: object) -> None:
        self.warnings.append(event)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def executor(backend: Replaying, log: Any) -> Executor:
    return Executor(backend, ServerMetrics(CollectorRegistry()), 1 << 20, log)


class Rows:
    """Requests of rows of one matrix, with two values of k, and their outputs."""

    def __init__(self, given: bool = True) -> None:
        self.scores = torch.empty(6, 100)
        self.outputs = [torch.empty(1, 4 + at % 2, dtype=torch.int32) for at in range(6)]
        self.requests = [
            validate_select(self.scores[at : at + 1], 4 + at % 2, order="value", out_indices=out if given else None)
            for at, out in enumerate(self.outputs)
        ]

    def prepared(self, executor: Executor) -> Batch:
        return executor.prepare(self.requests, [f"items[{at}]." for at in range(6)])

    def check(self, executor: Executor, batch: Batch, quiet: bool = True) -> Any:
        self.scores.normal_()
        for out in self.outputs:
            out.fill_(-7)
        results, times, _ = executor.run(batch)
        if quiet and executor.comes_again(batch):
            executor.capture(batch)
        assert len(times) == len(batch.calls) == 2
        for at, out in enumerate(self.outputs):
            assert torch.equal(out.long(), self.scores[at : at + 1].topk(4 + at % 2).indices)
        assert [result.kernel for result in results] == ["torch"] * 6
        return results


def test_a_batch_that_comes_again_is_run_as_a_whole(backend: Replaying, executor: Executor) -> None:
    rows = Rows()
    batch = rows.prepared(executor)
    rows.check(executor, batch)
    assert backend.captured == 0
    for _ in range(4):
        rows.check(executor, batch)
    assert (backend.captured, backend.replayed) == (2, 6)


def test_nothing_is_captured_while_a_stream_may_wait(backend: Replaying, executor: Executor) -> None:
    rows = Rows()
    batch = rows.prepared(executor)
    for _ in range(5):
        rows.check(executor, batch, quiet=False)
    assert backend.captured == 0
    rows.check(executor, batch)
    assert (backend.captured, backend.replayed) == (2, 0)
    rows.check(executor, batch)
    assert (backend.captured, backend.replayed) == (2, 2)


def test_what_goes_into_the_reply_is_not_captured(backend: Replaying, executor: Executor) -> None:
    rows = Rows(given=False)
    batch = rows.prepared(executor)
    rows.scores.normal_()
    for _ in range(4):
        results, _, _ = executor.run(batch)
        if executor.comes_again(batch):
            executor.capture(batch)
        assert all(result.indices.inline_data for result in results)
    assert backend.captured == 0


def test_what_cannot_be_captured_is_said_once_and_runs_on(backend: Replaying, executor: Executor, log: Log) -> None:
    backend.refuses = True
    rows = Rows()
    batch = rows.prepared(executor)
    for _ in range(5):
        rows.check(executor, batch)
    assert log.warnings == ["batch_not_captured"]
    backend.refuses = False
    again = rows.prepared(executor)
    for _ in range(5):
        rows.check(executor, again)
    assert backend.captured == 0, "after one that failed torch may take no other"
    assert backend.replayed == 0


def test_what_a_kernel_takes_by_a_table_stays_one_launch(
    backend: Replaying, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_execute, "_BY_TABLE", "torch")
    rows = Rows()
    batch = rows.prepared(executor)
    for _ in range(5):
        rows.check(executor, batch)
    assert len(batch.replays) == 2
    assert backend.captured == 0


def test_graphs_of_several_branches_do_not_run_beside_lanes(backend: Replaying, executor: Executor) -> None:
    rows = Rows()
    batch, one = rows.prepared(executor), executor.prepare(rows.requests[:1], ["items[0]."])
    for _ in range(4):
        rows.check(executor, batch)
        executor.run(one)
        if executor.comes_again(one):
            executor.capture(one)
    replayed = backend.replayed
    rows.scores.normal_()
    executor.run(batch, lanes=True)
    assert backend.replayed == replayed
    assert torch.equal(rows.outputs[5].long(), rows.scores[5:].topk(5).indices)
    executor.run(one, lanes=True)
    assert backend.replayed == replayed + 1
