"""`topkd doctor`: checks what a server and its clients need, and names the rule that fails and the remedy.

A rule is a function from what was looked up (`Facts`) to a `Finding`. The rules of the GPU are in `_doctor_gpu`, those
of the host and of a running server in `_doctor_host`.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from topkd._cli_common import add_json, add_target, print_json, progress
from topkd._doctor_gpu import GPU_RULES, look_at_gpu
from topkd._doctor_host import HOST_RULES, look_at_host
from topkd._doctor_rules import Facts, Finding, State

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["add_commands", "examine"]

_DESCRIPTION = """\
Check what a server and its clients need from this machine. Run it as the user, and in the container, of the process
that is in question. Every rule has a name, a state (ok, warn, fail, skip), a finding, and a remedy where it is not ok.
Exit status 1 if a rule fails, else 0.
"""


def add_commands(commands: Any) -> None:
    """Adds the command to the command line."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="check the machine, and name what is wrong and the remedy",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="show only what is not ok")
    add_target(parser)
    add_json(parser)
    parser.set_defaults(run=_run)


def examine(facts: Facts) -> list[Finding]:
    """Applies every rule, in the order in which they are best read."""
    return [rule(facts) for rule in (*HOST_RULES, *GPU_RULES)]


def _run(args: argparse.Namespace) -> int:
    with progress("looking at the GPU and torch"):
        gpu, torch = look_at_gpu()
    with progress("asking the server"):
        host, server = look_at_host(args)
    findings = examine(Facts(gpu=gpu, torch=torch, host=host, server=server))
    failed = [finding.rule for finding in findings if finding.state is State.FAIL]
    if args.json:
        print_json({"ok": not failed, "failed": failed, "rules": [_plain(finding) for finding in findings]})
    else:
        print(*_lines(findings, args.quiet), sep="\n")
    return 1 if failed else 0


def _plain(finding: Finding) -> dict[str, str]:
    return dataclasses.asdict(finding) | {"state": finding.state.value}


def _lines(findings: Iterable[Finding], quiet: bool) -> list[str]:
    findings = list(findings)
    lines = []
    for finding in findings:
        if quiet and finding.state in (State.OK, State.SKIP):
            continue
        lines.append(f"{finding.state.value:<4}  {finding.rule:<18}  {finding.finding}")
        if finding.remedy:
            lines.append(f"{'':<26}  -> {finding.remedy}")
    failed = [finding.rule for finding in findings if finding.state is State.FAIL]
    warned = sum(finding.state is State.WARN for finding in findings)
    verdict = f"failed: {', '.join(failed)}" if failed else "nothing fails"
    return [*lines, f"{verdict}; {warned} to look at" if warned else verdict]
