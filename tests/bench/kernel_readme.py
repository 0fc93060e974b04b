"""The README's table of kernel figures, from the record: the chooser's pick beside the best public kernel of each cell.

    python -m tests.bench.kernel_readme [RECORD] [--reference ENVELOPE]

Prints Markdown. docs/bench.md says how the record is made.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench import kernel_records as records
from tests.bench.kernel_cells import Cell
from tests.bench.kernel_records import GOALS, WORST, Row

WIDTHS = (4096, 16384, 131072, 262144, 1048576)
ROWS = (1, 16, 64, 256)
H200 = Path(__file__).with_name("results") / "h200"


def table(rows: Sequence[Row], reference: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the table: us of ours with a cold cache in bold, those of the best public kernel after it."""
    auto, best = records.of(rows, "auto"), records.envelope(reference)
    yield "| dtype, k | rows | " + " | ".join(f"{width:,}" for width in WIDTHS) + " |"
    yield "|---" * (2 + len(WIDTHS)) + "|"
    for dtype in GOALS:
        for k in (512, 2048):
            for count in ROWS:
                cells = [Cell(dtype, "normal", count, width, k) for width in WIDTHS]
                shown = (f"**{auto[cell].cold:.1f}** {best[cell].cold:.1f}" for cell in cells)
                yield f"| {dtype}, {k:,} | {count} | " + " | ".join(shown) + " |"


def means(rows: Sequence[Row], reference: Sequence[Row]) -> Iterator[str]:
    """Yield a line for each dtype: the geometric mean of ours over the best public kernel, and how many are far off."""
    best = records.envelope(reference)
    for dtype in GOALS:
        mine = {cell: row for cell, row in records.of(rows, "auto").items() if cell.dtype == dtype and cell in best}
        ratios = [row.cold / best[cell].cold for cell, row in mine.items()]
        over = sum(ratio > WORST for ratio in ratios)
        mean = records.geometric_mean(ratios)
        yield f"{dtype}: {mean:.3f} of the best public kernel over {len(ratios)} cells, {over} above {WORST}"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests.bench.kernel_readme", description="The README's table of figures.")
    parser.add_argument("record", nargs="?", type=Path, default=H200 / "kernels.csv")
    parser.add_argument("--reference", type=Path, default=H200 / "public_envelope.csv")
    options = parser.parse_args(argv)
    rows, reference = records.read(options.record), records.read(options.reference)
    for line in (*table(rows, reference), "", *means(rows, reference)):
        print(line)


if __name__ == "__main__":
    main()
