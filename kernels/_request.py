"""Requests (checked arguments, nothing allocated or launched) and results.

`SelectRequest` is what `validate_select` makes and every kernel family reads; `MergeRequest` is the same for
`merge_topk`. Constructing one directly checks nothing.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TopKResult:
    """What a selection or merge returns.

    Attributes:
        indices: (rows, columns) int32 or int64, -1 where there is nothing.
        values: (rows, k) in the input's dtype, -inf (+inf if not `largest`) beside every -1; None unless asked for.
    """

    indices: Tensor
    values: Tensor | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class SelectRequest:
    """One checked selection; the fields are the arguments of `select_topk`.

    Not to be changed; it is not frozen because that costs every call 5 us. After `validate_select` the integers are
    plain ints, `drop_neg_inf` is a bool and `expand` is False where `group` is 1. Tensors are held, not copied: their
    owner must keep their storage as it is until the call ran.
    """

    input: Tensor
    k: int
    lengths: Tensor | None = None
    next_n: int = 1
    max_length: int | None = None
    row_starts: Tensor | None = None
    group: int = 1
    pooled: bool = False
    pin_newest: bool = False
    drop_neg_inf: bool | None = None
    expand: bool = False
    largest: bool = True
    order: str = "any"
    ties: str = "any"
    values: bool = False
    index_dtype: torch.dtype = torch.int32
    row_offsets: Tensor | None = None
    page_table: Tensor | None = None
    page_size: int = 1
    row_to_table: Tensor | None = None
    table_starts: Tensor | None = None
    out_indices: Tensor | None = None
    out_values: Tensor | None = None
    kernel: str = "auto"

    @property
    def rows(self) -> int:
        """Rows of the input."""
        return self.input.shape[0]

    @property
    def width(self) -> int:
        """Capacity of a row: members, or elements if `pooled`."""
        return self.input.shape[1]

    @property
    def members(self) -> int:
        """Members that a row can hold."""
        return self.width * self.group if self.pooled else self.width

    @property
    def length_bound(self) -> int:
        """No row has more valid members than this, whatever the device data say."""
        return self.members if self.max_length is None else min(self.members, self.max_length)

    @property
    def element_bound(self) -> int:
        """No row has more valid elements than this."""
        return -(-self.length_bound // self.group)

    @property
    def columns(self) -> int:
        """Columns of the indices: k, or k * group with `expand`."""
        return self.k * self.group if self.expand else self.k

    @property
    def output_shape(self) -> tuple[int, int]:
        """Shape of the indices; the values, if asked for, have the same (`expand` writes none)."""
        return self.rows, self.columns

    @property
    def plan_key(self) -> Hashable:
        """Everything that must be equal for two requests to run as one call; neither row counts nor pointers."""
        offsets = None if self.row_offsets is None else self.row_offsets.dtype
        present = (
            self.lengths is not None,
            self.row_starts is not None,
            self.page_table is not None,
            self.row_to_table is not None,
            self.table_starts is not None,
        )
        flags = (self.pooled, self.pin_newest, self.drop_neg_inf, self.expand, self.largest, self.values)
        sizes = (self.width, self.k, self.next_n, self.max_length, self.group, self.page_size)
        kinds = (self.input.device, self.input.dtype, self.index_dtype, offsets)
        return (*kinds, *sizes, *flags, self.order, self.ties, self.kernel, present)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MergeRequest:
    """One checked merge; the fields are the arguments of `merge_topk`."""

    values: Tensor
    indices: Tensor
    k: int
    largest: bool = True
    order: str = "any"
    ties: str = "any"
    out_indices: Tensor | None = None
    out_values: Tensor | None = None

    @property
    def rows(self) -> int:
        """Rows of the candidates."""
        return self.values.shape[0]

    @property
    def candidates(self) -> int:
        """Candidates of a row."""
        return self.values.shape[1]

    @property
    def output_shape(self) -> tuple[int, int]:
        """Shape of the indices and of the values."""
        return self.rows, self.k

    @property
    def plan_key(self) -> Hashable:
        """Everything that must be equal for two merges to run as one call; neither row counts nor pointers."""
        kinds = (self.values.device, self.values.dtype, self.indices.dtype)
        return (*kinds, self.candidates, self.k, self.largest, self.order, self.ties)
