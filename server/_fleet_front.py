"""One front of a fleet: its process, its health, its restarts."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ._devices import FleetDevice
from ._directory import GRPC_SOCKET
from ._fleet_child import encode
from ._logging import Logger
from .config import ServerConfig

__all__ = ["FleetFront"]

_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.5, 30.0
_PROBE_EVERY_S, _PROBE_TIMEOUT_S = 1.0, 3.0
_STEADY_S = 60.0
_START_TRIES = 3
_STOP_MARGIN_S = 5.0


class FleetFront:
    """A front that is started, watched, and started anew when it ends.

    Attributes:
        name: the device's name.
        serving: whether its last health check said SERVING.
        restarts: how often it was started anew.
        metrics_port: port of its `/metrics` on loopback, 0 while there is none.
        settled: set when it has served, or ended before it did.
        started: whether it has ever served.
    """

    def __init__(
        self, device: FleetDevice, config: ServerConfig, log: Logger, on_change: Callable[["FleetFront"], None]
    ) -> None:
        self.name = device.name
        self.serving = False
        self.restarts = 0
        self.metrics_port = 0
        self.settled = asyncio.Event()
        self.started = False
        self._config = dataclasses.replace(config, device=device.device)
        self._log = log.bind(front=device.name)
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """Its process, None while there is none."""
        return None if self._process is None else self._process.pid

    async def run(self) -> None:
        """Keeps the front running until `stop`."""
        delay = _FIRST_BACKOFF_S / 2
        while True:
            born = time.monotonic()
            code = await self._run_once()
            self.settled.set()
            if self._stopping:
                return
            steady = time.monotonic() - born > _STEADY_S
            delay = min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S if steady else 2.0 * delay)
            self._log.error("front_ended", exit_code=code, next_start_s=delay)
            await asyncio.sleep(delay)
            self.restarts += 1

    async def stop(self, grace_s: float) -> None:
        """Lets the front drain, and kills it if it has not ended within the grace and a margin."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        self._signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s + _STOP_MARGIN_S):
                await process.wait()
        except TimeoutError:
            self._log.warning("front_killed", pid=process.pid, because="it did not end in time")
            self._signal(process, signal.SIGKILL)
            await process.wait()

    async def _run_once(self) -> int:
        """Starts the process and watches it; returns its exit status."""
        reading, writing = os.pipe()
        command = [sys.executable, "-m", "topkd.server._fleet_child", f"--parent={os.getpid()}", f"--name={self.name}"]
        command += [f"--report-fd={writing}", f"--config={encode(self._config)}"]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(writing,), stdin=asyncio.subprocess.DEVNULL
            )
        finally:
            os.close(writing)
        self._process = process
        if self._stopping:
            self._signal(process, signal.SIGTERM)
        watching = asyncio.ensure_future(self._watch_or_kill(process, reading))
        try:
            return await process.wait()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            self._process, self.metrics_port = None, 0
            self._set(serving=False)

    async def _watch_or_kill(self, process: asyncio.subprocess.Process, reading: int) -> None:
        """Watches the front; one that hangs, or cannot be watched, is killed, so that the next one is watched."""
        try:
            await self._watch(reading)
        except TimeoutError as error:
            self._log.error("front_killed", pid=process.pid, because=str(error) or "it did not start in time")
        except Exception as error:  # noqa: BLE001 - whatever it is, a front that nobody watches must not stay
            self._log.error("front_killed", pid=process.pid, because="it cannot be watched", exc_info=error)
        else:
            return  # it has ended
        if not self._stopping:
            self._signal(process, signal.SIGKILL)

    async def _watch(self, reading: int) -> None:
        """Waits until the front serves, then asks for its health for as long as it answers.

        Raises:
            TimeoutError: it does not start in time, or does not answer any more.
        """
        async with asyncio.timeout(_START_TRIES * self._config.start_timeout_s + self._config.front_timeout_s):
            said = await _read_line(reading)
        if not said:
            return
        self.metrics_port = said["metrics_port"] or 0
        self.started = True
        self._set(serving=True)
        self.settled.set()
        path = self._config.socket_dir / GRPC_SOCKET
        async with grpc.aio.insecure_channel(f"unix:{path}", options=[("grpc.use_local_subchannel_pool", 1)]) as front:
            check, answered = health_pb2_grpc.HealthStub(front).Check, time.monotonic()
            while True:
                await asyncio.sleep(_PROBE_EVERY_S)
                try:
                    status = (await check(health_pb2.HealthCheckRequest(), timeout=_PROBE_TIMEOUT_S)).status
                except grpc.aio.AioRpcError as error:
                    self._set(serving=False)
                    if (silent := time.monotonic() - answered) > self._config.front_timeout_s:
                        raise TimeoutError(f"no answer for {silent:.0f} s: {error.details()}") from None
                else:
                    answered = time.monotonic()
                    self._set(serving=status == health_pb2.HealthCheckResponse.SERVING)

    def _set(self, *, serving: bool) -> None:
        if serving != self.serving:
            self.serving = serving
            self._on_change(self)

    def _signal(self, process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


async def _read_line(fd: int) -> dict[str, Any]:
    """Returns the one line that a front writes on its pipe; nothing if it ends first."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(fd, "rb", buffering=0)
    )
    try:
        line = await stream.readline()
    finally:
        transport.close()
    said: dict[str, Any] = json.loads(line) if line else {}
    return said
