"""merge_topk: candidates of parts, and that parts merged give what the whole row gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.case import FORMATS, Case, MergeCase
from tests.conformance.backends import Backend
from tests.oracle import expected
from tests.patterns import FILLS, fill

ORDERS = ("any", "index", "value")
TIES = ("any", "lowest", "highest")


def candidates(kind: str, rows: int, count: int, k: int, **options: Any) -> MergeCase:
    """Scores of one class with the global indices of a larger row, in no order."""
    dtype = options.pop("dtype", "bfloat16")
    rng = np.random.default_rng(count)
    indices = np.stack([rng.permutation(4 * count + 1)[:count] for _ in range(rows)]).astype("int64")
    values = np.stack([fill(kind, dtype, seed, count) for seed in range(rows)])
    options.setdefault("indices", indices.astype(options.pop("index_dtype", "int32")))
    return MergeCase(values=values, dtype=dtype, k=k, **options)


def scores(*values: float) -> Any:
    return np.array([values], np.float32).view(np.uint32)


def named() -> dict[str, MergeCase]:
    made: dict[str, MergeCase] = {}
    for kind in FILLS:
        for dtype in FORMATS:
            made[f"{kind}-{dtype}"] = candidates(kind, 2, 300, 40, dtype=dtype, order="value", ties="lowest")
            made[f"{kind}-{dtype}-any"] = candidates(kind, 2, 300, 40, dtype=dtype)
            made[f"{kind}-{dtype}-smallest"] = candidates(
                kind, 2, 300, 40, dtype=dtype, largest=False, order="value", ties="highest"
            )
    for order in ORDERS:
        for ties in TIES:
            made[f"levels-{order}-{ties}"] = candidates("levels", 3, 500, 100, order=order, ties=ties)
            made[f"short-{order}-{ties}"] = candidates("levels", 3, 20, 100, order=order, ties=ties)
    some = np.array([[-1, 7, -1, 2**40, -1, 3, -1, 0]])
    gaps = scores(9, 1, float("nan"), 5, float("inf"), 5, 9, 5)
    for order in ORDERS:
        made[f"gaps-{order}"] = MergeCase(values=gaps, indices=some, dtype="float32", k=3, order=order, ties="highest")
        made[f"gaps-short-{order}"] = MergeCase(values=gaps, indices=some, dtype="float32", k=6, order=order)
    none = np.full((1, 8), -1)
    made["no-candidate"] = MergeCase(values=gaps, indices=none, dtype="float32", k=6)
    made["no-candidate-smallest"] = MergeCase(values=gaps, indices=none, dtype="float32", k=6, largest=False)
    twice = np.array([[4, 4, 4, 1, 1, 0, 0, 4]], np.int32)
    for order in ORDERS:
        made[f"twice-{order}"] = MergeCase(values=gaps, indices=twice, dtype="float32", k=5, order=order, ties="lowest")
    empty = np.zeros((3, 0), np.uint16)
    made["no-columns"] = MergeCase(values=empty, indices=empty.astype("int32"), dtype="bfloat16", k=2)
    made["no-rows"] = MergeCase(values=empty.T[:, :0], indices=np.zeros((0, 0), "int32"), dtype="bfloat16", k=2)
    made["padded"] = candidates("levels", 3, 50, 9, order="value", ties="lowest", row_pad=3, out_pad=2, out_offset=1)
    made["int64"] = candidates("levels", 3, 50, 9, order="index", index_dtype="int64", out_pad=0)
    made["ends-of-int32"] = MergeCase(
        values=scores(5, 5, 5),
        indices=np.array([[2**31 - 1, 0, 2**31 - 2]], np.int32),
        dtype="float32",
        k=2,
        order="value",
        ties="highest",
    )
    made["ends-of-int64"] = MergeCase(
        values=scores(5, 5, 5),
        indices=np.array([[2**63 - 1, 0, 2**63 - 2]]),
        dtype="float32",
        k=2,
        order="value",
        ties="highest",
    )
    return made


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in named().items()])
def test_merge(backend: Backend, case: MergeCase) -> None:
    backend.merge(case)


@pytest.mark.parametrize("ties", ["lowest", "highest"])
@pytest.mark.parametrize("kind", ["levels", "plateau", "specials", "one-bin"])
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
def test_merged_parts_are_the_whole(backend: Backend, kind: str, ties: str, largest: bool) -> None:
    """A row cut in three uneven parts: each part's best, merged, are the row's best, bit for bit."""
    bits, k = fill(kind, "bfloat16", 11, 3000), 200
    options: dict[str, Any] = {"k": k, "ties": ties, "order": "value", "largest": largest, "values": True}
    parts = []
    for start, stop in ((0, 100), (100, 1777), (1777, 3000)):
        part = Case(
            storage=bits[start:stop],
            dtype="bfloat16",
            rows=1,
            width=stop - start,
            **options,
            row_offsets=np.array([start], np.int32),
        )
        parts.append(backend.run(part))
    indices = np.concatenate([part[0] for part in parts], axis=1)
    values = np.concatenate([part[1] for part in parts if part[1] is not None], axis=1)
    merged = backend.merge(
        MergeCase(values=values, indices=indices, dtype="bfloat16", k=k, ties=ties, order="value", largest=largest)
    )
    whole = expected(Case(storage=bits, dtype="bfloat16", rows=1, width=3000, **options))
    assert whole.unique == [True]
    assert whole.values is not None
    assert merged[0].tolist() == whole.indices.tolist()
    assert merged[1].tolist() == whole.values.tolist()
