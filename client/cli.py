"""The command `topkd`, also `python -m topkd`: serve, info, health, doctor, select, explain, parity, precompile.

Every command takes `--json`. Exit status: 0 all is well, 1 it is not (the message says what), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from topkd import _cli_explain, _cli_info, _cli_parity, _cli_precompile, _cli_select, _cli_serve, _doctor
from topkd._cli_common import CommandError, version
from topkd.errors import TopkdError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["build_parser", "main"]


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="topkd", description="GPU top-k selection as a service.")
    parser.add_argument("--version", action="version", version=f"topkd {version()}")
    commands = parser.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for module in (_cli_serve, _cli_info, _doctor, _cli_select, _cli_explain, _cli_parity, _cli_precompile):
        module.add_commands(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: Arguments; None means those of the process.

    Returns:
        The exit status.
    """
    args = build_parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except (CommandError, TopkdError) as error:
        return _fail(error, args.json)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        return 1
    return status


def _fail(error: Exception, as_json: bool) -> int:
    if as_json:
        report: dict[str, Any] = {"error": {"type": type(error).__name__, "message": str(error)}}
        if reason := getattr(error, "reason", ""):
            report["error"]["reason"] = reason
        print(json.dumps(report))
    else:
        print(f"topkd: {error}", file=sys.stderr)
    return error.status if isinstance(error, CommandError) else 1
