"""Which tensors overlap: exact on row-strided memory, against brute force, and fast on any size."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkd.kernels import ArgumentValueError, check_batch_overlap, merge_topk, select_topk, validate_select
from topkd.kernels._overlap import Span, _box, overlap


@st.composite
def spans(draw: st.DrawFn) -> Span:
    rows = draw(st.integers(1, 7))
    return Span(draw(st.integers(0, 60)), rows, draw(st.integers(1, 14)), draw(st.integers(1, 9)))


def bytes_of(span: Span) -> set[int]:
    return {span.start + row * span.stride + i for row in range(span.rows) for i in range(span.width)}


@given(a=spans(), b=spans())
def test_overlap_is_exact(a: Span, b: Span) -> None:
    shared = bool(bytes_of(a) & bytes_of(b))
    assert overlap(a, b) == shared
    assert overlap(b, a) == shared


def test_every_pair_of_small_strides() -> None:
    for stride in range(1, 9):
        for other in range(1, 9):
            for start in range(30):
                a, b = Span(10, 4, stride, 2), Span(start, 3, other, 1)
                assert overlap(a, b) == bool(bytes_of(a) & bytes_of(b)), (a, b)


def test_huge_progressions_take_no_time() -> None:
    begin = time.perf_counter()
    odd, even = Span(1, 2**40, 6 * 2**20, 1), Span(0, 2**40, 10 * 2**20, 1)
    assert not overlap(odd, even)
    assert overlap(Span(2**21, 2**40, 6 * 2**20, 1), even)  # 6 i + 2 = 10 j
    assert not overlap(Span(2**20, 2**40, 6 * 2**20, 1), even)  # 6 i + 1 = 10 j has no solution
    assert time.perf_counter() - begin < 0.5


def test_spans_of_tensors() -> None:
    memory = torch.zeros(64, dtype=torch.int16)
    at = memory.data_ptr()
    assert Span.of(memory[:0]) is None
    assert Span.of(memory.view(8, 8)[:, :0]) is None
    assert Span.of(memory[3:5]) == Span(at + 6, 1, 0, 4)
    assert Span.of(memory.view(8, 8)) == Span(at, 1, 0, 128)
    assert Span.of(memory.view(8, 8)[:, 2:4]) == Span(at + 4, 8, 16, 4)
    assert Span.of(memory[:8].expand(5, 8)) == Span(at, 1, 0, 16)
    assert Span.of(memory.as_strided((5, 8), (2, 1))) == Span(at, 1, 0, 32)
    assert Span.of(memory.as_strided((1, 8), (999, 1))) == Span(at, 1, 0, 16)


@given(rows=st.integers(0, 5), width=st.integers(0, 5), stride=st.integers(0, 9), offset=st.integers(0, 9))
def test_the_box_of_a_tensor_is_what_it_spans(rows: int, width: int, stride: int, offset: int) -> None:
    for tensor in (
        torch.zeros(64, dtype=torch.int16).as_strided((rows, width), (stride, 1), offset),
        torch.zeros(64, dtype=torch.int64)[offset : offset + width],
    ):
        span = Span.of(tensor)
        start, end = _box(tensor)
        assert (start, end) == (span.start, span.end) if span else start == end


def request(rows: int = 4, width: int = 16, k: int = 3, **options: Any) -> Any:
    return validate_select(torch.zeros(rows, width), k, **options)


def test_column_slices_of_one_buffer_do_not_overlap() -> None:
    buffer = torch.zeros(4, 12, dtype=torch.int32)
    batch = [request(out_indices=buffer[:, at : at + 3]) for at in (0, 3, 6, 9)]
    check_batch_overlap(batch)
    batch.append(request(out_indices=buffer[:, 5:8]))
    with pytest.raises(ArgumentValueError, match=r"out_indices of selection 4 .* overlaps out_indices of") as caught:
        check_batch_overlap(batch)
    assert (caught.value.argument, caught.value.selection) == ("out_indices", 4)


def test_outputs_of_one_request() -> None:
    memory = torch.zeros(64, dtype=torch.int32)
    indices, values = memory[:12].view(4, 3), memory.view(torch.float32)[11:23].view(4, 3)
    with pytest.raises(ArgumentValueError, match="overlaps") as caught:
        request(values=True, out_indices=indices, out_values=values)
    assert caught.value.argument in ("out_indices", "out_values")
    assert request(values=True, out_indices=indices, out_values=memory.view(torch.float32)[12:24].view(4, 3)).values


@pytest.mark.parametrize("name", ["lengths", "row_starts", "row_offsets"])
def test_outputs_over_vectors(name: str) -> None:
    memory = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(ArgumentValueError, match=name):
        request(out_indices=memory[:12].view(4, 3), **{name: memory[11:15]})
    request(out_indices=memory[:12].view(4, 3), **{name: memory[12:16]})


@pytest.mark.parametrize("name", ["page_table", "row_to_table", "table_starts"])
def test_outputs_over_tables(name: str) -> None:
    memory = torch.zeros(64, dtype=torch.int32)
    options: dict[str, Any] = {"page_table": torch.zeros(4, 2, dtype=torch.int32), "row_to_table": None}
    options[name] = memory[8:16].view(4, 2) if name == "page_table" else memory[11:15]
    with pytest.raises(ArgumentValueError, match=name):
        request(out_indices=memory[:12].view(4, 3), **options)


def test_outputs_between_the_rows_of_an_input() -> None:
    memory = torch.zeros(4, 20)
    out = memory.view(torch.int32)[:, 16:19]
    assert select_topk(memory[:, :16], 3, out_indices=out).indices is out
    with pytest.raises(ArgumentValueError, match="input"):
        select_topk(memory[:, :17], 3, out_indices=out)
    repeated = memory[0, :16].expand(4, 16)  # row stride 0
    select_topk(repeated, 3, out_indices=memory.view(torch.int32)[:, 16:19])
    with pytest.raises(ArgumentValueError, match="input"):
        select_topk(repeated, 3, out_indices=memory.view(torch.int32)[:, 15:18])


def test_inputs_may_be_shared() -> None:
    scores, lengths = torch.zeros(4, 16), torch.full((4,), 9, dtype=torch.int32)
    batch = [
        validate_select(scores, 3, lengths=lengths, out_indices=torch.zeros(4, 3, dtype=torch.int32)) for _ in range(50)
    ]
    check_batch_overlap(batch)


def test_an_output_over_another_selections_input() -> None:
    scores = torch.zeros(4, 16)
    bad = request(out_indices=scores.view(torch.int32)[:, 3:6])
    with pytest.raises(ArgumentValueError, match=r"selection 1 .* overlaps input of selection 0") as caught:
        check_batch_overlap([validate_select(scores, 3), bad])
    assert caught.value.selection == 1
    with pytest.raises(ArgumentValueError, match="overlaps input of selection 1") as caught:
        check_batch_overlap([bad, validate_select(scores, 3)])
    assert caught.value.selection == 0


def test_requests_without_outputs_or_bytes() -> None:
    check_batch_overlap([])
    check_batch_overlap([request(), request()])
    shared = torch.zeros(0, 3, dtype=torch.int32)
    check_batch_overlap([request(rows=0, out_indices=shared), request(rows=0, out_indices=shared)])


def test_merges() -> None:
    memory = torch.zeros(64, dtype=torch.int32)
    values, indices = torch.zeros(2, 6), memory[:12].view(2, 6)
    with pytest.raises(ArgumentValueError, match=r"out_indices .* overlaps indices"):
        merge_topk(values, indices, 2, out_indices=memory[11:15].view(2, 2))
    with pytest.raises(ArgumentValueError, match=r"out_values .* overlaps values"):
        merge_topk(values, indices, 2, out_values=values[:, :2])
