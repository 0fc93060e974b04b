"""The report of what the compiled kernels take of a GPU, which is committed.

    python tests/kernels/resources.py check COMPILED.json [REPORT]    do the kernels take what the report says?
    python tests/kernels/resources.py write COMPILED.json [REPORT]    write the report

COMPILED.json is what `topkd precompile --json` printed (`make precompile-check`, `make resources`). The report has a
line for each variant and architecture: threads of a CTA, registers of a thread, shared memory of a CTA in bytes (what
a launch asks for; what the binary has of its own), and of a thread bytes of stack, and loads and stores of local
memory, which are spills.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

REPORT = Path(__file__).with_name("resources.csv")
KEY = ("family", "arch", "variant")
COLUMNS = {
    "threads": "threads",
    "registers": "registers",
    "shared_bytes": "shared_dynamic",
    "static_shared_bytes": "shared_static",
    "stack_bytes": "stack",
    "local_loads": "local_loads",
    "local_stores": "local_stores",
}
"""Names in the JSON, and in the report."""
COMPILER = ("nvidia-cutlass-dsl", "apache-tvm-ffi")
MOST_VARIANTS = 120
"""Of an architecture."""
RENEW = "If that is meant, `make resources` renews the report; commit it with the change."

Report = dict[tuple[str, ...], dict[str, str]]
"""Columns of each variant: family, architecture, compile-time facts."""


def compiled(rows: list[dict[str, Any]]) -> Report:
    """Returns the report of what was compiled."""
    return {
        tuple(row[name] for name in KEY): {
            column: str(row["resources"].get(name, "")) for name, column in COLUMNS.items()
        }
        for row in rows
    }


def compiler() -> str:
    """Returns the compiler's version, on which the code depends too."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in COMPILER)


def written(report: Report, made_by: str) -> str:
    """Returns the text of a report."""
    text = io.StringIO()
    text.write(f"# {made_by}\n")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow((*KEY, *COLUMNS.values()))
    lines.writerows((*key, *columns.values()) for key, columns in sorted(report.items()))
    return text.getvalue()


def read(text: str) -> tuple[Report, str]:
    """Returns a report, and the compiler that it is of."""
    first, _, rest = text.partition("\n")
    rows = csv.DictReader(io.StringIO(rest))
    report = {tuple(row.pop(name) for name in KEY): row for row in rows}
    return report, first.removeprefix("# ")


def differences(old: Report, new: Report) -> list[str]:
    """Returns a line for each variant that is not as the report has it."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        name = " ".join(key)
        if key not in new:
            lines.append(f"  gone: {name}")
        elif key not in old:
            lines.append(f"  new: {name}: " + ", ".join(f"{one} {value}" for one, value in new[key].items()))
        else:
            changed = [
                f"{one} {old[key].get(one)} -> {now}" for one, now in new[key].items() if old[key].get(one) != now
            ]
            if changed:
                lines.append(f"  changed: {name}: {', '.join(changed)}")
    return lines


def check(rows: list[dict[str, Any]], text: str, made_by: str) -> tuple[bool, list[str]]:
    """Compares what was compiled with a report.

    Args:
        rows: What was compiled.
        text: The report.
        made_by: The compiler's version.

    Returns:
        Whether they agree, and lines that say so.
    """
    (old, recorded_by), new = read(text), compiled(rows)
    archs = {key[1] for key in new}
    found = differences({key: columns for key, columns in old.items() if key[1] in archs}, new)
    sizes = Counter(key[1] for key in new)
    many = [f"  {arch} has {count} variants" for arch, count in sizes.items() if count > MOST_VARIANTS]
    spilling = sum(columns["local_stores"] not in ("", "0") for columns in new.values())
    lines = [f"{len(new)} variants for {', '.join(sorted(archs))}; {spilling} of them spill registers."]
    if found and recorded_by != made_by:
        lines.append(f"The report is of another compiler: {recorded_by}; here it is {made_by}.")
    if found:
        lines += ["The kernels take other resources than tests/kernels/resources.csv says:", *found, RENEW]
    lines += [f"{line}, more than {MOST_VARIANTS}" for line in many]
    return not found and not many, lines


def main(argv: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(description="The report of what the compiled kernels take of a GPU.")
    parser.add_argument("command", choices=("check", "write"))
    parser.add_argument("compiled", type=Path, metavar="COMPILED.json")
    parser.add_argument("report", type=Path, nargs="?", default=REPORT, metavar="REPORT")
    args = parser.parse_args(argv)
    rows = json.loads(args.compiled.read_text())
    before = args.report.read_text() if args.report.is_file() else ""
    good, lines = check(rows, before, compiler())
    if args.command == "write":
        args.report.write_text(written(compiled(rows), compiler()))
        lines = [line for line in lines if line != RENEW]
        good = True
    print(*lines, sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
