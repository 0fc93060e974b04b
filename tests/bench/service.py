"""What remote selections cost beside local ones and beside bare gRPC, with and without MPS.

Starts a server for each mode, and a client in another process: lanes beside the same kernel in the client's process
(eager, in graphs of 64 calls, from the host), calls on streams, unary calls and batches beside bare gRPC, the rate that
a lane keeps up, and eight clients that check every bit of what they get. docs/bench.md says how each figure is taken.

    python -m tests.bench.service [--device cuda] [--short] [--calls N] [--soak S] [--kills S] [--modes ...] ...

Prints a table and a plot, and writes `service.json` into `results/<device>/` beside this file or under `--results`;
with `--append` modes may be measured one by one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.bench import service_report
from tests.bench.mps import with_mps, without_mps
from tests.bench.service_mode import SHORT, Work, command

RESULTS = Path(__file__).with_name("results")
_GRACE_S = 30


def run_mode(device: str, work: Work, environment: dict[str, str] | None) -> dict[str, Any]:
    """Measures in a process with an environment (None: this one's).

    Returns:
        Its figures; if it failed after its first ones, those, and why under `failed`.

    Raises:
        RuntimeError: it failed before.
    """
    why = ""
    with subprocess.Popen(command(device, work), env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            output, _ = process.communicate(timeout=work.limit_seconds + _GRACE_S)
            why = f"ended with status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            why = "took too long"
    lines = [line for line in output.splitlines() if line.endswith("}")]
    if not lines:
        raise RuntimeError(f"nothing was measured: the process {why}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found | {"failed": why} if why else found


def measure(device: str, work: Work, modes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each mode and its figures; a mode that there cannot be here is left out, and said.

    Clients that check their outputs call under MPS, clients that are killed without it.
    """
    if device == "cpu":
        yield "cpu", run_mode(device, work, None)
        return
    both = False
    if "mps" in modes:
        with with_mps() as environment:
            if environment is None:
                print("no MPS here: its figures are left out", file=sys.stderr)
            else:
                yield "mps", run_mode(device, replace(work, kill_seconds=0.0), environment)
                both = True
    if service_report.NO_MPS in modes:
        alone = replace(work, waits_by="operations", soak_seconds=0.0 if both else work.soak_seconds)
        yield service_report.NO_MPS, run_mode(device, alone, without_mps())


def folder_of(device: str, name: str) -> str:
    """Returns the name of a device's folder of results."""
    if device == "cpu":
        return "cpu"
    from topkd.kernels._devices import kind_name

    kind: str = kind_name(name)
    return kind


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="What remote selections cost.")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--short", action="store_true", help="a few seconds: to see that everything runs")
    parser.add_argument("--calls", type=int, help="of each kind")
    parser.add_argument("--rate", type=float, help="seconds at 20,000 calls a second")
    parser.add_argument("--soak", type=float, help="seconds of eight clients")
    parser.add_argument("--kills", type=float, help="seconds of eight clients of which one is killed each second")
    parser.add_argument("--waits-by", choices=("operations", "kernel"), help="how armed lanes of those clients wait")
    parser.add_argument("--modes", default="mps,no_mps", help="with commas")
    parser.add_argument("--append", action="store_true", help="keep the record's figures of modes not measured now")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args(arguments)


def work_of(options: argparse.Namespace) -> Work:
    """Returns how much to measure."""
    work = SHORT if options.short else Work()
    given = {
        "calls": options.calls,
        "rate_seconds": options.rate,
        "soak_seconds": options.soak,
        "kill_seconds": options.kills,
        "waits_by": options.waits_by,
    }
    return replace(work, **{name: value for name, value in given.items() if value is not None})


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints, writes."""
    options = parse(arguments)
    found: dict[str, dict[str, Any]] = {}
    before = None
    for mode, figures in measure(options.device, work_of(options), options.modes.split(",")):
        path = options.results / folder_of(options.device, figures["device"]) / "service.json"
        if not found and options.append and path.is_file():
            before = json.loads(path.read_text())
        found[mode] = figures
        write(path, found, before)  # the next mode may fail
    if not found:
        sys.exit("nothing was measured")
    about = about_run(found)
    print(f"{about['device']}, {about['versions']}, {about['date']}")
    for line in (*service_report.table(found), *service_report.plot(found)):
        print(line)
    if failed := [f"{mode} {figures['failed']}" for mode, figures in found.items() if "failed" in figures]:
        sys.exit("; ".join(failed))


def about_run(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Returns where and when."""
    name = next(iter(found.values()))["device"]
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("torch", "grpcio"))
    return {
        "device": name,
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "versions": f"{versions}, Python {sys.version.split()[0]}",
    }


def write(path: Path, found: dict[str, dict[str, Any]], before: dict[str, Any] | None) -> None:
    """Writes the record of what was measured so far, and of other modes before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(service_report.record(found, about_run(found), before), indent=2) + "\n")


if __name__ == "__main__":
    main()
