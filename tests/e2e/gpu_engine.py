"""A client process with CUDA tensors that a test may kill: `python gpu_engine.py SOCKET_DIR MODE`.

It speaks like `engine.py`.

Modes:
    long        attaches, holds device memory in regions, and makes calls of some seconds each
    blocked     has a call accepted that its stream comes to after ten seconds only
    steady      makes short calls as fast as it can, checks every bit, and reports when its standard input ends
    expandable  registers a tensor from an expandable segment, and says what it was told
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

if sys.argv[2:] == ["expandable"]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ[name] = "expandable_segments:True"

import torch

import topkd

WIDTH = 131072
LONG_SECONDS = 4.0
MEMORY_BYTES = 256 << 20


def say(**what: object) -> None:
    """Writes one line."""
    print(json.dumps(what), flush=True)


def many_rows(client: topkd.Client, count: int) -> Any:
    """Returns a matrix of `count` rows that are all one row in session memory."""
    row = client.empty((1, WIDTH), torch.float32)
    row.copy_(torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3)).float()[None])
    return row.as_strided((count, WIDTH), (0, 1))


def long_call(client: topkd.Client, seconds: float = LONG_SECONDS) -> tuple[Any, int]:
    """Returns a matrix, and a k, whose selection by the family `torch` takes about `seconds` on the server."""
    rows = 2048
    for _ in range(2):
        probe = client.select_topk(many_rows(client, rows), 8, kernel="torch", timeout=60, wait="host").device_time
    return many_rows(client, min(1 << 23, int(rows * seconds / probe))), 8


def run_long(client: topkd.Client) -> None:
    """Calls of some seconds each."""
    held = client.empty((MEMORY_BYTES // 4,), torch.float32)
    held.fill_(1)
    other = torch.ones(MEMORY_BYTES // 4, device=held.device)
    region = client.register(other)
    scores, k = long_call(client)
    say(state="calling", held=held.numel(), shared=region.shared.size)
    while True:
        client.select_topk(scores, k, kernel="torch", timeout=60, wait="host")
        say(state="called")


def run_blocked(client: topkd.Client) -> None:
    """A call behind a stream that is busy for long."""
    scores = client.empty((4, 8192), torch.float32)
    client.select_topk(scores, 64, kernel="radix_wide")
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000_000)
    for _ in range(2):
        client.select_topk(scores, 64, kernel="radix_wide")
    say(state="blocked")
    time.sleep(60)


def wait_for_end(ended: threading.Event) -> None:
    """Notes the end of standard input."""
    sys.stdin.read()
    ended.set()


def run_steady(client: topkd.Client) -> None:
    """Short calls, each checked."""
    scores = client.empty((4, 8192), torch.float32)
    ended = threading.Event()
    threading.Thread(target=wait_for_end, args=(ended,), daemon=True).start()
    calls = wrong = failed = 0
    longest = 0.0
    say(state="calling")
    while not ended.is_set():
        scores.copy_(torch.randperm(scores.numel(), device=scores.device).view(scores.shape))
        started = time.monotonic()
        try:
            got = client.select_topk(scores, 64, order="index", ties="lowest").indices
            want = torch.topk(scores, 64).indices.sort(dim=1).values.to(torch.int32)
            wrong += not torch.equal(got, want)
        except topkd.TopkdError as error:
            failed += 1
            say(state="failed", error=repr(error))
        longest = max(longest, time.monotonic() - started)
        calls += 1
    say(state="ended", calls=calls, wrong=wrong, failed=failed, longest=longest)


def run_expandable(client: topkd.Client) -> None:
    """Memory that has no handle."""
    tensor = torch.ones(32 << 20, device="cuda")
    try:
        client.register(tensor)
    except topkd.TopkdError as error:
        say(state="told", kind=type(error).__name__, text=str(error))
    else:
        say(state="told", kind="", text="")
    # Selections from it are staged: slower, and right.
    scores = tensor[:4096].view(1, 4096)
    scores.copy_(torch.arange(4096, device="cuda")[None])
    say(state="staged", indices=client.select_topk(scores, 3, order="value").indices.tolist())


def main(target: str, mode: str) -> None:
    """Runs a mode."""
    with topkd.Client(Path(target), name=f"gpu engine {mode}", attach_timeout=60, ready_timeout=10) as client:
        client.connect()
        say(state="attached")
        {"long": run_long, "steady": run_steady, "blocked": run_blocked, "expandable": run_expandable}[mode](client)


if __name__ == "__main__":
    main(*sys.argv[1:])
