"""Kills and restarts clients and workers at random for a while, and judges what is left.

Clients speak in lines (`engine.py`). One that calls and says nothing for `HANG_S` seconds hangs, whatever it waits for;
those that attach have longer, since a worker's start is slow on a busy machine. At the end the clients that live are
asked to end, and the server must hold nothing any more.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.e2e import processes, scrape
from tests.e2e.servers import Running

__all__ = ["Chaos", "Report", "main"]

HANG_S: Final = 40.0
START_S: Final = 240.0
"""That a client may take to attach, to make its plans and to warm their kernels, with all others starting too."""

LOST_S: Final = 120.0
"""That a client may take from a loss to its next session's lane: twice its time-out, after which it says so."""

_LOOK_S: Final = 0.1
_GAUGES: Final = ("topkd_sessions", "topkd_lanes", "topkd_plans", "topkd_regions")


@dataclass
class Report:
    """What happened.

    Attributes:
        counts: calls, wrong, lost sessions (told to clients), kills, ends in order.
        failures: Each is a reason to fail.
        modes: How calls were dispatched.
    """

    seconds: float
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    modes: set[str] = field(default_factory=set)

    def verdict(self) -> list[str]:
        """Returns why the run has failed; nothing if it has not."""
        reasons = list(self.failures)
        reasons += [
            f"there was not one of: {name}"
            for name in ("calls", "clients_killed", "workers_killed")
            if not self.counts[name]
        ]
        return reasons

    def text(self) -> str:
        """Returns it as lines for people."""
        lines = [f"chaos of {self.seconds:.0f} s, lanes {', '.join(sorted(self.modes)) or 'none'}"]
        lines += [f"  {name:16} {count}" for name, count in sorted(self.counts.items())]
        lines += [f"  FAILED: {reason}" for reason in self.verdict()]
        return "\n".join([*lines, "no wrong answer, nothing hung" if not self.verdict() else "failed"])


def _patience(state: str) -> float:
    """Returns the seconds for which a client in a state may be silent."""
    return {"calling": HANG_S, "lost": LOST_S}.get(state, START_S)


class _Client:
    """A running client process."""

    def __init__(self, socket_dir: Path, device: str, seed: int) -> None:
        command = [sys.executable, "-m", "tests.chaos.engine", str(socket_dir), device, str(seed)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.seed = seed
        self.state = "starting"
        self.calls = self.worker = 0
        self.heard = time.monotonic()
        self.said: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))

    def close(self) -> None:
        """Kills it, if it lives, and lets go of it."""
        self.process.kill()
        self.process.wait(30)
        self._thread.join(30)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


class Chaos:
    """A run."""

    def __init__(self, server: Running, options: argparse.Namespace) -> None:
        self._server = server
        self._options = options
        self._random = random.Random(options.seed)
        self._clients: list[_Client] = []
        self.report = Report(options.seconds)

    def run(self) -> Report:
        """Starts clients, kills for the given time, ends the clients, and looks at what is left."""
        self._clients = [self._start() for _ in range(self._options.clients)]
        until = time.monotonic() + START_S
        while not any(client.state == "calling" for client in self._clients) and time.monotonic() < until:
            self._listen()
        began = next_client = next_worker = time.monotonic()
        while self._goes_on(time.monotonic() - began):
            self._listen()
            now = time.monotonic()
            if now >= next_worker and self._kill_worker():
                next_worker = now + self._options.worker_kill * self._random.uniform(0.5, 1.5)
            elif now >= next_client and self._kill_client():
                next_client = now + self._options.client_kill
        self._end()
        return self.report

    def _goes_on(self, seconds: float) -> bool:
        """Says whether it is not over; it lasts longer if nothing could be killed so far, on a machine that is busy."""
        if self.report.failures:
            return False
        idle = not (self.report.counts["clients_killed"] and self.report.counts["workers_killed"])
        return seconds < self._options.seconds or (idle and seconds < START_S)

    def _start(self) -> _Client:
        self.report.counts["clients_started"] += 1
        return _Client(self._server.socket_dir, self._options.device, self._random.randrange(1 << 31))

    def _listen(self) -> None:
        """Takes what the clients have said, and looks at who says nothing."""
        time.sleep(_LOOK_S)
        for place, client in enumerate(self._clients):
            self._take(client)
            silent = time.monotonic() - client.heard
            if client.process.poll() is not None and client.state != "ended":
                self._take(client)
                self._fail(f"client {client.seed} ended with {client.process.returncode}")
                client.close()
                self._clients[place] = self._start()
            elif client.state != "ended" and silent > _patience(client.state):
                self._fail(f"client {client.seed} hangs: {client.state} and silent for {silent:.0f} s")
                client.close()
                self._clients[place] = self._start()

    def _take(self, client: _Client) -> None:
        while not client.said.empty():
            said = client.said.get()
            client.heard = time.monotonic()
            state = said["state"]
            if "calls" in said:
                self.report.counts["calls"] += said["calls"] - client.calls
                client.calls = said["calls"]
            if state in ("wrong", "failed"):
                self.report.counts["wrong"] += state == "wrong"
                self._fail(f"client {client.seed}: {said}")
            elif state == "lost":
                self.report.counts["losses_told"] += 1
                if client.state == "calling":
                    client.state = state
            else:
                client.state = state
            if "mode" in said:
                self.report.modes.add(said["mode"])
                client.worker = said["worker"]

    def _fail(self, text: str) -> None:
        self.report.failures.append(text)
        print(f"chaos: {text}", file=sys.stderr, flush=True)

    def _kill_client(self) -> bool:
        """Kills a client, while most of them call: those that start do so undisturbed, or none would ever call."""
        calling = [place for place, client in enumerate(self._clients) if client.state == "calling"]
        if len(calling) * 2 < len(self._clients):
            return False
        place = self._random.choice(calling)
        self._take(self._clients[place])
        self._clients[place].close()
        self.report.counts["clients_killed"] += 1
        self._clients[place] = self._start()
        return True

    def _kill_worker(self) -> bool:
        """Kills the worker of a client that calls, if there is one."""
        workers = [client.worker for client in self._clients if client.state == "calling" and client.worker]
        alive = [pid for pid in workers if pid in self._server.workers()]
        if alive:
            processes.kill(self._random.choice(alive))
            self.report.counts["workers_killed"] += 1
        return bool(alive)

    def _end(self) -> None:
        """Ends the clients that call in order and the others by force; then the server holds nothing."""
        for client in self._clients:
            assert client.process.stdin is not None
            client.process.stdin.close()
        until = time.monotonic() + HANG_S + START_S
        while any(client.process.poll() is None for client in self._clients) and time.monotonic() < until:
            for client in self._clients:
                if client.state not in ("calling", "lost", "ended"):
                    client.process.kill()
                self._take(client)
            time.sleep(_LOOK_S)
        for client in self._clients:
            client.process.kill()
            client.process.wait(30)
            client._thread.join(30)
            self._take(client)
            if client.state == "ended":
                self.report.counts["clients_ended"] += 1
            elif client.state in ("calling", "lost"):
                self._fail(f"client {client.seed} did not end when it was asked to")
            client.process.stdout.close()  # type: ignore[union-attr]
        try:
            scrape.wait_for(self._server.metrics_port, dict.fromkeys(_GAUGES, 0), 30)
        except AssertionError as error:
            self._fail(f"the server holds something when all clients are gone: {error}")


def main(arguments: list[str] | None = None) -> int:
    """Runs it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="that clients and workers are killed for")
    parser.add_argument("--clients", type=int, help="processes; by default 8 on a GPU, 4 on the CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--client-kill", type=float, default=1.0, help="seconds between kills of clients")
    parser.add_argument("--worker-kill", type=float, default=10.0, help="mean seconds between kills of workers")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    options = parser.parse_args(arguments)
    if options.device == "auto":
        options.device = "cuda" if Path("/dev/nvidiactl").exists() else "cpu"
    options.clients = options.clients or (8 if options.device == "cuda" else 4)
    print(f"chaos: seed {options.seed}, {options.clients} clients on {options.device}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="topkd-"))
    limits = {"sessions": options.clients * 2 + 2}
    server = Running(folder / "s", options.device, {"log-level": "warning"}, limits)
    try:
        server.start()
        report = Chaos(server, options).run()
        if server.stop() != 0:
            report.failures.append("the server did not end in order")
        print(report.text())
        if report.verdict():
            print(server.tail(), file=sys.stderr)
        return bool(report.verdict())
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
