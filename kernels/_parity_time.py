"""How long the calls of a parity run take: medians of CUDA-graph replays where a family can be captured."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ._dispatch import families
from ._parity import Material, chosen, prepare

ROUNDS = 5
"""A median is taken of so many rounds."""


def microseconds(material: Material, family: str, form: str, reps: int) -> float:
    """Return us a call. The scores stay in the L2 cache where they fit. Synchronises.

    Args:
        material: of a call.
        family: name, or "auto".
        form: a name of `_parity.FORMS` that the family serves.
        reps: calls of one round.
    """
    select, _ = prepare(material, family, form)
    name = chosen(material, form)[0] if family == "auto" else family
    select()
    if material.scores.device.type != "cuda":
        return statistics.median(_on_host(select, reps) for _ in range(ROUNDS))
    if next(one.capturable for one in families() if one.name == name):
        select, reps, calls = _captured(select, reps)
    else:
        calls = 1
    return statistics.median(_on_device(select, reps) for _ in range(ROUNDS)) / calls


def _captured(select: Callable[[], Any], reps: int) -> tuple[Callable[[], Any], int, int]:
    """Capture calls in a graph; returns its replay, how many replays a round has, and how many calls a replay has."""
    calls = min(reps, 50)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(calls):
                select()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.replay()
    return graph.replay, -(-reps // calls), calls


def _on_device(select: Callable[[], Any], reps: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(reps):
        select()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / reps


def _on_host(select: Callable[[], Any], reps: int) -> float:
    started = time.perf_counter()
    for _ in range(reps):
        select()
    return (time.perf_counter() - started) * 1e6 / reps
