"""What the kernel bench measures: cells of shapes, kinds of rows, forms of output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.data import indexer_rows

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
BYTES_A_US = 4.3e6
"""What an H200 reads in a microsecond, measured 2026-11-30: the floor of a cell is its bytes over it."""

LARGEST_BYTES = 1_200_000_000
"""Cells above are left out."""

FORMS: dict[str, dict[str, Any]] = {
    "": {},
    "pdl": {},
    "index": {"order": "index", "ties": "lowest"},
    "value": {"order": "value"},
    "group8": {"group": 8},
}
"""Options of an output form by its name: "" is unordered indices, any ties; "pdl" the same, by dependent launch."""


class Cell(NamedTuple):
    """One shape of one kind of rows."""

    dtype: str
    data: str
    rows: int
    width: int
    k: int

    @property
    def input_bytes(self) -> int:
        """Bytes of the scores."""
        return self.rows * self.width * DTYPES[self.dtype].itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the scores and of the indices."""
        return self.input_bytes + 4 * self.rows * self.k

    @property
    def floor_us(self) -> float:
        """No kernel is faster on an H200 with a cold cache."""
        return self.bytes / BYTES_A_US


class Grid(NamedTuple):
    """Shapes to be combined."""

    rows: Sequence[int]
    widths: Sequence[int]
    ks: Sequence[int]


ROWS = (1, 4, 16, 64, 256)
WIDTHS = (4096, 16384, 65536, 131072, 262144, 524288, 1048576)
GRIDS = {
    "issue": Grid(ROWS, WIDTHS, (512, 2048)),
    "table": Grid(ROWS, (1024, 2048, 4096, 8192, 16384, 18432, 32768, *WIDTHS[2:]), (512, 2048)),
    "crossing": Grid(ROWS, (4096, 8192, 16384, 18432, 32768), (512, 2048)),
    "ordered": Grid((4, 64, 256), (1024, 4096, 8192, 16384, 18432, 32768, 65536, 131072, 1048576), (512, 2048)),
    "sorted": Grid((1, 64, 256), (4096, 8192, 9216), (2048,)),
    "between": Grid((2, 8, 32, 128), (3000, 6000, 12000, 24000, 50000, 100000, 200000, 700000), (64, 1024)),
    "small": Grid((1, 64, 256), (16384, 131072, 1048576), (2048,)),
}
"""Shapes by name: those of the record; more of them, those of ordered output, and short rows by value, for the
chooser's table; those at which families cross, for a quick renewal of it; others, on which its choices are tried; few
for kinds of rows and other output forms. Past 16,384 scores `radix_register` takes another variant, half as fast:
without a shape just above, the table would not tell until 32,768; past 8,192 it sorts float32 by other code."""

NAMED = {
    ("bf16", 1, 131072, 2048): 7.5,
    ("bf16", 16, 131072, 2048): 10.0,
    ("bf16", 64, 131072, 2048): 17.0,
    ("bf16", 256, 131072, 2048): 33.0,
    ("bf16", 1, 1048576, 2048): 16.0,
    ("bf16", 256, 1048576, 2048): 165.0,
    ("bf16", 1, 131072, 512): 6.0,
    ("bf16", 256, 1048576, 512): 145.0,
    ("f32", 1, 131072, 2048): 8.8,
    ("f32", 256, 1048576, 2048): 300.0,
    ("bf16", 1, 4096, 512): 3.5,
}
"""Goals of single cells in us with a cold cache: (dtype, rows, width, k)."""


def cells(grid: str, dtypes: Sequence[str], data: str = "normal") -> Iterator[Cell]:
    """Yield the cells of a grid, small ones first; "named" are the cells that have goals of their own."""
    if grid == "named":
        yield from (Cell(dtype, data, *shape) for dtype, *shape in NAMED if dtype in dtypes)
        return
    shapes = GRIDS[grid]
    for width in shapes.widths:
        for rows in shapes.rows:
            for dtype in dtypes:
                for k in shapes.ks:
                    cell = Cell(dtype, data, rows, width, k)
                    if k < width and cell.input_bytes <= LARGEST_BYTES:
                        yield cell


def largest_bytes(chosen: Sequence[Cell], dtype: str) -> int:
    """Return the bytes of the largest cell of a dtype, 0 without one."""
    return max((cell.input_bytes for cell in chosen if cell.dtype == dtype), default=0)


# ------------------------------------------------------------------------------------------------------ kinds of rows

Fill = Callable[[Tensor], None]


def _normal(scores: Tensor) -> None:
    scores.normal_()


def _real(scores: Tensor) -> None:
    """Attention scores of a real model, crowded around the cut; rows longer than the record repeat it."""
    _, bits, _ = indexer_rows()
    recorded = torch.from_numpy(bits[:8].view(np.int16).copy()).to(scores.device).view(torch.bfloat16).to(scores.dtype)
    rows, width = scores.shape
    for row in range(rows):
        whole = recorded[row % len(recorded)].roll(row * 509)
        scores[row].copy_(whole.repeat(-(-width // len(whole)))[:width])


def _one_bin(scores: Tensor) -> None:
    """All in [1, 1.25): one bin of the high bits."""
    scores.copy_(torch.rand_like(scores, dtype=torch.float32).div_(4).add_(1))


def _equal(scores: Tensor) -> None:
    scores.fill_(-2.5)


def _plateau(scores: Tensor) -> None:
    """Zeros under about 1,300 winners of a row of 131,072."""
    scores.normal_().sub_(2.33).relu_()


def _descending(scores: Tensor) -> None:
    width = scores.shape[1]
    scores.copy_(torch.linspace(8, -8, width, device=scores.device).expand_as(scores))


def _clustered(scores: Tensor) -> None:
    """The best 4,096 of a row stand together: no sample drawn evenly sees as many as it should, some see all."""
    scores.normal_()
    width = scores.shape[1]
    best = min(4096, width // 2)
    first = (width - best) // 2 // 8 * 8
    scores[:, first : first + best].add_(16)


def _periodic(scores: Tensor) -> None:
    """The best stand at every 32nd place, where a sample with a stride meets all of them or none."""
    scores.normal_()
    scores[:, ::32].add_(16)


KINDS: dict[str, Fill] = {
    "normal": _normal,
    "real": _real,
    "one_bin": _one_bin,
    "equal": _equal,
    "plateau": _plateau,
    "descending": _descending,
    "clustered": _clustered,
    "periodic": _periodic,
}
"""What fills (rows, width) scores, by name."""

ADVERSARIAL = frozenset({"clustered", "periodic"})
"""Kinds that are built against sampling."""
