"""Hand-made cases: one or more for every clause of the contract and every class of input that goes wrong elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.case import FORMATS, Array, Case
from tests.patterns import FILLS, fill

DTYPES = ("bfloat16", "float16", "float32")
INT32_MAX, INT32_MIN = 2**31 - 1, -(2**31)


def ints(*values: int, dtype: str = "int32") -> Any:
    """A vector of int32."""
    return np.array(values, dtype)


def rows_of(kind: str, rows: int, width: int, k: int, **options: Any) -> Case:
    """Contiguous rows of one class of pattern, each its own seed."""
    dtype = options.pop("dtype", "bfloat16")
    bits = [fill(kind, dtype, seed, width) for seed in range(rows)]
    storage = np.concatenate(bits) if bits else np.zeros(0, FORMATS[dtype].bits)
    return Case(storage=storage, dtype=dtype, rows=rows, width=width, k=k, **options)


def floats(*values: float, k: int, **options: Any) -> Case:
    """One float32 row."""
    storage = np.array(values, np.float32).view(np.uint32)
    return Case(storage=storage, dtype="float32", rows=1, width=len(values), k=k, **options)


def shuffled(dtype: str) -> Array:
    """Every pattern of a 16-bit dtype once, in no order."""
    return np.random.default_rng(16).permutation(65536).astype(FORMATS[dtype].bits)


def patterns() -> Iterator[tuple[str, Case]]:
    """Rule 4 and the input classes: every class of pattern, every dtype, both directions, k inside and at the ends."""
    for kind in FILLS:
        for dtype in DTYPES:
            for largest in (True, False):
                order, ties = ("value", "lowest") if largest else ("index", "highest")
                options: dict[str, Any] = {"dtype": dtype, "largest": largest, "values": True}
                name = f"{kind}-{dtype}-{'largest' if largest else 'smallest'}"
                yield name, rows_of(kind, 3, 1500, 257, order=order, ties=ties, **options)
                yield f"{name}-any", rows_of(kind, 2, 700, 100, **options)
    for kind in ("one-bin", "high-bits", "ascending", "descending", "plateau", "equal", "near-one"):
        yield f"{kind}-past-capacity", rows_of(kind, 2, 33793, 2048, order="value", ties="lowest", values=True)
        yield f"{kind}-past-capacity-f32", rows_of(kind, 1, 33793, 2048, dtype="float32", ties="highest", values=True)


def lengths() -> Iterator[tuple[str, Case]]:
    """Rules 2 and 6: windows, short rows, draft tokens, bounds."""
    odd = ints(0, -1, 40, 41, 1, INT32_MAX, INT32_MIN, 39, 7)
    for order in ("any", "index", "value"):
        yield f"lengths-{order}", rows_of("near-one", 9, 40, 7, lengths=odd, order=order, values=True)
        yield f"lengths-short-{order}", rows_of("specials", 9, 40, 64, lengths=odd, order=order, values=True)
    yield "length-is-k", rows_of("near-one", 1, 40, 9, lengths=ints(9), values=True)
    yield "length-is-k-plus-1", rows_of("near-one", 1, 40, 9, lengths=ints(10), values=True)
    for n in (2, 3):
        drafts = ints(*[0, 1, 2, 43, INT32_MIN, INT32_MAX][:6])
        yield f"next-n-{n}", rows_of("near-one", 6 * n, 40, 5, lengths=drafts, next_n=n, values=True)
    yield "next-n-all-members", rows_of("ascending", 4, 10, 3, next_n=4, order="value")
    yield "next-n-all-members-of-windows", rows_of("near-one", 4, 10, 9, next_n=4, row_starts=ints(0, 2, 9, 1))
    yield "next-n-int32-min", rows_of("near-one", 8, 10, 3, next_n=8, lengths=ints(INT32_MIN))
    yield "next-n-max-length", rows_of("near-one", 4, 10, 3, next_n=4, lengths=ints(9), max_length=8, order="index")
    for bound in (0, 1, 12, 40, INT32_MAX):
        yield f"max-length-{bound}", rows_of("near-one", 9, 40, 7, lengths=odd, max_length=bound, order="index")
        yield f"max-length-{bound}-no-lengths", rows_of("near-one", 2, 40, 7, max_length=bound, values=True)
    starts = ints(0, -1, 39, 40, 41, INT32_MAX, INT32_MIN, 10, 33)
    yield "starts", rows_of("near-one", 9, 40, 7, row_starts=starts, values=True, order="value")
    yield "starts-lengths", rows_of("near-one", 9, 40, 7, row_starts=starts, lengths=odd, order="index", values=True)
    yield "starts-max-length", rows_of("near-one", 9, 40, 7, row_starts=starts, max_length=20, ties="lowest")
    yield "masked-by-position", floats(1, 2, float("nan"), float("inf"), 9, k=3, lengths=ints(2), values=True)
    yield "masked-before-start", floats(float("nan"), float("inf"), 1, 2, 3, k=2, row_starts=ints(2), values=True)
    yield (
        "starts-unlike-alignment",
        rows_of("any-bits", 8, 400, 30, row_starts=ints(*range(8)), lengths=ints(*[333] * 8)),
    )


def shapes() -> Iterator[tuple[str, Case]]:
    """Widths, row counts, strides, outputs."""
    for values in (False, True):
        yield f"no-rows-{values}", rows_of("near-one", 0, 40, 7, values=values)
        yield f"no-width-{values}", rows_of("near-one", 3, 0, 7, values=values)
    yield "no-rows-no-width", rows_of("near-one", 0, 0, 1)
    yield "no-rows-given", rows_of("near-one", 0, 40, 7, lengths=ints(), row_starts=ints(), out_pad=2, values=True)
    yield "one-member", rows_of("near-one", 2, 1, 1, values=True)
    yield "k-over-width", rows_of("near-one", 2, 5, 9, values=True, order="value")
    yield "k-over-width-smallest", rows_of("specials", 2, 5, 9, values=True, order="value", largest=False)
    yield "k-is-width", rows_of("near-one", 2, 300, 300, order="value", values=True)
    yield "k-is-width-minus-1", rows_of("levels", 2, 300, 299, order="index", ties="highest", values=True)
    yield "k-largest-allowed", rows_of("near-one", 1, 10, 2**20, order="value", values=True)
    yield "many-rows", rows_of("specials", 300, 33, 4, order="value", ties="lowest", values=True)
    yield "odd-widths", rows_of("near-one", 5, 257, 3, order="value", values=True)
    flat = fill("near-one", "bfloat16", 5, 2000)
    view: dict[str, Any] = {"storage": flat, "dtype": "bfloat16", "k": 6, "values": True, "order": "index"}
    yield "stride-zero", Case(rows=4, width=300, row_stride=0, **view)
    yield "stride-padded", Case(rows=4, width=300, row_stride=333, storage_offset=1, **view)
    yield "stride-overlapping", Case(rows=9, width=300, row_stride=7, storage_offset=3, **view)
    yield "stride-of-one-row", Case(rows=1, width=300, row_stride=10**12, storage_offset=3, **view)
    yield "stride-of-one-column", Case(rows=4, width=1, row_stride=3, col_stride=50, **view)
    for pad, offset in ((0, 0), (0, 1), (1, 0), (5, 3), (16, 1)):
        name = f"outputs-{pad}-{offset}"
        given: dict[str, Any] = {"out_pad": pad, "out_offset": offset}
        yield name, rows_of("levels", 4, 100, 7, values=True, **given)
        yield f"{name}-int64", rows_of("levels", 4, 100, 7, index_dtype="int64", order="value", **given)
        yield f"{name}-expand", rows_of("levels", 4, 100, 7, group=4, expand=True, **given)
        yield f"{name}-short", rows_of("levels", 4, 5, 7, values=True, dtype="float32", **given)


def sets_and_orders() -> Iterator[tuple[str, Case]]:
    """Rule 5: every order with every tie rule, on rows where ties cross the k-th place."""
    for order in ("any", "index", "value"):
        for ties in ("any", "lowest", "highest"):
            for kind in ("levels", "equal", "plateau", "zeros", "nan", "specials"):
                for largest in (True, False):
                    name = f"{kind}-{order}-{ties}-{'largest' if largest else 'smallest'}"
                    options: dict[str, Any] = {"largest": largest, "values": True, "order": order, "ties": ties}
                    yield name, rows_of(kind, 2, 600, 80, **options)
    yield "k-1-lowest", rows_of("equal", 2, 600, 1, ties="lowest")
    yield "k-1-highest", rows_of("equal", 2, 600, 1, ties="highest")
    inf, nan = float("inf"), float("nan")
    yield "nan-over-inf", floats(inf, nan, inf, -nan, k=2, order="value", values=True)
    yield "nan-last-of-smallest", floats(nan, inf, -nan, 1, k=3, largest=False, order="value", values=True)
    yield "fewer-than-k-finite", floats(-inf, 1, nan, -inf, 2, -inf, k=5, order="value", ties="lowest", values=True)
    yield "zeros-of-both-signs", floats(-0.0, 0.0, -0.0, 0.0, -1, k=3, order="value", ties="highest", values=True)


def groups() -> Iterator[tuple[str, Case]]:
    """Groups, block scores, the pinned newest element, dropped -inf, and expansion."""
    inf = float("inf")
    odd = ints(0, -1, 1, 129, 400, 401, INT32_MAX, 128, 127)
    for group in (2, 4, 8, 16, 32, 64, 128):
        for kind in ("near-one", "specials"):
            yield (
                f"group-{group}-{kind}",
                rows_of(kind, 9, 400, 3, group=group, lengths=odd, values=True, order="value"),
            )
        yield f"group-{group}-starts", rows_of("near-one", 4, 400, 2, group=group, row_starts=ints(1, 7, 399, 400))
        yield (
            f"group-{group}-expand",
            rows_of("near-one", 9, 400, 3, group=group, lengths=odd, expand=True, order="index"),
        )
        members = ints(0, -1, 1, group, group + 1, 30 * group, 30 * group + 1, INT32_MAX, 7 * group - 1)
        pooled: dict[str, Any] = {"group": group, "pooled": True, "lengths": members}
        yield f"pooled-{group}", rows_of("specials", 9, 30, 4, values=True, order="value", ties="lowest", **pooled)
        yield f"pooled-{group}-expand", rows_of("near-one", 9, 30, 4, expand=True, order="value", **pooled)
    yield "pooled-max-length", rows_of("near-one", 2, 30, 4, group=8, pooled=True, max_length=33, order="index")
    yield (
        "pooled-next-n",
        rows_of("near-one", 4, 30, 4, group=8, pooled=True, next_n=4, lengths=ints(18), order="index"),
    )
    yield "pooled-keeps-bits", rows_of("nan", 2, 30, 4, group=8, pooled=True, values=True, order="value")
    yield "group-zero-and-nan-values", rows_of("specials", 4, 64, 16, group=2, values=True, order="value")
    for order in ("any", "index", "value"):
        for k in (1, 3, 60):
            name = f"{order}-{k}"
            dead = {"order": order, "values": True, "lengths": ints(50, 20, 3, 0)}
            yield f"drop-{name}", rows_of("few-finite", 4, 50, k, drop_neg_inf=True, **dead)
            yield f"pin-{name}", rows_of("few-finite", 4, 50, k, pin_newest=True, **dead)
            yield f"pin-drop-{name}", rows_of("few-finite", 4, 50, k, pin_newest=True, drop_neg_inf=True, **dead)
            yield f"pin-nan-{name}", rows_of("nan", 4, 50, k, pin_newest=True, **dead)
            yield f"pin-group-{name}", rows_of("few-finite", 4, 50, k, pin_newest=True, group=4, **dead)
            wide = {**dead, "values": False}
            yield (
                f"pin-group-expand-{name}",
                rows_of("few-finite", 4, 50, k, pin_newest=True, group=4, expand=True, **wide),
            )
    yield "drop-default-of-group", floats(-inf, -inf, 1, -inf, -inf, -inf, k=2, group=2, values=True, order="index")
    yield "drop-off-in-group", floats(-inf, -inf, 1, -inf, -inf, -inf, k=2, group=2, drop_neg_inf=False, values=True)
    yield "drop-default-of-pooled", floats(-inf, 1, -inf, k=2, group=2, pooled=True, values=True, order="value")
    yield "drop-default-of-members", floats(-inf, 1, -inf, k=2, values=True, order="value")
    yield "drop-none-left", floats(-inf, -inf, -inf, k=2, drop_neg_inf=True, values=True)
    yield "pinned-neg-inf-kept", floats(1, -inf, -inf, k=3, drop_neg_inf=True, pin_newest=True, values=True)
    yield "expand-of-members", rows_of("near-one", 2, 50, 5, expand=True, order="value")
    yield "expand-int64", rows_of("near-one", 2, 50, 5, group=4, expand=True, index_dtype="int64", order="value")


def transforms() -> Iterator[tuple[str, Case]]:
    """Offsets and page tables, with entries that are out of bounds in every way."""
    wild = ints(0, 5, -3, INT32_MAX, INT32_MIN)
    yield "offsets", rows_of("near-one", 5, 50, 9, row_offsets=wild, values=True, order="value")
    yield "offsets-any", rows_of("levels", 5, 50, 9, row_offsets=wild, values=True)
    yield "offsets-int64-index", rows_of("near-one", 5, 50, 9, row_offsets=wild, index_dtype="int64", order="index")
    far = ints(2**40, -(2**40), 2**63 - 10, -(2**63), 0, dtype="int64")
    yield (
        "offsets-int64",
        rows_of("near-one", 5, 50, 9, row_offsets=far, index_dtype="int64", order="index", values=True),
    )
    yield "offsets-short", rows_of("near-one", 5, 50, 9, row_offsets=wild, lengths=ints(3, 0, 9, 5, 2), values=True)
    yield "offsets-expand", rows_of("near-one", 5, 50, 9, row_offsets=wild, group=4, expand=True, order="index")
    yield "offsets-group", rows_of("near-one", 5, 50, 9, row_offsets=wild, group=4, order="index", values=True)
    yield "offsets-smallest", rows_of("near-one", 5, 50, 9, row_offsets=wild, largest=False, order="value", values=True)
    table = np.random.default_rng(9).permutation(40).astype(np.int32).reshape(4, 10)
    page: dict[str, Any] = {"page_table": table, "page_size": 4}
    for order in ("any", "index", "value"):
        yield f"pages-{order}", rows_of("levels", 4, 40, 9, order=order, values=True, **page)
    yield "pages-too-few", rows_of("near-one", 4, 50, 30, order="index", values=True, **page)
    yield "pages-start", rows_of("near-one", 4, 40, 9, table_starts=ints(-1, 0, 9, 3), order="value", **page)
    ends = ints(INT32_MIN, INT32_MAX, 10, -10)
    yield "pages-start-wild", rows_of("near-one", 4, 40, 9, table_starts=ends, order="value", values=True, **page)
    yield (
        "pages-rows",
        rows_of("near-one", 6, 40, 9, row_to_table=ints(3, 3, 0, -1, 4, INT32_MIN), order="index", **page),
    )
    yield "pages-padded", rows_of("near-one", 4, 40, 9, table_pad=3, order="index", **page)
    yield "pages-expand", rows_of("near-one", 4, 40, 3, group=8, expand=True, order="value", **page)
    yield "pages-group", rows_of("near-one", 4, 160, 3, group=8, order="value", values=True, **page)
    yield (
        "pages-starts-lengths",
        rows_of(
            "near-one", 4, 60, 9, row_starts=ints(1, 20, 59, -4), lengths=ints(40, 0, 9, 22), order="index", **page
        ),
    )
    yield "pages-int64", rows_of("near-one", 4, 40, 9, index_dtype="int64", values=True, **page)
    bad = table.copy()
    bad[:, ::3], bad[1, 1], bad[2, 2] = -1, INT32_MIN, INT32_MAX
    for order in ("any", "index", "value"):
        for dtype in ("int32", "int64"):
            options: dict[str, Any] = {"page_table": bad, "page_size": 4, "order": order, "index_dtype": dtype}
            yield f"pages-bad-{order}-{dtype}", rows_of("levels", 4, 40, 9, values=True, **options)
    yield "pages-shared", rows_of("levels", 4, 40, 9, page_table=table // 8, page_size=4, order="index", values=True)
    huge = np.array([[1, 2, 0]], np.int32)
    yield "pages-of-2-to-30", rows_of("near-one", 1, 9, 3, page_table=huge, page_size=2**30, table_starts=ints(1))
    yield (
        "pages-of-2-to-30-int64",
        rows_of(
            "near-one",
            1,
            9,
            3,
            page_table=huge,
            page_size=2**30,
            table_starts=ints(1),
            index_dtype="int64",
            order="value",
        ),
    )
    empty = np.zeros((0, 5), np.int32)
    yield "pages-no-tables", rows_of("near-one", 1, 9, 3, page_table=empty, row_to_table=ints(0), values=True)
    yield "pages-no-entries", rows_of("near-one", 1, 9, 3, page_table=np.zeros((1, 0), np.int32), values=True)


def whole_stack() -> Iterator[tuple[str, Case]]:
    """Real engines' combinations, all at once."""
    table = np.arange(64, dtype=np.int32)[::-1].reshape(4, 16)
    yield (
        "decode-blocks",
        rows_of(
            "few-finite",
            8,
            1000,
            16,
            group=8,
            pin_newest=True,
            next_n=2,
            lengths=ints(1000, 37, 129, 8),
            max_length=600,
        ),
    )
    yield (
        "indexer-paged",
        rows_of(
            "one-bin",
            4,
            1024,
            64,
            page_table=table,
            page_size=64,
            lengths=ints(1024, 63, 64, 500),
            order="index",
            ties="lowest",
            out_pad=3,
            out_offset=1,
        ),
    )
    yield (
        "strata-cells",
        rows_of(
            "levels",
            4,
            256,
            32,
            group=4,
            pooled=True,
            expand=True,
            order="index",
            ties="lowest",
            lengths=ints(1024, 9, 0, 513),
        ),
    )
    yield "sampler", rows_of("near-one", 3, 32000, 64, dtype="float32", order="value", ties="lowest", values=True)


def directed() -> dict[str, Case]:
    """All of them by name."""
    parts = (patterns, lengths, shapes, sets_and_orders, groups, transforms, whole_stack)
    named: dict[str, Case] = {}
    for part in parts:
        for name, case in part():
            if f"{part.__name__}/{name}" in named:
                raise ValueError(f"two cases are called {part.__name__}/{name}")
            named[f"{part.__name__}/{name}"] = case
    return named
