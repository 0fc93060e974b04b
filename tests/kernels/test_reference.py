"""The reference that ships, against the oracle: every dtype, every class of bits, short rows and ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.oracle import FORMATS, Case, expected
from tests.patterns import FILLS, fill
from topkd.kernels._reference import best_keys, group_keys, is_selection, rank_keys, selected

TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def as_torch(bits: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16 if bits.itemsize == 2 else np.int32)).view(TORCH[dtype])


@pytest.mark.parametrize("kind", FILLS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("largest", [True, False])
def test_selected_is_what_the_oracle_expects(kind: str, dtype: str, largest: bool) -> None:
    rows, width = 4, 70
    bits = fill(kind, dtype, 7, rows * width)
    lengths = np.array([70, 0, 13, 31], np.int32)
    case = Case(
        storage=bits,
        dtype=dtype,
        rows=rows,
        width=width,
        k=20,
        lengths=lengths,
        largest=largest,
        order="index",
        ties="lowest",
    )
    keys = rank_keys(as_torch(bits.reshape(rows, width), dtype), largest=largest)
    got = selected(keys, 20, torch.from_numpy(lengths))
    np.testing.assert_array_equal(got.numpy(), expected(case).indices)


def test_k_may_exceed_the_width() -> None:
    got = selected(rank_keys(torch.tensor([[1.0, 3.0, 2.0]])), 5, torch.tensor([2], dtype=torch.int32))
    assert got.tolist() == [[0, 1, -1, -1, -1]]


def test_groups_take_the_best_and_nan_wins() -> None:
    scores = torch.tensor([[1.0, 3.0, float("nan"), 9.0, -0.0, 0.0]])
    keys = group_keys(rank_keys(scores), 2)
    assert keys.argsort(descending=True).tolist() == [[1, 0, 2]]


def test_what_is_no_selection() -> None:
    keys = rank_keys(torch.tensor([[4.0, 1.0, 3.0, 3.0, 2.0]]))
    best = best_keys(keys, 3)

    def verdict(*indices: int) -> bool:
        return is_selection(keys, best, torch.tensor([indices], dtype=torch.int32))

    assert verdict(3, 0, 2)
    assert verdict(0, 3)
    assert verdict(0, 2)
    for wrong in ((0, 2, 4), (0, 2, 2), (0, 2, -1), (0, 2, 5), (2, 3)):
        assert not verdict(*wrong)
