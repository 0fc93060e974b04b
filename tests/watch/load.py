"""Engines at work: `python -m tests.watch.load SOCKET_DIR [ENGINES]` calls every kind of thing until it is terminated.

Selections of several dtypes and classes of k, plans, batches, merges, refused calls, sessions that end in order and
sessions that do not.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np

import topkd

PAUSE = 0.02
WAIT = 120.0  # for a warm worker, on a busy machine
ROWS, WIDTH = 4, 4096


def select_for_ever(directory: Path, seed: int) -> None:
    """One engine: a plan, calls of its own, now and then something wrong."""
    random = np.random.default_rng(seed)
    with topkd.Client(directory, name=f"engine-{seed}", attach_timeout=WAIT) as client:
        scores = client.empty((ROWS, WIDTH), "float32")
        halves = client.empty((ROWS, WIDTH), "float16")
        scores[:] = random.standard_normal((ROWS, WIDTH), np.float32)
        halves[:] = scores
        plan = client.plan(scores, 32)
        lane = plan.lane()
        while True:
            plan()
            lane.call_host()
            client.select_topk(scores, 512, order="index")
            client.select_topk_batch([topkd.Selection(halves, k, values=True) for k in (16, 16, 3000)])
            client.merge_topk(scores[:, :64].copy(), np.tile(np.arange(64, dtype=np.int32), (ROWS, 1)), 8)
            with contextlib.suppress(ValueError):
                client.select_topk(scores, 0)
            time.sleep(PAUSE)


def come_and_go(directory: Path) -> None:
    """Clients that attach, select once, and end: one in order, one without a word."""
    while True:
        with (
            contextlib.suppress(topkd.TopkdError),
            topkd.Client(directory, name="visitor", attach_timeout=WAIT) as client,
        ):
            client.select_topk(np.ones((1, 64), np.float32), 2)
            client.info()
        subprocess.run([sys.executable, "-m", "tests.watch.load", str(directory), "die"], check=False, timeout=180)
        time.sleep(5)


def die(directory: Path) -> None:
    """Attaches and ends at once, the session open."""
    client = topkd.Client(directory, name="mayfly", attach_timeout=WAIT)
    client.select_topk(np.ones((1, 64), np.float32), 2)
    os._exit(1)


def main(directory: Path, engines: int) -> None:
    """Runs some engines and the visitors until the process is ended."""
    threads = [threading.Thread(target=select_for_ever, args=(directory, seed)) for seed in range(engines)]
    threads.append(threading.Thread(target=come_and_go, args=(directory,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    if sys.argv[2:] == ["die"]:
        die(Path(sys.argv[1]))
    main(Path(sys.argv[1]), int((*sys.argv[2:], "2")[0]))
