from __future__ import annotations

import numpy as np
import pytest

from topkd import _arrays
from topkd._output import check_given, check_overlaps
from topkd.errors import ArgumentTypeError, ArgumentValueError

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
