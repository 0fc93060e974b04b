"""An engine process: puts score rows into memory that it shares with a topkd server, and selects from them there.

    python docs/examples/engine.py SOCKET_DIR tests/data/indexer_rows.npz

The rows are attention scores of a real model over real text, 131,072 of them for each query (tests/data/README.md).
Every selected row is checked against numpy. Exit status 0 if all of them are right.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

import topkd

CALLS = 5


class Scores(NamedTuple):
    """Rows in shared memory, and the same rows as numpy sees them."""

    name: str
    shared: torch.Tensor  # (rows, width) bfloat16, CUDA or CPU: wherever the server computes
    floats: np.ndarray  # (rows, width) float32


def share(client: topkd.Client, path: str) -> list[Scores]:
    """Reads the recorded rows into tensors that the server can see too."""
    scores = []
    with np.load(path) as file:
        for name in ("relu_sum", "dot", "plateau"):
            bits = file[name]  # (rows, width) uint16: bit patterns of bfloat16
            shared = client.empty(bits.shape, torch.bfloat16)
            shared.copy_(torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16))
            floats = (bits.astype(np.uint32) << 16).view(np.float32)
            scores.append(Scores(name, shared, floats))
    return scores


def some_lengths(rows: int, width: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields valid lengths of each row: full rows, and rows cut at different places, one of them shorter than k."""
    yield "full", np.full(rows, width, np.int32)
    yield "ragged", np.linspace(1000, width - 1, rows).astype(np.int32)


def best(row: np.ndarray, length: int, k: int) -> np.ndarray:
    """Says with numpy what must come out: the k best, of equals the lowest indices, in ascending order, then -1."""
    order = np.argsort(-row[:length], kind="stable")[:k]
    return np.concatenate([np.sort(order), np.full(k - len(order), -1)])


def right_rows(scores: Scores, lengths: np.ndarray, indices: torch.Tensor) -> int:
    """Counts the rows that are as numpy says."""
    selected = indices.cpu().numpy()
    k = selected.shape[1]
    expected = [best(row, length, k) for row, length in zip(scores.floats, lengths, strict=True)]
    return sum(np.array_equal(got, want) for got, want in zip(selected, expected, strict=True))


def main(socket_dir: str, path: str) -> int:
    """Selects and checks; returns the number of wrong rows."""
    wrong = total = 0
    with topkd.Client(socket_dir) as client:
        device = client.info().device
        print(f"engine: pid {os.getpid()}, attached; the server computes on {device.name} ({device.backend.value})\n")
        print("scores     rows x width     k  lengths  kernel           call  kernel alone  rows right")
        everything = share(client, path)
        for scores in everything:
            rows, width = scores.floats.shape
            for k in (2048, 512):
                for kind, host_lengths in some_lengths(rows, width):
                    lengths = client.empty((rows,), torch.int32)
                    lengths.copy_(torch.from_numpy(host_lengths))
                    calls, kernels = [], []
                    for _ in range(CALLS):
                        start = time.perf_counter()
                        result = client.select_topk(
                            scores.shared, k, lengths=lengths, order="index", ties="lowest", wait="host"
                        )
                        calls.append(time.perf_counter() - start)
                        kernels.append(result.device_time)
                    right = right_rows(scores, host_lengths, result.indices)
                    total, wrong = total + rows, wrong + rows - right
                    print(
                        f"{scores.name:<9} {rows:>2} x {width:>7} {k:>7}  {kind:<7}  {result.kernel:<10}"
                        f"  {statistics.median(calls) * 1e3:>7.2f} ms  {statistics.median(kernels) * 1e3:>9.2f} ms"
                        f"  {right} of {rows}"
                    )
        batch = [topkd.Selection(scores.shared, 2048, order="index", ties="lowest") for scores in everything]
        start = time.perf_counter()
        results = client.select_topk_batch(batch, wait="host")
        took = time.perf_counter() - start
        for scores, result in zip(everything, results, strict=True):
            rows, width = scores.floats.shape
            right = right_rows(scores, np.full(rows, width), result.indices)
            total, wrong = total + rows, wrong + rows - right
        print(f"all of them in one request, k = 2048: {took * 1e3:.2f} ms")
    print(f"\n{total - wrong} of {total} rows are what numpy says. Times are medians of {CALLS} calls.")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(*sys.argv[1:]), 1))
