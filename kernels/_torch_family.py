"""The `torch` family: any selection, exactly, in torch operations on the CPU or a CUDA device.

The reference and the last resort of all other families. It runs rows in chunks, so that its scratch stays within
`CELLS` * 64 bytes or so beside the outputs, and launches of one plan as one by concatenating their rows where they are
small. It takes its scratch from torch's allocator with each call and refuses capture in CUDA graphs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._family import Job
from ._request import SelectRequest
from ._torch_rows import Rows
from ._torch_select import choose_elements, row_cells
from ._torch_write import CELLS, arrange, write

_VECTORS = ("lengths", "row_starts", "row_offsets", "row_to_table", "table_starts")


class TorchFamily:
    """Selections in torch operations; see the module."""

    name = "torch"
    capturable = False

    def unmet(self, request: SelectRequest) -> str | None:
        """Return None: there is no valid request that this family does not serve."""
        return None

    def run(self, jobs: Sequence[Job]) -> None:
        """Run jobs of one plan key; small ones that use one page table, or none, together."""
        with torch.inference_mode():
            for batch in _batches(jobs):
                if len(batch) == 1:
                    _run_job(batch[0])
                else:
                    _run_together(batch)


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Group jobs that can be concatenated: one table, and few enough cells to be copied."""
    waiting: dict[Any, list[Job]] = {}
    for job in jobs:
        table = job.request.page_table
        key = None if table is None else (table.data_ptr(), table.shape, table.stride())
        waiting.setdefault(key, []).append(job)
    for same in waiting.values():
        batch: list[Job] = []
        cells = 0
        for job in same:
            size = job.request.rows * max(job.request.width, job.request.columns)
            if batch and cells + size > CELLS:
                yield batch
                batch, cells = [], 0
            batch.append(job)
            cells += size
        yield batch


def _run_together(jobs: list[Job]) -> None:
    """Run jobs of one plan key and table as one, on concatenated rows."""
    requests = [job.request for job in jobs]
    first = requests[0]
    changes: dict[str, Any] = {"input": torch.cat([_bits(request.input) for request in requests])}
    for name in _VECTORS:
        if getattr(first, name) is not None:
            changes[name] = torch.cat([getattr(request, name) for request in requests])
    device = first.input.device
    if first.page_table is not None and first.row_to_table is None:
        default = [torch.arange(request.rows, device=device, dtype=torch.int32) for request in requests]
        changes["row_to_table"] = torch.cat(default)
    changes["input"] = changes["input"].view(first.input.dtype)
    merged = replace(first, **changes)
    indices = torch.empty(merged.output_shape, dtype=merged.index_dtype, device=device)
    values = torch.empty(merged.output_shape, dtype=merged.input.dtype, device=device) if merged.values else None
    _run_job(Job(merged, indices, values))
    first_row = 0
    for job in jobs:
        part = slice(first_row, first_row + job.request.rows)
        job.indices.copy_(indices[part])
        if values is not None and job.values is not None:
            _bits(job.values).copy_(_bits(values[part]))
        first_row = part.stop


def _bits(values: Tensor) -> Tensor:
    """View scores as integers, so that copies keep NaN payloads."""
    return values.detach().view(torch.int32 if values.dtype == torch.float32 else torch.int16)


def _run_job(job: Job) -> None:
    """Run one job, in chunks of rows."""
    rows = Rows.of(job.request)
    count = job.request.rows
    cells = max(row_cells(rows), min(job.request.k, job.request.element_bound), 1)
    step = max(1, CELLS // cells)
    for first in range(0, count, step):
        stop = min(first + step, count)
        part = rows if stop - first == count else rows.part(first, stop)
        chosen, dead = arrange(part, choose_elements(part))
        values = None if job.values is None else job.values[first:stop]
        write(part, chosen, dead, job.indices[first:stop], values)
