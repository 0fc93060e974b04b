"""Lanes under load: clients that check their outputs, killed at random if asked; a rate that must be kept up."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import topkd
from tests.bench.service_calls import fill
from tests.bench.service_lanes import CALLS_OF_A_GRAPH, SMALL, Timer, from_host, on_a_stream
from tests.e2e import processes
from tests.e2e.servers import Running

RATE = 20_000
"""Calls a second that re-arming must keep up with."""

_KILL_EVERY_S = 1.0
_GRACE_S = 200.0


class _Process:
    """A client process, and the last line that it wrote."""

    def __init__(self, socket_dir: Path, device: str, seed: int, seconds: float, waits_by: str) -> None:
        command = [sys.executable, "-m", "tests.bench.service_client", str(socket_dir), device, str(seed)]
        self.last: dict[str, Any] = {"calls": 0, "wrong": 0, "over": False}
        self.killed = False
        self.popen = subprocess.Popen([*command, f"{seconds:.1f}", waits_by], stdout=subprocess.PIPE, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                self.last = json.loads(line)

    def kill(self) -> None:
        self.killed = True
        self.popen.kill()
        self.wait(10)

    def wait(self, timeout: float) -> bool:
        """Waits for its end; False if it does not come, and then it is killed."""
        try:
            self.popen.wait(max(timeout, 0.1))
            in_time = True
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait(10)
            in_time = False
        self._reader.join(10)
        return in_time


def check_answers(
    socket_dir: Path, device: str, seconds: float, *, clients: int, kills: bool = False, waits_by: str = "operations"
) -> dict[str, Any]:
    """Lets clients call for some seconds, each with a lane of its own.

    Args:
        socket_dir: of the server.
        device: the server's.
        seconds: for which each calls.
        clients: processes at a time.
        kills: whether one of them is killed, and another started, every second.
        waits_by: what calls of their armed lanes on streams are.

    Returns:
        How many calls were made, how many were wrong, how many clients failed, hung, and were killed on purpose.
    """
    rng = random.Random(7)
    ends = time.monotonic() + seconds
    running = [_Process(socket_dir, device, seed, seconds, waits_by) for seed in range(clients)]
    over: list[_Process] = []
    while kills and (left := ends - time.monotonic()) > 2 * _KILL_EVERY_S:
        time.sleep(_KILL_EVERY_S)
        place = rng.randrange(clients)
        running[place].kill()
        over.append(running[place])
        running[place] = _Process(socket_dir, device, len(over) + clients, left, waits_by)
    hung = sum(not one.wait(ends + _GRACE_S - time.monotonic()) for one in running)
    over += running
    return {
        "waits_by": waits_by,
        "clients": clients,
        "seconds": seconds,
        "calls": sum(one.last["calls"] for one in over),
        "wrong": sum(one.last["wrong"] for one in over),
        "failed": sum(not one.killed and not (one.last["over"] and one.popen.returncode == 0) for one in over) - hung,
        "hung": hung,
        "killed": sum(one.killed for one in over),
    }


def _worker_seconds(server: Running) -> float:
    return sum(processes.cpu_seconds(pid) for pid in server.workers())


def keep_up(server: Running, client: topkd.Client, device: str, seconds: float, rate: int = RATE) -> dict[str, Any]:
    """Calls a lane at a rate, in graphs of 64 calls on a GPU, from the host on a CPU.

    Returns:
        The rate that was reached, calls of a dry lane, and the cores that the workers used.
    """
    shape = SMALL
    scores = client.empty((shape.rows, shape.width), "float32" if device == "cpu" else "bfloat16")
    fill(scores)
    with client.plan(scores, shape.k) as plan, plan.lane() as lane:
        if device == "cpu":
            return _measured(server, lane.mode, seconds, lambda: from_host(lane, CALLS_OF_A_GRAPH), rate, 2)
        timer = Timer()
        with on_a_stream():
            import torch

            lane()
            torch.cuda.current_stream().synchronize()
            graph = timer.graph(lane, CALLS_OF_A_GRAPH)
            done = torch.cuda.Event()

            def replay() -> None:
                done.synchronize()
                graph.replay()
                done.record()

            figures = _measured(server, lane.mode, seconds, replay, rate, 1)
            lane.check()
            return figures


def _measured(server: Running, mode: str, seconds: float, call: Any, rate: int, times: int) -> dict[str, Any]:
    """Paces calls of `times * 64` each; figures of the whole."""
    before, dry = _worker_seconds(server), dry_rounds(server)
    started = time.monotonic()
    made = 0
    while (now := time.monotonic()) < started + seconds:
        due = started + made / rate
        if due > now:
            time.sleep(min(due - now, 0.01))
            continue
        call()
        made += times * CALLS_OF_A_GRAPH
    took = time.monotonic() - started
    cores = (_worker_seconds(server) - before) / took
    time.sleep(0.5)  # the workers' figures come with a delay
    return {
        "mode": mode,
        "seconds": round(took, 1),
        "asked": rate,
        "calls_a_second": round(made / took),
        "dry_rounds": dry_rounds(server) - dry,
        "worker_cores": round(cores, 2),
    }


def dry_rounds(server: Running) -> int:
    """Returns how often calls of lanes found no round armed."""
    samples = server.metrics()
    return int(sum(value for (name, _), value in samples.items() if name == "topkd_lane_dry_total"))
