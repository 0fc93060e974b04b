"""`select_topk` and `merge_topk` as torch's operators: in compiled code, exported, and under torch's modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.library import opcheck

from tests.compiled import BACKENDS, QUIET, compiled_anew
from topkd.kernels import merge_topk, select_topk

pytestmark = QUIET

PLAIN: dict[str, Any] = {
    "lengths": None,
    "next_n": 1,
    "max_length": None,
    "row_starts": None,
    "group": 1,
    "pooled": False,
    "pin_newest": False,
    "drop_neg_inf": None,
    "expand": False,
    "largest": True,
    "order": "any",
    "ties": "any",
    "values": False,
    "index_dtype": torch.int32,
    "row_offsets": None,
    "page_table": None,
    "page_size": 1,
    "row_to_table": None,
    "table_starts": None,
    "family": "auto",
}


fresh = pytest.fixture(autouse=True)(compiled_anew)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"values": True, "order": "value"},
        {"lengths": ints(3, 9), "max_length": 8, "row_starts": ints(1, 2), "index_dtype": torch.int64, "values": True},
        {"lengths": ints(30), "next_n": 2, "group": 4, "expand": True, "pin_newest": True, "row_offsets": ints(5, 7)},
        {"lengths": ints(9, 24), "page_table": ints(4, 5, 6, 7).view(1, 4), "page_size": 8, "row_to_table": ints(0, 0)},
        {"largest": False, "ties": "highest", "family": "torch"},
    ],
)
def test_the_operators_are_as_torch_expects(options: dict[str, Any]) -> None:
    scores = torch.randn(2, 24)
    for given in (scores, scores.bfloat16(), torch.randn(2, 24, requires_grad=True)):
        opcheck(torch.ops.topkd.select_topk.default, (given, 3), {**PLAIN, **options})
    found = select_topk(scores, 3, **{"kernel" if name == "family" else name: one for name, one in options.items()})
    outputs = {
        "out_indices": torch.empty_like(found.indices),
        "out_values": None if found.values is None else torch.empty_like(found.values),
    }
    opcheck(torch.ops.topkd.select_topk_out.default, (scores, 3), {**PLAIN, **options, **outputs})


def test_the_merge_is_as_torch_expects() -> None:
    values, indices = torch.randn(2, 9), torch.arange(18, dtype=torch.int32).view(2, 9)
    opcheck(torch.ops.topkd.merge_topk.default, (values, indices, 3, True, "value", "any"))
    outputs = torch.empty(2, 3, dtype=torch.int32), torch.empty(2, 3)
    opcheck(torch.ops.topkd.merge_topk_out.default, (values, indices, 3, *outputs, True, "value", "any"))


def step(scores: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
    best = select_topk(scores * 2, 3, lengths=lengths, values=True, order="value", ties="lowest")
    assert best.values is not None
    merged = merge_topk(best.values, best.indices, 2, order="value", ties="lowest")
    assert merged.values is not None
    return best.indices + 1, best.values, merged.indices, merged.values


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_code_gives_the_same(backend: str) -> None:
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for rows in (2, 5, 9):  # the second compiles anew, for any number of rows
        scores, lengths = torch.randn(rows, 24), torch.randint(0, 25, (rows,), dtype=torch.int32)
        for got, want in zip(compiled(scores, lengths), step(scores, lengths), strict=True):
            assert torch.equal(got, want)


def test_outputs_are_written_in_compiled_code() -> None:
    indices, values = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def write(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {"out_indices": indices, "out_values": values, "index_dtype": torch.int64}
        both = select_topk(scores, 3, values=True, order="value", **given)
        first = both.indices + 0, values + 0
        merge_topk(scores, torch.arange(48).view(2, 24), 3, order="value", out_values=values)
        only = select_topk(scores, 3, values=True, largest=False, order="value", out_values=values)
        return (
            *first,
            both.indices,
            only.indices,
            select_topk(scores, 3, order="index", out_indices=only.indices).indices,
        )

    scores = torch.randn(2, 24)
    first_indices, first_values, same, least, ascending = write(scores)
    most = scores.topk(3)
    assert torch.equal(first_indices, most.indices)
    assert torch.equal(first_values, most.values)
    assert torch.equal(same, indices)
    assert torch.equal(values, scores.topk(3, largest=False).values)
    assert torch.equal(ascending, most.indices.int().sort().values)
    assert torch.equal(least, ascending)


def test_a_graph_can_be_exported() -> None:
    class Selects(torch.nn.Module):
        def forward(self, scores: torch.Tensor) -> torch.Tensor:
            return select_topk(scores, 3, order="value").indices

    scores = torch.randn(2, 24)
    exported = torch.export.export(Selects(), (scores,))
    assert "topkd.select_topk" in str(exported.graph)
    assert torch.equal(exported.module()(scores), scores.topk(3).indices.int())


def test_wrong_arguments_are_named_while_a_graph_is_traced() -> None:
    scores = torch.randn(2, 24)
    for options, name in (
        ({"group": 3}, "group is 3"),
        ({"lengths": ints(1)}, "lengths is a tensor of shape"),
        ({"out_indices": torch.zeros(2, 4, dtype=torch.int32)}, "out_indices is a tensor of shape"),
    ):
        compiled = torch.compile(lambda x, given: select_topk(x, 3, **given), fullgraph=True, backend="eager")
        with pytest.raises(Exception, match=name):
            compiled(scores, options)


def test_autograd_goes_through_the_indices_only() -> None:
    def loss(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = select_topk(scores, 3, values=True, index_dtype=torch.int64)
        assert best.values is not None
        return scores.gather(1, best.indices).sum(), best.values

    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        scores = torch.randn(2, 24, requires_grad=True)
        total, values = function(scores)
        total.backward()
        assert scores.grad is not None
        assert scores.grad.sum() == 6
        with pytest.raises(RuntimeError, match="does not require grad"):
            values.sum().backward()


def test_inference_mode() -> None:
    scores = torch.randn(2, 24)
    with torch.inference_mode():
        found = torch.compile(lambda x: select_topk(x, 3).indices, fullgraph=True, backend="aot_eager")(scores)
    assert torch.equal(found.sort().values, scores.topk(3).indices.int().sort().values)


@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_is_refused(compiled: bool) -> None:
    mapped = torch.vmap(lambda x: select_topk(x, 2).indices)
    if compiled:
        mapped = torch.compile(mapped, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="cannot be mapped by vmap: its rows are a batch already"):
        mapped(torch.randn(2, 3, 24))
    with pytest.raises(RuntimeError, match="merge_topk cannot be mapped"):
        torch.vmap(lambda x: merge_topk(x, torch.zeros(3, 24, dtype=torch.int32), 2).indices)(torch.randn(2, 3, 24))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_deterministic_mode_asks_for_one_answer(compiled: bool) -> None:
    def select(scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ids = torch.arange(9, dtype=torch.int32).expand(1, 9).contiguous()
        return (
            select_topk(scores, 3).indices,
            select_topk(scores, 3, ties="highest").indices,
            merge_topk(scores, ids, 3).indices,
        )

    function = torch.compile(select, fullgraph=True, backend="eager") if compiled else select
    scores = torch.tensor([[1.0, 5, 1, 1, 0, 0, 0, 1, 0]])
    torch.use_deterministic_algorithms(True)
    try:
        lowest, highest, merged = function(scores)
    finally:
        torch.use_deterministic_algorithms(False)
    assert lowest.tolist() == [[0, 1, 2]]
    assert highest.tolist() == [[1, 3, 7]]
    assert merged.tolist() == [[0, 1, 2]]
