"""Hypothesis strategies for requests: legal combinations of every option, scores by bit pattern.

Small rows are drawn pattern by pattern, so that a failure shrinks; larger ones are filled from a drawn seed by the
classes of `tests.patterns`. A failing case prints in full, with the blob that reproduces it; `tests/conftest.py` says
how a whole run is repeated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.case import FORMATS, Array, Case, MergeCase
from tests.patterns import FILLS, fill, specials

DTYPES = st.sampled_from(sorted(FORMATS))
ORDERS = st.sampled_from(["any", "index", "value"])
TIES = st.sampled_from(["any", "lowest", "highest"])
GROUPS = st.sampled_from([2, 4, 8, 16, 32, 64, 128])
INT32_ENDS = st.sampled_from([-(2**31), -(2**31) + 1, -1, 0, 1, 2**31 - 2, 2**31 - 1])
INT64_ENDS = st.sampled_from([-(2**63), -(2**31) - 1, -1, 0, 2**31, 2**63 - 2, 2**63 - 1])
EDGES = st.sampled_from([1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2049, 4609])
WIDTHS = st.one_of(st.integers(0, 12), st.integers(0, 300), EDGES)
SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def bit_rows(draw: st.DrawFn, dtype: str, size: int) -> Array:
    """Bit patterns of one class; up to 24 of them are drawn one by one half of the time."""
    if size <= 24 and draw(st.booleans()):
        pattern = st.one_of(st.sampled_from(specials(dtype)), st.integers(0, 2 * FORMATS[dtype].sign - 1))
        return np.array(draw(st.lists(pattern, min_size=size, max_size=size)), FORMATS[dtype].bits)
    return fill(draw(st.sampled_from(sorted(FILLS))), dtype, draw(SEEDS), size)


def vector(size: int, near: int, ends: st.SearchStrategy[int] = INT32_ENDS, dtype: str = "int32") -> Any:
    """Integers around 0 .. near, on either side of it, and the ends of the type."""
    entry = st.one_of(st.integers(-3, near + 3), st.integers(0, near), ends)
    return st.lists(entry, min_size=size, max_size=size).map(lambda entries: np.array(entries, dtype))


@st.composite
def views(draw: st.DrawFn) -> dict[str, Any]:
    """Storage and the view of it: rows apart, padded, overlapping or the same."""
    dtype, width, rows = draw(DTYPES), draw(WIDTHS), draw(st.integers(0, 6))
    stride = draw(st.sampled_from([width, width, width + 1, width + 7, 0, width // 2]))
    offset = draw(st.integers(0, 3))
    storage = draw(bit_rows(dtype, offset + max(0, rows - 1) * stride + width + draw(st.integers(0, 5))))
    for row in range(rows):
        if draw(st.booleans()):
            at = offset + row * stride
            storage[at : at + width] = draw(bit_rows(dtype, width))
    return {
        "storage": storage,
        "dtype": dtype,
        "rows": rows,
        "width": width,
        "row_stride": stride,
        "storage_offset": offset,
    }


@st.composite
def elements(draw: st.DrawFn) -> dict[str, Any]:
    """What an element is, and the options that only go with the largest."""
    if draw(st.integers(0, 3)) == 0:
        drop = draw(st.sampled_from([None, False]))
        return {"largest": False, "drop_neg_inf": drop, "values": draw(st.booleans())}
    group = draw(st.one_of(st.just(1), GROUPS))
    expand = draw(st.booleans())
    return {
        "group": group,
        "pooled": group > 1 and draw(st.booleans()),
        "pin_newest": draw(st.booleans()),
        "drop_neg_inf": draw(st.sampled_from([None, True, False])),
        "expand": expand,
        "values": not expand and draw(st.booleans()),
    }


@st.composite
def windows(draw: st.DrawFn, rows: int, width: int, members: int, pooled: bool) -> dict[str, Any]:
    """Lengths, draft tokens, bounds and starts, in range and out of it."""
    next_n = draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0] or [1]))
    lengths = draw(st.one_of(st.none(), vector(rows // next_n, members)))
    starts = None if pooled else draw(st.one_of(st.none(), vector(rows, width)))
    return {
        "next_n": next_n,
        "lengths": lengths,
        "row_starts": starts,
        "max_length": draw(st.one_of(st.none(), st.integers(0, members + 3), st.sampled_from([0, 1, 2**31 - 1]))),
    }


@st.composite
def transforms(draw: st.DrawFn, rows: int, members: int) -> dict[str, Any]:
    """No transform, row offsets, or a page table with bad entries."""
    index_dtype = draw(st.sampled_from(["int32", "int64"]))
    kind = draw(st.sampled_from(["none", "offsets", "table"]))
    chosen: dict[str, Any] = {"index_dtype": index_dtype}
    if kind == "offsets":
        wide = index_dtype == "int64" and draw(st.booleans())
        ends, dtype = (INT64_ENDS, "int64") if wide else (INT32_ENDS, "int32")
        chosen["row_offsets"] = draw(vector(rows, 1000, ends, dtype))
    if kind == "table":
        page_size = 1 << draw(st.one_of(st.integers(0, 6), st.sampled_from([20, 30])))
        entries = draw(st.integers(0, 2 + min(20, members // page_size)))
        mapped = draw(st.booleans())
        tables = draw(st.integers(0, 4)) if mapped else rows + draw(st.integers(0, 2))
        chosen["page_table"] = draw(vector(tables * entries, 50)).reshape(tables, entries)
        chosen["page_size"] = page_size
        chosen["row_to_table"] = draw(vector(rows, max(0, tables - 1))) if mapped else None
        chosen["table_starts"] = draw(st.one_of(st.none(), vector(rows, entries)))
        chosen["table_pad"] = draw(st.sampled_from([0, 0, 1, 5]))
    return chosen


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any legal request on small rows."""
    view, element = draw(views()), draw(elements())
    rows, width, group = view["rows"], view["width"], element.get("group", 1)
    pooled = element.get("pooled", False)
    members = width * group if pooled else width
    count = members // group
    k = draw(st.one_of(st.integers(1, 8), st.integers(1, count + 3), st.sampled_from([1, count + 1, max(1, count)])))
    return Case(
        k=k,
        **view,
        **element,
        **draw(windows(rows, width, members, pooled)),
        **draw(transforms(rows, members)),
        order=draw(ORDERS),
        ties=draw(TIES),
        out_pad=draw(st.sampled_from([None, 0, 1, 6])),
        out_offset=draw(st.integers(0, 3)),
    )


@st.composite
def merge_cases(draw: st.DrawFn) -> MergeCase:
    """Any legal merge: unordered global indices, some of them -1, some twice."""
    dtype, rows, count = draw(DTYPES), draw(st.integers(0, 4)), draw(st.one_of(st.integers(0, 10), st.integers(0, 200)))
    index_dtype = draw(st.sampled_from(["int32", "int64"]))
    rng = np.random.default_rng(draw(SEEDS))
    spread = draw(st.sampled_from([max(1, count // 2), 4 * count + 1, int(np.iinfo(index_dtype).max)]))
    indices = rng.integers(0, spread, (rows, count), dtype=index_dtype, endpoint=True)
    if draw(st.booleans()):
        indices = np.stack([rng.permutation(count) for _ in range(rows)]) if rows else indices
    indices = np.where(rng.random((rows, count)) < draw(st.sampled_from([0.0, 0.2, 1.0])), -1, indices)
    return MergeCase(
        values=draw(bit_rows(dtype, rows * count)).reshape(rows, count),
        indices=indices.astype(index_dtype),
        dtype=dtype,
        k=draw(st.one_of(st.integers(1, 8), st.integers(1, count + 3))),
        largest=draw(st.booleans()),
        order=draw(ORDERS),
        ties=draw(TIES),
        row_pad=draw(st.sampled_from([0, 3])),
        out_pad=draw(st.sampled_from([None, 0, 5])),
        out_offset=draw(st.integers(0, 3)),
    )
