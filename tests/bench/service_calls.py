"""Remote calls beside bare gRPC: on an open stream, unary, and in batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import topkd
from tests.bench.overhead import BATCH, WARM, WIDTH, K, echo_calls, take_turns
from tests.bench.streams import echo_stream


def fill(scores: Any, seed: int = 1) -> None:
    """Puts normal scores into an array or tensor."""
    values = np.random.default_rng(seed).standard_normal(tuple(scores.shape), np.float32)
    if isinstance(scores, np.ndarray):
        scores[:] = values
    else:
        import torch

        scores.copy_(torch.from_numpy(values))


def _batch_of(client: topkd.Client) -> tuple[list[topkd.Selection], list[topkd.Plan]]:
    """Returns selections of the rows of one matrix, each with outputs of its own, and plans of the same."""
    scores, out = client.empty((BATCH, WIDTH), "float32"), client.empty((BATCH, K), "int32")
    fill(scores)
    rows = [(scores[at : at + 1], out[at : at + 1]) for at in range(BATCH)]
    selections = [topkd.Selection(row, K, out_indices=output) for row, output in rows]
    return selections, [client.plan(row, K, out_indices=output) for row, output in rows]


def measure(client: topkd.Client, folder: Path, calls: int) -> dict[str, Any]:
    """Measures calls that wait for their result, in turns.

    Args:
        client: of a server whose spare worker is warm.
        folder: for the bare server's sockets.
        calls: of each kind that has a goal for itself; a fourth of the others, and of batches.

    Returns:
        `stream_over_echo`, `unary_over_echo` (less the device time that the server reports, over the bare call),
        `batch64_over_one` (whole), and medians in us under `calls`.
    """
    selections, plans = _batch_of(client)
    one, plan = selections[0], plans[0]
    (folder / "unary").mkdir()
    (folder / "stream").mkdir()
    with (
        client.stream() as stream,
        echo_stream(folder / "stream") as message,
        echo_calls(folder / "unary", lambda: 0.0) as bare,
    ):
        singles: dict[str, Callable[[], float]] = {
            "stream_echo": message,
            "stream_plan": lambda: stream.run(plan, wait="host").device_time,
            "unary_echo": bare["echo"],
            "unary_plan": lambda: plan(wait="host").device_time,
        }
        others: dict[str, Callable[[], float]] = {
            "stream_selection": lambda: stream.select_topk_batch([one], wait="host")[0].device_time,
            "unary_selection": lambda: client.select_topk_batch([one], wait="host")[0].device_time,
        }
        if not isinstance(one.input, np.ndarray):
            others["ordered_plan"] = lambda: plan().device_time
            others["ordered_stream_plan"] = lambda: stream.run(plan).device_time
        batches: dict[str, Callable[[], float]] = {
            "one_plan": lambda: plan(wait="host").device_time,
            "batch_of_plans": lambda: client.select_topk_batch(plans, wait="host")[0].device_time,
            "batch_of_selections": lambda: client.select_topk_batch(selections, wait="host")[0].device_time,
        }
        medians: dict[str, float] = {}
        fewer = max(calls // 4, 10)
        for kinds, count in ((singles, calls), (others, fewer), (batches, fewer)):
            take_turns(kinds, min(WARM, count // 2))
            for name, (beyond, computed) in take_turns(kinds, count).items():
                whole = beyond + computed if kinds is batches else beyond
                medians[name] = round(float(np.median(whole)) * 1e6, 2)
    return {
        "stream_over_echo": medians["stream_plan"] / medians["stream_echo"],
        "unary_over_echo": medians["unary_plan"] / medians["unary_echo"],
        "batch64_over_one": medians["batch_of_plans"] / medians["one_plan"],
        "calls_us": medians,
    }
