"""What a request of the selection contract is, as bit patterns and options: `Case` and `MergeCase`.

Neither torch nor topkd is needed here, so that a case can be made, shown and judged anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Format(NamedTuple):
    """Layout of a floating-point dtype: sign, then exponent, then fraction."""

    bits: type[np.unsignedinteger[Any]]
    exponent: int
    fraction: int

    @property
    def inf(self) -> int:
        """Bits of +inf."""
        return ((1 << self.exponent) - 1) << self.fraction

    @property
    def sign(self) -> int:
        """The sign bit."""
        return 1 << (self.exponent + self.fraction)

    @property
    def nan(self) -> int:
        """Bits of the quiet NaN: positive, only the highest fraction bit set."""
        return self.inf | 1 << (self.fraction - 1)


FORMATS = {
    "bfloat16": Format(np.uint16, 8, 7),
    "float16": Format(np.uint16, 5, 10),
    "float32": Format(np.uint32, 8, 23),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One request: a view of `storage` (flat, bit patterns of `dtype`) and the options of the contract.

    Attributes that are no options of the contract: `row_stride` (None: `width`), `col_stride` (other than 1 only if
    `width` is 1) and `storage_offset` describe the view; `out_pad` (None: outputs are not given) is the number of
    unused elements between the rows of the given outputs, `out_offset` the number before them; `table_pad` the number
    of unused entries between the rows of the page table; `note` says where the case comes from.
    """

    storage: Array
    dtype: str
    rows: int
    width: int
    k: int
    row_stride: int | None = None
    col_stride: int = 1
    storage_offset: int = 0
    lengths: Array | None = None
    next_n: int = 1
    max_length: int | None = None
    row_starts: Array | None = None
    group: int = 1
    pooled: bool = False
    pin_newest: bool = False
    drop_neg_inf: bool | None = None
    expand: bool = False
    largest: bool = True
    order: str = "any"
    ties: str = "any"
    values: bool = False
    index_dtype: str = "int32"
    row_offsets: Array | None = None
    page_table: Array | None = None
    page_size: int = 1
    row_to_table: Array | None = None
    table_starts: Array | None = None
    kernel: str = "auto"
    out_pad: int | None = None
    out_offset: int = 0
    table_pad: int = 0
    note: str = ""

    @property
    def stride(self) -> int:
        """Elements from one row to the next."""
        return self.width if self.row_stride is None else self.row_stride

    @property
    def columns(self) -> int:
        """Columns of the index output."""
        return self.k * self.cell_columns

    @property
    def cell_columns(self) -> int:
        """Columns of the index output that one element takes."""
        return self.group if self.expand else 1

    @property
    def drops(self) -> bool:
        """`drop_neg_inf` with its default put in."""
        return self.group > 1 and self.largest if self.drop_neg_inf is None else self.drop_neg_inf

    @property
    def fill_bits(self) -> int:
        """The value beside every -1."""
        layout = FORMATS[self.dtype]
        return layout.inf | layout.sign if self.largest else layout.inf

    def row_bits(self, row: int) -> Array:
        """All members (or block scores) of a row, as bits."""
        at = self.storage_offset + row * self.stride + np.arange(self.width, dtype=np.int64) * self.col_stride
        bits: Array = self.storage[at]
        return bits

    def __repr__(self) -> str:
        """Every attribute that is not the default; arrays of up to 64 entries in full."""
        return describe(self)


@dataclass(frozen=True, kw_only=True, eq=False)
class MergeCase:
    """One merge: candidate scores (rows, candidates) as bits, and their global indices."""

    values: Array
    indices: Array
    dtype: str
    k: int
    largest: bool = True
    order: str = "any"
    ties: str = "any"
    row_pad: int = 0
    out_pad: int | None = None
    out_offset: int = 0
    note: str = ""

    @property
    def fill_bits(self) -> int:
        """The value beside every -1."""
        layout = FORMATS[self.dtype]
        return layout.inf | layout.sign if self.largest else layout.inf

    def __repr__(self) -> str:
        """Every attribute that is not the default; arrays of up to 64 entries in full."""
        return describe(self)


def describe(case: Case | MergeCase) -> str:
    parts = []
    for one in fields(case):
        value = getattr(case, one.name)
        if isinstance(value, np.ndarray):
            shown = value.tolist() if value.size <= 64 else f"<{value.size} of {value.dtype}, from {value.flat[0]}>"
            parts.append(f"{one.name}={shown}")
        elif value != one.default:
            parts.append(f"{one.name}={value!r}")
    return f"{type(case).__name__}({', '.join(parts)})"
