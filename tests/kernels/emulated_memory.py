"""Tensors in the memory that the PTX interpreter gives a kernel."""

from __future__ import annotations

import numpy as np
import torch

from tests.kernels.ptx import GlobalMemory
from topkd.kernels._cute_launch import launch_arguments
from topkd.kernels._family import Job

POINTERS = (0, 2, 4, 5, 7, 9, 10, 12, 13)
"""Which launch arguments of a selection are addresses."""


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def place(memory: GlobalMemory, tensor: torch.Tensor, written: bool) -> int:
    """Copy a tensor's storage in, allow access to its elements only, and return the address of its first."""
    whole = bytes_of(tensor)
    offset = tensor.data_ptr() - whole.data_ptr()
    start = memory.add(whole.numpy(), skew=whole.data_ptr() % 256)
    first = start - memory.BASE
    memory.readable[first : first + whole.numel()] = False
    rows, stride = (1, 0) if tensor.dim() == 1 else (tensor.shape[0], tensor.stride(0) * tensor.element_size())
    size = tensor.shape[-1] * tensor.element_size()
    allowed = memory.writable if written else memory.readable
    for row in range(rows):
        allowed[first + offset + row * stride :][:size] = True
    return start + offset


class Placed:
    """A job's tensors in the memory of a kernel.

    Attributes:
        arguments: what `launch_arguments` gives for the job, with the addresses that its tensors have there.
    """

    def __init__(self, memory: GlobalMemory, job: Job) -> None:
        self._memory, self._job = memory, job
        self._places: dict[int, int] = {}
        request, outputs = job.request, (job.indices, job.values)
        tensors = [request.lengths, request.row_starts, request.row_offsets, request.page_table]
        tensors += [request.row_to_table, request.table_starts, request.input, *outputs]
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                written = any(tensor is output for output in outputs)
                self._places[tensor.data_ptr()] = place(memory, tensor, written)
        arguments = list(launch_arguments(job))
        for at in POINTERS:
            arguments[at] = self._places.get(arguments[at], arguments[at])
        self.arguments = tuple(arguments)

    def read_back(self) -> None:
        """Copies what is in the memory of the job's outputs, and around them, into them."""
        for output in (self._job.indices, self._job.values):
            if output is not None:
                whole = bytes_of(output)
                start = self._places[output.data_ptr()] - (output.data_ptr() - whole.data_ptr())
                whole.numpy()[:] = self._memory.get(start, np.uint8, whole.numel())
