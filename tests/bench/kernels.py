"""How long the kernels take: `auto`, every family, torch.topk and installed peers, exactness first.

    python -m tests.bench.kernels [--grid issue] [--dtypes bf16,f32] [--families auto] [--seconds 90] ...

Needs a GPU. Writes `kernels.csv`, and `kernels.txt` with what is printed, into `results/<device>/` beside this file or
under `--results`. docs/bench.md says how each figure is taken.
"""

from __future__ import annotations

import argparse
import datetime
import faulthandler
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.bench import kernel_host as host
from tests.bench import kernel_records as records
from tests.bench import kernel_seed as seed
from tests.bench.kernel_cells import DTYPES, GRIDS, KINDS, Cell, cells, largest_bytes
from tests.bench.kernel_peers import Contender, contenders
from tests.bench.kernel_timing import COLD_BYTES, EagerTimer, GraphTimer, Timer, copies
from topkd.kernels._devices import kind_name
from topkd.kernels._reference import best_keys, group_keys, is_selection, rank_keys, selected

RESULTS = Path(__file__).with_name("results")
POISON = -7
MOST_K = 2048
GRACE_S = 120
"""The process ends itself so long after its budget: a kernel that hangs must not keep the GPU."""

SHARE = (0.005, 0.4)
"""Least and most seconds of one measurement."""

Say = Callable[[str], None]


class Inputs:
    """Memory that the scores of all cells are views of, filled as each cell wants it."""

    def __init__(self, chosen: Sequence[Cell], device: str = "cuda") -> None:
        self._flat: dict[str, Tensor] = {}
        self._filled: dict[str, object] = {}
        for dtype, kind in DTYPES.items():
            if most := largest_bytes(chosen, dtype):
                size = max(most, most * copies(most), COLD_BYTES + (16 << 20))
                self._flat[dtype] = torch.empty(size // kind.itemsize, dtype=kind, device=device)

    def of(self, cell: Cell) -> list[Tensor]:
        """Return the inputs of a cell, (rows, width) each, as many as a cold measurement takes turns with."""
        flat, size = self._flat[cell.dtype], cell.rows * cell.width
        count = min(copies(cell.input_bytes), len(flat) // size)
        # Normal scores are the same in every shape; others depend on where a row begins.
        filled = "normal" if cell.data == "normal" else cell._replace(k=0)
        if self._filled.get(cell.dtype) != filled:
            whole = flat.view(1, -1) if cell.data == "normal" else flat[: count * size].view(-1, cell.width)
            KINDS[cell.data](whole)
            self._filled[cell.dtype] = filled
        return [flat[at * size : (at + 1) * size].view(cell.rows, cell.width) for at in range(count)]


class Reference:
    """What the first input of the cell at hand must give; made once for cells that differ in k only."""

    def __init__(self) -> None:
        self._of: object = None

    def set(self, cell: Cell, scores: Tensor) -> None:
        """Prepare for a cell."""
        if self._of != cell._replace(k=0):
            self._of = cell._replace(k=0)
            self._keys = rank_keys(scores)
            self._best = best_keys(self._keys, min(cell.width, max(MOST_K, cell.k)))
            self._ordered: dict[int, Tensor] = {}

    def accepts(self, form: str, indices: Tensor) -> bool:
        """Say whether an output is right for an output form."""
        keys, best, k = self._keys, self._best, indices.shape[1]
        if form == "index":
            if k not in self._ordered:
                counts = torch.full((len(keys),), keys.shape[1], dtype=torch.int32, device=keys.device)
                self._ordered[k] = selected(keys, k, counts)
            return torch.equal(indices, self._ordered[k])
        if form == "group8":
            keys = group_keys(keys, 8)
            best = best_keys(keys, k)
        if not is_selection(keys, best, indices):
            return False
        if form == "value":
            places = indices.to(torch.int64)
            got = keys.gather(1, places)
            falls, same = got[:, 1:] < got[:, :-1], got[:, 1:] == got[:, :-1]
            return bool((falls | (same & (places[:, 1:] > places[:, :-1]))).all())
        return True


class Bench:
    """Measures cells within a budget of seconds.

    Args:
        inputs: memory of the scores.
        timers: for what can be captured in a graph, and for what cannot.
        ends: when to stop, by `time.monotonic`.
        say: told what is left out or fails.
        warm: measure with a warm L2 cache too.
    """

    def __init__(
        self, inputs: Inputs, timers: tuple[Timer, Timer], ends: float, say: Say, *, warm: bool = True
    ) -> None:
        self.inputs, self.timers, self.ends, self.say, self.warm = inputs, timers, ends, say, warm
        self.failures = 0
        self.left_out = 0
        self.lost = False  # after a CUDA error nothing works any more
        self._failed: Counter[str] = Counter()
        self._reference = Reference()
        self._said: set[tuple[str, str]] = set()

    def run(self, work: Sequence[tuple[Cell, Sequence[Contender]]]) -> Iterator[records.Row]:
        """Yield a row for each cell and contender that can be measured."""
        waiting = sum(_weight(cell) * len(many) for cell, many in work)
        for cell, many in work:
            if time.monotonic() >= self.ends or self.lost:
                self.left_out += len(many)
                continue
            scores = self.inputs.of(cell)
            self._reference.set(cell, scores[0])
            for contender in many:
                if self.lost or self._failed[contender.name] > 1:
                    self.left_out += 1
                    continue
                left = (self.ends - time.monotonic()) * _weight(cell) / waiting
                share = min(SHARE[1], max(SHARE[0], left))
                waiting -= _weight(cell)
                row = self._try(contender, cell, scores, share)
                if row is not None:
                    yield row

    def _try(self, contender: Contender, cell: Cell, scores: list[Tensor], seconds: float) -> records.Row | None:
        try:
            return self._measure(contender, cell, scores, seconds)
        except Exception as error:  # noqa: BLE001  # one implementation must not cost the others their figures
            self.failures += 1
            self._failed[contender.name] += 1
            self.lost = "CUDA error" in str(error)
            self.say(f"FAILED {contender.name} {records.name(cell)}: {type(error).__name__}: {error}")
            return None

    def _measure(self, contender: Contender, cell: Cell, scores: list[Tensor], seconds: float) -> records.Row | None:
        indices = torch.full((cell.rows, cell.k), POISON, dtype=torch.int32, device=scores[0].device)
        ready = contender.prepare(scores, cell.k, indices)
        if isinstance(ready, str):
            why = re.sub(r"\d+", "", ready)  # of one bound there may be as many texts as shapes
            if (contender.name, why) not in self._said:
                self._said.add((contender.name, why))
                self.say(f"not measured: {contender.name} from {records.name(cell)}: {ready}")
            return None
        ready.calls[0]()
        ready.finish()
        exact = self._reference.accepts(contender.form, indices)
        timer = self.timers[0 if contender.capturable else 1]
        calls = ready.calls[::-1]  # the first input comes last, and its answer is what is there afterwards
        wanted = round(400 / (4 + cell.floor_us))
        calls *= max(1, min(64, wanted) // len(calls))
        cold = timer.cold(calls, len(scores) * cell.input_bytes, seconds / 2)
        ready.finish()
        exact = exact and self._reference.accepts(contender.form, indices)
        warm = timer.warm(ready.calls[0], seconds / 2, cold) if self.warm else math.nan
        return records.Row(contender.name, cell, warm, cold, exact)


def _weight(cell: Cell) -> float:
    """Return a cell's claim on the budget: preparing it, and what its calls take."""
    return 1 + cell.floor_us / 50


def plan(options: argparse.Namespace) -> list[tuple[Cell, list[Contender]]]:
    """Return what is to be measured, in order: the record itself, other kinds of rows, other forms of output."""
    dtypes = options.dtypes.split(",")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise SystemExit(f"there is no dtype {dtype!r}; there are {', '.join(DTYPES)}")
    families = options.families.split(",")
    plain = list(contenders(families, options.peers.split(",")))
    work = [(cell, plain) for cell in cells(options.grid, dtypes)]
    ours = [one for one in plain if one.name == "auto"] or plain
    if options.kinds:
        work += [(cell, ours) for kind in KINDS if kind != "normal" for cell in cells("small", dtypes, kind)]
    if options.forms and options.grid in ("table", "crossing"):
        ordered, widths = list(contenders(families, ("none",), ("index",))), GRIDS[options.grid].widths
        work += [(cell, ordered) for cell in cells("ordered", dtypes) if cell.width in widths]
        by_value = list(contenders(families, ("none",), ("value",)))
        work += [(cell, by_value) for cell in cells("sorted", dtypes)]
    if options.forms:
        formed = list(contenders(families, ("none",), ("pdl", "index", "value", "group8")))
        work += [(cell, formed) for cell in cells("small", dtypes)]
    return work


def device_kind() -> str:
    """Return the device's name as the records' folder has it, such as "h200"."""
    return kind_name(torch.cuda.get_device_name())


def described() -> str:
    """Return where and when this is."""
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {today}"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="tests.bench.kernels", description="How long the kernels take.")
    add: Any = made.add_argument
    add("--grid", default="issue", choices=[*GRIDS, "named"], help="which shapes (default: issue)")
    add("--dtypes", default="bf16,f32", help="of bf16, f16, f32 (default: bf16,f32)")
    add("--families", default="auto", help="kernel families and auto, with commas, or all, or none (default: auto)")
    add("--peers", default="all", help="torch, cudnn, with a comma, or all that are installed, or none (default: all)")
    add("--kinds", action="store_true", help="other kinds of rows too, at few shapes")
    add("--forms", action="store_true", help="ordered output, groups and dependent launch too, at few shapes")
    add("--warm", action=argparse.BooleanOptionalAction, default=True, help="with a warm L2 cache too")
    add("--append", action="store_true", help="keep what the record has of other implementations and cells")
    add("--seed-table", action="store_true", help="the seed's comparison of prompt batches and decode windows instead")
    add("--seconds", type=float, default=90.0, help="how long to measure (default: 90)")
    add("--reference", type=Path, help="record to compare with (default: the committed envelope of the device, if any)")
    add("--results", type=Path, default=RESULTS, help="folder of the records (default: beside this file)")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; the exit status is 1 where an answer was wrong or a call failed."""
    options = parser().parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("the kernel bench needs a GPU that torch can use")
    faulthandler.dump_traceback_later(options.seconds + GRACE_S, exit=True)
    folder = options.results / device_kind()
    lines: list[str] = [described()]

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    if options.seed_table:
        return seed.run(folder, options.families.split(","), options.seconds, say)
    started = time.monotonic()
    work = plan(options)
    inputs, timers = Inputs([cell for cell, _ in work]), (GraphTimer(), EagerTimer())
    bench = Bench(inputs, timers, started + options.seconds, say, warm=options.warm)
    record = folder / "kernels.csv"
    before = records.read(record) if options.append and record.is_file() else []
    rows: list[records.Row] = []
    with records.Writer(record) as writer:
        for row in bench.run(work):
            writer.write(row)
            rows.append(row)
    rows = records.together(before, rows)
    with records.Writer(record) as writer:
        writer.write_all(rows)
    if not bench.lost:
        for line in host.costs():
            say(line)
    reference = options.reference or RESULTS / device_kind() / "public_envelope.csv"
    for line in records.summary(rows, records.read(reference) if reference.is_file() else []):
        say(line)
    say(f"{time.monotonic() - started:.0f} s, {bench.left_out} measurements left out, {bench.failures} failures")
    (folder / "kernels.txt").write_text("\n".join(lines) + "\n")
    return int(bench.failures > 0 or not all(row.exact for row in rows))


if __name__ == "__main__":
    sys.exit(main())
