from __future__ import annotations

import numpy as np
import pytest
import torch

from topkd import _arrays, kernels
from topkd._output import Output, check_given, check_overlaps
from topkd._placer import Prepared
from topkd.errors import ArgumentTypeError, ArgumentValueError, ProtocolError
from topkd.v1 import selection_pb2

BUFFER = np.zeros((8, 64), np.int32)
INT32 = _arrays.CODES["int32"]


def entry(place: int, name: str, array: np.ndarray) -> tuple[int, str, _arrays.View]:
    return place, name, _arrays.describe(name, array)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BUFFER[:4], BUFFER[4:]),
        (BUFFER[:, :32], BUFFER[:, 32:]),
        (BUFFER[:, 40:], BUFFER[:, 8:40]),
        (BUFFER[:0], BUFFER),
        (BUFFER[0], BUFFER[1]),
    ],
)
def test_what_is_apart(first: np.ndarray, second: np.ndarray) -> None:
    check_overlaps([entry(0, "out_indices", first), entry(1, "out_indices", second)])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BUFFER, BUFFER),
        (BUFFER[:5], BUFFER[4:]),
        (BUFFER[:, :33], BUFFER[:, 32:]),
        (BUFFER[:, 32:], BUFFER[:, :33]),
        (BUFFER[2], BUFFER),
        (BUFFER[:, :4], BUFFER[:, 3:5]),
    ],
)
def test_what_overlaps(first: np.ndarray, second: np.ndarray) -> None:
    with pytest.raises(ArgumentValueError, match="overlaps") as caught:
        check_overlaps([entry(0, "input", first), entry(1, "out_indices", second)])
    assert (caught.value.argument, caught.value.selection) == ("out_indices", 1)


def _in_process(scores: list[torch.Tensor], outputs: tuple[torch.Tensor, torch.Tensor], one: bool) -> None:
    if one:
        kernels.validate_select(scores[0], 4, values=True, out_indices=outputs[0], out_values=outputs[1])
        return
    requests = [
        kernels.validate_select(scores[0], 4, values=True, out_indices=outputs[0]),
        kernels.validate_select(scores[1], 4, values=True, out_values=outputs[1]),
    ]
    kernels.check_batch_overlap(requests)


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("places", [(0, 0), (0, 1)])
def test_the_blamed_output_is_that_of_the_kernels(first: int, second: int, places: tuple[int, int]) -> None:
    block = np.zeros((4, 4), np.int32)
    indices, values = block[first : first + 3], block[second : second + 3].view(np.float32)
    scores = [torch.zeros(3, 9) for _ in range(2)]
    outputs = (torch.from_numpy(indices), torch.from_numpy(values))
    with pytest.raises(ArgumentValueError) as ours:
        check_overlaps([entry(places[0], "out_indices", indices), entry(places[1], "out_values", values)])
    with pytest.raises(kernels.ArgumentValueError) as theirs:
        _in_process(scores, outputs, places[0] == places[1])
    assert (ours.value.argument, ours.value.selection) == (theirs.value.argument, theirs.value.selection)


def test_inputs_may_overlap() -> None:
    check_overlaps([entry(0, "input", BUFFER), entry(1, "input", BUFFER)])


def test_given_outputs_are_checked_where_the_server_cannot_see_them() -> None:
    view = _arrays.describe("out_indices", BUFFER[:2, :4])
    check_given("out_indices", view, (INT32, (2, 4)), 0)
    with pytest.raises(ArgumentValueError, match=r"must be \(2, 5\)"):
        check_given("out_indices", view, (INT32, (2, 5)), 0)
    with pytest.raises(ArgumentTypeError, match="must be int64"):
        check_given("out_indices", view, (_arrays.CODES["int64"], (2, 4)), 0)
    rows = np.lib.stride_tricks.as_strided(BUFFER, (2, 4), (8, 4))
    with pytest.raises(ArgumentValueError, match="overlap"):
        check_given("out_indices", _arrays.describe("out_indices", rows), (INT32, (2, 4)), 0)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_reply_has_a_result_for_each_entry(count: int) -> None:
    prepared = Prepared(selection_pb2.SelectTopKRequest())
    prepared.outputs = [Output("numpy", None, BUFFER, None, None, None)] * 2
    result = selection_pb2.SelectionResult(kernel="torch", device_time_ns=5)
    assert [one.kernel for one in prepared.results(selection_pb2.SelectTopKResponse(results=[result] * 2))] == [
        "torch"
    ] * 2
    with pytest.raises(ProtocolError, match=f"{count} results for 2"):
        prepared.results(selection_pb2.SelectTopKResponse(results=[result] * count))
