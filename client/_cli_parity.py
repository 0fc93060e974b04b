"""`topkd parity`: the kernels compared with a reference on the device that is here, and timed."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from topkd._cli_common import CommandError, UsageError, add_json, print_json, progress

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_commands"]

_DESCRIPTION = """\
Compare every kernel family that can with a reference, on the device that is here, and time it: QUERIES queries that
end at CONTEXT cells, each with its count, in rows of CAPACITY cells, four cells a block, 512 blocks selected in order.
With --decode only the device knows the counts. Scores are continuous, of 64 levels, and equal.

--selftest compares 54 calls for each dtype instead: nine pairs of context and capacity, as decode windows and as prompt
batches, with each kind of scores; prompt batches also without their bound, which must not change an answer.

Exit status: 0 all answers are right, 1 one is not.
"""
_DTYPES = ("float32", "bfloat16", "float16")
_NUMBERS = ("CONTEXT", "QUERIES", "REPS", "CAPACITY")


def add_commands(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "parity",
        help="compare the kernels with a reference, and time them",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("numbers", nargs="*", type=int, metavar=" ".join(_NUMBERS), help="cells, queries, calls a round, cells")
    add("--selftest", action="store_true", help="compare many calls, and time none")
    add("--decode", action="store_true", help="counts that only the device knows")
    add(
        "--dtype", action="append", choices=_DTYPES, help="of the scores; again for more (default: all with --selftest)"
    )
    add("--family", action="append", metavar="NAME", help="kernel family, or auto; again for more (default: all)")
    add("--device", choices=("cpu", "cuda"), help="where (default: cuda if there is a GPU)")
    add("--shrink", type=int, default=1, metavar="N", help="divide the self-test's sizes, for a machine without a GPU")
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    try:
        import torch

        from topkd.kernels import _parity as parity
    except ModuleNotFoundError as error:
        raise CommandError(f"parity needs the package {error.name}, which is not installed") from None
    place = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if place == "cuda" and not torch.cuda.is_available():
        raise CommandError("there is no GPU that torch can use")
    dtypes = [getattr(torch, name) for name in args.dtype or (_DTYPES if args.selftest else _DTYPES[:1])]
    try:
        parity.names(args.family)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        if args.selftest:
            return _selftest(args, parity, dtypes, torch.device(place))
        return _compare(args, parity, dtypes, torch.device(place))
    except RuntimeError as error:  # a kernel that cannot be compiled, or CUDA's own: memory, a fault
        raise CommandError(f"{type(error).__name__}: {error}") from None


def _selftest(args: argparse.Namespace, parity: Any, dtypes: Sequence[Any], device: Any) -> int:
    if args.numbers:
        raise UsageError("--selftest has sizes of its own")
    if args.shrink < 1:
        raise UsageError("--shrink must be at least 1")
    outcomes: list[Any] = []
    calls = list(parity.selftest_calls(dtypes, args.shrink))
    for at, call in enumerate(calls):
        with progress(f"call {at + 1} of {len(calls)}"):
            outcomes += parity.compare(call, device, args.family)
    wrong = [one for one in outcomes if one.wrong]
    families = list(dict.fromkeys(one.family for one in outcomes))
    if args.json:
        print_json({"calls": len(calls), "comparisons": len(outcomes), "wrong": [_plain(one) for one in wrong]})
        return int(bool(wrong))
    print(f"{'family':<16}{'comparisons':>12}{'wrong':>8}  forms")
    for family in families:
        own = [one for one in outcomes if one.family == family]
        forms = ", ".join(dict.fromkeys(one.form for one in own))
        print(f"{family:<16}{len(own):>12}{sum(one.wrong > 0 for one in own):>8}  {forms}")
    for one in wrong:
        print(f"WRONG {one.family} {_text(one.call)}: {one.wrong} queries{' without the bound' if one.note else ''}")
    print(f"{len(calls)} calls on {device}: {'all answers are right' if not wrong else f'{len(wrong)} are WRONG'}")
    return int(bool(wrong))


def _compare(args: argparse.Namespace, parity: Any, dtypes: Sequence[Any], device: Any) -> int:
    from topkd.kernels._parity_time import microseconds

    context, queries, reps, capacity = _numbers(args)
    rows = []
    for dtype in dtypes:
        for scores in parity.SCORES:
            kind = "decode" if args.decode else "prompt"
            call = parity.Call(kind, queries, context, capacity, scores, dtype)
            outcomes = list(parity.compare(call, device, args.family))
            material = parity.Material(call, device)
            for one in dict.fromkeys((outcome.family, outcome.form) for outcome in outcomes):
                family, form = one
                wrong = max(outcome.wrong for outcome in outcomes if outcome.family == family)
                took = microseconds(material, family, form, reps)
                named, reason = parity.chosen(material, form) if family == "auto" else (family, "")
                rows.append((scores, dtype, family, form, queries - wrong, took, named, reason))
    if args.json:
        keys = ("scores", "dtype", "family", "form", "right", "us", "kernel", "reason")
        print_json([dict(zip(keys, (row[0], _name(row[1]), *row[2:]), strict=True)) for row in rows])
    else:
        print(*_table(rows, queries), sep="\n")
    return int(any(row[4] < queries for row in rows))


def _numbers(args: argparse.Namespace) -> tuple[int, int, int, int]:
    if len(args.numbers) != 4:
        raise UsageError(f"parity takes {' '.join(_NUMBERS)}, or --selftest")
    context, queries, reps, capacity = args.numbers
    if min(args.numbers) < 1:
        raise UsageError("CONTEXT, QUERIES, REPS and CAPACITY must be at least 1")
    if capacity % 4 or context > capacity:
        raise UsageError(f"CAPACITY is {capacity}; it must be a multiple of 4, and at least CONTEXT, {context}")
    return context, queries, reps, capacity


def _table(rows: Sequence[tuple[Any, ...]], queries: int) -> list[str]:
    lines = [f"{'scores':<12}{'dtype':<10}{'family':<22}{'form':<12}{'right':>14}{'us':>12}"]
    for scores, dtype, family, form, right, took, named, _ in rows:
        shown = family if family == named else f"auto: {named}"
        verdict = f"{right} of {queries}"
        lines.append(f"{scores:<12}{_name(dtype):<10}{shown:<22}{form:<12}{verdict:>14}{took:>12.2f}")
    reasons = dict.fromkeys(row[7] for row in rows if row[7])
    return [*lines, *(f"auto: {reason}" for reason in reasons)]


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _text(call: Any) -> str:
    return (
        f"{call.kind} {call.queries} x {call.context:,} of {call.capacity:,} cells, {call.scores}, {_name(call.dtype)}"
    )


def _plain(outcome: Any) -> dict[str, Any]:
    document = {**outcome._asdict(), **outcome.call._asdict()}
    del document["call"]
    return document | {"dtype": _name(document["dtype"])}
