"""What serves a merge: the kernel, or torch operations in its place; no GPU is needed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from topkd.kernels import KernelUnavailableError, MergeRequest, _merge, merge_topk, validate_merge
from topkd.kernels.merge import MAX_K, MergeKernel, merge_arguments

VALUES = torch.tensor([[1.0, 3.0, 2.0, 3.0]])
INDICES = torch.tensor([[40, 30, -1, 10]])


class Stub:
    """A kernel that serves everything, on the CPU."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.ran = 0

    def unmet(self, request: MergeRequest) -> str | None:
        return None

    def prepare(self, request: MergeRequest) -> None:
        if self.error is not None:
            raise self.error

    def run(self, request: MergeRequest, indices: Tensor, values: Tensor) -> None:
        self.ran += 1
        indices.fill_(7)
        values.fill_(7)


def test_candidates_on_the_cpu_are_not_the_kernels() -> None:
    assert "CUDA" in str(MergeKernel().unmet(validate_merge(VALUES, INDICES, 1)))


def test_the_kernel_is_taken_where_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = Stub()
    monkeypatch.setattr(_merge, "_KERNEL", stub)
    out = torch.zeros(1, 2, dtype=torch.int64)
    assert merge_topk(VALUES, INDICES, 2, out_indices=out).indices is out
    assert out.tolist() == [[7, 7]]
    assert merge_topk(VALUES[:0], INDICES[:0], 2).indices.shape == (0, 2)
    assert stub.ran == 1, "no rows, no launch"


def test_without_code_torch_operations_take_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_merge, "_KERNEL", Stub(KernelUnavailableError("no compiler")))
    result = merge_topk(VALUES, INDICES, 2, order="value", ties="lowest")
    assert result.indices.tolist() == [[10, 30]]


def test_a_cold_kernel_in_capture_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_merge, "_KERNEL", Stub(RuntimeError("warm it")))
    with pytest.raises(RuntimeError, match="warm it"):
        merge_topk(VALUES, INDICES, 2)


def test_what_the_kernel_is_given() -> None:
    values, indices = VALUES.repeat(3, 1)[:, 1:], INDICES.repeat(3, 1)[:, :3]
    out = torch.zeros(3, 5, dtype=torch.int64)[:, :2], torch.zeros(3, 2)
    request = validate_merge(values, indices, 2, largest=False, order="value", ties="highest")
    tensors = (values, indices, *out)
    places = [part for one in tensors for part in (one.data_ptr(), one.stride(0))]
    assert merge_arguments(request, *out) == (*places, 3, 2, 0, 2, 2, 3)


def test_the_list_holds_a_power_of_two() -> None:
    assert MAX_K & (MAX_K - 1) == 0
