"""The host side of the `split_merge` family; no GPU is needed."""

from __future__ import annotations

import pytest
import torch

from topkd.kernels import validate_select
from topkd.kernels.split_merge import GRAIN, SplitMergeFamily, cut


def test_a_cpu_tensor_is_not_served() -> None:
    unmet = SplitMergeFamily().unmet(validate_select(torch.zeros(2, 9), 3))
    assert unmet is not None
    assert "CUDA" in unmet


def test_parts_cover_the_row_and_hold_k() -> None:
    for rows in (1, 3, 16, 54, 66, 500):
        for k in (1, 5, 63, 64, 100, 2048, 20000):
            for elements in (2 * k, 2 * k + 1, 2 * k + 63, 3 * k, 4097, 131072, 1048577, 2**31 - 1):
                if elements < 2 * k:
                    continue
                parts, each = cut(rows, elements, k, 132)
                assert (parts - 1) * each < elements <= parts * each
                assert each >= k
                assert each % GRAIN == 0
                assert parts == 1 or rows * parts <= max(132, 2 * rows)


@pytest.mark.parametrize(
    ("rows", "elements", "k", "parts"),
    [(1, 1048576, 2048, 16), (1, 131072, 512, 11), (1, 1048576, 64, 91), (16, 1048576, 2048, 8), (66, 1048576, 64, 2)],
)
def test_how_rows_are_cut(rows: int, elements: int, k: int, parts: int) -> None:
    assert cut(rows, elements, k, 132).parts == parts


def test_shapes_that_are_not_served() -> None:
    unmet_shape = SplitMergeFamily().unmet_shape
    scores = torch.zeros(3, 4000)
    assert unmet_shape(validate_select(scores, 2000)) is None
    assert unmet_shape(validate_select(torch.zeros(65, 400), 5)) is None
    assert "has 1025" in str(unmet_shape(validate_select(torch.zeros(1025, 400), 5)))
    assert "4002 elements" in str(unmet_shape(validate_select(scores, 2001)))
    assert "at most 500" in str(unmet_shape(validate_select(scores, 400, group=8)))
    assert "at most 700" in str(unmet_shape(validate_select(scores, 400, max_length=700)))
    assert unmet_shape(validate_select(torch.zeros(1, 20000), 9000)) is None
    assert "value" in str(unmet_shape(validate_select(torch.zeros(1, 20000), 9000, order="value")))
