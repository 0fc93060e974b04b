"""What calls cost the host: each way to make the same one, and a choice of kernel.

The device does not hold the host up: a round is no more calls than fit its queue, and is waited for outside of what is
timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import torch

from topkd.kernels import _dispatch, plan, run_select, select_topk, supports, validate_select
from topkd.kernels._chooser import Chooser

ROUNDS, CALLS = 15, 100
SHAPE = 4, 4096, 512
"""Rows, width and k: a call that costs the device as little as one can."""


def microseconds(call: Callable[[], object], calls: int = CALLS) -> float:
    """Return us of the host's time a call, the median of some rounds."""
    taken = []
    for _ in range(ROUNDS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - started) / calls * 1e6)
    return statistics.median(taken)


def costs(device: str = "cuda") -> Iterator[str]:
    """Yield lines that say what calls and choices cost."""
    rows, width, k = SHAPE
    scores = torch.randn(rows, width, device=device).to(torch.bfloat16)
    lengths = torch.full((rows,), width, dtype=torch.int32, device=device)
    out = torch.empty(rows, k, dtype=torch.int32, device=device)
    request = validate_select(scores, k, lengths=lengths, out_indices=out)
    planned = plan(scores, k, lengths=lengths, out_indices=out)
    ways: dict[str, Callable[[], object]] = {
        "select_topk": lambda: select_topk(scores, k, lengths=lengths, out_indices=out),
        "a checked request": lambda: run_select(request),
        "a plan": planned.run,
    }
    if supports("cluster", scores, k, lengths=lengths) is None:
        dependent = plan(scores, k, lengths=lengths, out_indices=out, kernel="cluster", dependent=True)
        ways["a plan with dependent launch"] = dependent.run
    us = ", ".join(f"{name} {microseconds(call):.1f}" for name, call in ways.items())
    yield f"host, us a call of {rows} x {width:,}, k={k}, by {planned.kernel}: {us}"
    chooser = Chooser(_dispatch.families(), _dispatch.unmet_of)

    def anew() -> None:
        Chooser(_dispatch.families(), _dispatch.unmet_of).choose(request)

    known = microseconds(lambda: chooser.choose(request), 5000) - microseconds(lambda: None, 5000)
    yield f"host: a choice {known:.2f} us, of a shape that was not seen before {microseconds(anew, 200):.0f} us"
