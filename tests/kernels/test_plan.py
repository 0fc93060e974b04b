"""Plans without a GPU: what they give, what they refuse, how they end. On a GPU: tests/gpu/test_plan.py."""

from __future__ import annotations

import ctypes
import doctest
import weakref
from typing import Any

import pytest
import torch

from topkd.kernels import ArgumentTypeError, ArgumentValueError, _plan, plan, select_topk


def test_a_run_reads_what_the_tensors_hold_now() -> None:
    scores, lengths = torch.randn(3, 50), torch.tensor([50, 4, 17], dtype=torch.int32)
    options: dict[str, Any] = {"lengths": lengths, "order": "value", "ties": "lowest", "values": True}
    selection = plan(scores, 7, **options)
    for _ in range(3):
        scores.normal_()
        lengths.random_(0, 60)
        got, want = selection(), select_topk(scores, 7, **options)
        assert got is selection.result
        assert torch.equal(got.indices, want.indices)
        assert got.values is not None
        assert want.values is not None
        assert torch.equal(got.values, want.values)


def test_outputs_are_those_given_or_its_own() -> None:
    scores, out = torch.randn(2, 9), torch.full((2, 3), -5, dtype=torch.int64)
    selection = plan(scores, 3, out_indices=out, index_dtype=torch.int64)
    assert (out == -5).all(), "nothing runs when a plan is made"
    assert selection.run().indices is out
    assert (out >= 0).all()
    assert selection.result.values is None
    own = plan(scores, 3)
    first = own.run().indices
    assert own.run().indices is first
    assert own.result.indices.dtype == torch.int32


def test_rows_of_nothing() -> None:
    assert plan(torch.zeros(0, 5), 2).run().indices.shape == (0, 2)
    assert (plan(torch.zeros(2, 0), 2).run().indices == -1).all()


def test_it_says_what_runs_it() -> None:
    selection = plan(torch.zeros(1, 5), 2)
    assert selection.kernel == "torch"
    assert selection.reason
    assert repr(selection) == "<topkd.kernels.SelectPlan: torch>"
    assert plan(torch.zeros(1, 5), 2, kernel="torch").reason == "asked for by name"


def test_wrong_arguments_raise_at_once() -> None:
    scores = torch.zeros(1, 5)
    with pytest.raises(ArgumentValueError, match="k is 0"):
        plan(scores, 0)
    with pytest.raises(ArgumentTypeError, match="sorted"):
        plan(scores, 1, sorted=True)
    with pytest.raises(ArgumentValueError, match="dependent") as caught:
        plan(scores, 1, dependent=True)
    assert caught.value.argument == "dependent"
    for wrong in (1, None, "yes", torch.ones(2)):
        with pytest.raises(ArgumentTypeError, match="dependent is"):
            plan(scores, 1, dependent=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="overlaps input"):
        plan(scores, 2, out_indices=scores.view(torch.int32)[:, 1:3])


def test_a_closed_plan_does_not_run() -> None:
    with plan(torch.zeros(1, 5), 2) as selection:
        selection.run()
        assert not selection.closed
    assert selection.closed
    selection.close()
    with pytest.raises(RuntimeError, match="closed"):
        selection.run()
    assert "closed" in repr(selection)


class Graph:
    """A captured graph."""


def test_a_plan_that_is_closed_during_a_launch_keeps_its_graph_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    selection, graph = plan(torch.zeros(1, 5), 2), Graph()
    there = weakref.ref(graph)
    selection._graph, selection._index, selection._handle = graph, 0, ctypes.c_void_p()  # type: ignore[assignment]
    del graph

    def launch(handle: ctypes.c_void_p, stream: int) -> int:
        selection.close()  # as another thread may
        assert there() is not None
        return 0

    selection._launch = launch
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    selection.run()
    assert there() is None
    with pytest.raises(RuntimeError, match="closed"):
        selection.run()


def test_the_example() -> None:
    assert doctest.testmod(_plan, extraglobs={"torch": torch}).failed == 0
