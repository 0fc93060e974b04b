"""Calls of the synchronous client over session memory, staged memory and in batches."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import topkd
from tests.conftest import Server
from topkd import _codec, _cuda

RNG = np.random.default_rng(20261130)


def scores(rows: int, width: int) -> np.ndarray[Any, Any]:
    return RNG.permutation(rows * width).reshape(rows, width).astype(np.float32)


def best(array: np.ndarray[Any, Any], k: int) -> np.ndarray[Any, Any]:
    return np.argsort(-array, axis=1, kind="stable")[:, :k]


def test_session_memory_is_selected_from_in_place(client: topkd.Client) -> None:
    array = client.empty((5, 300), "float32")
    array[:] = scores(5, 300)
    result = client.select_topk(array, 7, order="value", values=True)
    assert (result.indices == best(array, 7)).all()
    assert (result.values == np.take_along_axis(array, result.indices, 1)).all()
    assert result.kernel
    assert result.device_time > 0
    assert result.queue_time >= 0
    assert not result.local


def test_views_of_session_memory_are_found(client: topkd.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    array = client.empty((8, 300), "float32")
    array[:] = scores(8, 300)
    part = array[2:7:2, 50:250]
    monkeypatch.setattr(_codec, "inline", None)
    assert (client.select_topk(part, 9, order="value").indices == best(part, 9)).all()


@pytest.mark.parametrize(("rows", "width"), [(1, 4), (3, 1000), (40, 20000)])
def test_ordinary_arrays_are_staged(client: topkd.Client, rows: int, width: int) -> None:
    array = scores(rows, width)
    indices = np.empty((rows, 4), np.int64)
    values = np.empty((rows, 8), np.float32)[:, :4]
    result = client.select_topk(
        array, 4, order="value", values=True, index_dtype="int64", out_indices=indices, out_values=values
    )
    assert result.indices is indices
    assert result.values is values
    assert (indices == best(array, 4)).all()
    assert (values == np.take_along_axis(array, indices, 1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torch_tensors_give_torch_tensors(client: topkd.Client, dtype: torch.dtype) -> None:
    for tensor in (torch.randn(6, 500).to(dtype), client.empty((6, 500), dtype).copy_(torch.randn(6, 500))):
        result = client.select_topk(tensor, 5, order="value", values=True, index_dtype=torch.int64)
        assert result.values.dtype == dtype
        assert torch.equal(result.values, tensor.topk(5).values)
        assert torch.equal(tensor.gather(1, result.indices), result.values)
        out = torch.empty(6, 5, dtype=torch.int32)
        assert client.select_topk(tensor, 5, order="value", ties="lowest", out_indices=out).indices is out
        assert torch.equal(tensor.gather(1, out.long()), result.values)


def test_bfloat16_of_numpy(client: topkd.Client) -> None:
    array = client.empty((2, 100), ml_dtypes.bfloat16)
    array[:] = RNG.standard_normal((2, 100))
    result = client.select_topk(array, 3, order="value", values=True)
    assert result.values.dtype == array.dtype
    assert (np.diff(result.values.astype(np.float32)) <= 0).all()


def test_every_tensor_option(client: topkd.Client) -> None:
    array = scores(4, 64)
    int32 = {"lengths": [64, 30, 2, 0], "row_starts": [0, 4, 8, 60]}
    options: Any = {name: np.array(value, np.int32) for name, value in int32.items()}
    table = np.arange(4 * 16, dtype=np.int32).reshape(4, 16)[:, ::-1].copy()
    paged = client.select_topk(
        array,
        3,
        order="value",
        page_table=table,
        page_size=8,
        row_to_table=np.arange(4, dtype=np.int32),
        table_starts=np.zeros(4, np.int32),
        **options,
    )
    plain = client.select_topk(array, 3, order="value", **options).indices
    pages = np.take_along_axis(table, np.maximum(plain, 0) // 8, 1)
    assert (paged.indices == np.where(plain < 0, -1, pages * 8 + plain % 8)).all()
    offsets = np.array([1000, 0, 10, 5], np.int64)
    moved = client.select_topk(array, 3, order="value", row_offsets=offsets, index_dtype="int64", **options)
    assert (moved.indices == np.where(plain < 0, -1, plain + offsets[:, None])).all()


def test_no_rows(client: topkd.Client) -> None:
    result = client.select_topk(np.zeros((0, 8), np.float32), 3, values=True)
    assert result.indices.shape == result.values.shape == (0, 3)
    out = np.empty((0, 3), np.int32)
    assert client.select_topk(np.zeros((0, 8), np.float32), 3, out_indices=out).indices is out
    tensor = torch.empty(0, 3, dtype=torch.int32)
    assert client.select_topk(torch.zeros(0, 8), 3, out_indices=tensor).indices is tensor
    assert client.plan(client.empty((0, 8), torch.float32), 3)().indices.shape == (0, 3)
    assert client.select_topk_batch([]) == []


@pytest.mark.parametrize(
    ("options", "error", "argument"),
    [
        ({"k": 0}, topkd.ArgumentValueError, "k"),
        ({"k": 1.0}, topkd.ArgumentTypeError, "k"),
        ({"k": 2**21}, topkd.ArgumentValueError, "k"),
        ({"group": 3}, topkd.ArgumentValueError, "group"),
        ({"group": 2**40, "expand": True}, topkd.ArgumentValueError, "group"),
        ({"kernel": "none"}, topkd.ArgumentValueError, "kernel"),
        ({"lengths": np.zeros(3, np.int32)}, topkd.ArgumentValueError, "lengths"),
        ({"lengths": np.zeros(8, np.int32)[::2]}, topkd.ArgumentValueError, "lengths"),
        ({"lengths": np.zeros(4, np.int64)}, topkd.ArgumentTypeError, "lengths"),
        ({"lengths": [1, 2, 3, 4]}, topkd.ArgumentTypeError, "lengths"),
        ({"input": None}, topkd.ArgumentTypeError, "input"),
        ({"input": np.zeros(4, np.float32)}, topkd.ArgumentValueError, "input"),
        ({"input": np.zeros((2, 2, 8), np.float32)}, topkd.ArgumentValueError, "input"),
        ({"max_length": np.ones(1, np.int64)}, topkd.ArgumentTypeError, "max_length"),
        ({"input": np.zeros((4, 8), np.float32)[:, ::2]}, topkd.ArgumentValueError, "input"),
        ({"input": np.zeros((4, 8), np.float32)[::-1]}, topkd.ArgumentValueError, "input"),
        ({"out_indices": np.zeros((4, 2), np.int32)}, topkd.ArgumentValueError, "out_indices"),
        ({"out_indices": np.zeros((4, 1), np.int64)}, topkd.ArgumentTypeError, "out_indices"),
        ({"out_values": np.zeros((4, 1), np.float32)}, topkd.ArgumentValueError, "out_values"),
    ],
)
def test_bad_arguments(client: topkd.Client, options: dict[str, Any], error: type[Exception], argument: str) -> None:
    options = {"input": np.zeros((4, 8), np.float32), "k": 1, **options}
    with pytest.raises(error, match=argument) as caught:
        client.select_topk(**options)
    assert isinstance(caught.value, topkd.ArgumentError)
    assert (caught.value.argument, caught.value.selection) == (argument, 0)


def test_read_only_outputs_are_refused(client: topkd.Client) -> None:
    out = np.zeros((4, 1), np.int32)
    out.flags.writeable = False
    with pytest.raises(topkd.ArgumentValueError, match="read-only"):
        client.select_topk(np.zeros((4, 8), np.float32), 1, out_indices=out)


def test_an_unknown_option_is_a_type_error(client: topkd.Client) -> None:
    with pytest.raises(TypeError, match="sorted"):
        client.select_topk(np.zeros((4, 8), np.float32), 1, sorted=True)  # type: ignore[call-arg]


def test_outputs_that_overlap_inputs_are_refused_staged_or_not(client: topkd.Client) -> None:
    ordinary, shared = np.zeros((64, 64), np.float32), client.empty((64, 64), "float32")
    for array in (ordinary, shared):
        with pytest.raises(topkd.ArgumentValueError, match="overlap") as caught:
            client.select_topk(array, 8, out_indices=array[:, :8].view(np.int32))
        assert caught.value.argument == "out_indices"


def test_a_batch_is_checked_whole_and_names_the_entry(client: topkd.Client) -> None:
    array, out = scores(3, 50), np.full((3, 2), -7, np.int32)
    good = topkd.Selection(array, 2, out_indices=out)
    with pytest.raises(topkd.ArgumentValueError, match="group") as caught:
        client.select_topk_batch([good, topkd.Selection(array, 2), topkd.Selection(array, 2, group=5)])
    assert (caught.value.selection, caught.value.argument) == (2, "group")
    assert (out == -7).all()
    results = client.select_topk_batch([good, topkd.Selection(array, 4, order="value")])
    assert results[0].indices is out
    assert (results[1].indices == best(array, 4)).all()


def test_plans(client: topkd.Client) -> None:
    array, lengths = client.empty((3, 100), "float32"), client.empty(3, "int32")
    array[:], lengths[:] = scores(3, 100), 100
    with client.plan(array, 4, order="value", values=True, lengths=lengths) as plan:
        assert plan.kernel
        assert plan.reason
        first = plan()
        assert (first.indices == best(array, 4)).all()
        array[:] = scores(3, 100)
        lengths[:] = [2, 100, 50]
        second = plan.run()
        assert second.indices is first.indices, "a plan's outputs are its own"
        assert (second.indices[1] == best(array, 4)[1]).all()
        assert second.indices[0, 2:].tolist() == [-1, -1]
        mixed = client.select_topk_batch([topkd.Selection(array, 1), plan])
        assert mixed[1].indices is first.indices
    assert plan.closed
    with pytest.raises(topkd.ClientClosedError, match="plan is closed"):
        plan()


def test_plans_want_session_memory(client: topkd.Client) -> None:
    array = client.empty((3, 100), "float32")
    with pytest.raises(topkd.ArgumentValueError, match="lengths is not in session memory") as caught:
        client.plan(array, 4, lengths=np.zeros(3, np.int32))
    assert caught.value.argument == "lengths"
    with pytest.raises(topkd.ArgumentValueError, match="input is not in session memory"):
        client.plan(np.zeros((3, 100), np.float32), 4)
    with pytest.raises(topkd.ArgumentValueError, match="k is 0"):
        client.plan(array, 0)


def test_merges(client: topkd.Client) -> None:
    values, indices = scores(2, 30), RNG.permutation(60).reshape(2, 30).astype(np.int64)
    result = client.merge_topk(values, indices, 5, order="value")
    order = best(values, 5)
    assert (result.indices == np.take_along_axis(indices, order, 1)).all()
    assert (result.values == np.take_along_axis(values, order, 1)).all()
    assert result.indices.dtype == np.int64
    with pytest.raises(topkd.ArgumentError, match="indices"):
        client.merge_topk(values, values, 5)


def test_results_stay_valid_while_they_are_held(client: topkd.Client) -> None:
    array = client.empty((4, 256), "float32")
    kept = []
    for _ in range(50):
        array[:] = scores(4, 256)
        kept.append((client.select_topk(array, 16, order="value").indices, best(array, 16)))
    for got, wanted in kept:
        assert (got == wanted).all()
    addresses = {got.ctypes.data for got, _ in kept}
    assert len(addresses) == 50
    del got
    kept.clear()
    assert client.select_topk(array, 16).indices.ctypes.data in addresses


def test_results_outlive_the_client(server: Server) -> None:
    with topkd.Client(server.socket_dir) as client:
        array = client.empty((2, 1 << 20), "float32")
        array[:] = 0
        array[:, 77] = 1
        result = client.select_topk(array, 1)
    del client
    gc.collect()
    assert result.indices.tolist() == [[77], [77]]
    assert array.sum() == 2


def test_large_memory_is_released_with_its_last_view(client: topkd.Client) -> None:
    array = client.empty((1, 1 << 20), "float32")
    session = client._core.session
    assert session is not None
    regions = len(session.index.ids)
    view = array[:, 5:]
    del array
    time.sleep(0.1)
    assert len(session.index.ids) == regions
    del view
    deadline = time.monotonic() + 5
    while len(session.index.ids) != regions - 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(session.index.ids) == regions - 1
    assert client.info().sessions >= 1


def test_ordinary_memory_cannot_be_registered(client: topkd.Client) -> None:
    for tensor in (np.zeros(4, np.float32), torch.zeros(4)):
        with pytest.raises(topkd.RegionError, match=r"client\.empty"):
            client.register(tensor)
    array = client.empty((3, 4), "float32")
    with client.register(array[1:]) as region:
        assert region.shared.offset >= 16
        assert "allocation of" in repr(region)
    assert region.closed
    assert region.wait_released(5)
    assert client.select_topk(array, 1).indices.shape == (3, 1)


def test_threads(client: topkd.Client) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            random = np.random.default_rng(seed)
            array = client.empty((2, 500), "float32")
            for _ in range(25):
                array[:] = random.permutation(1000).reshape(2, 500)
                result = client.select_topk(array if seed % 2 else array.copy(), 8, order="value")
                assert (result.indices == best(array, 8)).all()
        except BaseException as error:  # noqa: BLE001 - reported by the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_information(client: topkd.Client) -> None:
    info = client.info()
    assert info.device.backend is topkd.Backend.CPU
    assert info.limits.max_batch > 0
    assert [family.name for family in info.kernels]
    assert info.version == topkd.__version__


def test_options_of_a_client_are_checked() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"timeout": 0}, topkd.ArgumentValueError),
        ({"timeout": "1"}, topkd.ArgumentTypeError),
        ({"attach_timeout": -1}, topkd.ArgumentValueError),
        ({"on_unavailable": "maybe"}, topkd.ArgumentValueError),
        ({"target": 5}, topkd.ArgumentTypeError),
        ({"target": "/run/topkd", "token": "x"}, topkd.ArgumentValueError),
        ({"device": "tpu"}, topkd.ArgumentValueError),
        ({"tls": "yes", "target": "h:1"}, topkd.ArgumentTypeError),
    ]
    for options, error in wrong:
        with pytest.raises(error):
            topkd.Client(**options)


def test_a_device_that_cuda_does_not_show_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> int:
        raise topkd.RegionError("cudaGetDevice failed: cudaErrorNoDevice")

    monkeypatch.setattr(_cuda, "current_device", failing)
    with pytest.raises(topkd.RegionError, match=r"device is 'cuda', which .*: cudaGetDevice failed"):
        topkd.Client(device="cuda")


def test_another_device_is_refused(server: Server) -> None:
    with (
        topkd.Client(server.socket_dir, device="GPU-00000000-0000-0000-0000-000000000000") as client,
        pytest.raises(topkd.RegionError, match="CPU"),
    ):
        client.connect()
    with topkd.Client(server.socket_dir, device="cpu") as client:
        client.connect()
        assert client.attached


def test_a_closed_client_says_so(server: Server) -> None:
    client = topkd.Client(server.socket_dir)
    assert not client.attached
    client.connect()
    client.close()
    client.close()
    with pytest.raises(topkd.ClientClosedError, match="closed"):
        client.info()
    assert str(server.socket_dir) in repr(client)
