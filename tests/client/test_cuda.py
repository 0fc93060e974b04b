"""Device memory: what can be checked without a device, and the client against a CUDA server."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import topkd
from tests.conftest import Server
from topkd import _cuda

gpu = pytest.mark.gpu


def test_failures_of_the_runtime_are_region_errors_that_name_the_call() -> None:
    assert _cuda.checked("cudaGetDevice", (0, 3)) == 3
    assert _cuda.checked("cudaFree", (0,)) == ()
    with pytest.raises(topkd.RegionError, match="cudaMalloc of 5 bytes failed: 2"):
        _cuda.checked("cudaMalloc of 5 bytes", (2, None))


@pytest.fixture(scope="module")
def client(cuda_server: Server) -> Iterator[topkd.Client]:
    with topkd.Client(cuda_server.socket_dir, device="cuda:0") as client:
        yield client


def check(tensor: torch.Tensor, result: topkd.SelectResult, k: int) -> None:
    assert result.indices.device == tensor.device
    assert torch.equal(tensor.gather(1, result.indices.long()), tensor.topk(k).values)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_session_memory_registered_memory_and_staged_memory(client: topkd.Client, dtype: torch.dtype) -> None:
    shared = client.empty((4, 5000), dtype)
    shared.copy_(torch.randn(4, 5000))
    assert shared.is_cuda
    assert shared.dtype == dtype
    check(shared, client.select_topk(shared, 9, order="value"), 9)
    ordinary = torch.randn(4, 5000, device="cuda").to(dtype)
    check(ordinary, client.select_topk(ordinary, 9, order="value"), 9)
    out = torch.empty(4, 9, dtype=torch.int32, device="cuda")
    assert client.select_topk(ordinary, 9, order="value", out_indices=out).indices is out
    with client.register(ordinary) as region:
        assert region.shared.size >= region.shared.nbytes
        check(ordinary[1:, 7:], client.select_topk(ordinary[1:, 7:], 9, order="value"), 9)
    assert region.wait_released(10)


@gpu
def test_host_tensors_go_inline(client: topkd.Client) -> None:
    tensor = torch.randn(3, 100)
    check(tensor, client.select_topk(tensor, 4, order="value"), 4)
    with pytest.raises(topkd.ArgumentValueError, match="one device"):
        client.select_topk(tensor.cuda(), 4, lengths=torch.zeros(3, dtype=torch.int32))


@gpu
def test_plans_and_the_order_of_the_current_stream(client: topkd.Client) -> None:
    scores = client.empty((2, 100_000), torch.float32)
    plan = client.plan(scores, 5, order="value")
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        scores.copy_(torch.randn(2, 100_000))
        check(scores, plan(), 5)


@gpu
def test_a_call_in_capture_raises_before_anything_is_sent(client: topkd.Client) -> None:
    scores = client.empty((2, 1000), torch.float32)
    client.select_topk(scores, 5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(topkd.CaptureError, match="capture"):
        client.select_topk(scores, 5)


@gpu
@pytest.mark.exclusive
def test_device_memory_is_freed_after_the_server_has_released_it(client: topkd.Client) -> None:
    client.connect()
    free = torch.cuda.mem_get_info()[0]
    tensor: Any = client.empty((1, 64 << 20), torch.float32)
    view = tensor[:, 5:]
    del tensor
    gc.collect()
    assert torch.cuda.mem_get_info()[0] <= free - (200 << 20)
    del view
    deadline = time.monotonic() + 10
    while torch.cuda.mem_get_info()[0] < free - (64 << 20) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.cuda.mem_get_info()[0] >= free - (64 << 20)


@gpu
def test_expandable_segments_can_be_registered(cuda_server: Server) -> None:
    code = f"""
import torch, topkd
with topkd.Client({str(cuda_server.socket_dir)!r}, timeout=60, attach_timeout=60) as client:
    scores = torch.arange(1 << 24, device="cuda", dtype=torch.float32).view(1, -1)
    with client.register(scores) as region:
        print(region.shared.nbytes, client.select_topk(scores, 2, order="value").indices.tolist())
"""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/", check=False
    )
    assert result.stdout == "67108864 [[16777215, 16777214]]\n", result.stderr
