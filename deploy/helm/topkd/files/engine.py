"""An example engine: it selects from rows that it shares with the server of its GPU, checks them, and says how it goes.

    python engine.py [cuda|cpu]

It runs until SIGTERM, and goes on by itself when the server was started anew. Exit status 1 if a selection is wrong.
"""

import signal
import sys
import time

import torch

import topkd

ROWS, WIDTH, K = 16, 131_072, 2048
PAUSE_S, SAY_EVERY_S = 0.05, 10.0
stopped = False


def stop(*_: object) -> None:
    """Ends the loop after the selection that runs."""
    global stopped
    stopped = True


def work(client: topkd.Client, kind: str) -> None:
    """Selects from new scores until it is told to stop."""
    dtype = torch.bfloat16
    scores, out = client.empty((ROWS, WIDTH), dtype), client.empty((ROWS, K), torch.int32)
    plan = client.plan(scores, K, order="index", ties="lowest", out_indices=out)
    done, said = 0, time.monotonic()
    while not stopped:
        scores.copy_(torch.randn(ROWS, WIDTH, device=kind).to(dtype))
        indices = plan().indices
        worst = scores.gather(1, indices.long()).amin(1)
        better = (scores > worst.unsqueeze(1)).sum(1)
        if int(better.max()) >= K:
            raise SystemExit(f"a selected score is not among the {K} best of its row")
        done += 1
        if done == 1 or time.monotonic() - said >= SAY_EVERY_S:
            print(f"{done} selections of {ROWS} x {WIDTH}, k = {K}, by {plan.kernel}", flush=True)
            said = time.monotonic()
        time.sleep(PAUSE_S)


def main() -> None:
    """Works, and attaches anew when a session is lost."""
    kind = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    with topkd.Client(device=kind if kind == "cuda" else None, name="example engine", attach_timeout=60) as client:
        while not stopped:
            try:
                work(client, kind)
            except topkd.UnavailableError as error:  # the server is being started anew
                print(f"no server now: {error}", flush=True)
                time.sleep(1)


if __name__ == "__main__":
    main()
