"""The comparison of the seed document, remade: prompt batches and decode windows over pooled scores, 4 cells a block.

A prompt batch is 256 queries that end together with their context: query q of it sees `context - 255 + q` cells. The
call says how many there are at most (`max_length`, the seed's block count), so that the kernel is chosen by it and not
by the capacity. A decode window is 4 queries whose number of cells only the device knows. All select 512 blocks, in
index order, ties to the lowest block, and write their 2,048 cells.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.bench.kernel_timing import EagerTimer, GraphTimer, Timer, copies
from topkd.kernels import _dispatch, choose, kernels, run_select, validate_select, warm_select
from topkd.kernels._dispatch import supports
from topkd.kernels._reference import rank_keys, selected

BLOCK = 4
BLOCKS = 512
CAPACITY = 262_144
PROMPTS = (4096, 8192, 16384, 20480, 32768, 65536, 98304, 131072, 163840, 196608, 262144, 393216, 524288)
WINDOWS = (2100, 8192, 32768, 131072, 262144)
WITHIN = 1.05
"""How near the chooser's pick should be to the best family."""


class Call(NamedTuple):
    """One line of the table; capacity and context in cells."""

    kind: str  # prompt or decode
    queries: int
    capacity: int
    context: int

    def options(self, device: str) -> dict[str, Any]:
        """Return the arguments of `select_topk` beside the scores and k."""
        last = torch.arange(self.queries, dtype=torch.int32, device=device) + (self.context - self.queries + 1)
        options: dict[str, Any] = {"lengths": last.clamp_(min=1), "group": BLOCK, "pooled": True, "expand": True}
        options |= {"order": "index", "ties": "lowest"}
        return options | ({"max_length": self.context} if self.kind == "prompt" else {})


def calls() -> list[Call]:
    """Return the lines of the table."""
    prompts = [Call("prompt", 256, CAPACITY if n <= CAPACITY else 2 * CAPACITY, n) for n in PROMPTS]
    return prompts + [Call("decode", 4, CAPACITY, n) for n in WINDOWS]


def expected(call: Call, scores: Tensor, lengths: Tensor) -> Tensor:
    """Return the cells that a call must select, (queries, 2,048) int32."""
    blocks = selected(rank_keys(scores), BLOCKS, (lengths + BLOCK - 1) // BLOCK)
    cells = blocks[:, :, None] * BLOCK + torch.arange(BLOCK, dtype=torch.int32, device=scores.device)
    wrong = (blocks[:, :, None] < 0) | (cells >= lengths[:, None, None])
    return torch.where(wrong, -1, cells).flatten(1)


class Line(NamedTuple):
    """What one implementation took; us with a cold cache."""

    call: Call
    impl: str
    us: float
    exact: bool


def measure(
    call: Call, names: Sequence[str], timers: tuple[Timer, Timer], seconds: float, device: str = "cuda"
) -> list[Line]:
    """Measure one line of the table."""
    blocks = call.capacity // BLOCK
    scores = torch.randn(copies(call.queries * call.context // BLOCK * 4), call.queries, blocks, device=device)
    options = call.options(device)
    want = expected(call, scores[0], options["lengths"])
    lines = []
    for name in names:
        if name != "auto" and supports(name, scores[0], BLOCKS, **options) is not None:
            continue
        out = torch.full_like(want, -7)
        requests = [validate_select(one, BLOCKS, kernel=name, out_indices=out, **options) for one in scores]
        warm_select(requests[0])
        run_select(requests[0])
        exact = torch.equal(out, want)
        chosen = choose(requests[0])[0]
        capturable = next(one.capturable for one in _dispatch.families() if one.name == chosen)
        ready = [partial(run_select, request) for request in reversed(requests)]
        us = timers[0 if capturable else 1].cold(ready, len(scores) * scores[0].nbytes, seconds)
        lines.append(Line(call, name, us, exact and torch.equal(out, want)))
    return lines


def run(folder: Path, families: Sequence[str], seconds: float, say: Callable[[str], None]) -> int:
    """Measure the whole table, print it, and write `seed_table.csv`; 1 where something is wrong."""
    asked = [name for name in kernels() if name != "torch"] if set(families) <= {"auto", "all"} else list(families)
    names = ["auto", *(name for name in asked if name != "auto")]
    timers = (GraphTimer(), EagerTimer())
    started = time.monotonic()
    todo = calls()
    lines: list[Line] = []
    for at, call in enumerate(todo):
        left = seconds - (time.monotonic() - started)
        share = min(0.3, max(0.005, left / (len(todo) - at) / len(names) / 2))
        lines += measure(call, names, timers, share)
    write(folder / "seed_table.csv", lines)
    for text in table(lines, names):
        say(text)
    (folder / "seed_table.txt").write_text("\n".join(table(lines, names)) + "\n")
    return int(not all(line.exact for line in lines))


def write(path: Path, lines: Sequence[Line]) -> None:
    """Write the lines as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("impl", *Call._fields, "us_l2_cold", "exact"))
        writer.writerows((line.impl, *line.call, f"{line.us:.3f}", int(line.exact)) for line in lines)


def table(lines: Sequence[Line], names: Sequence[str]) -> list[str]:
    """Return the table as text: calls down, implementations across, us; then how near the chooser's pick is."""
    made = [f"{'call':<8}{'capacity':>10}{'context':>10}" + "".join(f"{name:>16}" for name in names)]
    far = []
    for call in dict.fromkeys(line.call for line in lines):
        us = {line.impl: line for line in lines if line.call == call}
        shown = (f"{us[n].us:.2f}{'' if us[n].exact else ' WRONG'}" if n in us else "" for n in names)
        made.append(f"{call.kind:<8}{call.capacity:>10,}{call.context:>10,}" + "".join(f"{text:>16}" for text in shown))
        best = min((line.us for name, line in us.items() if name != "auto"), default=0.0)
        if "auto" in us and best and us["auto"].us > WITHIN * best:
            far.append(f"auto is {us['auto'].us / best:.2f} of the best family: {call.kind} {call.context:,} cells")
    return [*made, *(far or [f"auto is within {WITHIN} of the best family everywhere"])]
