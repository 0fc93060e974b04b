"""What a call leaves alone: gradients, modes, inputs; and refusal in capture. The oracle's cases are in conformance."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from topkd.kernels import _dispatch, merge_topk, select_topk
from topkd.kernels._torch_keys import CODES, composite, split


def test_inputs_with_gradients() -> None:
    scores = torch.randn(3, 20, requires_grad=True)
    found = select_topk(scores, 4, values=True, order="value")
    assert found.values is not None
    assert not found.values.requires_grad
    assert not found.values.is_inference()
    assert not found.indices.is_inference()
    assert torch.equal(found.values, scores.detach().topk(4).values)


def test_outputs_with_gradients_and_of_inference_mode() -> None:
    scores = torch.randn(3, 20)
    wanted = scores.topk(4).values
    values = torch.zeros(3, 4, requires_grad=True)
    assert torch.equal(select_topk(scores, 4, values=True, order="value", out_values=values).values, wanted)  # type: ignore[arg-type]
    with torch.inference_mode():
        inside = torch.zeros(3, 4)
        indices = torch.zeros(3, 4, dtype=torch.int32)
        frozen = scores.clone()
    select_topk(frozen, 4, values=True, order="value", out_values=inside, out_indices=indices)
    assert torch.equal(inside, wanted)


def test_results_can_be_used_in_autograd() -> None:
    scores = torch.randn(3, 20, requires_grad=True)
    indices = select_topk(scores, 4, index_dtype=torch.int64).indices
    scores.gather(1, indices).sum().backward()
    assert scores.grad is not None
    assert scores.grad.sum() == 12


def test_deterministic_algorithms_are_no_obstacle() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        lengths = torch.tensor([5, 9], dtype=torch.int32)
        table = torch.zeros(2, 9, dtype=torch.int32)
        select_topk(torch.randn(2, 9), 4, lengths=lengths, page_table=table, ties="highest", order="value", values=True)
        select_topk(torch.randn(2, 64), 4, group=8, lengths=lengths, expand=True, pin_newest=True, row_starts=lengths)
        merge_topk(torch.randn(2, 9), table, 3, ties="lowest")
    finally:
        torch.use_deterministic_algorithms(False)


def test_capture_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"'torch'.*capture"):
        _dispatch.refuse_capture("torch", torch.device("cuda", 0))
    _dispatch.refuse_capture("torch", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    _dispatch.refuse_capture("torch", torch.device("cuda", 0))


def test_threads() -> None:
    scores = [torch.randn(4, 500) for _ in range(8)]
    found: dict[int, Any] = {}

    def work(place: int) -> None:
        for _ in range(20):
            found[place] = select_topk(scores[place], 9, order="value", values=True).values

    threads = [threading.Thread(target=work, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for place, one in enumerate(scores):
        assert torch.equal(found[place], one.topk(9).values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("largest", [True, False])
def test_keys_order_every_16_bit_pattern(dtype: torch.dtype, largest: bool) -> None:
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    scores, code = bits.view(dtype).to(torch.float64), CODES[dtype]
    keys = code.encode(bits, largest).to(torch.int64)
    assert keys.min() > code.masked
    assert keys.max() < code.newest
    nan = scores.isnan()
    assert keys[nan].unique().numel() == 1
    assert ((keys[~nan].max() < keys[nan].min()) if largest else (keys[~nan].min() > keys[nan].max())).item()
    finite = scores[~nan]
    steps = finite[finite.argsort()], keys[~nan][finite.argsort()] * (1 if largest else -1)
    assert torch.equal(steps[0].diff() > 0, steps[1].diff() > 0)
    assert torch.equal(steps[0].diff() == 0, steps[1].diff() == 0)


@pytest.mark.parametrize("dtype", list(CODES))
def test_keys_decode(dtype: torch.dtype) -> None:
    code = CODES[dtype]
    wanted = torch.tensor([0.0, -0.0, 1.5, -1.5, float("inf"), float("-inf"), float("nan")], dtype=dtype)
    again = code.decode(code.encode(wanted.view(code.dtype), largest=True)).view(dtype)
    assert again[:1].view(code.dtype).item() == again[1:2].view(code.dtype).item() == 0
    assert torch.equal(again[2:6], wanted[2:6])
    assert again[6:].view(code.dtype).item() == code.quiet_nan
    newest = torch.tensor([code.newest], dtype=code.dtype)
    assert code.decode(newest).view(dtype).item() == float("inf")


@pytest.mark.parametrize("highest", [False, True])
def test_composites(highest: bool) -> None:
    keys = torch.tensor([[CODES[torch.float32].masked, -1, 0, 0, CODES[torch.float32].newest]], dtype=torch.int32)
    places = torch.tensor([0, 7, 2**31 - 1, 0, 2**31 - 1])
    made = composite(keys, places, highest)
    again, found = split(made, highest)
    assert torch.equal(again, keys.to(torch.int64))
    assert torch.equal(found[0], places)
    assert (made[0, 2] > made[0, 3]).item() is highest
