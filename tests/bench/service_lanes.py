"""Calls of a lane beside the same kernel in this process, eager and in CUDA graphs, and from the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import topkd
from tests.bench.kernel_records import read
from tests.bench.service_calls import fill
from topkd.kernels import select_topk

CALLS_OF_A_GRAPH = 64
ENVELOPE = Path(__file__).with_name("results") / "h200" / "public_envelope.csv"
_BLOCK = 50
_AHEAD_CYCLES = 400_000
"""For which a stream is kept busy, so that everything that is timed is enqueued before it begins: about 0.2 ms."""

Call = Callable[[], object]


class Shape(NamedTuple):
    """What a lane selects from; rows of bfloat16."""

    rows: int
    width: int
    k: int

    def __str__(self) -> str:
        return f"{self.rows} x {self.width:,} k={self.k:,}"


SHAPES = (Shape(16, 131_072, 2048), Shape(64, 131_072, 2048), Shape(1, 131_072, 2048), Shape(1, 4096, 512))
"""The first is what the figures that have goals are taken of."""

SMALL = Shape(1, 4096, 512)


def figures(times: Any, less: float = 0.0) -> dict[str, float]:
    """Returns p50 and p99 of times, less a constant."""
    return {f"p{percent}": round(float(np.percentile(times, percent)) - less, 2) for percent in (50, 99)}


def best_public(shape: Shape) -> float | None:
    """Returns the recorded us, with a warm L2 cache as here, of the best exact public kernel in its own process."""
    same = [
        row.warm
        for row in read(ENVELOPE)
        if row.exact and row.cell.dtype == "bf16" and row.cell.data == "normal" and row.cell[2:] == tuple(shape)
    ]
    return min(same, default=None)


@contextmanager
def on_a_stream() -> Iterator[None]:
    """A stream of its own, as engines have one."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield
        stream.synchronize()


class Timer:
    """Times what stands between two small kernels on the current stream."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._little = torch.zeros(1, device="cuda")

    def small(self) -> None:
        """A small kernel."""
        self._little.add_(1)

    def eager(self, call: Call, count: int) -> list[float]:
        """Returns the device's us from before the small kernel to after the other, of each of `count` calls."""
        return self._times(lambda: (self.small(), call(), self.small()), count)

    def replays(self, graph: Any, count: int) -> list[float]:
        """Returns us a call of replays of a graph."""
        return [taken / CALLS_OF_A_GRAPH for taken in self._times(graph.replay, count)]

    def _times(self, call: Call, count: int) -> list[float]:
        torch = self._torch
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for before, after in pairs:
            torch.cuda._sleep(_AHEAD_CYCLES)
            before.record()
            call()
            after.record()
        torch.cuda.current_stream().synchronize()
        return [before.elapsed_time(after) * 1e3 for before, after in pairs]

    def graph(self, call: Call, calls: int = 1, *, between: bool = False) -> Any:
        """Captures calls, with small kernels before and after each if `between`."""
        graph = self._torch.cuda.CUDAGraph()
        stream = self._torch.cuda.current_stream()
        stream.synchronize()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                if between:
                    self.small()
                call()
                if between:
                    self.small()
        finally:
            graph.capture_end()
        graph.replay()
        stream.synchronize()
        return graph

    def in_turns(self, kinds: dict[str, Callable[[int], list[float]]], count: int) -> dict[str, Any]:
        """Measures kinds in turns; returns an array of `count` times or a few more of each."""
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(-(-count // _BLOCK)):
            for name, measure in kinds.items():
                taken[name] += measure(min(_BLOCK, count))
        return {name: np.array(times) for name, times in taken.items()}


def from_host(lane: topkd.Lane, count: int) -> Any:
    """Returns the us of calls that a thread waits for."""
    taken = np.empty(count)
    for at in range(-min(100, count), count):
        started = time.perf_counter_ns()
        lane.call_host()
        taken[max(at, 0)] = (time.perf_counter_ns() - started) * 1e-3
    return taken


def measure_cuda(client: topkd.Client, shape: Shape, calls: int) -> dict[str, Any]:
    """Measures a lane's calls of one shape; `calls` eager ones, and a graph of 64 as often as makes as many or more.

    A kernel waits for them where one can (MPS); of the first shape those that wait by memory operations are then
    measured too (`operations`).
    """
    import torch

    scores = client.empty((shape.rows, shape.width), "bfloat16")
    fill(scores)
    out = torch.empty(shape.rows, shape.k, dtype=torch.int32, device=scores.device)

    def local() -> None:
        select_topk(scores, shape.k, out_indices=out)

    with client.plan(scores, shape.k) as plan, on_a_stream():
        with _cheapest(plan) as lane:
            found = {"shape": str(shape), "kernel": plan.kernel, "mode": lane.mode, "waits_by": lane.waits_by}
            found |= _times(lane, local, calls)
            result = lane()
            torch.cuda.current_stream().synchronize()
            _compare(scores, result.indices, out)
        if found["waits_by"] == "kernel" and shape == SHAPES[0]:
            with plan.lane(waits_by="operations") as lane:
                found["operations"] = _times(lane, local, calls)
    return found | {"best_public_us": best_public(shape)}


def _cheapest(plan: topkd.Plan) -> topkd.Lane:
    """Opens a lane for which a kernel waits, or one as it is by default where none can."""
    try:
        return plan.lane(waits_by="kernel")
    except topkd.RegionError:
        return plan.lane()


def _times(lane: topkd.Lane, local: Call, calls: int) -> dict[str, Any]:
    """Measures calls of a lane beside the same kernel in this process, eager, in graphs, and from the host."""
    import torch

    timer = Timer()
    lane()
    local()
    torch.cuda.current_stream().synchronize()
    lane.check()
    alone = timer.graph(local)
    kinds = {
        "lane": lambda count: timer.eager(lane, count),
        "local": lambda count: timer.eager(alone.replay, count),
        "nothing": lambda count: timer.eager(lambda: None, count),
    }
    eager = timer.in_turns(kinds, calls)
    graphs = {
        name: timer.graph(call, CALLS_OF_A_GRAPH, between=True)
        for name, call in (("lane", lane), ("local", local), ("nothing", lambda: None))
    }
    graphs |= {
        f"{name}_in_a_row": timer.graph(call, CALLS_OF_A_GRAPH) for name, call in (("lane", lane), ("local", local))
    }
    replays = max(calls // CALLS_OF_A_GRAPH, 20)
    replayed = {name: np.array(timer.replays(graph, replays)) for name, graph in graphs.items()}
    host = from_host(lane, calls)
    lane.check()
    kernel = float(np.median(replayed["local"]) - np.median(replayed["nothing"]))
    return {
        "lane_minus_local_us": figures(eager["lane"], float(np.median(eager["local"]))),
        "lane_in_graph_minus_local_us": figures(replayed["lane"], float(np.median(replayed["local"]))),
        "lane_us": round(float(np.median(eager["lane"]) - np.median(eager["nothing"])), 2),
        "lane_in_graph_us": round(float(np.median(replayed["lane"]) - np.median(replayed["nothing"])), 2),
        "lane_in_a_row_us": round(float(np.median(replayed["lane_in_a_row"])), 2),
        "kernel_us": round(kernel, 2),
        "kernel_in_a_row_us": round(float(np.median(replayed["local_in_a_row"])), 2),
        "host_lane_us": figures(host),
        "host_lane_minus_kernel_us": figures(host, kernel),
    }


def _compare(scores: Any, indices: Any, expected: Any) -> None:
    """Refuses a lane whose selection is not the kernel's: the selected scores must be the same."""
    import torch

    pairs = [torch.gather(scores.float(), 1, places.long()).sort(dim=1).values for places in (indices, expected)]
    if not torch.equal(*pairs):
        raise RuntimeError("the lane selected other scores than the kernel in this process")


def measure_cpu(client: topkd.Client, shape: Shape, calls: int) -> dict[str, Any]:
    """Measures calls of a lane from the host beside the same kernel in this process."""
    import torch

    scores, out = client.empty((shape.rows, shape.width), "float32"), np.empty((shape.rows, shape.k), np.int32)
    fill(scores)
    with client.plan(scores, shape.k, order="value", ties="lowest") as plan, plan.lane() as lane:
        lane_us = from_host(lane, calls)
        result = lane.call_host().indices
        lane.check()
        taken = np.empty(calls)
        tensors = torch.from_numpy(scores), torch.from_numpy(out)
        for at in range(-min(100, calls), calls):
            started = time.perf_counter_ns()
            select_topk(tensors[0], shape.k, out_indices=tensors[1], order="value", ties="lowest")
            taken[max(at, 0)] = (time.perf_counter_ns() - started) * 1e-3
    if not np.array_equal(result, out):
        raise RuntimeError("the lane selected otherwise than the kernel in this process")
    local = float(np.median(taken))
    return {
        "shape": str(shape),
        "kernel": plan.kernel,
        "mode": lane.mode,
        "lane_minus_local_us": figures(lane_us, local),
        "kernel_us": round(local, 2),
        "host_lane_us": figures(lane_us),
        "host_lane_minus_kernel_us": figures(lane_us, local),
    }
