"""A client process that a test may kill: `python engine.py SOCKET_DIR MODE`. It says what it does in lines of JSON.

Modes:
    long    attaches, and makes calls of some seconds each, one after another
    steady  makes short calls as fast as it can, checks every bit, and reports when its standard input ends
    idle    attaches, registers memory, makes a plan, and waits for its standard input to end
    lane, long-lane, steady-lane
            the same by a lane: open and not called; a call of many seconds; short calls
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np

import topkd

WIDTH = 16384
LONG_SECONDS = 4.0
MEMORY_BYTES = 64 << 20


def say(**what: object) -> None:
    """Writes one line."""
    print(json.dumps(what), flush=True)


def hold(client: topkd.Client) -> tuple[object, topkd.Plan]:
    """Registers memory, touched by the server, and makes a plan."""
    scores = client.empty((MEMORY_BYTES // 4 // WIDTH, WIDTH), "float32")
    scores[:] = np.arange(WIDTH, dtype=np.float32)
    plan = client.plan(scores, 16)
    plan()
    return scores, plan


def many_rows(client: topkd.Client, count: int) -> np.ndarray:
    """Returns a matrix of `count` rows that are all one row in session memory."""
    row = client.empty((1, WIDTH), "float32")
    row[:] = np.random.default_rng(3).permutation(WIDTH)
    return np.lib.stride_tricks.as_strided(row, (count, WIDTH), (0, 4))


def long_call(client: topkd.Client, seconds: float = LONG_SECONDS) -> tuple[np.ndarray, int]:
    """Returns a matrix, and a k, whose selection takes about `seconds` on the server, or more if others compute too."""
    rows = many_rows(client, 512)
    probe = min(client.select_topk(rows, 8).device_time for _ in range(3))
    return many_rows(client, max(512, int(512 * seconds / probe))), 8


def run_long(client: topkd.Client) -> None:
    """Calls of some seconds each."""
    held = hold(client)
    scores, k = long_call(client)
    say(state="calling", held=len(held))
    while True:
        client.select_topk(scores, k, timeout=60)
        say(state="called")


def wait_for_end(ended: threading.Event) -> None:
    """Notes the end of standard input."""
    sys.stdin.read()
    ended.set()


def run_long_lane(client: topkd.Client) -> None:
    """A call of a lane that takes far longer than a test."""
    scores, k = long_call(client, 60.0)
    with client.plan(scores, k, timeout=60) as plan, plan.lane(timeout=600) as lane:
        say(state="calling")
        lane.call_host()


def run_steady(client: topkd.Client, by_lane: bool) -> None:
    """Short calls, each checked."""
    rng = np.random.default_rng(5)
    scores = client.empty((4, 2048), "float32")
    ended = threading.Event()
    threading.Thread(target=wait_for_end, args=(ended,), daemon=True).start()
    calls = wrong = failed = 0
    longest = 0.0
    options = {"order": "index", "ties": "lowest"}
    lane = client.plan(scores, 64, **options).lane() if by_lane else None
    say(state="calling")
    while not ended.is_set():
        scores[:] = rng.permutation(scores.size).reshape(scores.shape)
        want = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :64], axis=1)
        started = time.monotonic()
        try:
            result = client.select_topk(scores, 64, **options) if lane is None else lane.call_host()
            got = result.indices
            wrong += not np.array_equal(got, want)
        except topkd.TopkdError as error:
            failed += 1
            say(state="failed", error=repr(error))
        longest = max(longest, time.monotonic() - started)
        calls += 1
    say(state="ended", calls=calls, wrong=wrong, failed=failed, longest=longest)


def main(target: str, mode: str) -> None:
    """Runs a mode."""
    with topkd.Client(Path(target), name=f"engine {mode}") as client:
        client.connect()
        say(state="attached")
        if mode == "long":
            run_long(client)
        elif mode == "long-lane":
            run_long_lane(client)
        elif mode in ("steady", "steady-lane"):
            run_steady(client, by_lane=mode == "steady-lane")
        else:
            held = hold(client)
            lane = held[1].lane() if mode == "lane" else None
            if lane is not None:
                lane.call_host()
            say(state="idle", held=len(held))
            sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
