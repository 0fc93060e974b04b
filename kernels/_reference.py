"""What a selection must give, by torch.topk of integers: what kernels are compared with on the device where they run.

Shares no code with any kernel family. Slow, and its scratch is several times its input. Of integers that all differ
there is one answer, so that torch.topk's treatment of NaN and ties does not matter.
"""

import torch
from torch import Tensor

_INFINITY = 0x7F800000
"""Bits of a float32 infinity; greater magnitudes are NaN."""


def rank_keys(scores: Tensor, *, largest: bool = True) -> Tensor:
    """Return int32 keys that order as scores do by rule 4 of the contract, the better the greater; NaNs share one key.

    Args:
        scores: bfloat16, float16 or float32, any shape.
        largest: as for `select_topk`.
    """
    if scores.dtype == torch.bfloat16:
        bits = scores.view(torch.int16).to(torch.int32) << 16
    else:
        bits = scores.to(torch.float32).view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    keys = torch.where(bits < 0, -magnitude, magnitude)
    if not largest:
        keys = -keys
    nan = _INFINITY + 1 if largest else -_INFINITY - 1
    return keys.masked_fill_(magnitude > _INFINITY, nan)


def group_keys(keys: Tensor, group: int) -> Tensor:
    """Return the keys of groups of consecutive members: the greatest of each; `keys` is (rows, multiple of `group`)."""
    return keys.view(len(keys), -1, group).amax(dim=2)


def selected(keys: Tensor, k: int, counts: Tensor) -> Tensor:
    """Select by keys, ties to the lowest index, in ascending order of indices.

    Args:
        keys: (rows, width) int32.
        k: elements selected per row.
        counts: (rows,) int32, valid elements of each row, 0 .. width.

    Returns:
        (rows, k) int32 indices, ascending, then -1.
    """
    width = keys.shape[1]
    places = torch.arange(width, device=keys.device)
    # One int64 for each element, all different, the better the greater: what is not valid is below everything.
    unique = (keys.to(torch.int64) << 32) | (width - 1 - places)
    unique.masked_fill_(places >= counts[:, None], torch.iinfo(torch.int64).min)
    best = unique.topk(min(k, width), dim=1, sorted=True).indices
    taken = torch.arange(best.shape[1], device=keys.device) < counts[:, None]
    order = torch.where(taken, best, width).sort(dim=1).values
    indices = torch.full((len(keys), k), -1, dtype=torch.int32, device=keys.device)
    indices[:, : best.shape[1]] = torch.where(order < width, order, -1).to(torch.int32)
    return indices


def best_keys(keys: Tensor, k: int) -> Tensor:
    """Return the k greatest keys of each row, the greatest first; k <= width."""
    return keys.topk(k, dim=1, sorted=True).values


def is_selection(keys: Tensor, best: Tensor, indices: Tensor) -> bool:
    """Say whether indices are a legal answer of full rows under `ties="any"` and `order="any"`. Synchronises.

    Args:
        keys: (rows, width) int32.
        best: (rows, k or more), from `best_keys`.
        indices: (rows, k).
    """
    k = indices.shape[1]
    if bool(((indices < 0) | (indices >= keys.shape[1])).any()):
        return False
    order = indices.to(torch.int64).sort(dim=1).values
    if bool((order[:, 1:] == order[:, :-1]).any()):
        return False
    got = keys.gather(1, order).sort(dim=1, descending=True).values
    return bool(torch.equal(got, best[:, :k]))
