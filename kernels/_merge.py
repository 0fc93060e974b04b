"""`merge_topk`: the k best of candidates that were selected apart.

On a CUDA device by a kernel (`merge`) as far as that goes, else in torch operations (`_torch_merge`).
"""

from typing import Any

import torch
from torch import Tensor

from ._dispatch import refuse_capture
from ._errors import KernelUnavailableError
from ._request import MergeRequest, TopKResult
from ._torch_merge import merge_by_torch
from ._torch_modes import by_operator, determined
from ._validate import check_merge
from .merge import MergeKernel

_KERNEL = MergeKernel()


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

    Outputs that were not given are allocated from torch's allocator.

    Raises:
        RuntimeError: the current stream is being captured in a CUDA graph, and the kernel is cold or does not serve the
            merge; the stream was not touched.
    """
    device, shape = request.values.device, request.output_shape
    unmet = _KERNEL.unmet(request)
    if unmet is None:
        try:
            _KERNEL.prepare(request)
        except KernelUnavailableError as error:
            unmet = str(error)
    if unmet is not None:
        refuse_capture("torch", device)
    indices, values = request.out_indices, request.out_values
    if indices is None:
        indices = torch.empty(shape, dtype=request.indices.dtype, device=device)
    if values is None:
        values = torch.empty(shape, dtype=request.values.dtype, device=device)
    if not request.rows:
        return TopKResult(indices, values)
    if unmet is None:
        _KERNEL.run(request, indices, values)
    else:
        merge_by_torch(request, indices, values)
    return TopKResult(indices, values)


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
        RuntimeError: in CUDA graph capture, if `k` is over 4,096, if the kernel is missing, or if it is cold (one call
            before the capture warms it); the stream was not touched.
    """
    if torch.are_deterministic_algorithms_enabled():
        order, ties = determined(order, ties)
    if by_operator(values):
        if out_indices is None and out_values is None:
            return TopKResult(*torch.ops.topkd.merge_topk(values, indices, k, largest, order, ties))
        out_indices = indices.new_empty((indices.shape[0], k)) if out_indices is None else out_indices
        out_values = values.new_empty((values.shape[0], k)) if out_values is None else out_values
        torch.ops.topkd.merge_topk_out(values, indices, k, out_indices, out_values, largest, order, ties)
        return TopKResult(out_indices, out_values)
    options = {"largest": largest, "order": order, "ties": ties}
    return run_merge(validate_merge(values, indices, k, out_indices=out_indices, out_values=out_values, **options))
