"""The recorded score rows, with the sizes of k that sparse attention uses."""

from __future__ import annotations

import numpy as np
import pytest

from tests.case import Case
from tests.conformance.backends import Backend
from tests.data import indexer_rows

NAMES, BITS, LENGTHS = indexer_rows()
TIES = {"any": ("any", "any"), "lowest-index": ("lowest", "index"), "highest-value": ("highest", "value")}


@pytest.mark.parametrize("k", [512, 2048])
@pytest.mark.parametrize("rule", sorted(TIES))
def test_all_rows_at_once(backend: Backend, k: int, rule: str) -> None:
    ties, order = TIES[rule]
    rows, width = BITS.shape
    backend.run(
        Case(
            storage=BITS.ravel(),
            dtype="bfloat16",
            rows=rows,
            width=width,
            k=k,
            lengths=LENGTHS,
            ties=ties,
            order=order,
            values=True,
        )
    )


@pytest.mark.parametrize("row", range(len(NAMES)), ids=NAMES)
def test_lengths_of_a_decode(backend: Backend, row: int) -> None:
    """One row as a query would see it at several lengths: overlapping views that all start at its first member."""
    lengths = np.array([131072, 131071, 65536, 33793, 4609, 2049, 2048, 2047, 1, 0], np.int32)
    backend.run(
        Case(
            storage=BITS[row],
            dtype="bfloat16",
            rows=len(lengths),
            width=131072,
            row_stride=0,
            k=2048,
            lengths=lengths,
            order="value",
            ties="lowest",
            values=True,
        )
    )


@pytest.mark.parametrize("row", range(len(NAMES)), ids=NAMES)
def test_blocks(backend: Backend, row: int) -> None:
    """Blocks of 8 with the newest pinned, and their members."""
    for expand in (False, True):
        backend.run(
            Case(
                storage=BITS[row],
                dtype="bfloat16",
                rows=1,
                width=131072,
                k=256,
                group=8,
                pin_newest=True,
                order="index",
                ties="lowest",
                expand=expand,
                values=not expand,
            )
        )
