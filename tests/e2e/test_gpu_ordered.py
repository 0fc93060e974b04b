"""Selections that are ordered on the caller's streams: nobody waits, everything is in order, nothing hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

import topkd
from tests.e2e import answers, gpu_engine, processes, scrape
from tests.e2e.answers import UNIQUE, best
from tests.e2e.conftest import Launch
from tests.e2e.engines import Engine
from tests.e2e.servers import Running

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
ROWS, WIDTH, K = 6, 20_000, 512
UNTOUCHED = -7
KERNELS = ("radix_wide", "torch")
"""One that the server's stream can hold behind the ready word, and one that the server launches when it has come."""


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch("cuda")


@pytest.fixture(scope="module")
def client(own: Running) -> Iterator[topkd.Client]:
    with topkd.Client(own.socket_dir, device="cuda:0", timeout=60, attach_timeout=60, ready_timeout=10) as attached:
        warm(attached)
        own.settle()
        yield attached


@pytest.fixture(autouse=True)
def nothing_left(client: topkd.Client) -> Iterator[None]:
    yield
    torch.cuda.synchronize()
    client.check()


def warm(client: topkd.Client) -> None:
    """Loads what a first call loads, here and there, which waits for blocked streams."""
    scores = filled(client, 0)
    for kernel in KERNELS:
        client.select_topk(scores, K, kernel=kernel, **UNIQUE)
    client.select_topk(torch.zeros(2, 4096, dtype=torch.bfloat16, device="cuda"), 8)
    torch.cuda._sleep(1000)
    torch.topk(scores, K).indices.sort(dim=1)
    torch.cuda.synchronize()


def filled(client: topkd.Client, seed: int) -> Any:
    scores = client.empty((ROWS, WIDTH), torch.float32)
    scores.copy_(torch.from_numpy(answers.rows(seed, ROWS, WIDTH)))
    torch.cuda.synchronize()
    return scores


def out_of(client: topkd.Client) -> Any:
    out = client.empty((ROWS, K), torch.int32)
    out.fill_(UNTOUCHED)
    torch.cuda.synchronize()
    return out


def want(scores: Any) -> Any:
    return torch.from_numpy(best(scores.float().cpu().numpy(), K))


_cycles: list[float] = []


def sleep(seconds: float) -> None:
    """Keeps the current stream busy."""
    if not _cycles:
        started = time.perf_counter()
        torch.cuda._sleep(100_000_000)
        torch.cuda.synchronize()
        _cycles.append(100_000_000 / (time.perf_counter() - started))
    torch.cuda._sleep(int(seconds * _cycles[0]))


@pytest.mark.exclusive
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_call_does_not_wait_for_its_stream(client: topkd.Client, kernel: str) -> None:
    scores, later, out = filled(client, 1), torch.from_numpy(answers.rows(2, ROWS, WIDTH)).cuda(), out_of(client)
    sleep(0.001)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        sleep(0.5)
        scores.copy_(later)
        started = time.monotonic()
        result = client.select_topk(scores, K, out_indices=out, kernel=kernel, **UNIQUE)
        took = time.monotonic() - started
        copy = result.indices.clone()  # the next work of the stream sees the result
    assert took < 0.25
    assert not stream.query()
    assert (result.kernel, result.device_time) == (kernel, 0.0)
    stream.synchronize()
    assert torch.equal(copy.cpu(), want(later))
    assert torch.equal(out.cpu(), want(later))


@pytest.mark.exclusive
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_stream_that_comes_too_late_finds_its_outputs_untouched(own: Running, kernel: str) -> None:
    with topkd.Client(own.socket_dir, timeout=60, attach_timeout=60, ready_timeout=0.2) as impatient:
        warm(impatient)
        scores, out, other = filled(impatient, 1), out_of(impatient), out_of(impatient)
        before = scrape.total(own.metrics(), "topkd_ordered_calls_total", outcome="ready_timeout")
        sleep(0.8)
        impatient.select_topk(scores, K, out_indices=out, kernel=kernel, **UNIQUE)
        impatient.check()  # it is not over yet
        torch.cuda.synchronize()
        assert bool((out == UNTOUCHED).all())
        with pytest.raises(topkd.DeadlineExceededError, match="ready_timeout"):
            impatient.check()
        impatient.check()  # told once
        impatient.select_topk(scores, K, out_indices=other, kernel=kernel, **UNIQUE)
        torch.cuda.synchronize()
        impatient.check()
        assert torch.equal(other.cpu(), want(scores))
        assert bool((out == UNTOUCHED).all())
        scrape.wait_for(own.metrics_port, {"topkd_ordered_calls_total": before + 1}, outcome="ready_timeout")
        sleep(0.8)
        impatient.select_topk(scores, K, out_indices=out, kernel=kernel, **UNIQUE)
        torch.cuda.synchronize()
        with pytest.raises(topkd.DeadlineExceededError, match="ready_timeout"):
            impatient.select_topk(scores, K, out_indices=other, kernel=kernel, **UNIQUE)
        assert bool((out == UNTOUCHED).all())


@pytest.mark.exclusive
def test_streams_do_not_wait_for_each_other(client: topkd.Client) -> None:
    scores, out, other = filled(client, 3), out_of(client), out_of(client)
    sleep(0.001)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    started = time.monotonic()
    with torch.cuda.stream(first):
        sleep(0.6)
        client.select_topk(scores, K, out_indices=out, kernel="radix_wide", **UNIQUE)
    with torch.cuda.stream(second):
        client.select_topk(scores, K, out_indices=other, kernel="radix_wide", **UNIQUE)
    second.synchronize()
    assert time.monotonic() - started < 0.4
    assert not first.query()
    assert torch.equal(other.cpu(), want(scores))
    first.synchronize()
    assert torch.equal(out.cpu(), want(scores))


def test_more_streams_than_slots(client: topkd.Client) -> None:
    scores = [filled(client, seed) for seed in range(4)]
    outs = [out_of(client) for _ in range(24)]
    sleep(0.001)
    streams = [torch.cuda.Stream() for _ in range(12)]
    torch.cuda.synchronize()
    for turn in range(2):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                sleep(0.02 * (number % 5))
                place = turn * 12 + number
                client.select_topk(scores[place % 4], K, out_indices=outs[place], **UNIQUE)
    torch.cuda.synchronize()
    for place, out in enumerate(outs):
        assert torch.equal(out.cpu(), want(scores[place % 4])), place


def loop(client: topkd.Client, turns: int, wrong: list[int], plan: bool) -> None:
    """Scores, selection and check in a stream, over and over, without a look at the stream until the end."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        scores = client.empty((4, 8192), torch.float32)
        planned = client.plan(scores, 64, order="index", ties="lowest") if plan else None
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(turns):
            scores.copy_(torch.randperm(scores.numel(), device="cuda").view(scores.shape))
            got = (planned() if planned else client.select_topk(scores, 64, order="index", ties="lowest")).indices
            bad += (got != torch.topk(scores, 64).indices.sort(dim=1).values).sum()
    stream.synchronize()
    wrong.append(int(bad))


def test_threads_with_streams_of_their_own_never_see_a_wrong_result(client: topkd.Client) -> None:
    wrong: list[int] = []
    threads = [threading.Thread(target=loop, args=(client, 300, wrong, number % 2 == 0)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == [0, 0, 0, 0]


def test_a_batch_over_all_kernels_is_ordered_too(client: topkd.Client) -> None:
    scores = [filled(client, seed) for seed in range(4)]
    entries = [topkd.Selection(one, K, kernel=KERNELS[place % 2], **UNIQUE) for place, one in enumerate(scores)]
    sleep(0.2)
    results = client.select_topk_batch(entries)
    torch.cuda.synchronize()
    for one, result in zip(scores, results, strict=True):
        assert torch.equal(result.indices.cpu(), want(one))


def test_waiting_on_the_host_is_to_be_had(client: topkd.Client) -> None:
    scores, out = filled(client, 5), out_of(client)
    stream = torch.cuda.current_stream()
    sleep(0.3)
    started = time.monotonic()
    result = client.select_topk(scores, K, out_indices=out, wait="host", **UNIQUE)
    assert time.monotonic() - started > 0.2
    assert stream.query()
    assert result.device_time > 0
    assert torch.equal(out.cpu(), want(scores))
    with pytest.raises(topkd.ArgumentValueError, match="wait"):
        client.select_topk(scores, K, wait="never")  # type: ignore[arg-type]


def test_memory_that_is_dropped_at_once_is_not_given_to_another_stream_too_early(client: topkd.Client) -> None:
    sleep(0.001)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    shape = (ROWS, 20_000)
    for seed in range(5):
        rows = torch.from_numpy(answers.rows(seed, *shape)).cuda()
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            scores = client.empty(shape, torch.float32)
            scores.copy_(rows)
            sleep(0.1)
            copy = client.select_topk(scores, K, kernel="radix_wide", **UNIQUE).indices.clone()
            del scores
        with torch.cuda.stream(second):
            for _ in range(3):
                client.empty(shape, torch.float32).fill_(-1)
                client.empty((ROWS, K), torch.int32).fill_(-1)
        torch.cuda.synchronize()
        assert torch.equal(copy.cpu(), want(rows)), seed


def test_closing_waits_for_what_was_accepted(own: Running) -> None:
    with topkd.Client(own.socket_dir, timeout=60, attach_timeout=60) as short:
        warm(short)
        scores, out = filled(short, 6), out_of(short)
        sleep(0.4)
        short.select_topk(scores, K, out_indices=out, **UNIQUE)
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), want(scores))
    short.check()


def test_a_region_is_released_behind_the_calls_that_use_it(client: topkd.Client) -> None:
    registered = torch.from_numpy(answers.rows(7, ROWS, WIDTH)).cuda()
    region, out = client.register(registered), out_of(client)
    sleep(0.4)
    client.select_topk(registered, K, out_indices=out, **UNIQUE)
    expected = want(registered) if torch.cuda.current_stream().query() else None
    region.close()
    assert not region.wait_released(0.05)
    assert region.wait_released(10)
    torch.cuda.synchronize()
    assert torch.equal(out.cpu(), want(registered) if expected is None else expected)


@pytest.mark.parametrize("victim", ["worker", "front"])
def test_a_death_releases_the_stream_and_is_told(launch: Launch, victim: str) -> None:
    server = launch("cuda")
    worker = server.spare()
    with topkd.Client(server.socket_dir, timeout=60, attach_timeout=60, ready_timeout=10) as doomed:
        warm(doomed)
        scores, out = filled(doomed, 8), out_of(doomed)
        sleep(3.0)  # the calls are still to come when it dies, on a busy machine too
        for _ in range(3):
            doomed.select_topk(scores, K, out_indices=out, kernel="radix_wide", **UNIQUE)
        killed_at = processes.kill(worker if victim == "worker" else server.pid)
        torch.cuda.synchronize()
        assert time.monotonic() - killed_at < 10
        with pytest.raises(topkd.SessionLostError):
            doomed.check()
        if victim == "front":
            assert server.process is not None
            server.process.wait(10)
            server.start()
        doomed.select_topk(scores, K, out_indices=out, **UNIQUE)
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), want(scores))
    server.stop()


def test_a_client_that_dies_behind_a_word_takes_its_worker_along(own: Running, client: topkd.Client) -> None:
    own.settle()
    before = own.workers()
    engine = Engine(own.socket_dir, "blocked", "gpu_engine.py")
    try:
        engine.wait_for("blocked", 120)
        own.settle()
        assert own.workers() - before
        engine.kill()
        processes.wait_until(lambda: len(own.workers()) == len(before), 15.0, "the dead client's worker has ended")
        scores, out = filled(client, 9), out_of(client)
        client.select_topk(scores, K, out_indices=out, **UNIQUE)
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), want(scores))
    finally:
        engine.kill()


@pytest.mark.slow
def test_the_steady_engine_finds_nothing_wrong(own: Running) -> None:
    engines = [Engine(own.socket_dir, "steady", "gpu_engine.py") for _ in range(2)]
    try:
        for engine in engines:
            engine.wait_for("calling", 120)
        time.sleep(3)
        for engine in engines:
            engine.wait_for("many", 60)
            report = engine.finish()
            assert (report["wrong"], report["failed"]) == (0, 0), report
    finally:
        for engine in engines:
            engine.kill()


def test_large_rows_of_bfloat16_by_auto(client: topkd.Client) -> None:
    scores = client.empty((16, gpu_engine.WIDTH), torch.bfloat16)
    scores.copy_(torch.randn(scores.shape, device="cuda"))
    sleep(0.1)
    result = client.select_topk(scores, 2048, values=True)
    torch.cuda.synchronize()
    assert torch.equal(result.values.sort(dim=1).values, scores.topk(2048).values.sort(dim=1).values)
    assert torch.equal(scores.gather(1, result.indices.long()), result.values)
