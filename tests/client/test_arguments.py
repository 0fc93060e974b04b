"""Arguments that a client refuses by itself, by name and at once."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest
import torch

import topkd
from tests.conftest import Server
from topkd import _arrays
from topkd._output import check_overlaps

SCORES = np.arange(64, dtype=np.float32).reshape(4, 16)


def negated(client: topkd.Client, dtype: torch.dtype, *shape: int) -> Any:
    """Returns a lazily negated view of session memory that holds ones."""
    tensor = client.empty(shape, dtype)
    tensor.fill_(1)
    view = torch._neg_view(tensor)
    assert view.is_neg()
    return view


def test_lazily_negated_scores_are_refused(client: topkd.Client) -> None:
    pairs = client.empty((2, 2), torch.float32)
    pairs.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    view = torch.view_as_complex(pairs).conj().imag.unsqueeze(1)
    client.select_topk(torch.view_as_real(torch.view_as_complex(pairs))[:, 1:], 1)  # the same memory, not negated
    for call in (client.select_topk, client.plan):
        with pytest.raises(topkd.ArgumentValueError, match=r"input .*resolve_neg") as caught:
            call(view, 1)
        assert caught.value.argument == "input"
    assert client.select_topk(view.resolve_neg(), 1, values=True).values.tolist() == [[-2.0], [-4.0]]


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "options"),
    [
        ("lengths", torch.int32, (4,), {}),
        ("row_offsets", torch.int32, (4,), {}),
        ("page_table", torch.int32, (4, 4), {}),
        ("out_indices", torch.int32, (4, 3), {}),
        ("out_values", torch.float32, (4, 3), {"values": True}),
    ],
)
def test_every_lazily_negated_tensor_is_refused(
    client: topkd.Client, name: str, dtype: torch.dtype, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    view = negated(client, dtype, *shape)
    plain = view.resolve_neg() if name != "page_table" else torch.zeros(shape, dtype=dtype)
    client.select_topk(torch.from_numpy(SCORES), 3, **options, **{name: plain})
    with pytest.raises(topkd.ArgumentValueError, match=f"{name} .*resolve_neg") as caught:
        client.select_topk(torch.from_numpy(SCORES), 3, **options, **{name: view})
    assert caught.value.argument == name


def test_outputs_may_lie_in_the_gaps_of_an_input(client: topkd.Client) -> None:
    for buffer in (np.full((4, 10), 5, np.int32), client.empty((4, 10), "int32")):
        buffer[:] = 5
        out = client.select_topk(SCORES, 3, order="value", lengths=buffer[1, 5:9], out_indices=buffer[:, :3]).indices
        assert out.tolist() == [[4, 3, 2]] * 4
        with pytest.raises(topkd.ArgumentValueError, match="overlap"):
            client.select_topk(SCORES, 3, lengths=buffer[1, 2:6], out_indices=buffer[:, :3])


def test_overlap_is_judged_by_element_as_in_process() -> None:
    rng = np.random.default_rng(0)
    buffer = np.zeros(200, np.int32)
    met = 0
    for _ in range(2000):
        pair, members = [], []
        for name in ("input", "out_indices"):
            rows, columns = map(int, rng.integers(1, 5, 2))
            stride = columns + int(rng.integers(0, 20))
            start = int(rng.integers(0, 100))
            view = np.lib.stride_tricks.as_strided(buffer[start:], (rows, columns), (stride * 4, 4))
            pair.append((0, name, _arrays.describe(name, view)))
            members.append({start + row * stride + column for row in range(rows) for column in range(columns)})
        try:
            check_overlaps(pair)
            refused = False
        except topkd.ArgumentValueError:
            refused = True
        assert refused == bool(members[0] & members[1])
        met += refused
    assert 100 < met < 1900


def test_plans_of_another_client_are_refused_at_once(server: Server, client: topkd.Client) -> None:
    plan = client.plan(client.empty((2, 8), "float32"), 3)
    selection = topkd.Selection(SCORES, 1)
    started = time.monotonic()
    with topkd.Client(server.socket_dir) as other:
        stream = other.stream()
        for call in (other.select_topk_batch, stream.select_topk_batch, stream.submit):
            with pytest.raises(
                topkd.ArgumentValueError, match=r"selections\[1\] is a plan of another client"
            ) as caught:
                call([selection, plan])
            assert caught.value.selection == 1
        with pytest.raises(topkd.ArgumentValueError, match="another client"):
            stream.run(plan)
        stream.close()

    async def asynchronous() -> None:
        async with topkd.AsyncClient(server.socket_dir) as other:
            with pytest.raises(topkd.ArgumentValueError, match="another client"):
                await other.select_topk_batch([plan])  # type: ignore[list-item]

    asyncio.run(asynchronous())
    assert time.monotonic() - started < 10
    assert client.select_topk_batch([selection, plan])[1].indices.shape == (2, 3)


def test_batches_are_of_selections_and_plans(client: topkd.Client) -> None:
    for wrong in ("x", SCORES, None):
        with pytest.raises(topkd.ArgumentTypeError, match=r"selections\[1\] must be"):
            client.select_topk_batch([topkd.Selection(SCORES, 1), wrong])  # type: ignore[list-item]


def test_a_batch_is_several(client: topkd.Client) -> None:
    for wrong in (topkd.Selection(SCORES, 1), 1, None):
        with pytest.raises(topkd.ArgumentTypeError, match="selections must be a list") as caught:
            client.select_topk_batch(wrong)  # type: ignore[arg-type]
        assert caught.value.argument == "selections"


@pytest.mark.parametrize("timeout", [True, "1", b"1", [1], 1j, np.ones(1)])
def test_timeouts_are_numbers(client: topkd.Client, timeout: Any) -> None:
    for call in (
        lambda: client.select_topk(SCORES, 1, timeout=timeout),
        lambda: client.info(timeout=timeout),
        lambda: client.connect(timeout=timeout),
        lambda: topkd.Client(timeout=timeout),
    ):
        with pytest.raises(topkd.ArgumentTypeError, match="timeout must be seconds"):
            call()


@pytest.mark.parametrize("timeout", [math.nan, -1, -math.inf, -1e-9])
def test_timeouts_are_not_negative(client: topkd.Client, timeout: float) -> None:
    with pytest.raises(topkd.ArgumentValueError, match="timeout is"):
        client.select_topk(SCORES, 1, timeout=timeout)
    with pytest.raises(topkd.ArgumentValueError, match="timeout is"):
        topkd.Client(timeout=timeout)


def test_endless_timeouts(server: Server) -> None:
    endless = {"timeout": math.inf, "attach_timeout": 1e300, "ready_timeout": math.inf}
    with topkd.Client(server.socket_dir, **endless) as client, client.stream() as stream:
        assert stream.select_topk(SCORES, 1).indices.tolist() == [[15]] * 4
        for timeout in (None, math.inf, 1e300, 10**400, np.float32(1e9)):
            for caller in (client, stream):
                assert caller.select_topk(SCORES, 1, timeout=timeout).indices.tolist() == [[15]] * 4


def test_a_kernel_without_a_name_is_no_choice(client: topkd.Client) -> None:
    scores = client.empty((1, 8), "float32")
    for call in (client.select_topk, client.plan):
        with pytest.raises(topkd.ArgumentValueError, match="kernel is ''") as caught:
            call(scores, 1, kernel="")
        assert caught.value.argument == "kernel"
    with pytest.raises(topkd.ArgumentValueError, match="kernel is ''") as caught:
        client.select_topk_batch([topkd.Selection(scores, 1), topkd.Selection(scores, 1, kernel="")])
    assert (caught.value.argument, caught.value.selection) == ("kernel", 1)


def test_texts_that_no_message_carries(client: topkd.Client) -> None:
    with pytest.raises(topkd.ArgumentValueError, match="kernel is"):
        client.select_topk(SCORES, 1, kernel="\ud800")
    with pytest.raises(topkd.ArgumentValueError, match="name is"):
        topkd.Client(name="\ud800")
    with pytest.raises(topkd.ArgumentTypeError, match="name must be a str"):
        topkd.Client(name=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["a\n", "\0", "é", " a", "\ud800"])
def test_tokens_are_printable(token: str) -> None:
    with pytest.raises(topkd.ArgumentValueError, match="token"):
        topkd.Client("localhost:1", token=token)
    with pytest.raises(topkd.ArgumentTypeError, match="token must be a str"):
        topkd.Client("localhost:1", token=b"a")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused(client: topkd.Client) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)])
    with pytest.raises(topkd.ArgumentValueError, match=r"input .*nested"):
        client.select_topk(nested, 1)


@pytest.mark.parametrize("shape", [True, (2, False)])
def test_bools_are_no_sizes(client: topkd.Client, shape: Any) -> None:
    with pytest.raises(topkd.ArgumentTypeError, match="shape must be"):
        client.empty(shape)
