"""`merge_topk` in torch operations, on any device.

Keys as in selections (`_torch_keys`). Ties and orders go by global index, which may need all 64 bits: candidates are
then sorted by index first and their places in that order are what the composites hold. Rows of very many candidates
are merged block by block, the best so far joining each next block.
"""

import torch
from torch import Tensor

from ._request import MergeRequest
from ._torch_keys import CODES, KeyCode, composite, split
from ._torch_write import CELLS, INT64_MAX

Candidates = tuple[Tensor, Tensor]
"""Bits (rows, n) int16 or int32, and global indices (rows, n) int32 or int64, -1 for none."""


def merge_by_torch(request: MergeRequest, indices: Tensor, values: Tensor) -> None:
    """Merge into outputs, on the current stream of their device; allocates scratch memory.

    Args:
        request: the merge.
        indices: (rows, k), written.
        values: (rows, k), written.
    """
    code = CODES[request.values.dtype]
    step = max(1, CELLS // max(request.candidates, request.k))
    with torch.inference_mode():
        bits, written = request.values.detach().view(code.dtype), values.detach().view(code.dtype)
        for first in range(0, request.rows, step):
            rows = slice(first, min(first + step, request.rows))
            _merge_rows(request, code, (bits[rows], request.indices[rows]), (written[rows], indices[rows]))


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
