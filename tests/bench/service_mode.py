"""Measures a server and this client of it, as the environment has it: under MPS or not. One process of `service`.

`python -m tests.bench.service_mode DEVICE OPTIONS_JSON` writes lines of JSON, each with all figures so far.
"""

from __future__ import annotations

import faulthandler
import json
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import topkd
from tests.bench import service_calls, service_lanes, service_load
from tests.e2e.servers import Running


@dataclass(frozen=True)
class Work:
    """How much to measure.

    Attributes:
        calls: of each kind.
        rate_seconds: for which a lane is called 20,000 times a second.
        soak_seconds: for which clients call, and check.
        kill_seconds: the same with clients killed every second.
        clients: how many.
        waits_by: what calls of their armed lanes on streams are: "operations" or a "kernel" (under MPS).
        limit_seconds: after which the process ends itself.
    """

    calls: int = 2000
    rate_seconds: float = 60.0
    soak_seconds: float = 180.0
    kill_seconds: float = 180.0
    clients: int = 8
    waits_by: str = "operations"
    limit_seconds: float = 900.0


SHORT = Work(calls=100, rate_seconds=1.0, soak_seconds=2.0, kill_seconds=0.0, clients=2, limit_seconds=300.0)
"""Enough to see that everything runs."""


def say(found: dict[str, Any], *parts: str) -> None:
    """Writes the figures so far, and new ones for who looks on."""
    for part in parts:
        print(f"{part}: {found[part]}", file=sys.stderr, flush=True)
    print(json.dumps(found), flush=True)


def measure(device: str, work: Work) -> None:
    """Starts a server, measures, and stops it."""
    folder = Path(tempfile.mkdtemp(prefix="topkd-"))
    server = Running(folder / "s", device, limits={"sessions": 2 * work.clients + 2})
    try:
        server.start()
        with topkd.Client(server.socket_dir, attach_timeout=60) as client:
            client.connect()
            server.settle()
            found: dict[str, Any] = {"device": client.info().device.name}
            found |= service_calls.measure(client, folder, work.calls)
            shapes = [service_lanes.SMALL] if device == "cpu" else service_lanes.SHAPES
            lanes = service_lanes.measure_cpu if device == "cpu" else service_lanes.measure_cuda
            found["lanes"] = [lanes(client, shape, work.calls) for shape in shapes]
            say(found, "calls_us", "lanes")
            if work.rate_seconds:
                found["rate"] = service_load.keep_up(server, client, device, work.rate_seconds)
                say(found, "rate")
        for name, seconds in (("soak", work.soak_seconds), ("kills", work.kill_seconds)):
            if seconds:
                how = {"clients": work.clients, "kills": name == "kills", "waits_by": work.waits_by}
                found[name] = service_load.check_answers(server.socket_dir, device, seconds, **how)
                say(found, name)
                if found[name]["failed"]:
                    print(server.tail(), file=sys.stderr, flush=True)
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """The command line."""
    work = Work(**json.loads(sys.argv[2]))
    faulthandler.dump_traceback_later(work.limit_seconds, exit=True)
    measure(sys.argv[1], work)


def command(device: str, work: Work) -> list[str]:
    """Returns the command line of this module."""
    return [sys.executable, "-m", "tests.bench.service_mode", device, json.dumps(asdict(work))]


if __name__ == "__main__":
    main()
