"""Tensors in the memory that the PTX interpreter gives a kernel."""

from __future__ import annotations

import torch

from tests.kernels.ptx import GlobalMemory


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
