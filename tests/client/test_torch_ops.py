"""Remote selections in compiled code, by a server on the CPU; `tests/e2e/test_gpu_compile.py` does it on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.library import opcheck

import topkd
from tests.compiled import BACKENDS, QUIET, compiled_anew
from topkd import torch_ops

ROWS, WIDTH, K = 3, 24, 4


pytestmark = QUIET


fresh = pytest.fixture(autouse=True)(compiled_anew)


@pytest.fixture
def memory(client: topkd.Client) -> dict[str, torch.Tensor]:
    """Scores and lengths in session memory."""
    tensors = {
        "scores": client.empty((ROWS, WIDTH), torch.float32),
        "lengths": client.empty(ROWS, torch.int32),
    }
    tensors["scores"].copy_(torch.randn(ROWS, WIDTH))
    tensors["lengths"].fill_(WIDTH)
    return tensors


@pytest.fixture(params=["request", "lane"])
def select(request: pytest.FixtureRequest, plan: topkd.Plan) -> Iterator[torch_ops.PlanOperator]:
    """An operator of the plan, either way."""
    if request.param == "request":
        yield torch_ops.PlanOperator(plan)
        return
    with plan.lane() as lane:
        yield torch_ops.PlanOperator(plan, lane)


@pytest.fixture
def plan(client: topkd.Client, memory: dict[str, torch.Tensor]) -> Iterator[topkd.Plan]:
    options: Any = {"order": "value", "ties": "lowest", "values": True}
    with client.plan(memory["scores"], K, lengths=memory["lengths"], **options) as plan:
        yield plan


def best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = scores.sort(dim=1, descending=True, stable=True)
    return found.indices[:, :K].int(), found.values[:, :K]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_in_compiled_code(select: torch_ops.PlanOperator, memory: dict[str, torch.Tensor], backend: str) -> None:
    @torch.compile(fullgraph=True, backend=backend)
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = select.new(input=x * 2)  # copied to the plan's memory
        memory["scores"].copy_(x * -3)  # written there by the graph
        second = select()
        return first.indices, first.values, second.indices + 0, second.values + 0

    for _ in range(3):
        x = torch.randn(ROWS, WIDTH)
        got = step(x)
        for one, want in zip(got, (*best(x * 2), *best(x * -3)), strict=True):
            assert torch.equal(one, want)
        assert torch.equal(memory["scores"], x * -3)
        assert torch.equal(select.indices, got[2])


def test_one_function_for_several_plans(client: topkd.Client) -> None:
    step = torch.compile(lambda select, x: select.new(input=x).indices, fullgraph=True, backend="aot_eager")
    counts = [2, 3, 4, 3, 2]
    plans = [client.plan(client.empty((ROWS, WIDTH), torch.float32), k, order="value") for k in counts]
    selects = [torch_ops.PlanOperator(plan) for plan in plans]
    for _ in range(2):
        for select, k in zip(selects, counts, strict=True):
            x = torch.randn(ROWS, WIDTH)
            assert torch.equal(step(select, x), x.topk(k).indices.int())


def test_the_graph_sees_what_a_call_writes(select: torch_ops.PlanOperator, memory: dict[str, torch.Tensor]) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before = select.inputs["input"] + 1
        result = select(input=x)
        after = select.inputs["input"] + 0  # the plan's memory holds x now
        taken = result.indices + 0
        select(input=-x)
        return before, after, taken, result.indices  # the plan's own: of the last call

    old, x = memory["scores"].clone(), torch.randn(ROWS, WIDTH)
    before, after, taken, last = step(x)
    assert torch.equal(before, old + 1)
    assert torch.equal(after, x)
    assert torch.equal(taken, best(x)[0])
    assert torch.equal(last, best(-x)[0])
    assert torch.equal(memory["scores"], -x)


def test_a_plan_outside_of_a_graph(
    select: torch_ops.PlanOperator, plan: topkd.Plan, memory: dict[str, torch.Tensor]
) -> None:
    assert list(select.inputs) == ["input", "lengths"]
    result = select()
    assert result.indices is select.indices
    assert result.kernel == plan.kernel
    assert torch.equal(result.indices, best(memory["scores"])[0])
    short = select.new(lengths=torch.full((ROWS,), 2, dtype=torch.int32))
    assert short.indices[:, 2:].eq(-1).all()
    assert memory["lengths"].tolist() == [2] * ROWS


def test_the_operators_are_as_torch_expects(
    client: topkd.Client, plan: topkd.Plan, memory: dict[str, torch.Tensor]
) -> None:
    select = torch_ops.PlanOperator(plan)
    outputs = [torch.empty_like(select.indices), torch.empty_like(select.values)]
    given = [memory["scores"], torch.full((ROWS,), 5, dtype=torch.int32)]
    for operator in (torch.ops.topkd.run_plan.default, torch.ops.topkd.run_lane.default):
        opcheck(operator, (select._number, given, [1], [memory["lengths"]], outputs))
    remote = torch_ops.ClientOperator(client)
    options = {**torch_ops._DEFAULTS, "order": "value", "values": True, "family": "auto"}
    for name in ("kernel", "out_indices", "out_values"):
        del options[name]
    for scores in (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH, requires_grad=True)):
        opcheck(torch.ops.topkd.select_remotely.default, (remote._number, scores, K), options)
    opcheck(torch.ops.topkd.select_remotely_out.default, (remote._number, scores.detach(), K, *outputs), options)


def test_any_selection_in_compiled_code(client: topkd.Client) -> None:
    remote = torch_ops.ClientOperator(client)
    out = torch.zeros(ROWS, K, dtype=torch.int64)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        best = remote.select_topk(x + 1, K, order="value", values=True)
        remote.select_topk(
            x, K, lengths=lengths, largest=False, order="index", index_dtype=torch.int64, out_indices=out
        )
        return best.indices, best.values * 2

    x = torch.randn(ROWS, WIDTH)
    indices, values = step(x, torch.tensor([0, 2, WIDTH], dtype=torch.int32))
    assert torch.equal(indices, best(x + 1)[0])
    assert torch.equal(values, best(x + 1)[1] * 2)
    assert out[:2].tolist() == [[-1] * K, [0, 1, -1, -1]]
    assert torch.equal(out[2], x[2].topk(K, largest=False).indices.sort().values)
    for given in ({"values": True, "out_indices": out.int()}, {"out_values": torch.zeros(ROWS, K), "values": True}):
        result = remote.select_topk(x, K, order="value", **given)
        assert torch.equal(result.indices, best(x)[0])
        assert torch.equal(result.values, best(x)[1])


def test_bad_arguments_name_what_is_wrong(client: topkd.Client, plan: topkd.Plan) -> None:
    select = torch_ops.PlanOperator(plan)
    for wrong, kind, name in (
        ({"row_starts": torch.zeros(ROWS, dtype=torch.int32)}, topkd.ArgumentTypeError, "row_starts"),
        ({"input": torch.zeros(ROWS, WIDTH, dtype=torch.float16)}, topkd.ArgumentTypeError, "input"),
        ({"lengths": torch.zeros(ROWS + 1, dtype=torch.int32)}, topkd.ArgumentValueError, "lengths"),
    ):
        with pytest.raises(kind, match=name):
            select(**wrong)
    with pytest.raises(Exception, match="lengths is of shape"):
        torch.compile(lambda x: select.new(lengths=x).indices, fullgraph=True, backend="eager")(
            torch.zeros(1, dtype=torch.int32)
        )
    for given in (client, "plan", None):
        with pytest.raises(topkd.ArgumentTypeError, match="plan must be"):
            torch_ops.PlanOperator(given)  # type: ignore[arg-type]
    with pytest.raises(topkd.ArgumentTypeError, match="client must be"):
        torch_ops.ClientOperator(plan)  # type: ignore[arg-type]
    for lane in (5, plan):
        with pytest.raises(topkd.ArgumentTypeError, match="lane must be"):
            torch_ops.PlanOperator(plan, lane)  # type: ignore[arg-type]
    for given in (None, 5, np.zeros((ROWS, WIDTH), np.float32)):
        with pytest.raises(topkd.ArgumentTypeError, match="input must be") as caught:
            select(input=given)
        assert caught.value.argument == "input"
    with (
        plan.lane() as lane,
        client.plan(select.inputs["input"], K) as other,
        pytest.raises(topkd.ArgumentValueError, match="none of the lane's"),
    ):
        torch_ops.PlanOperator(other, lane)
    scores = client.empty((ROWS, WIDTH), "float32")
    with client.plan(scores, K) as of_arrays, pytest.raises(topkd.ArgumentTypeError, match="numpy"):
        torch_ops.PlanOperator(of_arrays)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", "2"),
        ("k", 2.0),
        ("k", True),
        ("input", None),
        ("input", np.zeros((ROWS, WIDTH), np.float32)),
        ("lengths", [1] * ROWS),
        ("out_indices", np.zeros((ROWS, K), np.int32)),
        ("order", 5),
        ("kernel", None),
        ("largest", 1),
        ("index_dtype", "int32"),
    ],
)
def test_wrong_types_of_any_selection_are_told_by_name(client: topkd.Client, name: str, value: object) -> None:
    arguments: dict[str, Any] = {"input": torch.zeros(ROWS, WIDTH), "k": K, name: value}
    with pytest.raises(topkd.ArgumentTypeError, match=name) as caught:
        torch_ops.ClientOperator(client).select_topk(**arguments)
    assert caught.value.argument == name


@pytest.mark.parametrize("name", ["sorted", "timeout", "family"])
def test_an_option_that_there_is_not_is_told(client: topkd.Client, name: str) -> None:
    arguments: Any = {name: "torch"}
    with pytest.raises(TypeError, match=name):
        torch_ops.ClientOperator(client).select_topk(torch.zeros(ROWS, WIDTH), K, **arguments)


def test_errors_of_a_call_come_out_of_a_graph(client: topkd.Client, memory: dict[str, torch.Tensor]) -> None:
    plan = client.plan(memory["scores"], K)
    select = torch_ops.PlanOperator(plan)
    step = torch.compile(lambda: select.new().indices, fullgraph=True, backend="aot_eager")
    step()
    plan.close()
    with pytest.raises(topkd.ClientClosedError, match="plan is closed"):
        step()


def test_an_operator_that_was_dropped_is_told(client: topkd.Client) -> None:
    number = torch_ops.ClientOperator(client)._number
    gc.collect()
    options = {
        name: value
        for name, value in torch_ops._DEFAULTS.items()
        if name not in ("kernel", "out_indices", "out_values")
    }
    with pytest.raises(topkd.ClientClosedError, match="ClientOperator that this graph was made with is gone"):
        torch.ops.topkd.select_remotely(number, torch.zeros(1, 8), 1, **options, family="auto")


def test_modes(client: topkd.Client, plan: topkd.Plan, memory: dict[str, torch.Tensor]) -> None:
    select, remote = torch_ops.PlanOperator(plan), torch_ops.ClientOperator(client)
    with torch.inference_mode():
        assert torch.equal(select.new().indices, best(memory["scores"])[0])
    scores = torch.randn(ROWS, WIDTH, requires_grad=True)
    values = remote.select_topk(scores, K, values=True).values
    with pytest.raises(RuntimeError, match="does not require grad"):
        values.sum().backward()
    assert not select.new(input=scores).values.requires_grad
    with pytest.raises(RuntimeError, match="cannot be mapped by vmap"):
        torch.vmap(lambda x: remote.select_topk(x, 2).indices)(torch.randn(2, ROWS, WIDTH))
