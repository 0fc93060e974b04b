"""The choice of a row's k best elements in torch operations.

1. Few elements: where no row can have more than k, all are chosen and nothing is compared (but for order "value").
2. Plain rows (no windows, groups, pins or ties to break): torch.topk on the scores themselves.
3. Others: torch.topk on keys (`_torch_keys`), which order every score and mask what is none. Where the set or the
   order must be unique, on composites of key and position, of which no two are equal.
4. Rows longer than a step's cells: block by block, the best so far joining each next block as composites.

Nothing here reads device data on the host.
"""

import torch
from torch import Tensor

from ._torch_keys import composite, split
from ._torch_rows import Rows
from ._torch_write import CELLS, Chosen


def choose_elements(rows: Rows) -> Chosen:
    """Choose the best min(k, element_bound) elements of each row; with order "value" and ties not "highest", sorted."""
    request = rows.request
    count, highest = request.element_bound, request.ties == "highest"
    needs_keys = bool(request.drop_neg_inf) or (request.values and request.group > 1 and not request.pooled)
    if count == 0:
        return Chosen(rows.span(0, 0).expand(rows.scores.shape[0], -1), None, True)
    if count <= request.k and request.order != "value":
        index = rows.span(0, count).expand(rows.scores.shape[0], -1)
        return Chosen(index, _all_keys(rows) if needs_keys else None, True)
    k = min(request.k, count)
    unique = request.ties != "any" or request.order == "value"
    if row_cells(rows) > CELLS:
        keys, index = split(_best_by_blocks(rows, k), highest)
    elif unique:
        best = composite(rows.keys(0, count), rows.span(0, count), highest)
        keys, index = split(_top(best, k, request.order == "value"), highest)
    elif _is_plain(rows):
        found = rows.scores[:, :count].topk(k, dim=1, largest=request.largest, sorted=False)
        return Chosen(found.indices, None, False)
    else:
        keys, index = rows.keys(0, count).topk(k, dim=1, sorted=False)
    needs_keys = needs_keys or (request.order == "value" and highest)
    return Chosen(index, keys if needs_keys else None, False)


def row_cells(rows: Rows) -> int:
    """Scores that one row's choice reads."""
    request = rows.request
    return request.element_bound * (1 if request.pooled else request.group)


def _is_plain(rows: Rows) -> bool:
    """Say whether the scores can be compared as they are."""
    request = rows.request
    grouped = request.group > 1 and not request.pooled
    return rows.lengths is None and not (grouped or request.pin_newest or request.drop_neg_inf)


def _top(composites: Tensor, k: int, ordered: bool) -> Tensor:
    """Return the k greatest composites of each row, descending if `ordered`."""
    return composites.topk(k, dim=1, sorted=ordered).values


def _blocks(rows: Rows) -> list[tuple[int, int]]:
    """Cut the elements into blocks of at most `CELLS` scores in all rows together."""
    request = rows.request
    group = 1 if request.pooled else request.group
    step = max(1, CELLS // (group * rows.scores.shape[0]))
    return [(i, min(i + step, request.element_bound)) for i in range(0, request.element_bound, step)]


def _best_by_blocks(rows: Rows, k: int) -> Tensor:
    """Return the composites of the k best elements of each row, reading it block by block."""
    request = rows.request
    best = torch.empty((rows.scores.shape[0], 0), dtype=torch.int64, device=rows.scores.device)
    for first, stop in _blocks(rows):
        block = composite(rows.keys(first, stop), rows.span(first, stop), request.ties == "highest")
        block = torch.cat((best, block), dim=1)
        best = _top(block, min(k, block.shape[1]), stop == request.element_bound and request.order == "value")
    return best


def _all_keys(rows: Rows) -> Tensor:
    """Return the keys of all elements, computed block by block."""
    parts = [rows.keys(first, stop) for first, stop in _blocks(rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
