"""The record of kernel figures: rows of a CSV file, and what is said about them. Knows no GPU."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from tests.bench.kernel_cells import ADVERSARIAL, DTYPES, NAMED, Cell

COLUMNS = ("impl", "dtype", "data", "rows", "width", "k", "us_l2_warm", "us_l2_cold", "exact")
GOALS = {"bf16": 0.8, "f32": 0.95}
"""Geometric means of ours over the recorded envelope that are to be reached."""

WORST = 1.25
"""No cell above this times the envelope."""


class Row(NamedTuple):
    """One implementation in one cell; times in us a call."""

    impl: str
    cell: Cell
    warm: float
    cold: float
    exact: bool


def read(path: Path) -> list[Row]:
    """Read a record."""
    with path.open(newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: dict[str, str]) -> Row:
    cell = Cell(line["dtype"], line["data"], int(line["rows"]), int(line["width"]), int(line["k"]))
    warm, cold = (float(line[column] or "nan") for column in ("us_l2_warm", "us_l2_cold"))
    return Row(line["impl"], cell, warm, cold, line["exact"] == "1")


class Writer:
    """Appends rows to a new file, each as soon as it is known."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="")
        self._csv = csv.writer(self._file, lineterminator="\n")
        self._csv.writerow(COLUMNS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, row: Row) -> None:
        """Write a row, at once."""
        times = ("" if math.isnan(us) else f"{us:.3f}" for us in (row.warm, row.cold))
        self._csv.writerow((row.impl, *row.cell, *times, int(row.exact)))
        self._file.flush()

    def write_all(self, rows: Iterable[Row]) -> None:
        """Write rows."""
        for row in rows:
            self.write(row)


def together(before: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Return an earlier record's rows and new ones, which replace those of the same implementation and cell."""
    return list({(row.impl, row.cell): row for row in (*before, *rows)}.values())


def geometric_mean(ratios: Iterable[float]) -> float:
    """Return the geometric mean, NaN of nothing."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def envelope(rows: Iterable[Row], *, without: Callable[[str], bool] = lambda _: False) -> dict[Cell, Row]:
    """Return the exact row of each cell that is fastest with a cold cache, leaving some implementations out."""
    best: dict[Cell, Row] = {}
    for row in rows:
        if not row.exact or math.isnan(row.cold) or without(row.impl):
            continue
        if row.cell not in best or row.cold < best[row.cell].cold:
            best[row.cell] = row
    return best


def public_envelope(rows: Sequence[Row]) -> list[Row]:
    """Reduce a record of public kernels to what is compared with: the best exact row of each cell, and torch's."""
    best = envelope(rows).values()
    return [*best, *(row for row in rows if row.impl == "torch" and row not in best)]


def of(rows: Iterable[Row], impl: str, data: str = "normal") -> dict[Cell, Row]:
    """Return one implementation's rows of one kind of data, by cell."""
    return {row.cell: row for row in rows if row.impl == impl and row.cell.data == data}


# -------------------------------------------------------------------------------------------------------- the summary


def summary(rows: Sequence[Row], reference: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of what there is to say of a record, beside a reference."""
    wrong = [row for row in rows if not row.exact]
    yield f"{len(rows)} measurements, {len(wrong)} of them inexact"
    yield from (f"  INEXACT {row.impl} {name(row.cell)}" for row in wrong)
    if reference:
        yield from _against(rows, reference)
    yield from _named(rows)
    yield from _choice(rows)
    yield from _kinds(rows)
    yield from _forms(rows)
    yield from _types(rows)


def name(cell: Cell) -> str:
    """Return a cell as text."""
    return f"{cell.dtype} {cell.data} {cell.rows} x {cell.width:,} k={cell.k}"


def _against(rows: Sequence[Row], reference: Sequence[Row]) -> Iterator[str]:
    """Ours over the envelope of the reference, and torch.topk then and now, which scales it."""
    best = envelope(reference, without=lambda impl: impl == "auto")
    torch_then, torch_now = of(reference, "torch"), of(rows, "torch")
    shared = torch_then.keys() & torch_now.keys()
    scale = geometric_mean(torch_now[cell].cold / torch_then[cell].cold for cell in shared)
    if shared:
        yield f"torch.topk now / recorded: {scale:.3f} ({len(shared)} cells)"
    for dtype in DTYPES:
        auto = {cell: row for cell, row in of(rows, "auto").items() if cell.dtype == dtype and cell in best}
        if not auto:
            continue
        ratios = sorted(((row.cold / best[cell].cold, cell) for cell, row in auto.items()), reverse=True)
        mean = geometric_mean(ratio for ratio, _ in ratios)
        goal = f", goal {GOALS[dtype]}" if dtype in GOALS else ""
        scaled = f", {mean / scale:.3f} if the envelope is scaled" if shared else ""
        over = sum(ratio > WORST for ratio, _ in ratios)
        yield f"{dtype}: auto / envelope {mean:.3f}{goal}{scaled}; {len(ratios)} cells, {over} above {WORST}"
        for ratio, cell in ratios[:8]:
            shown = f"{auto[cell].cold:.2f} us, {best[cell].impl} {best[cell].cold:.2f}, floor {cell.floor_us:.1f}"
            yield f"  {ratio:5.2f}  {name(cell)}: {shown}"
        yield from _grid({cell: ratio for ratio, cell in ratios})


def _grid(ratios: dict[Cell, float]) -> Iterator[str]:
    """A table of ratios: shapes down, widths across."""
    widths = sorted({cell.width for cell in ratios})
    yield "  k, rows     " + "".join(f"{width:>10,}" for width in widths)
    lines: dict[tuple[int, int], dict[int, float]] = {}
    for cell, ratio in ratios.items():
        lines.setdefault((cell.k, cell.rows), {})[cell.width] = ratio
    for (k, count), line in sorted(lines.items()):
        cells = "".join(f"{line[width]:10.2f}" if width in line else " " * 10 for width in widths)
        yield f"  {k:>5} {count:>6}{cells}"


def _named(rows: Sequence[Row]) -> Iterator[str]:
    """The cells that have goals of their own."""
    auto = of(rows, "auto")
    measured = [(Cell(dtype, "normal", *shape), goal) for (dtype, *shape), goal in NAMED.items()]
    measured = [(cell, goal) for cell, goal in measured if cell in auto]
    if measured:
        yield "cells with goals, us cold (warm)"
    for cell, goal in measured:
        row = auto[cell]
        verdict = "met" if row.cold <= goal else "MISSED"
        warm = "" if math.isnan(row.warm) else f" ({row.warm:.2f})"
        yield f"  {name(cell):<36} {row.cold:8.2f}{warm}  goal {goal:g}: {verdict}"


def families(rows: Iterable[Row]) -> list[str]:
    """Return the kernel families of a record: what has no form and is neither auto nor a peer."""
    names = dict.fromkeys(row.impl for row in rows)
    return [impl for impl in names if impl not in ("auto", "torch", "cudnn", "torch_family") and "+" not in impl]


def _choice(rows: Sequence[Row]) -> Iterator[str]:
    """How far the chooser's pick is from the best family, and how far each family is, cold, normal rows."""
    known = families(rows)
    best = envelope(row for row in rows if row.impl in known and row.cell.data == "normal")
    auto = of(rows, "auto")
    ratios = sorted(((auto[cell].cold / best[cell].cold, cell) for cell in best if cell in auto), reverse=True)
    if not ratios:
        return
    mean = geometric_mean(ratio for ratio, _ in ratios)
    yield f"auto / best family: {mean:.3f}, worst {ratios[0][0]:.2f} ({name(ratios[0][1])})"
    for family in known:
        own = of(rows, family)
        mean = geometric_mean(row.cold / best[cell].cold for cell, row in own.items() if row.exact)
        first = sum(best[cell].impl == family for cell in own)
        yield f"  {family:<16} {mean:6.2f} of the best where it serves ({len(own)} cells), best in {first}"


def _kinds(rows: Sequence[Row]) -> Iterator[str]:
    """Each kind of rows against normal ones of the same shape, for the chooser's pick."""
    normal = of(rows, "auto")
    for kind in dict.fromkeys(row.cell.data for row in rows if row.cell.data != "normal"):
        ratios = [
            (row.cold / normal[plain].cold, cell)
            for cell, row in of(rows, "auto", kind).items()
            if (plain := cell._replace(data="normal")) in normal
        ]
        if ratios:
            worst, cell = max(ratios)
            bound = 2.0 if kind in ADVERSARIAL else 1.25
            mean = geometric_mean(ratio for ratio, _ in ratios)
            verdict = "met" if worst <= bound else "MISSED"
            yield f"{kind} / normal: {mean:.2f}, worst {worst:.2f} ({name(cell)}), bound {bound}: {verdict}"
            yield from _over(ratios, bound)


def _forms(rows: Sequence[Row]) -> Iterator[str]:
    """Each output form against unordered output, for each implementation."""
    bounds = {"index": 1.3, "value": 2.0, "group8": 1.15}
    for impl in dict.fromkeys(row.impl for row in rows if "+" in row.impl):
        family, _, form = impl.partition("+")
        plain, formed = of(rows, family), of(rows, impl)
        ratios = [(row.cold / plain[cell].cold, cell) for cell, row in formed.items() if cell in plain]
        if ratios:
            worst, cell = max(ratios)
            bound = f", bound {bounds[form]}" if form in bounds else ""
            mean = geometric_mean(ratio for ratio, _ in ratios)
            yield f"{impl} / {family}: {mean:.2f}, worst {worst:.2f} ({name(cell)}){bound}"
            if family == "auto":
                yield from _over(ratios, bounds.get(form, math.inf))


def _over(ratios: Iterable[tuple[float, Cell]], bound: float) -> Iterator[str]:
    """The cells above a bound, the worst first, where there are more than the one that was named."""
    above = sorted((one for one in ratios if one[0] > bound), reverse=True)[1:]
    if above:
        shown = ", ".join(f"{ratio:.2f} {cell.dtype} {cell.rows} x {cell.width:,}" for ratio, cell in above[:8])
        yield f"  above the bound too: {shown}{f' and {len(above) - 8} more' if len(above) > 8 else ''}"


def _types(rows: Sequence[Row]) -> Iterator[str]:
    """Cells of 16 bits that are slower than f32."""
    auto = of(rows, "auto")
    slow = [
        (row.cold / auto[wide].cold, cell)
        for cell, row in auto.items()
        if cell.dtype != "f32" and (wide := cell._replace(dtype="f32")) in auto
    ]
    if slow:
        worst, cell = max(slow)
        count = sum(ratio > 1 for ratio, _ in slow)
        yield f"16 bits / f32: worst {worst:.2f} ({name(cell)}), {count} of {len(slow)} slower"
