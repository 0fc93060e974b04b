"""Computing locally keeps the contract: batches are checked whole, and outputs are untouched after an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import topkd

SCORES = np.arange(64, dtype=np.float32).reshape(4, 16)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[topkd.Client]:
    with topkd.Client(tmp_path, attach_timeout=0.01, on_unavailable="local") as client:
        yield client


def output(shape: tuple[int, int] = (4, 3), dtype: Any = np.int32) -> np.ndarray[Any, Any]:
    return np.full(shape, -77, dtype)


def read_only() -> np.ndarray[Any, Any]:
    array = output()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("out", [read_only(), np.frombuffer(output().tobytes(), np.int32).reshape(4, 3)])
def test_read_only_outputs_are_refused(local: topkd.Client, out: np.ndarray[Any, Any]) -> None:
    indices = np.tile(np.arange(16, dtype=np.int32), (4, 1))
    for call in (
        lambda: local.select_topk(SCORES, 3, out_indices=out),
        lambda: local.merge_topk(SCORES, indices, 3, out_indices=out),
    ):
        with pytest.raises(topkd.ArgumentValueError, match="out_indices is read-only") as caught:
            call()
        assert caught.value.argument == "out_indices"
        assert (out == -77).all()


def test_read_only_inputs_are_selected_from_without_a_warning(local: topkd.Client) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = local.select_topk(np.broadcast_to(SCORES[0], (2, 16)), 2, order="value")
    assert result.indices.tolist() == [[15, 14]] * 2


def test_a_bad_entry_leaves_the_outputs_of_the_others(local: topkd.Client) -> None:
    out, other = output(), output()
    with pytest.raises(topkd.ArgumentValueError, match="k") as caught:
        local.select_topk_batch(
            [topkd.Selection(SCORES, 3, out_indices=out), topkd.Selection(SCORES, 0, out_indices=other)]
        )
    assert (caught.value.argument, caught.value.selection) == ("k", 1)
    assert (out == -77).all()
    assert (other == -77).all()


def test_outputs_overlap_nothing_of_the_other_entries(local: topkd.Client) -> None:
    scores, out = SCORES.copy(), output()
    batches = [
        [topkd.Selection(scores, 3, out_indices=out), topkd.Selection(scores, 3, largest=False, out_indices=out)],
        [topkd.Selection(SCORES, 3), topkd.Selection(SCORES, 3, out_indices=scores.view(np.int32)[:, :3])],
    ]
    batches[1][0].input = scores
    for batch in batches:
        with pytest.raises(topkd.ArgumentValueError, match="overlap") as caught:
            local.select_topk_batch(batch)
        assert (caught.value.argument, caught.value.selection) == ("out_indices", 1)
    assert (out == -77).all()
    assert (scores == SCORES).all()


def test_good_batches_are_served(local: topkd.Client) -> None:
    out = output()
    results = local.select_topk_batch(
        [topkd.Selection(SCORES, 3, order="value", out_indices=out), topkd.Selection(SCORES, 1, values=True)]
    )
    assert results[0].indices is out
    assert out.tolist() == [[15, 14, 13]] * 4
    assert results[1].values.tolist() == [[15], [31], [47], [63]]


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"input": SCORES[::-1]}, "input"),
        ({"input": SCORES[:, ::-1]}, "input"),
        ({"lengths": np.full(4, 5, np.int32)[::-1]}, "lengths"),
        ({"out_indices": output()[::-1]}, "out_indices"),
    ],
)
def test_negative_strides_are_refused_by_name(local: topkd.Client, options: dict[str, Any], argument: str) -> None:
    with pytest.raises(topkd.ArgumentValueError, match=f"{argument} has strides") as caught:
        local.select_topk(**{"input": SCORES, "k": 3, **options})
    assert caught.value.argument == argument


def test_strides_of_a_single_row_are_not_looked_at(local: topkd.Client) -> None:
    row = np.lib.stride_tricks.as_strided(SCORES[3], (1, 16), (-64, 4))
    assert local.select_topk(row, 2, order="value").indices.tolist() == [[15, 14]]
