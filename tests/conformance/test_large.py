"""Inputs of more than 2^31 elements, where a 32-bit row offset would wrap; only a GPU has the memory to spare."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.conformance.backends import Backend, InProcess, strided
from tests.oracle import Case, check
from tests.patterns import fill

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive]


def judged(backend: Backend, scores: torch.Tensor, some: list[int], **options: Any) -> None:
    """Select from all rows, and judge some of them."""
    result = backend.api.select_topk(scores, 16, values=True, order="value", ties="lowest", **options)
    bits = scores[some].view(torch.int16).cpu().numpy().view(np.uint16)
    case = Case(
        storage=bits.ravel(),
        dtype="bfloat16",
        rows=len(some),
        width=scores.shape[1],
        k=16,
        values=True,
        order="value",
        ties="lowest",
        **options,
    )
    values = result.values[some].view(torch.int16).cpu().numpy().view(np.uint16)
    check(case, result.indices[some].cpu().numpy(), values)


def test_row_offset_past_2_to_31(backend: Backend) -> None:
    flat = backend.api.empty(2**32 + 20000, torch.bfloat16)
    flat.zero_()
    scores = strided(flat, (3, 5000), (2**31 + 64, 1), 5)
    for row in range(3):
        bits = torch.from_numpy(fill("near-one", "bfloat16", row, 5000).view(np.int16))
        scores[row].view(torch.int16).copy_(bits)
    judged(backend, scores, [0, 1, 2])


@pytest.mark.parametrize("backend", ["inprocess-cuda", "remote-cuda"], indirect=True)  # minutes on a CPU
def test_more_than_2_to_31_members(backend: Backend) -> None:
    rows, width = 16500, 131072
    scores = backend.api.empty(rows * width, torch.bfloat16).view(rows, width)
    row = torch.from_numpy(fill("near-one", "bfloat16", 1, width).view(np.int16)).to(scores.device)
    scores.view(torch.int16).copy_(row.expand(rows, width))
    for one in (0, rows // 2, rows - 2, rows - 1):
        scores[one].view(torch.int16).copy_(row.roll(one))
    judged(backend, scores, [0, 1, rows // 2, rows - 2, rows - 1])
    if isinstance(backend.api, InProcess):
        judged(backend, scores, [rows - 1], kernel="torch")
