"""The oracle itself: examples worked by hand, every output of tiny rows enumerated, and right answers corrupted."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.data import indexer_rows
from tests.oracle import FORMATS, Case, MergeCase, check, check_merge, decode, expected, expected_merge

NAN, INF, DENORMAL = float("nan"), float("inf"), 2.0**-149


def f32(*rows: list[float]) -> Any:
    return np.array(rows, np.float32).view(np.uint32)


def case(*rows: list[float], k: int, **options: Any) -> Case:
    bits = f32(*rows)
    return Case(storage=bits.ravel(), dtype="float32", rows=len(rows), width=len(rows[0]), k=k, **options)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


SEVEN = [3.0, -INF, 5.0, 5.0, NAN, -0.0, 0.0]
BY_HAND = [
    ("value", case(SEVEN, k=4, order="value", ties="lowest", values=True), [[4, 2, 3, 0]], [[NAN, 5, 5, 3]]),
    ("index", case(SEVEN, k=4, order="index", ties="lowest"), [[0, 2, 3, 4]], None),
    ("lowest", case(SEVEN, k=2, order="index", ties="lowest"), [[2, 4]], None),
    ("highest", case(SEVEN, k=2, order="index", ties="highest"), [[3, 4]], None),
    ("zeros-tie-lowest", case(SEVEN, k=5, order="value", ties="lowest", values=True), [[4, 2, 3, 0, 5]], None),
    ("zeros-tie-highest", case(SEVEN, k=5, order="value", ties="highest"), [[4, 2, 3, 0, 6]], None),
    ("smallest", case(SEVEN, k=3, largest=False, order="value", ties="lowest"), [[1, 5, 6]], None),
    ("smallest-nan-last", case(SEVEN, k=7, largest=False, order="value"), [[1, 5, 6, 0, 2, 3, 4]], None),
    ("short", case(SEVEN, k=9, values=True), [[0, 1, 2, 3, 4, 5, 6, -1, -1]], [[*SEVEN, -INF, -INF]]),
    ("short-value", case([1, 2], k=3, order="value", values=True), [[1, 0, -1]], [[2, 1, -INF]]),
    ("short-smallest", case([1, 2], k=3, largest=False, order="value", values=True), [[0, 1, -1]], [[1, 2, INF]]),
    ("length", case(SEVEN, k=2, lengths=ints(3), order="index"), [[0, 2]], None),
    ("length-negative", case(SEVEN, k=2, lengths=ints(-5)), [[-1, -1]], None),
    ("length-huge", case(SEVEN, k=1, lengths=ints(2**31 - 1)), [[4]], None),
    ("max-length", case(SEVEN, k=1, max_length=2), [[0]], None),
    ("next-n", case([1, 2], [1, 2], [1, 2], k=2, lengths=ints(1), next_n=3), [[-1, -1], [-1, -1], [0, -1]], None),
    ("start", case(SEVEN, k=1, row_starts=ints(5), values=True, ties="lowest", order="value"), [[0]], [[-0.0]]),
    ("start-past", case(SEVEN, k=1, row_starts=ints(99)), [[-1]], None),
    ("start-negative", case(SEVEN, k=1, row_starts=ints(-9), lengths=ints(2)), [[0]], None),
    ("start-length", case(SEVEN, k=2, row_starts=ints(1), lengths=ints(9)), None, None),
    ("group", case(SEVEN, k=2, group=2, order="value", values=True), [[2, 1]], [[NAN, 5]]),
    ("group-partial", case(SEVEN, k=4, group=2, order="value", values=True), [[2, 1, 0, 3]], [[NAN, 5, 3, 0.0]]),
    ("pooled", case([1, 9, 3], k=1, group=4, pooled=True, lengths=ints(9)), [[1]], None),
    ("pooled-short", case([1, 9, 3], k=3, group=4, pooled=True, lengths=ints(5)), [[0, 1, -1]], None),
    (
        "pin",
        case([1, NAN, INF, 0], k=3, pin_newest=True, order="value", values=True),
        [[3, 1, 2]],
        [[INF, NAN, INF]],
    ),
    ("pin-one", case([1, 2, -INF], k=1, pin_newest=True, drop_neg_inf=True, values=True), [[2]], [[INF]]),
    ("drop", case([-INF, 2, -INF], k=2, drop_neg_inf=True, order="index", values=True), [[1, -1]], [[2, -INF]]),
    ("drop-short", case([-INF, 2, -INF], k=4, drop_neg_inf=True, order="index"), [[1, -1, -1, -1]], None),
    ("drop-default-group", case([-INF, -INF, 2], k=2, group=2, order="index"), [[1, -1]], None),
    ("drop-off", case([-INF, -INF, 2], k=2, group=2, drop_neg_inf=False), [[0, 1]], None),
    ("expand", case(SEVEN, k=2, group=2, expand=True, order="index"), [[2, 3, 4, 5]], None),
    ("expand-partial", case([1, 2, 3], k=1, group=2, expand=True), [[2, -1]], None),
    (
        "expand-drop",
        case([-INF, -INF, 2], k=3, group=2, expand=True, order="value"),
        [[2, -1, -1, -1, -1, -1]],
        None,
    ),
    ("offset", case([1, 2], k=1, row_offsets=ints(40)), [[41]], None),
    ("offset-overflow", case([1, 2], k=1, row_offsets=ints(2**31 - 1), values=True), [[-1]], [[-INF]]),
    ("offset-below", case([1, 2], k=2, row_offsets=ints(-1)), [[-1, 0]], None),
    (
        "page",
        case([1, 2, 9, 3], k=2, page_table=np.array([[7, 4]], np.int32), page_size=2, order="value"),
        [[8, 9]],
        None,
    ),
    (
        "page-bad",
        case([1, 2, 9, 3], k=4, page_table=np.array([[-7, 4]], np.int32), page_size=2, values=True),
        [[-1, -1, 8, 9]],
        [[-INF, -INF, 9, 3]],
    ),
    ("page-start", case([1, 2], k=1, page_table=np.array([[7, 4]], np.int32), table_starts=ints(-1)), [[7]], None),
    ("page-row", case([1, 2], k=1, page_table=np.array([[7, 4], [5, 3]], np.int32), row_to_table=ints(1)), [[3]], None),
    ("page-row-bad", case([1, 2], k=1, page_table=np.array([[7, 4]], np.int32), row_to_table=ints(-1)), [[-1]], None),
    ("subnormals", case([0.0, DENORMAL, 2 * DENORMAL], k=2, order="value"), [[2, 1]], None),
    (
        "negative-nan",
        Case(storage=np.array([0x7F80, 0xFF81], np.uint16), dtype="bfloat16", rows=1, width=2, k=1),
        [[1]],
        None,
    ),
    ("no-rows", Case(storage=np.zeros(0, np.uint16), dtype="float16", rows=0, width=5, k=2), np.zeros((0, 2)), None),
    ("no-width", Case(storage=np.zeros(0, np.uint16), dtype="float16", rows=1, width=0, k=2), [[-1, -1]], None),
    (
        "overlapping",
        Case(storage=f32([1, 2, 9])[0], dtype="float32", rows=2, width=2, row_stride=1, k=1),
        [[1], [1]],
        None,
    ),
]


@pytest.mark.parametrize(("request_", "indices", "values"), [pytest.param(*one[1:], id=one[0]) for one in BY_HAND])
def test_examples_by_hand(request_: Case, indices: Any, values: Any) -> None:
    if indices is None:  # window 1 .. 6 of SEVEN: NaN at 3, then one of the fives
        for first in (1, 2):
            check(request_, ints(3, first)[None], None)
        return
    want = expected(request_)
    assert want.indices.tolist() == np.asarray(indices).tolist()
    if values is not None:
        assert want.values is not None
        assert want.values.tolist() == f32(*values).tolist()
    check(request_, want.indices, want.values)


def test_decode_knows_every_pattern() -> None:
    half = np.arange(65536).astype(np.uint16)
    np.testing.assert_array_equal(decode(half, "float16"), half.view(np.float16).astype(np.float64))
    single = half.astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):  # signalling NaN
        np.testing.assert_array_equal(decode(half, "bfloat16"), single.view(np.float32).astype(np.float64))
        np.testing.assert_array_equal(decode(single, "float32"), single.view(np.float32).astype(np.float64))
    assert decode(np.array([1], np.uint32), "float32").tolist() == [DENORMAL]
    for layout, quiet in (
        (FORMATS["bfloat16"], 0x7FC0),
        (FORMATS["float16"], 0x7E00),
        (FORMATS["float32"], 0x7FC00000),
    ):
        assert layout.nan == quiet


def legal_outputs(request_: Case) -> set[tuple[int, ...]]:
    """Every row of indices that the check accepts, of all there are."""
    accepted = set()
    for row in itertools.product(range(-1, request_.width), repeat=request_.k):
        try:
            check(request_, np.array([row], np.int32), None)
        except AssertionError:
            continue
        accepted.add(row)
    return accepted


TWO_TIED = [7.0, 5.0, 5.0, 1.0]
ENUMERATED = [
    ("any", case(TWO_TIED, k=2), {(0, 1), (1, 0), (0, 2), (2, 0)}),
    ("any-lowest", case(TWO_TIED, k=2, ties="lowest"), {(0, 1), (1, 0)}),
    ("any-highest", case(TWO_TIED, k=2, ties="highest"), {(0, 2), (2, 0)}),
    ("index", case(TWO_TIED, k=2, order="index"), {(0, 1), (0, 2)}),
    ("value-reversed", case(TWO_TIED[::-1], k=2, order="value"), {(3, 1), (3, 2)}),
    ("value-ascends", case(TWO_TIED, k=3, order="value"), {(0, 1, 2)}),
    ("any-short", case(TWO_TIED, k=4), {(0, 1, 2, 3)}),
    ("any-three", case(TWO_TIED, k=3), set(itertools.permutations((0, 1, 2)))),
    ("dropped-any", case([-INF, 2, -INF, -INF], k=2, drop_neg_inf=True), {(1, -1), (-1, 1)}),
    ("dropped-index", case([-INF, 2, -INF, -INF], k=2, drop_neg_inf=True, order="index"), {(1, -1)}),
    (
        "dropped-short",
        case([1, -INF, 2], k=4, drop_neg_inf=True),
        {(0, 2, -1, -1), (0, -1, 2, -1), (-1, 0, 2, -1)},
    ),
    ("pinned", case([9, 9, 1], k=2, pin_newest=True), {(0, 2), (2, 0), (1, 2), (2, 1)}),
    ("pinned-value", case([9, 9, 1], k=2, pin_newest=True, order="value"), {(2, 0), (2, 1)}),
    ("smallest", case(TWO_TIED, k=2, largest=False, order="value"), {(3, 1), (3, 2)}),
    (
        "page-table-not-injective",
        case([5, 5, 5, 9], k=2, page_table=ints(2, 2, 1, 0)[None], order="index"),
        {(2, 0), (1, 0)},
    ),
    ("page-table-all-bad", case([5, 5, 5, 9], k=2, page_table=ints(-2, -2, -1, 0)[None]), {(-1, 0), (0, -1)}),
]


@pytest.mark.parametrize(("request_", "legal"), [pytest.param(*one[1:], id=one[0]) for one in ENUMERATED])
def test_exactly_the_legal_outputs_pass(request_: Case, legal: set[tuple[int, ...]]) -> None:
    assert legal_outputs(request_) == legal
    unique = expected(request_).unique == [True]
    assert unique == (len(legal) == 1)


ROWS = np.random.default_rng(3).integers(0, 12, (3, 40)).astype(np.float32)
ROWS[1, ::3] = -INF
CORRUPTED = [
    ("any", {}),
    ("any-values", {"values": True}),
    ("lowest", {"ties": "lowest", "values": True}),
    ("highest-index", {"ties": "highest", "order": "index"}),
    ("value", {"order": "value", "values": True}),
    ("smallest", {"order": "value", "values": True, "largest": False}),
    ("short", {"lengths": ints(3, 0, 40)}),
    ("dropped", {"drop_neg_inf": True, "values": True, "lengths": ints(40, 7, 9)}),
    ("pinned", {"pin_newest": True, "values": True, "order": "index"}),
    ("group", {"group": 4, "order": "value", "values": True}),
    ("expand", {"group": 4, "expand": True}),
    ("paged", {"page_table": np.arange(60, dtype=np.int32)[::-1].reshape(3, 20), "page_size": 2, "order": "index"}),
    ("offsets", {"row_offsets": ints(100, -3, 7), "values": True}),
]


@pytest.mark.parametrize("options", [pytest.param(one[1], id=one[0]) for one in CORRUPTED])
def test_every_corruption_is_rejected(options: dict[str, Any]) -> None:
    request_ = Case(storage=ROWS.view(np.uint32).ravel(), dtype="float32", rows=3, width=40, k=8, **options)
    want = expected(request_)
    check(request_, want.indices, want.values)
    rejected = 0
    for row, column in itertools.product(range(request_.rows), range(request_.columns)):
        for wrong in wrong_indices(request_, want.indices, row, column):
            with pytest.raises(AssertionError, match=rf"row {row}.*column"):
                check(request_, wrong, want.values)
            rejected += 1
    for row, column in itertools.product(range(request_.rows), range(request_.k)):
        if want.values is not None:
            wrong = want.values.copy()
            wrong[row, column] ^= 1
            with pytest.raises(AssertionError, match=rf"row {row}"):
                check(request_, want.indices, wrong)
            rejected += 1
    assert rejected > 40


def wrong_indices(request_: Case, right: Any, row: int, column: int) -> list[Any]:
    """Outputs with one index that is out of the window, repeated, or missing."""
    made = []
    for bad in (request_.width * 1000, -2, right[row, (column + 1) % request_.columns], -1):
        wrong = right.copy()
        wrong[row, column] = bad
        if (wrong != right).any():
            made.append(wrong)
    return made


def test_wrong_member_is_rejected() -> None:
    request_ = case([9, 8, 7, 6, 5], k=2)
    with pytest.raises(AssertionError, match=r"row 0 .*column 1: got index 2, which is not selected.*index 1"):
        check(request_, ints(0, 2)[None], None)


@pytest.mark.parametrize("order", ["index", "value"])
@pytest.mark.parametrize("ties", ["any", "lowest", "highest"])
def test_swapped_columns_are_rejected(order: str, ties: str) -> None:
    request_ = Case(
        storage=ROWS.view(np.uint32).ravel(), dtype="float32", rows=3, width=40, k=8, order=order, ties=ties
    )
    for row, column in itertools.product(range(3), range(7)):
        wrong = expected(request_).indices
        wrong[row, [column, column + 1]] = wrong[row, [column + 1, column]]
        with pytest.raises(AssertionError, match=rf"row {row}.*(order|column)"):
            check(request_, wrong, None)


def test_the_other_ties_are_rejected() -> None:
    names, bits, _ = indexer_rows()
    assert len(names) == len(bits) == 10
    request_ = Case(
        storage=bits[0], dtype="bfloat16", rows=1, width=bits.shape[1], k=2048, order="index", ties="lowest"
    )
    other = expected(replace(request_, ties="highest"))
    check(replace(request_, ties="any"), other.indices, None)
    with pytest.raises(AssertionError, match=r"row 0.*column"):
        check(request_, other.indices, None)


def test_shapes_and_dtypes_are_checked() -> None:
    request_ = case([1, 2, 3], k=2, values=True)
    want = expected(request_)
    for indices, values in (
        (want.indices.astype(np.int64), want.values),
        (want.indices[:, :1], want.values),
        (want.indices, None),
        (want.indices, want.values.view(np.float32) if want.values is not None else None),
    ):
        with pytest.raises(AssertionError, match=r"(indices|values): want"):
            check(request_, indices, values)
    with pytest.raises(AssertionError, match="not asked for"):
        check(replace(request_, values=False), want.indices, want.values)


# -------------------------------------------------------------------------------------------------------------- merges


def merge(values: list[float], indices: list[int], k: int, **options: Any) -> MergeCase:
    return MergeCase(values=f32(values), indices=np.array([indices], np.int64), dtype="float32", k=k, **options)


MERGED = [
    ("value", merge([1, 9, 5], [10, 20, 30], 2, order="value"), [20, 30], [9, 5]),
    ("index", merge([1, 9, 5], [30, 20, 10], 2, order="index"), [10, 20], [5, 9]),
    ("none", merge([9, 9, 9], [-1, 2, -1], 2, order="value"), [2, -1], [9, -INF]),
    ("smallest-padded", merge([9, NAN], [4, 3], 3, order="value", largest=False), [4, 3, -1], [9, NAN, INF]),
    ("lowest", merge([5, 5, 5], [30, 10, 20], 2, order="value", ties="lowest"), [10, 20], [5, 5]),
    ("highest", merge([5, 5, 5], [30, 10, 20], 2, order="value", ties="highest"), [20, 30], [5, 5]),
    ("twice", merge([5, 5, 1], [7, 7, 8], 2, order="index"), [7, 7], [5, 5]),
    ("nan-first", merge([INF, NAN], [1, 2], 1), [2], [NAN]),
]


@pytest.mark.parametrize(("request_", "indices", "values"), [pytest.param(*one[1:], id=one[0]) for one in MERGED])
def test_merges_by_hand(request_: MergeCase, indices: list[int], values: list[float]) -> None:
    want = expected_merge(request_)
    assert want.indices.tolist() == [indices]
    assert want.values is not None
    assert want.values.tolist() == f32(values).tolist()
    assert want.unique == [True]
    check_merge(request_, want.indices, want.values)


@pytest.mark.parametrize("order", ["any", "index", "value"])
@pytest.mark.parametrize("ties", ["any", "lowest", "highest"])
def test_corrupted_merges_are_rejected(order: str, ties: str) -> None:
    request_ = merge([5, 5, 5, 9, 1, 2], [30, 10, 20, 25, 1, -1], 3, order=order, ties=ties)
    want = expected_merge(request_)
    assert want.values is not None
    check_merge(request_, want.indices, want.values)
    if ties != "any":
        other = expected_merge(replace(request_, ties="highest" if ties == "lowest" else "lowest"))
        assert other.values is not None
        with pytest.raises(AssertionError, match=r"ties .* want"):
            check_merge(request_, other.indices, other.values)
    if order != "any":
        with pytest.raises(AssertionError, match="break order"):
            check_merge(request_, want.indices[:, ::-1], want.values[:, ::-1])
    for column in range(3):
        for index, bits in ((1, f32([1])), (25, f32([8])), (99, f32([5])), (-1, f32([-INF]))):
            indices, values = want.indices.copy(), want.values.copy()
            indices[0, column], values[0, column] = index, bits[0, 0]
            with pytest.raises(AssertionError):
                check_merge(request_, indices, values)


def test_merge_padding_is_checked() -> None:
    request_ = merge([5], [30], 2)
    check_merge(request_, np.array([[30, -1]]), f32([5, -INF]))
    for indices, values in (([30, -1], [5, INF]), ([30, 30], [5.0, 5.0]), ([-1, 30], [-INF, 5]), ([30, 0], [5, -INF])):
        with pytest.raises(AssertionError, match="row 0, column"):
            check_merge(request_, np.array([indices]), f32(values))


def test_merge_of_equal_indices_may_hold_either() -> None:
    request_ = merge([0.0, -0.0], [4, 4], 1, order="value", ties="lowest")
    for bits in (0, 0x80000000):
        check_merge(request_, np.array([[4]]), np.array([[bits]], np.uint32))
    assert expected_merge(request_).unique == [False]
