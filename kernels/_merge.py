"""`merge_topk`: the k best of candidates that were selected apart, in torch operations.

Keys as in selections (`_torch_keys`). Ties and orders go by global index, which may need all 64 bits: candidates are
then sorted by index first and their places in that order are what the composites hold. Rows of very many candidates
are merged block by block, the best so far joining each next block.
"""

from typing import Any

import torch
from torch import Tensor

from ._dispatch import refuse_capture
from ._request import MergeRequest, TopKResult
from ._torch_keys import CODES, KeyCode, composite, split
from ._torch_write import CELLS, INT64_MAX
from ._validate import check_merge


def validate_merge(values: Tensor, indices: Tensor, k: int, **options: Any) -> MergeRequest:
    """Check a merge whole. Allocates, launches and synchronises nothing.

    Args:
        values: as for `merge_topk`, like `indices` and `k`.
        indices: global indices.
        k: candidates kept per row.
        **options: the other arguments of `merge_topk`.

    Returns:
        The request; run it by `run_merge`.

    Raises:
        ArgumentTypeError: an argument has a wrong Python type or dtype.
        ArgumentValueError: an argument is wrong otherwise.
    """
    return check_merge(values, indices, k, **options)


def run_merge(request: MergeRequest) -> TopKResult:
    """Run one checked merge on the current stream of its device and return without waiting.

    Raises:
        RuntimeError: the current stream is being captured in a CUDA graph; it was not touched.
    """
    device, shape = request.values.device, request.output_shape
    refuse_capture("torch", device)
    indices, values = request.out_indices, request.out_values
    if indices is None:
        indices = torch.empty(shape, dtype=request.indices.dtype, device=device)
    if values is None:
        values = torch.empty(shape, dtype=request.values.dtype, device=device)
    code = CODES[request.values.dtype]
    step = max(1, CELLS // max(request.candidates, request.k))
    with torch.inference_mode():
        bits, written = request.values.detach().view(code.dtype), values.detach().view(code.dtype)
        for first in range(0, request.rows, step):
            rows = slice(first, min(first + step, request.rows))
            _merge_rows(request, code, (bits[rows], request.indices[rows]), (written[rows], indices[rows]))
    return TopKResult(indices, values)


Candidates = tuple[Tensor, Tensor]
"""Bits (rows, n) int16 or int32, and global indices (rows, n) int32 or int64, -1 for none."""


def _merge_rows(request: MergeRequest, code: KeyCode, given: Candidates, out: Candidates) -> None:
    """Merge some rows into their outputs."""
    step = max(1, CELLS // max(1, given[0].shape[0]))
    best = (given[0][:, :0], given[1][:, :0])
    for first in range(0, request.candidates, step):
        block = [torch.cat((old, new[:, first : first + step]), dim=1) for old, new in zip(best, given, strict=True)]
        best = _best(request, code, (block[0], block[1]))
    bits, indices = _ordered(request, code, best)
    count = bits.shape[1]
    out[0][:, :count].copy_(bits.masked_fill(indices == -1, code.padding(request.largest)))
    out[1][:, :count].copy_(indices)
    out[0][:, count:].fill_(code.padding(request.largest))
    out[1][:, count:].fill_(-1)


def _keys(request: MergeRequest, code: KeyCode, given: Candidates) -> Tensor:
    """Return the keys of candidates, masked where there is none."""
    return code.encode(given[0], request.largest).masked_fill_(given[1] == -1, code.masked)


def _ascending(indices: Tensor) -> Tensor:
    """Map global indices to int64 that order as they do, but for -1 above all others."""
    wide = indices.to(torch.int64)
    return torch.where(wide == -1, INT64_MAX, wide - (wide >= 0).to(torch.int64))


def _best(request: MergeRequest, code: KeyCode, given: Candidates) -> Candidates:
    """Return the best min(k, n) candidates of each row, in any order."""
    if given[0].shape[1] <= request.k:
        return given
    keys = _keys(request, code, given)
    if request.ties == "any":
        chosen = keys.topk(request.k, dim=1, sorted=False).indices
    else:
        highest = request.ties == "highest"
        by_index = _ascending(given[1]).argsort(dim=1, stable=True)
        places = torch.arange(keys.shape[1], device=keys.device)
        best = composite(keys.gather(1, by_index), places, highest).topk(request.k, dim=1, sorted=False).values
        chosen = by_index.gather(1, split(best, highest)[1])
    return given[0].gather(1, chosen), given[1].gather(1, chosen)


def _ordered(request: MergeRequest, code: KeyCode, given: Candidates) -> Candidates:
    """Sort candidates by index or value, none last. Order "any" gets the order by index, which short rows need."""
    by_index = _ascending(given[1]).argsort(dim=1, stable=True)
    bits, indices = given[0].gather(1, by_index), given[1].gather(1, by_index)
    if request.order != "value":
        return bits, indices
    by_key = _keys(request, code, (bits, indices)).argsort(dim=1, descending=True, stable=True)
    return bits.gather(1, by_key), indices.gather(1, by_key)


def merge_topk(
    values: Tensor,
    indices: Tensor,
    k: int,
    *,
    largest: bool = True,
    order: str = "any",
    ties: str = "any",
    out_indices: Tensor | None = None,
    out_values: Tensor | None = None,
) -> TopKResult:
    """Merge candidates that were selected apart into the k best of each row.

    Ranks, ties and orders are those of `select_topk`, by global index. An index that occurs twice counts twice.
    Enqueues on the current stream of the candidates' device and returns without waiting; outputs that are not given
    are allocated from torch's allocator.

    Args:
        values: (rows, candidates) bfloat16, float16 or float32 scores, last stride 1, any row stride.
        indices: (rows, candidates) int32 or int64 global indices; -1 is no candidate.
        k: candidates kept per row, 1 .. 2^20; may exceed `candidates`.
        largest: False keeps the smallest.
        order: "any", "index" (ascending) or "value" (best first, equal ones by ascending index).
        ties: which of the candidates equal to the k-th are kept: "any", "lowest" or "highest" indices.
        out_indices: (rows, k) of the dtype of `indices`, written in place.
        out_values: (rows, k) of the dtype of `values`, written in place.

    Returns:
        indices (rows, k) and values (rows, k), -1 and -inf (+inf if not `largest`) past the candidates.

    Raises:
        ArgumentTypeError: an argument has a wrong Python type or dtype; nothing was launched.
        ArgumentValueError: an argument is wrong otherwise; nothing was launched.
        RuntimeError: in CUDA graph capture; the stream was not touched.
    """
    request = validate_merge(
        values,
        indices,
        k,
        largest=largest,
        order=order,
        ties=ties,
        out_indices=out_indices,
        out_values=out_values,
    )
    return run_merge(request)
