"""The service on CUDA tensors: client and server in processes of their own, memory shared by CUDA IPC."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import topkd
from tests.e2e import answers, gpu_engine, processes, scrape
from tests.e2e.answers import UNIQUE, best
from tests.e2e.calls import start_call
from tests.e2e.conftest import Launch
from tests.e2e.engines import Engine
from tests.e2e.servers import Running

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
ROWS, WIDTH, K = 6, 20_000, 512
DTYPES = ("bfloat16", "float16", "float32")


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch("cuda")


@pytest.fixture(scope="module")
def client(own: Running) -> Iterator[topkd.Client]:
    with topkd.Client(own.socket_dir, device="cuda:0", timeout=60, attach_timeout=60) as attached:
        attached.connect()
        own.settle()
        yield attached


def bits(tensor: Any) -> Any:
    """Returns a tensor's bits on the host."""
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).cpu()


def filled(client: topkd.Client, seed: int, shape: tuple[int, int], dtype: str = "float32") -> Any:
    """Returns scores in session memory; 16-bit types have many equal ones."""
    tensor = client.empty(shape, getattr(torch, dtype))
    tensor.copy_(torch.from_numpy(answers.rows(seed, *shape)))
    return tensor


def want(scores: Any, k: int) -> Any:
    """Returns the one right answer."""
    return torch.from_numpy(best(scores.float().cpu().numpy(), k))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_selection_from_session_memory(client: topkd.Client, dtype: str) -> None:
    scores = filled(client, 1, (ROWS, WIDTH), dtype)
    assert scores.is_cuda
    result = client.select_topk(scores, K, values=True, wait="host", **UNIQUE)
    assert result.indices.device == scores.device
    assert torch.equal(result.indices.cpu(), want(scores, K))
    assert torch.equal(bits(result.values), bits(scores.gather(1, result.indices.long())))
    assert 0 < result.device_time < 5


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_selection_from_ordinary_memory_is_staged(client: topkd.Client, dtype: str) -> None:
    scores = torch.from_numpy(answers.rows(2, ROWS, WIDTH)).to("cuda", getattr(torch, dtype))
    assert torch.equal(client.select_topk(scores, K, **UNIQUE).indices.cpu(), want(scores, K))
    host = scores.float().cpu()
    on_host = client.select_topk(host, K, **UNIQUE).indices
    assert not on_host.is_cuda
    assert torch.equal(on_host, want(host, K))
    array = client.select_topk(host.numpy(), K, **UNIQUE).indices
    assert isinstance(array, np.ndarray)
    assert np.array_equal(array, best(host.numpy(), K))


def test_given_outputs_and_options(client: topkd.Client) -> None:
    scores = filled(client, 3, (ROWS, WIDTH))
    out = client.empty((ROWS, K), torch.int64)
    result = client.select_topk(scores, K, index_dtype=torch.int64, out_indices=out, **UNIQUE)
    assert result.indices is out
    assert torch.equal(out.cpu(), want(scores, K).long())
    lengths = torch.tensor([0, 1, 600, 7000, 20_000, 99_999], dtype=torch.int32, device="cuda")
    got = client.select_topk(scores, K, lengths=lengths, **UNIQUE).indices.cpu()
    for row, length in enumerate(lengths.clamp(0, WIDTH).tolist()):
        chosen = want(scores[row : row + 1, :length], K)[0]
        assert torch.equal(got[row, : len(chosen)], chosen), row
        assert bool((got[row, len(chosen) :] == -1).all()), row
    with pytest.raises(ValueError, match="page_size"):
        client.select_topk(scores, K, page_size=8)


def test_a_call_is_in_the_order_of_the_callers_stream(client: topkd.Client) -> None:
    scores = filled(client, 4, (ROWS, WIDTH))
    later = torch.from_numpy(answers.rows(5, ROWS, WIDTH)).cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        scores.copy_(later)
        indices = client.select_topk(scores, K, **UNIQUE).indices.cpu()  # a copy by another stream might come first
    assert torch.equal(indices, want(later, K))


def test_a_call_during_capture_is_refused(client: topkd.Client) -> None:
    scores, other = filled(client, 6, (2, 4096)), torch.zeros(4, device="cuda")
    client.select_topk(scores, 8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        other.add_(1)
        with pytest.raises(topkd.CaptureError):
            client.select_topk(scores, 8)
    graph.replay()
    torch.cuda.synchronize()
    assert other.tolist() == [1, 1, 1, 1]
    assert torch.equal(client.select_topk(scores, 8, **UNIQUE).indices.cpu(), want(scores, 8))


def test_a_batch_over_several_regions(client: topkd.Client) -> None:
    registered = torch.from_numpy(answers.rows(7, 4, 1 << 20)).cuda()
    with client.register(registered):
        scores = [filled(client, seed, (1 + seed, 300_000 + seed)) for seed in range(4)]  # each a region of its own
        scores += [filled(client, seed, (2, 500), "bfloat16") for seed in range(4)]
        scores += [registered, registered[1:3, 5000:90_000], torch.from_numpy(answers.rows(8, 3, 900)).cuda()]
        results = client.select_topk_batch([topkd.Selection(one, 40, **UNIQUE) for one in scores])
        for place, (one, result) in enumerate(zip(scores, results, strict=True)):
            assert torch.equal(result.indices.cpu(), want(one, 40)), place


def test_a_plan_reads_its_tensors_anew(client: topkd.Client) -> None:
    scores = filled(client, 1, (ROWS, WIDTH), "bfloat16")
    lengths = client.empty(ROWS, torch.int32)
    with client.plan(scores, K, lengths=lengths, **UNIQUE) as plan:
        for seed in range(5):
            scores.copy_(torch.from_numpy(answers.rows(seed, ROWS, WIDTH)))
            lengths.fill_(6000 * (seed % 3 + 1))
            got = plan().indices.cpu()
            assert torch.equal(got, want(scores[:, : 6000 * (seed % 3 + 1)], K)), seed


def test_merging_parts_gives_the_whole(client: topkd.Client) -> None:
    scores = torch.from_numpy(answers.rows(9, ROWS, 4 * WIDTH)).cuda()
    values, indices = [], []
    for part in range(4):
        result = client.select_topk(scores[:, part * WIDTH : (part + 1) * WIDTH], K, values=True, **UNIQUE)
        values.append(result.values.clone())
        indices.append(result.indices + part * WIDTH)
    merged = client.merge_topk(torch.cat(values, 1), torch.cat(indices, 1), K, **UNIQUE)
    assert torch.equal(merged.indices.cpu(), want(scores, K))


def test_figures_come_from_the_device(own: Running, client: topkd.Client) -> None:
    info = client.info()
    assert info.device.backend is topkd.Backend.CUDA
    assert info.device.uuid.startswith("GPU-")
    scores = filled(client, 1, (2, 4096))
    time.sleep(0.6)  # the figures of what was before are in
    before = scrape.total(own.metrics(), "topkd_kernel_seconds_count")
    client.select_topk(scores, 8)
    page = scrape.wait_for(own.metrics_port, {"topkd_kernel_seconds_count": before + 1})
    assert scrape.total(page, "topkd_regions", memory="cuda_ipc") >= 1
    assert 0 < scrape.total(page, "topkd_kernel_seconds_sum") / (before + 1) < 5
    assert scrape.total(page, "topkd_compiles_total") == 0


def test_two_clients_at_once(own: Running, client: topkd.Client) -> None:
    engines = [Engine(own.socket_dir, "steady", "gpu_engine.py") for _ in range(2)]
    try:
        for engine in engines:
            engine.wait_for("calling", 120)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            scores = filled(client, 1, (ROWS, WIDTH))
            assert torch.equal(client.select_topk(scores, K, **UNIQUE).indices.cpu(), want(scores, K))
        for engine in engines:
            engine.wait_for("many", 60)
            report = engine.finish()
            assert (report["wrong"], report["failed"]) == (0, 0), report
    finally:
        for engine in engines:
            engine.kill()


def test_a_killed_worker_is_named_and_everything_restored(own: Running) -> None:
    own.settle()
    before = own.workers()
    with topkd.Client(own.socket_dir, timeout=60, attach_timeout=60) as client:
        scores, out = filled(client, 1, (ROWS, WIDTH)), client.empty((ROWS, K), torch.int32)
        registered = torch.from_numpy(answers.rows(2, ROWS, WIDTH)).cuda()
        region = client.register(registered)
        plan = client.plan(registered, K, **UNIQUE)
        matrix, k = gpu_engine.long_call(client)
        call = start_call(client.select_topk, matrix, k, kernel="torch", wait="host")
        worker = _computing(before)
        killed_at = processes.kill(worker)
        call.wait()
        assert isinstance(call.error, topkd.SessionLostError), repr(call)
        assert call.ended - killed_at < 1.0
        client.select_topk(scores, K, out_indices=out, **UNIQUE)
        assert torch.equal(out.cpu(), want(scores, K))
        assert torch.equal(plan().indices.cpu(), want(registered, K))
        region.close()


def _computing(workers: set[int]) -> int:
    """Waits for one of some processes to compute, and returns it."""
    seen = {pid: processes.cpu_seconds(pid) for pid in workers}

    def busy() -> int:
        return next((pid for pid in workers if processes.cpu_seconds(pid) - seen[pid] > 0.4), 0)

    return processes.wait_until(busy, 20, "a worker computes")


@pytest.mark.exclusive
def test_a_killed_front_takes_its_workers_along_and_the_client_comes_back(launch: Launch) -> None:
    free = torch.cuda.mem_get_info(0)[0]
    server = launch("cuda")
    with topkd.Client(server.socket_dir, timeout=60, attach_timeout=60) as client:
        registered = torch.from_numpy(answers.rows(3, ROWS, WIDTH)).cuda()
        scores = filled(client, 1, (ROWS, WIDTH))
        region, plan = client.register(registered), client.plan(registered, K, **UNIQUE)
        server.settle()
        workers = server.workers()
        matrix, k = gpu_engine.long_call(client)
        call = start_call(client.select_topk, matrix, k, kernel="torch", wait="host")
        _computing(workers)
        killed_at = processes.kill(server.pid)
        call.wait()
        assert isinstance(call.error, topkd.SessionLostError), repr(call)
        assert call.ended - killed_at < 1.0
        processes.wait_until(lambda: not any(map(processes.alive, workers)), 2.0, "no worker outlives the front")
        assert server.process is not None
        server.process.wait(10)
        server.start()
        assert torch.equal(client.select_topk(scores, K, **UNIQUE).indices.cpu(), want(scores, K))
        assert torch.equal(plan().indices.cpu(), want(registered, K))
        region.close()
    server.stop()
    del scores, registered, matrix, plan
    back = lambda: free - torch.cuda.mem_get_info(0)[0] < 1 << 30  # noqa: E731 - of this process's own
    processes.wait_until(back, 10, "the servers' device memory is free again")
