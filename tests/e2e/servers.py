"""Servers that tests may kill, stall and start again on the same sockets."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e import processes, raw, scrape

START_TIMEOUT = 90.0
STOP_TIMEOUT = 20.0


def health(channel: grpc.Channel, timeout: float = 5.0) -> str:
    """Returns the health status behind a channel: its name, or that of the call's failure."""
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout).status
    except grpc.RpcError as error:
        return str(error.code().name)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


@dataclass
class Running:
    """A server process of a test's own.

    Attributes:
        socket_dir: where its sockets are.
        flags: of `topkd serve`, beside those that every server here has.
        limits: of `--limit`.
        metrics_port: where /metrics is.
        process: the front.
    """

    socket_dir: Path
    device: str = "cpu"
    flags: Mapping[str, object] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    metrics_port: int = field(default_factory=processes.free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """What the server wrote."""
        return self.socket_dir.with_name(f"{self.socket_dir.name}.log")

    @property
    def pid(self) -> int:
        """The front."""
        assert self.process is not None, "it was not started"
        return self.process.pid

    def command(self) -> list[str]:
        """Returns the command line."""
        given = {"device": self.device, "socket-dir": self.socket_dir, "metrics-port": self.metrics_port, **self.flags}
        command = [sys.executable, "-m", "topkd", "serve"]
        for name, value in given.items():
            command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        for name, value in self.limits.items():
            command += ["--limit", f"{name}={value}"]
        return command

    def start(self) -> Running:
        """Starts it, again or for the first time, and waits until it serves with a warm spare."""
        self.socket_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/"
            )
        deadline = time.monotonic() + START_TIMEOUT
        with raw.front(self.socket_dir) as channel:
            while health(channel) != "SERVING":
                assert self.process.poll() is None, f"the server ended at its start:\n{self.tail()}"
                assert time.monotonic() < deadline, f"the server did not become healthy:\n{self.tail()}"
                time.sleep(0.05)
        self.settle()
        return self

    def tail(self) -> str:
        """Returns the end of its log."""
        return self.log.read_text(errors="replace")[-4000:]

    def metrics(self) -> scrape.Samples:
        """Returns the metrics page."""
        return scrape.scrape(self.metrics_port)

    def workers(self) -> set[int]:
        """Returns the processes under the front."""
        return processes.children(self.pid)

    def shared(self) -> set[int]:
        """Returns the workers that serve the sessions over TCP."""
        return {pid for pid in self.workers() if "--shared" in processes.arguments(pid)}

    def spare(self) -> int:
        """Waits for a warm spare, which the next session takes, and returns its process.

        Only while no session of this host is open: else there are other workers.
        """

        def ready() -> int | None:
            workers = self.workers() - self.shared()
            warm = scrape.total(self.metrics(), "topkd_workers", state="spare")
            return workers.pop() if len(workers) == 1 and warm == 1 else None

        found = processes.wait_until(ready, START_TIMEOUT, "one warm spare")
        assert found is not None
        return found

    def settle(self) -> None:
        """Waits until a spare is warm again, so that its start disturbs nothing."""
        processes.wait_until(
            lambda: scrape.total(self.metrics(), "topkd_workers", state="spare") == 1, START_TIMEOUT, "a warm spare"
        )

    def stop(self) -> int:
        """Ends it by SIGTERM, else by SIGKILL; returns the exit status."""
        if self.process is None:
            return 0
        self.process.terminate()
        try:
            return self.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(STOP_TIMEOUT)
