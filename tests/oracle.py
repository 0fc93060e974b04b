"""The oracle: what a selection is, slow and obviously right, row by row, in numpy and plain Python.

It works on bit patterns (uint16 or uint32 arrays and the name of a dtype) and needs neither torch nor topkd.

- `Case` describes one `select_topk` request, `MergeCase` one `merge_topk` request: bits and every option.
- `expected(case)` gives a legal output and says for each row whether it is the only legal one.
- `check(case, indices, values)` accepts every legal output and raises `AssertionError` with an explanation otherwise.
- `expected_merge` and `check_merge` do the same for merges.

How a row is judged: its window is cut out (`window`), its elements are scored (`row_elements`), ranked with equal
scores sharing a rank (`dense_ranks`), and split into those that every legal output holds (`must`) and those of which
some must be held (`tied`, `need`). Each element has one *cell*, what an output shows for it: the columns of indices
after `expand` and the transforms, and the bits of the value. A row of output is a sequence of k cells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.case import FORMATS, Array, Case, MergeCase

__all__ = ["FORMATS", "Case", "Expected", "MergeCase", "check", "check_merge", "expected", "expected_merge"]

INDEX_MAX = {"int32": 2**31 - 1, "int64": 2**63 - 1}
Cell = tuple[tuple[int, ...], int]
"""The index columns and the value bits (0 where no values are asked for) that an output shows for one element."""


@dataclass(frozen=True)
class Expected:
    """A legal output; where `unique[row]`, the only one."""

    indices: Array
    values: Array | None
    unique: list[bool]


# ------------------------------------------------------------------------------------------------- scores and ranks


def decode(bits: Array, dtype: str) -> npt.NDArray[np.float64]:
    """The scores of bit patterns, exact in float64, made with integers so that no flush-to-zero mode can matter."""
    layout = FORMATS[dtype]
    wide = bits.astype(np.int64)
    fraction = wide & ((1 << layout.fraction) - 1)
    exponent = (wide >> layout.fraction) & ((1 << layout.exponent) - 1)
    significand = np.where(exponent == 0, fraction, fraction + (1 << layout.fraction)).astype(np.float64)
    bias = (1 << (layout.exponent - 1)) - 1
    magnitude = np.ldexp(significand, (np.maximum(exponent, 1) - bias - layout.fraction).astype(np.int32))
    special = np.where(fraction == 0, np.inf, np.nan)
    magnitude = np.where(exponent == (1 << layout.exponent) - 1, special, magnitude)
    return np.where(wide & layout.sign != 0, -magnitude, magnitude)


def dense_ranks(score: npt.NDArray[np.float64], largest: bool, pinned: int = -1) -> npt.NDArray[np.int64]:
    """0 for the best, the same number for equal scores: rule 4, and `pinned` (an index) above everything."""
    nan = np.isnan(score)
    value = np.where(nan, 0.0, score) + 0.0  # adding +0.0 makes a +0.0 of -0.0
    keys = np.stack([np.arange(len(score)) != pinned, ~nan if largest else nan, -value if largest else value])
    order = np.lexsort(keys[::-1])
    ranked = keys[:, order]
    worse = (ranked[:, 1:] != ranked[:, :-1]).any(axis=0)
    ranks = np.zeros(len(score), np.int64)
    ranks[order[1:]] = np.cumsum(worse)
    return ranks


# ---------------------------------------------------------------------------------------------------- one row's rules


class Elements(NamedTuple):
    """The valid elements of a row: scores, the bits `values` shows, the pinned index (-1: none), the row's length."""

    score: npt.NDArray[np.float64]
    bits: Array
    pinned: int
    length: int


def window(case: Case, row: int) -> tuple[int, int]:
    """Start and length of a row's window, in members, clamped by rule 6."""
    members = case.width * case.group if case.pooled else case.width
    start = 0 if case.row_starts is None else min(max(int(case.row_starts[row]), 0), case.width)
    length = members if case.lengths is None else int(case.lengths[row // case.next_n])
    length = length - case.next_n + row % case.next_n + 1
    limit = members - start
    if case.max_length is not None:
        limit = min(limit, case.max_length)
    return start, max(0, min(length, limit))


def row_elements(case: Case, row: int) -> Elements:
    """Score the elements of a row: members, groups of members, or block scores."""
    layout = FORMATS[case.dtype]
    start, length = window(case, row)
    count = -(-length // case.group)
    bits = case.row_bits(row)
    if case.pooled or case.group == 1:
        bits = bits[start : start + count].copy()
        score = decode(bits, case.dtype)
    else:
        padded = np.full(count * case.group, layout.inf | layout.sign, layout.bits)
        padded[:length] = bits[start : start + length]
        groups = padded.reshape(count, case.group)
        scores = decode(groups, case.dtype)
        score = scores.max(axis=1)  # numpy's max and argmax find NaN first
        bits = groups[np.arange(count), scores.argmax(axis=1)]
        bits[score == 0] = 0
        bits[np.isnan(score)] = layout.nan
    pinned = count - 1 if case.pin_newest and count else -1
    if pinned >= 0:
        bits[pinned] = layout.inf
    return Elements(score, bits, pinned, length)


class Choice(NamedTuple):
    """Which elements an output holds: all of `must`, `need` of `tied`; `ranks` of all elements, `dropped` or not."""

    must: list[int]
    tied: list[int]
    need: int
    ranks: npt.NDArray[np.int64]
    dropped: npt.NDArray[np.bool_]


def choose(case: Case, elements: Elements) -> Choice:
    """Split a row's elements by rules 1, 2, 3 and 5."""
    ranks = dense_ranks(elements.score, case.largest, elements.pinned)
    everything = np.arange(len(ranks))
    dropped = (elements.score == -np.inf) & (everything != elements.pinned) & case.drops
    if len(ranks) <= case.k:
        return Choice(everything.tolist(), [], 0, ranks, dropped)
    last = np.sort(ranks)[case.k - 1]
    must, tied = np.flatnonzero(ranks < last), np.flatnonzero(ranks == last)
    need = case.k - len(must)
    if case.ties == "highest":
        must, tied = np.concatenate([must, tied[len(tied) - need :]]), tied[:0]
    elif case.ties == "lowest" or len(tied) == need or dropped[tied[0]]:  # one dropped element looks like another
        must, tied = np.concatenate([must, tied[:need]]), tied[:0]
    return Choice(must.tolist(), tied.tolist(), need if len(tied) else 0, ranks, dropped)


def transform(case: Case, row: int, index: int) -> int:
    """An index as it is written: through the page table or with the offset, -1 where there is no such result."""
    if case.page_table is not None:
        table = row if case.row_to_table is None else int(case.row_to_table[row])
        entry = (0 if case.table_starts is None else int(case.table_starts[row])) + index // case.page_size
        tables, entries = case.page_table.shape
        if not (0 <= table < tables and 0 <= entry < entries):
            return -1
        page = int(case.page_table[table, entry])
        if page < 0:
            return -1
        index = page * case.page_size + index % case.page_size
    if case.row_offsets is not None:
        index += int(case.row_offsets[row])
    return index if 0 <= index <= INDEX_MAX[case.index_dtype] else -1


def fill_cell(case: Case) -> Cell:
    """What an output shows where there is no element, or a dropped one."""
    return (-1,) * case.cell_columns, case.fill_bits if case.values else 0


def cell(case: Case, row: int, element: int, elements: Elements) -> Cell:
    """What an output shows for an element that is not dropped."""
    if case.cell_columns == 1:
        columns: tuple[int, ...] = (transform(case, row, element),)
    else:
        members = range(element * case.group, (element + 1) * case.group)
        columns = tuple(transform(case, row, i) if i < elements.length else -1 for i in members)
    if not case.values:
        return columns, 0
    return columns, case.fill_bits if columns[0] == -1 else int(elements.bits[element])


def arrange(case: Case, chosen: Iterable[int], ranks: npt.NDArray[np.int64]) -> list[int]:
    """Elements as orders "index" and "value" want them ("any": by index, as rule 2 wants it of short rows)."""
    at = np.array(sorted(chosen), np.int64)
    if case.order == "value":
        at = at[np.argsort(ranks[at], kind="stable")]
    return at.tolist()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------- entry points


def expected(case: Case) -> Expected:
    """A legal output, and for each row whether the contract leaves no other.

    Returns:
        indices (rows, columns) in the index dtype, values (rows, k) as bits or None, and the flags.
    """
    indices = np.full((case.rows, case.columns), -1, case.index_dtype)
    values = np.full((case.rows, case.k), case.fill_bits, FORMATS[case.dtype].bits)
    unique = []
    for row in range(case.rows):
        elements = row_elements(case, row)
        choice = choose(case, elements)
        chosen = arrange(case, choice.must + choice.tied[: choice.need], choice.ranks)
        cells = [cell(case, row, e, elements) for e in chosen if not choice.dropped[e]]
        if cells:
            indices[row, : len(cells) * case.cell_columns] = np.array([columns for columns, _ in cells]).ravel()
            values[row, : len(cells)] = [bits for _, bits in cells]
        settled = len(choice.ranks) <= case.k and len(cells) == len(chosen)  # short and nothing dropped
        unique.append(not choice.tied and (case.order != "any" or case.k == 1 or settled))
    return Expected(indices, values if case.values else None, unique)


def check(case: Case, indices: Array, values: Array | None) -> None:
    """Accept any legal output of a request.

    Args:
        case: The request.
        indices: (rows, columns) in the index dtype.
        values: (rows, k) as bits if the case asks for values, else None.

    Raises:
        AssertionError: The output breaks a rule; the text names the row, the column, what was wanted and what came.
    """
    _check_shape(case, "indices", indices, (case.rows, case.columns), np.dtype(case.index_dtype))
    if case.values:
        _check_shape(case, "values", values, (case.rows, case.k), np.dtype(FORMATS[case.dtype].bits))
    elif values is not None:
        raise AssertionError(f"values were not asked for and came, of shape {values.shape}\n{case!r}")
    want = expected(case)
    bits, want_bits = (np.zeros((case.rows, 0)) if v is None else v for v in (values, want.values))
    for row in range(case.rows):
        if not want.unique[row]:
            _check_by_rules(case, row, _cells(case, indices, values, row))
        elif (indices[row] != want.indices[row]).any() or not np.array_equal(bits[row], want_bits[row]):
            _check_same(case, row, _cells(case, want.indices, want.values, row), _cells(case, indices, values, row))


def _check_by_rules(case: Case, row: int, got: list[Cell]) -> None:
    """Judge a row of which several outputs are legal: first what it holds, then where it stands."""
    elements = row_elements(case, row)
    choice = choose(case, elements)
    fill = fill_cell(case)
    must = {e: fill if choice.dropped[e] else cell(case, row, e, elements) for e in choice.must}
    tied = {e: cell(case, row, e, elements) for e in choice.tied}
    _check_contents(case, row, got, (must, tied, choice.need))
    if case.order == "any":
        if len(choice.ranks) <= case.k:  # short, and something dropped: the others still ascend
            wanted = [must[e] for e in arrange(case, must, choice.ranks) if must[e] != fill]
            _check_same(case, row, wanted, [c for c in got if c != fill], "short row without its -1s, ")
            _check_same(case, row, [fill] * (case.k - len(must)), got[len(must) :], "the -1s past the elements, ")
        return
    sequence = [(must.get(e, tied.get(e, fill)), e in must) for e in arrange(case, [*must, *tied], choice.ranks)]
    if not _is_subsequence(sequence, got):
        raise AssertionError(_text(case, row, f"the right elements, but not in order {case.order!r}: {got[:64]}"))


def _check_contents(case: Case, row: int, got: list[Cell], parts: tuple[dict[int, Cell], dict[int, Cell], int]) -> None:
    """The cells are those of `must`, of `need` elements of `tied`, and fills, each as often as it should be."""
    must, tied, need = parts
    left = Counter(must.values())
    left[fill_cell(case)] += case.k - len(must) - need
    spare = Counter(tied.values())
    for at, one in enumerate(got):
        if left[one] > 0:
            left[one] -= 1
        elif spare[one] > 0 and need > 0:
            spare[one] -= 1
            need -= 1
        else:
            reason = "which is not selected here, or too often, or has another value"
            missing = [c for c, count in left.items() if count > 0][:4]
            text = f"column {at}: got {_show(case, one)}, {reason}; still wanted {[_show(case, c) for c in missing]}"
            raise AssertionError(_text(case, row, f"{text} and {need} of the {len(tied)} tied"))


def _is_subsequence(sequence: Sequence[tuple[Cell, bool]], got: list[Cell]) -> bool:
    """Whether `got` is `sequence` with some of its optional entries (flag False) left out.

    Cells need not differ (a page table may map two pages to one), so all ways are followed at once: `reached` holds
    the numbers of output cells that the entries so far can account for.
    """
    places: dict[Cell, list[int]] = {}
    for at, one in enumerate(got):
        places.setdefault(one, []).append(at)
    reached = {0}
    for one, required in sequence:
        stepped = {at + 1 for at in places.get(one, ()) if at in reached}
        if required:
            reached = stepped
        else:
            reached |= stepped
    return len(got) in reached


# -------------------------------------------------------------------------------------------------------------- merges


def expected_merge(case: MergeCase) -> Expected:
    """A legal output of a merge (values always), and for each row whether the contract leaves no other."""
    rows = len(case.values)
    indices = np.full((rows, case.k), -1, case.indices.dtype)
    values = np.full((rows, case.k), case.fill_bits, FORMATS[case.dtype].bits)
    unique = []
    for row in range(rows):
        candidates = _candidates(case, row)
        sign = -1 if case.ties == "highest" else 1
        best = sorted(candidates, key=lambda c: (c.rank, sign * c.at))
        chosen, rest = best[: case.k], best[case.k :]
        chosen.sort(key=lambda c: (c.rank, c.at) if case.order == "value" else (c.at, c.rank))
        for at, one in enumerate(chosen):
            indices[row, at], values[row, at] = one.at, one.bits
        bits_of: dict[int, set[int]] = {}
        for one in candidates:
            bits_of.setdefault(one.at, set()).add(one.bits)
        twins = any(len(bits) > 1 for bits in bits_of.values())  # one index with different scores
        free = case.ties == "any" and bool(rest) and best[case.k - 1].rank == rest[0].rank
        unique.append(not twins and not free and (case.order != "any" or len(chosen) <= 1))
    return Expected(indices, values, unique)


def check_merge(case: MergeCase, indices: Array, values: Array) -> None:
    """Accept any legal output of a merge: indices in the candidates' index dtype, values as bits, both (rows, k).

    Raises:
        AssertionError: The output breaks a rule; the text names the row, the column, what was wanted and what came.
    """
    _check_shape(case, "indices", indices, (len(case.values), case.k), case.indices.dtype)
    _check_shape(case, "values", values, (len(case.values), case.k), np.dtype(FORMATS[case.dtype].bits))
    for row in range(len(case.values)):
        candidates = _candidates(case, row)
        count = min(case.k, len(candidates))
        pairs = list(zip(indices[row].tolist(), values[row].tolist(), strict=True))
        for at in range(count, case.k):
            if pairs[at] != (-1, case.fill_bits):
                text = f"column {at}: want the padding -1, {case.fill_bits:#x}, got {pairs[at][0]}, {pairs[at][1]:#x}"
                raise AssertionError(_text(case, row, text))
        left = Counter((c.at, c.bits) for c in candidates)
        for at, pair in enumerate(pairs[:count]):
            if left[pair] == 0:
                text = f"column {at}: index {pair[0]}, value {pair[1]:#x} is no candidate, or came too often"
                raise AssertionError(_text(case, row, text))
            left[pair] -= 1
        ranks = {(c.at, c.bits): c.rank for c in candidates}
        got = [(ranks[pair], pair[0]) for pair in pairs[:count]]
        _check_merge_set(case, row, got, sorted((c.rank, c.at) for c in candidates))
        keys = [(index, 0) for _, index in got] if case.order == "index" else got
        at = next((i for i in range(1, count) if keys[i - 1] > keys[i]), 0)
        if case.order != "any" and at:
            raise AssertionError(
                _text(case, row, f"columns {at - 1} and {at} break order {case.order!r}: {pairs[:64]}")
            )


def _check_merge_set(case: MergeCase, row: int, got: list[tuple[int, int]], best: list[tuple[int, int]]) -> None:
    """The right ranks were taken, and of the tied ones those that `ties` wants; entries are (rank, index)."""
    if [rank for rank, _ in sorted(got)] != [rank for rank, _ in best[: len(got)]]:
        worst = max((rank for rank, _ in best[: len(got)]), default=0)
        wrong = [(rank, index) for rank, index in got if rank > worst]
        raise AssertionError(_text(case, row, f"not the k best: (rank, index) {wrong[:8]} are worse than rank {worst}"))
    if case.ties == "highest":
        best = sorted(best, key=lambda pair: (pair[0], -pair[1]))
    if case.ties != "any" and sorted(got) != sorted(best[: len(got)]):
        missing = sorted((Counter(best[: len(got)]) - Counter(got)).elements())
        raise AssertionError(_text(case, row, f"ties {case.ties!r} want (rank, index) {missing[:8]} too"))


class _Candidate(NamedTuple):
    rank: int
    at: int
    bits: int


def _candidates(case: MergeCase, row: int) -> list[_Candidate]:
    valid = case.indices[row] != -1
    bits, indices = case.values[row][valid], case.indices[row][valid]
    ranks = dense_ranks(decode(bits, case.dtype), case.largest)
    return [_Candidate(*one) for one in zip(ranks.tolist(), indices.tolist(), bits.tolist(), strict=True)]


# ------------------------------------------------------------------------------------------------------- explanations


def _cells(case: Case, indices: Array, values: Array | None, row: int) -> list[Cell]:
    bits = [0] * case.k if values is None else values[row].tolist()
    columns = indices[row].reshape(case.k, case.cell_columns).tolist()
    return [(tuple(one), b) for one, b in zip(columns, bits, strict=True)]


def _check_same(case: Case, row: int, want: list[Cell], got: list[Cell], where: str = "") -> None:
    if want == got:
        return
    at = next((i for i, (w, g) in enumerate(zip(want, got, strict=False)) if w != g), min(len(want), len(got)))
    wanted = _show(case, want[at]) if at < len(want) else "no more"
    came = _show(case, got[at]) if at < len(got) else "no more"
    raise AssertionError(_text(case, row, f"{where}column {at}: want {wanted}, got {came}"))


def _check_shape(
    case: Case | MergeCase, name: str, got: Array | None, shape: tuple[int, int], dtype: np.dtype[Any]
) -> None:
    if got is None or got.shape != shape or got.dtype != dtype:
        came = "None" if got is None else f"{got.dtype} {got.shape}"
        raise AssertionError(f"{name}: want {dtype} {shape}, got {came}\n{case!r}")


def _show(case: Case, one: Cell) -> str:
    index = f"index {one[0][0]}" if len(one[0]) == 1 else f"indices {one[0]}"
    if not case.values:
        return index
    score = decode(np.array([one[1]], FORMATS[case.dtype].bits), case.dtype)[0]
    return f"{index} with value {one[1]:#x} ({score})"


def _text(case: Case | MergeCase, row: int, text: str) -> str:
    where = ""
    if isinstance(case, Case):
        start, length = window(case, row)
        where = f" (start {start}, length {length}, {-(-length // case.group)} elements)"
    return f"row {row}{where}, {text}\n{case!r}"
