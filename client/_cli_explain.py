"""`topkd explain`: which kernel family serves a shape, and why."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

from topkd._cli_common import CommandError, UsageError, add_json, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["add_commands"]

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}
_FLAGS = ("pooled", "pin_newest", "drop_neg_inf", "expand", "largest", "values")
_NUMBERS = ("rows", "width", "k", "max_length", "group", "next_n")
_TEXTS = ("dtype", "order", "ties", "index_dtype", "kernel")
_DESCRIPTION = """\
Say which kernel family kernel="auto" takes for a selection, why, and what is known of the others.

Give a shape, or --file: a CSV file whose columns are named rows, width, k and, if wanted, as the options are.
"""


def add_commands(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "explain",
        help="say which kernel serves a shape, and why",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("shape", nargs="*", type=int, metavar="ROWS WIDTH K", help="rows, capacity of a row, elements selected per row")
    add("--file", type=Path, metavar="CSV", help="shapes to explain")
    add("--device", metavar="KIND", help="kind of device, such as h200 (default: the GPU that is here, else cpu)")
    group = parser.add_argument_group("of the selection")
    add = group.add_argument
    add("--dtype", default="bfloat16", help="bfloat16 (default), float16 or float32; also bf16, f16, f32")
    add("--max-length", type=int, metavar="N", help="bound of the rows' lengths, in members")
    add("--group", type=int, default=1, metavar="N", help="members of an element")
    add("--next-n", type=int, default=1, metavar="N", help="draft tokens")
    add("--order", default="any", help="any, index or value")
    add("--ties", default="any", help="any, lowest or highest")
    add("--index-dtype", default="int32", help="int32 or int64")
    add("--kernel", default="auto", help="a family's name: whether it can, and what it takes")
    for name in ("pooled", "pin-newest", "expand", "values"):
        add(f"--{name}", action="store_true")
    add("--drop-neg-inf", action=argparse.BooleanOptionalAction)
    add("--smallest", dest="largest", action="store_false")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        import torch

        from topkd.kernels import explain
    except ModuleNotFoundError as error:
        raise CommandError(f"explain needs the package {error.name}, which is not installed") from None
    documents = []
    for selection in _selections(args):
        options = {name: value for name, value in selection.items() if value is not None}
        for name in _NUMBERS[:3]:
            if options.get(name, -1) < 0:
                raise UsageError(f"{name} is {options.get(name)}; it must be a number from 0")
        try:
            for name in ("dtype", "index_dtype"):
                options[name] = _torch_dtype(torch, name, options[name])
            shape = [options.pop(name) for name in ("rows", "width", "k")]
            found = explain(*shape, device=args.device, **options)
        except (TypeError, ValueError) as error:
            raise UsageError(str(error)) from None
        documents.append(_document(selection, found))
    if args.json:
        print_json(documents if args.file else documents[0])
    else:
        print(*(_table(documents) if args.file else _lines(documents[0])), sep="\n")
    return 0


def _torch_dtype(torch: Any, name: str, text: str) -> Any:
    dtype = getattr(torch, _DTYPES.get(text, text), None)
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"{name} is {text!r}, which is no dtype")
    return dtype


def _selections(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields what is to be explained: shapes and options, None where one is left out."""
    given = {name: getattr(args, name) for name in (*_NUMBERS[3:], *_TEXTS, *_FLAGS)}
    if (args.file is None) == (len(args.shape) == 0):
        raise UsageError("explain takes ROWS WIDTH K, or --file, and not both")
    if args.file is None:
        if len(args.shape) != 3:
            raise UsageError(f"explain takes three numbers, ROWS WIDTH K, not {len(args.shape)}")
        yield dict(zip(_NUMBERS, args.shape, strict=False)) | given
        return
    try:
        with args.file.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except OSError as error:
        raise CommandError(f"{args.file}: {error.strerror}") from None
    for number, line in enumerate(lines, 2):
        try:
            yield given | {name: _cell(name, text) for name, text in line.items() if text}
        except ValueError as error:
            raise UsageError(f"{args.file}, line {number}: {error}") from None


def _cell(name: str, text: str) -> Any:
    """Reads a cell of a file by the name of its column."""
    if name in _NUMBERS:
        return int(text)
    if name in _FLAGS:
        if text.lower() not in ("0", "1", "true", "false"):
            raise ValueError(f"{name} is {text!r}; it must be true or false")
        return text.lower() in ("1", "true")
    if name not in _TEXTS:
        raise ValueError(f"there is no column {name!r}; there are {', '.join((*_NUMBERS, *_TEXTS, *_FLAGS))}")
    return text


def _document(selection: dict[str, Any], found: Any) -> dict[str, Any]:
    facts, decision = found
    return {
        "device": facts.device.name,
        "selection": {name: value for name, value in selection.items() if value is not None},
        "bound": facts.bound,
        "elements": facts.elements,
        "kernel": decision.family,
        "source": decision.source,
        "reason": decision.reason,
        "families": [verdict._asdict() for verdict in decision.verdicts],
    }


def _shape(document: dict[str, Any]) -> str:
    one = document["selection"]
    return f"{one['rows']} x {one['width']:,} {one['dtype']}, k = {one['k']:,}"


def _lines(document: dict[str, Any]) -> list[str]:
    lines = [
        f"{_shape(document)} on {document['device']}, at most {document['elements']:,} elements a row",
        f"kernel   {document['kernel']}",
        f"reason   {document['reason']}",
        "",
    ]
    for family in document["families"]:
        known = "not measured" if family["us"] is None else f"{family['us']:.2f} us"
        unmet = family["unmet"]
        lines.append(f"  {family['family']:<16} {f'cannot: {unmet}' if unmet else known}")
    return lines


def _table(documents: Sequence[dict[str, Any]]) -> list[str]:
    """Returns a line for each shape of a file."""
    cells = [("shape", "kernel", "us", "source", "reason")]
    for document in documents:
        us = next(one["us"] for one in document["families"] if one["family"] == document["kernel"])
        shown = "" if us is None else f"{us:.2f}"
        cells.append((_shape(document), document["kernel"], shown, document["source"], document["reason"]))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
