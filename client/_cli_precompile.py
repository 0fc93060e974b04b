"""`topkd precompile`: kernels compiled ahead of time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topkd._cli_common import CommandError, UsageError, add_json, print_json, size

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from topkd.kernels import Precompiled

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "precompile",
        help="compile the GPU kernels ahead of time",
        description="Compile the GPU kernels ahead of time, for processes that then load them in milliseconds. "
        "Needs the compiler (nvidia-cutlass-dsl) and a linker, but no GPU.",
    )
    add = parser.add_argument
    add(
        *("--arch", "-a"),
        action="append",
        metavar="ARCH",
        help="architecture such as sm_90a, or all; again for more (default: those of this machine's GPUs)",
    )
    add("--family", action="append", metavar="NAME", help="kernel family; again for more (default: all)")
    add("--jobs", "-j", type=int, default=1, metavar="N", help="processes that compile (default: this one)")
    add("--dir", type=Path, metavar="DIR", help="where to store (default: $TOPKD_CACHE_DIR, or ~/.cache/topkd)")
    add(
        "--with-runtime",
        action="store_true",
        help="keep the compiler's runtime library too (43 MB): where $TOPKD_PRECOMPILED_DIR names the directory, "
        "kernels load without the compiler",
    )
    add("--list", action="store_true", help="show what is stored, and compile nothing")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        from topkd import kernels
    except ImportError as error:
        raise CommandError(f"precompile needs topkd[server]: {error}") from None
    if args.with_runtime and (args.list or args.dir is None):
        raise UsageError("--with-runtime needs --dir, and goes without --list")
    rows = list(kernels.stored(args.dir)) if args.list else _compile(args)
    if args.json:
        print_json([row._asdict() for row in rows])
    else:
        print(*_table(rows), sep="\n")
    lost = [] if args.list else [row for row in rows if not row.size]
    if lost:
        raise CommandError(f"{len(lost)} of {len(rows)} variants could not be stored; the warnings above say why")
    return 0


def _compile(args: argparse.Namespace) -> list[Precompiled]:
    from topkd.kernels import precompile
    from topkd.kernels._precompile import ARCHITECTURES, keep_runtime

    archs = ARCHITECTURES if "all" in (args.arch or ()) else args.arch
    try:
        if args.with_runtime:
            keep_runtime(args.dir)
        return precompile(archs, args.family, directory=args.dir, jobs=args.jobs, see=_say)
    except ValueError as error:
        raise UsageError(str(error)) from None
    except (RuntimeError, OSError) as error:
        raise CommandError(str(error)) from None


def _say(row: Precompiled) -> None:
    """Shows progress."""
    text = f"{row.family} {row.arch} {row.variant}: {row.source}, {row.seconds:.2f} s"
    print(text, file=sys.stderr, flush=True)


def _table(rows: Sequence[Precompiled]) -> list[str]:
    """Returns the lines of a table."""
    cells = [("family", "arch", "variant", "registers", "spills", "seconds", "size", "state")]
    for row in rows:
        registers, stores = (str(row.resources.get(name, "-")) for name in ("registers", "local_stores"))
        cells.append(
            (row.family, row.arch, row.variant, registers, stores, f"{row.seconds:.2f}", size(row.size), row.source)
        )
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
