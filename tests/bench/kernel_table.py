"""From the bench's records to the chooser's table, `kernels/measured.csv`.

    python -m tests.bench.kernel_table [RECORD...] [--device h200] [--table kernels/measured.csv]...

Takes normal rows, exact ones only, with a cold L2 cache: of plain output, and of the output forms that the chooser
tells apart. A later record overrules an earlier one. Lines of other devices stay in the table as they are.

The seed's comparison is left out: its pooled scores are served by some families only, and a shape at which the others
are missing would keep them from being chosen there for scores that they do serve.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.bench import kernel_records as records
from tests.bench import kernels as bench
from topkd.kernels import _measured, kernels
from topkd.kernels._devices import KNOWN
from topkd.kernels._measured import COLUMNS

INSTALLED = Path(str(_measured.__file__)).with_name("measured.csv")
"""The table that `topkd.kernels` reads here."""

FORMS = {"": "any", "index": "index", "value": "value", "group8": "group8"}
"""The chooser's names of the bench's output forms."""

Key = tuple[str, str, int, int, int]
"""Form, dtype, k, rows, width."""


def times(rows: Iterable[records.Row]) -> dict[Key, dict[str, float]]:
    """Return what each family took, by shape."""
    known = set(kernels()) - {"torch"}
    found: dict[Key, dict[str, float]] = {}
    for row in rows:
        family, _, form = row.impl.partition("+")
        if family in known and form in FORMS and row.exact and row.cell.data == "normal":
            key = (FORMS[form], row.cell.dtype, row.cell.k, row.cell.rows, row.cell.width)
            found.setdefault(key, {})[family] = row.cold
    return found


def lines(device: str, found: dict[Key, dict[str, float]]) -> list[dict[str, str]]:
    """Return the table's lines of a device."""
    capability = ".".join(map(str, KNOWN[device]))
    made = []
    for (form, dtype, k, rows, width), us in sorted(found.items()):
        text = " ".join(f"{name}={one:.4g}" for name, one in sorted(us.items(), key=lambda item: item[1]))
        values: tuple[Any, ...] = (device, capability, form, dtype, k, rows, width, text)
        made.append(dict(zip(COLUMNS, map(str, values), strict=True)))
    return made


def update(table: Path, device: str, files: Sequence[Path]) -> int:
    """Write a device's lines into the table; returns how many they are."""
    found: dict[Key, dict[str, float]] = {}
    for file in files:
        for key, us in times(records.read(file)).items():
            found.setdefault(key, {}).update(us)
    others: list[dict[str, str]] = []
    if table.is_file():
        with table.open(newline="") as old:
            others = [line for line in csv.DictReader(old) if line["device"] != device]
    made = lines(device, found)
    with table.open("w", newline="") as new:
        writer = csv.DictWriter(new, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*others, *made])
    return len(made)


def here() -> str:
    """Return the kind of the GPU that is here, h200 without one that is known."""
    kind = bench.device_kind() if torch.cuda.is_available() else ""
    return kind if kind in KNOWN else "h200"


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="tests.bench.kernel_table", description="Make the chooser's table.")
    add = parser.add_argument
    add("records", nargs="*", type=Path, help="kernels.csv (default: the device's in --results)")
    add("--results", type=Path, default=bench.RESULTS, help="folder of the records (default: beside this file)")
    add("--device", default=here(), choices=sorted(KNOWN), help="kind of device (default: the one here, else h200)")
    add("--table", type=Path, action="append", help="file to write; again for more (default: the installed one)")
    options = parser.parse_args(argv)
    folder = options.results / options.device
    files = options.records or [folder / "kernels.csv"]
    for table in options.table or [INSTALLED]:
        count = update(table, options.device, files)
        print(f"{table}: {count} shapes of {options.device}")


if __name__ == "__main__":
    main()
