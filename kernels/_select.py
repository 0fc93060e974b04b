"""`select_topk`, the in-process call."""

from typing import Any

import torch
from torch import Tensor

from ._dispatch import run_select, with_kernel_checked
from ._request import TopKResult
from ._torch_modes import by_operator, determined
from ._validate import check_whole


def select_topk(
    input: Tensor,
    k: int,
    *,
    lengths: Tensor | None = None,
    next_n: int = 1,
    max_length: int | None = None,
    row_starts: Tensor | None = None,
    group: int = 1,
    pooled: bool = False,
    pin_newest: bool = False,
    drop_neg_inf: bool | None = None,
    expand: bool = False,
    largest: bool = True,
    order: str = "any",
    ties: str = "any",
    values: bool = False,
    index_dtype: torch.dtype = torch.int32,
    row_offsets: Tensor | None = None,
    page_table: Tensor | None = None,
    page_size: int = 1,
    row_to_table: Tensor | None = None,
    table_starts: Tensor | None = None,
    out_indices: Tensor | None = None,
    out_values: Tensor | None = None,
    kernel: str = "auto",
) -> TopKResult:
    """Select the k best elements of each row, exactly.

    Enqueues on the current stream of the input's device and returns without waiting; on the CPU the result is
    complete on return. Outputs that are not given are allocated from torch's allocator. NaN ranks above +inf if
    `largest` and after everything if not; -0.0 equals +0.0. Inside `torch.compile` it is one operator of the graph. In
    torch's deterministic mode order "any" is "index", and ties "any" are "lowest".

    Args:
        input: (rows, width) bfloat16, float16 or float32 scores on the CPU or a CUDA device; last stride 1, any row
            stride. Not modified, not differentiated: the results require no gradient.
        k: elements selected per row, 1 .. 2^20; may exceed what a row has.
        lengths: (rows / next_n,) int32, valid members of each row's window; clamped. None: all.
        next_n: with n > 1, row r sees lengths[r // n] - n + r % n + 1 members.
        max_length: lengths are clamped to it, and kernels chosen by it.
        row_starts: (rows,) int32, first member of each window; clamped. Indices are relative to it.
        group: 1, 2, 4 .. 128; an element is the maximum of `group` consecutive members, NaN if one is NaN.
        pooled: `input` holds one score per group already; `lengths` and `max_length` still count members.
        pin_newest: always select the row's last valid element, as if it were above everything.
        drop_neg_inf: write -1 for selected elements that score -inf. None: True if `group` > 1 and `largest`.
        expand: write the members of the elements: k * group columns.
        largest: False selects the smallest.
        order: "any", "index" (ascending) or "value" (best first, equal ones by ascending index).
        ties: which of the elements equal to the k-th are taken: "any", "lowest" or "highest" indices.
        values: also return the scores.
        index_dtype: torch.int32 or torch.int64.
        row_offsets: (rows,) int32 or int64, added to each index.
        page_table: (tables, entries) int32, last stride 1; index i of row r becomes
            table[row_to_table[r], table_starts[r] + i // page_size] * page_size + i % page_size.
        page_size: a power of two up to 2^30.
        row_to_table: (rows,) int32. None: row r uses table r.
        table_starts: (rows,) int32, in pages. None: 0.
        out_indices: (rows, columns) of `index_dtype`, written in place.
        out_values: (rows, k) of the input's dtype, written in place; only with `values`.
        kernel: "auto", or the name of one family (see `kernels`).

    Returns:
        indices (rows, columns) and, if asked for, values (rows, k). Where there is nothing to write, or a transform
        has no valid result, the index is -1 and the value -inf (+inf if not `largest`).

    Raises:
        ArgumentTypeError: an argument has a wrong Python type or dtype; nothing was launched.
        ArgumentValueError: an argument is wrong otherwise; nothing was launched.
        RuntimeError: in CUDA graph capture, if the family cannot be captured; the stream was not touched.
    """
    if torch.are_deterministic_algorithms_enabled():
        order, ties = determined(order, ties)
    # As a whole dictionary: to hand so many arguments on by name, twice, costs the host 6 us.
    options: dict[str, Any] = {
        "k": k,
        "lengths": lengths,
        "next_n": next_n,
        "max_length": max_length,
        "row_starts": row_starts,
        "group": group,
        "pooled": pooled,
        "pin_newest": pin_newest,
        "drop_neg_inf": drop_neg_inf,
        "expand": expand,
        "largest": largest,
        "order": order,
        "ties": ties,
        "values": values,
        "index_dtype": index_dtype,
        "row_offsets": row_offsets,
        "page_table": page_table,
        "page_size": page_size,
        "row_to_table": row_to_table,
        "table_starts": table_starts,
        "out_indices": out_indices,
        "out_values": out_values,
        "kernel": kernel,
    }
    if by_operator(input):
        return _select_by_operator(input, options)
    return run_select(with_kernel_checked(check_whole(input, options)))


def _select_by_operator(input: Tensor, options: dict[str, Any]) -> TopKResult:
    k, indices, values = (options.pop(name) for name in ("k", "out_indices", "out_values"))
    options["family"] = options.pop("kernel")
    if indices is None and values is None:
        return TopKResult(*torch.ops.topkd.select_topk(input, k, **options))
    if indices is None:
        columns = k * options["group"] if options["expand"] else k
        indices = input.new_empty((input.shape[0], columns), dtype=options["index_dtype"])
    if values is None and options["values"]:
        values = input.new_empty((input.shape[0], k))
    torch.ops.topkd.select_topk_out(input, k, indices, values, **options)
    return TopKResult(indices, values)
