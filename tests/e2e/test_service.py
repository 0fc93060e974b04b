"""The service as a user has it on one host: select, batch, plan, merge, info, and what the metrics say of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import topkd
from tests.e2e import answers, processes, scrape
from tests.e2e.answers import UNIQUE, best
from tests.e2e.servers import Running

pytestmark = pytest.mark.timeout(90)
ROWS, WIDTH, K = 6, 3000, 100


@pytest.fixture(scope="module")
def client(cpu: Running) -> Iterator[topkd.Client]:
    with topkd.Client(cpu.socket_dir, name="service") as attached:
        attached.connect()
        cpu.settle()
        yield attached


def shared(client: topkd.Client, values: np.ndarray[Any, Any]) -> Any:
    """Returns a copy in session memory."""
    array = client.empty(values.shape, values.dtype)
    array[...] = values
    return array


def test_a_selection_from_session_memory(client: topkd.Client) -> None:
    scores = answers.rows(1, ROWS, WIDTH)
    result = client.select_topk(shared(client, scores), K, values=True, **UNIQUE)
    want = best(scores, K)
    assert np.array_equal(result.indices, want)
    assert np.array_equal(result.values, np.take_along_axis(scores, want, 1))
    assert result.kernel in {family.name for family in client.info().kernels}
    assert result.device_time > 0
    assert not result.local


def test_a_selection_from_ordinary_memory(client: topkd.Client) -> None:
    scores = answers.rows(2, ROWS, WIDTH)
    assert np.array_equal(client.select_topk(scores, K, **UNIQUE).indices, best(scores, K))


def test_given_outputs_are_written_and_come_back(client: topkd.Client) -> None:
    scores = shared(client, answers.rows(3, ROWS, WIDTH))
    out = client.empty((ROWS, K), "int64")
    result = client.select_topk(scores, K, index_dtype="int64", out_indices=out, **UNIQUE)
    assert result.indices is out
    assert np.array_equal(out, best(scores, K))


def test_results_that_are_kept_are_not_written_again(client: topkd.Client) -> None:
    kept = [(seed, client.select_topk(answers.rows(seed, 2, 64), 5, **UNIQUE).indices) for seed in range(40)]
    for seed, indices in kept:
        assert np.array_equal(indices, best(answers.rows(seed, 2, 64), 5)), seed


def test_options_that_change_the_answer(client: topkd.Client) -> None:
    scores = shared(client, answers.rows(4, ROWS, WIDTH))
    lengths = shared(client, np.array([0, 1, 50, 1000, 3000, 9999], np.int32))
    got = client.select_topk(scores, K, lengths=lengths, **UNIQUE).indices
    for row, length in enumerate(lengths.clip(0, WIDTH)):
        want = np.full(K, -1, np.int32)
        chosen = best(scores[row : row + 1, :length], K)[0]
        want[: len(chosen)] = chosen
        assert np.array_equal(got[row], want), row
    smallest = client.select_topk(scores, K, largest=False, **UNIQUE).indices
    assert np.array_equal(smallest, best(-scores, K))
    offsets = np.arange(ROWS, dtype=np.int32) * WIDTH
    moved = client.select_topk(scores, K, row_offsets=offsets, **UNIQUE).indices
    assert np.array_equal(moved, best(scores, K) + offsets[:, None])


def test_a_batch_of_different_selections(client: topkd.Client) -> None:
    inputs = [answers.rows(seed, 1 + seed % 4, 200 + 31 * seed) for seed in range(16)]
    entries = [topkd.Selection(shared(client, one), 10 + place, **UNIQUE) for place, one in enumerate(inputs)]
    for place, result in enumerate(client.select_topk_batch(entries)):
        assert np.array_equal(result.indices, best(inputs[place], 10 + place)), place


def test_an_error_names_its_place_and_nothing_runs(client: topkd.Client) -> None:
    good = shared(client, answers.rows(5, ROWS, WIDTH))
    out = client.empty((ROWS, K), "int32")
    out[...] = 77
    bad = [topkd.Selection(good, K, out_indices=out), topkd.Selection(good, K, page_size=4)]
    with pytest.raises(ValueError, match="page_size") as raised:
        client.select_topk_batch(bad)
    assert isinstance(raised.value, topkd.ArgumentValueError)
    assert (raised.value.argument, raised.value.selection) == ("page_size", 1)
    assert bool((out == 77).all())
    with pytest.raises(TypeError, match="lengths"):
        client.select_topk(good, K, lengths=np.zeros(ROWS, np.float32))


def test_a_plan_reads_its_tensors_anew(client: topkd.Client) -> None:
    scores, lengths = client.empty((ROWS, WIDTH), "float32"), client.empty(ROWS, "int32")
    with client.plan(scores, K, lengths=lengths, **UNIQUE) as plan:
        assert plan.kernel
        assert plan.reason
        for seed in range(5):
            scores[...] = answers.rows(seed, ROWS, WIDTH)
            lengths[...] = 1000 * (seed % 3 + 1)
            assert np.array_equal(plan().indices, best(scores[:, : lengths[0]], K)), seed
        mixed = client.select_topk_batch([topkd.Selection(scores, 3, **UNIQUE), plan])
        assert np.array_equal(mixed[0].indices, best(scores, 3))
        assert np.array_equal(mixed[1].indices, best(scores[:, : lengths[0]], K))
        with pytest.raises(topkd.ArgumentValueError, match="overlap"):
            client.select_topk_batch([plan, plan])  # a plan's outputs are one place


def test_merging_parts_gives_the_whole(client: topkd.Client) -> None:
    scores = answers.rows(6, ROWS, 4 * WIDTH)
    values, indices = [], []
    for part in range(4):
        result = client.select_topk(scores[:, part * WIDTH : (part + 1) * WIDTH].copy(), K, values=True, **UNIQUE)
        values.append(np.array(result.values))
        indices.append(result.indices + np.int32(part * WIDTH))
    merged = client.merge_topk(np.concatenate(values, 1), np.concatenate(indices, 1), K, **UNIQUE)
    assert np.array_equal(merged.indices, best(scores, K))
    assert np.array_equal(merged.values, np.take_along_axis(scores, merged.indices, 1))


def test_many_threads_share_a_client(client: topkd.Client) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        scores = answers.rows(seed, 2, 500)
        results = [client.select_topk(scores, 20, **UNIQUE).indices for _ in range(20)]
        wrong.extend(seed for indices in results if not np.array_equal(indices, best(scores, 20)))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_the_asynchronous_client(cpu: Running) -> None:
    inputs = [answers.rows(seed, 2, 300) for seed in range(12)]
    before = scrape.total(cpu.metrics(), "topkd_region_bytes")

    async def run() -> list[Any]:
        async with topkd.AsyncClient(cpu.socket_dir) as client:
            calls = [client.select_topk(scores, 9, **UNIQUE) for scores in inputs]
            results = await asyncio.gather(*calls)
            await asyncio.sleep(0.6)  # the worker has told the front
            grown = scrape.total(cpu.metrics(), "topkd_region_bytes") - before
            assert grown <= 32 << 20, "each of twelve first calls made memory"
            return [result.indices.copy() for result in results]

    for scores, indices in zip(inputs, asyncio.run(asyncio.wait_for(run(), 60)), strict=True):
        assert np.array_equal(indices, best(scores, 9))


def test_information(client: topkd.Client) -> None:
    info = client.info()
    assert info.device.backend is topkd.Backend.CPU
    assert info.version == topkd.__version__
    assert info.sessions >= 1
    assert "torch" in {family.name for family in info.kernels}
    assert info.limits.max_batch >= 64


COUNTERS = {
    "select": ("topkd_requests_total", {"method": "SelectTopK", "code": "OK"}),
    "refused": ("topkd_requests_total", {"method": "SelectTopK", "code": "INVALID_ARGUMENT"}),
    "merge": ("topkd_requests_total", {"method": "MergeTopK", "code": "OK"}),
    "plan": ("topkd_requests_total", {"method": "CreatePlan", "code": "OK"}),
    "rows": ("topkd_rows_total", {}),
    "input_bytes": ("topkd_input_bytes_total", {}),
    "output_bytes": ("topkd_output_bytes_total", {}),
    "batches": ("topkd_batch_items_count", {}),
    "items": ("topkd_batch_items_sum", {}),
    "queue": ("topkd_queue_seconds_count", {}),
    "request_times": ("topkd_request_seconds_count", {"method": "SelectTopK"}),
    "kernel_512": ("topkd_kernel_seconds_count", {"dtype": "float32", "k": "<=512"}),
    "kernel_64": ("topkd_kernel_seconds_count", {"dtype": "float16", "k": "<=64"}),
    "compiles": ("topkd_compiles_total", {}),
    "attached": ("topkd_attaches_total", {"transport": "unix", "outcome": "attached"}),
}


def figures(cpu: Running) -> dict[str, float]:
    samples = cpu.metrics()
    return {name: scrape.total(samples, metric, **labels) for name, (metric, labels) in COUNTERS.items()}


def test_metrics_grow_by_exactly_what_ran(cpu: Running) -> None:
    with topkd.Client(cpu.socket_dir) as client:
        scores = shared(client, answers.rows(7, ROWS, WIDTH))
        half = shared(client, answers.rows(8, 2, 256).astype(np.float16))
        client.select_topk(scores, K)
        cpu.settle()
        before = _at_rest(cpu)
        gauges = cpu.metrics()
        for _ in range(3):
            client.select_topk(scores, K)
        client.select_topk_batch([topkd.Selection(half, 7) for _ in range(5)])
        with pytest.raises(ValueError, match="k"):
            client.select_topk(scores, 0)
        client.merge_topk(np.ones((2, 9), np.float32), np.ones((2, 9), np.int32), 200)
        plan = client.plan(scores, K)
        plan()
        plan()
        after = _at_rest(cpu)
        grown = {name: after[name] - before[name] for name in COUNTERS}
        one, entry = 4 * ROWS * WIDTH, 2 * 2 * 256
        assert grown == {
            "select": 6,
            "refused": 1,
            "merge": 1,
            "plan": 1,
            "rows": 5 * ROWS + 5 * 2 + 2,
            "input_bytes": 5 * one + 5 * entry + 2 * 9 * 4,
            "output_bytes": 5 * 4 * ROWS * K + 5 * 4 * 2 * 7 + 2 * 200 * 8,
            "batches": 7,
            "items": 5 + 5 + 1,
            "queue": 7,
            "request_times": 7,
            "kernel_512": 6,
            "kernel_64": 1,  # entries of one plan key are one kernel call
            "compiles": 0,
            "attached": 0,
        }
        page = scrape.wait_for(cpu.metrics_port, {"topkd_plans": 1 + scrape.total(gauges, "topkd_plans")})
        assert scrape.total(page, "topkd_sessions", transport="unix") == 2  # and the module's client
        assert scrape.total(page, "topkd_queued_requests") == 0
        assert scrape.total(page, "topkd_regions", memory="memfd") >= 2
        assert scrape.total(page, "topkd_kernel_seconds_sum") > 0
    scrape.wait_for(cpu.metrics_port, {"topkd_sessions": 1, "topkd_plans": scrape.total(gauges, "topkd_plans")})
    kept = figures(cpu)
    assert kept == after | {"compiles": 0}, "what an ended session did stays counted"


def _at_rest(cpu: Running) -> dict[str, float]:
    """Returns the figures once two readings, a push of the workers apart, agree."""
    seen: list[dict[str, float]] = []

    def same() -> bool:
        seen.append(figures(cpu))
        threading.Event().wait(0.4)
        return len(seen) > 1 and seen[-1] == seen[-2]

    processes.wait_until(same, 10, "the figures come to rest")
    return seen[-1]


def test_histograms_are_whole(cpu: Running, client: topkd.Client) -> None:
    client.select_topk(answers.rows(9, 2, 64), 3)
    page = scrape.wait_for(cpu.metrics_port, {"topkd_queued_requests": 0})
    buckets: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, float]]] = {}
    for (name, labels), value in page.items():
        if name.endswith("_bucket"):
            bound = float(dict(labels)["le"])
            rest = tuple(pair for pair in labels if pair[0] != "le")
            buckets.setdefault((name.removesuffix("_bucket"), rest), []).append((bound, value))
    kinds = {name for name, _ in buckets}
    assert {"topkd_kernel_seconds", "topkd_queue_seconds", "topkd_request_seconds", "topkd_batch_items"} <= kinds
    for (name, rest), counts in buckets.items():
        values = [value for _, value in sorted(counts)]
        assert values == sorted(values), (name, rest)
        assert values[-1] == page[f"{name}_count", rest], (name, rest)
