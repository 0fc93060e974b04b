"""A server of several devices: a front for each, started anew when it ends, one page of metrics, one answer of health.

The fleet's process serves nobody: a client attaches to its device's front in `SOCKET_DIR/DEVICE`. Health, on
`SOCKET_DIR/grpc.sock` and on the health address, answers for every device by its name, for all of them together by ""
(SERVING if every one is), and by "live" for the fleet's process alone.
"""

import asyncio
import dataclasses
import os
from collections.abc import Coroutine, Sequence
from contextlib import suppress

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from topkd._paths import device_directories

from . import _logging
from ._devices import FleetDevice, find_devices
from ._directory import GRPC_SOCKET, DirectoryError, SocketDirectory, make_directory
from ._fleet_front import FleetFront
from ._fleet_metrics import FleetCollector, FrontFigures
from ._front_endpoints import LIVE, make_health_server, read_attach_token
from ._front_http import MetricsServer
from ._life import live
from .config import ConfigError, ServerConfig, split_address

__all__ = ["serve_fleet"]

_Status = health_pb2.HealthCheckResponse


class FleetError(RuntimeError):
    """No front could be started."""


def serve_fleet(config: ServerConfig) -> int:
    """Runs a front on each device of `config.devices` until SIGTERM or SIGINT. Blocks.

    Returns:
        0 after an orderly end; 1 if no front could start (logged as `start_failed`).
    """
    log = _logging.configure(config.log_level, config.log_format, process="fleet", pid=os.getpid())
    try:
        config.check()
        read_attach_token(config)
        devices = find_devices(config.devices or "all")
        group = config.allowed_gids[0] if config.allowed_gids else None
        with SocketDirectory(config.socket_dir, group) as directory:
            asyncio.run(live(lambda: Fleet(config, devices, directory, log), log))
    except (ConfigError, DirectoryError, FleetError, OSError) as error:
        log.error("start_failed", message=str(error))
        return 1
    return 0


def front_config(config: ServerConfig, device: FleetDevice, place: int) -> ServerConfig:
    """Returns the options of one front: sockets in a folder of its own, TCP on a port of its own, metrics for us alone.

    Raises:
        ConfigError: the TCP port of a late device would be above 65535, or its socket directory's path is too long.
    """
    tcp = config.tcp_address
    if tcp is not None:
        host, port = split_address(tcp)
        port = port + place if port else 0
        tcp = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    one = dataclasses.replace(
        config,
        device=device.device,
        devices=None,
        socket_dir=config.socket_dir / device.name,
        tcp_address=tcp,
        health_address=None,
        metrics_host="127.0.0.1",
        metrics_port=None if config.metrics_port is None else 0,
    )
    one.check()
    return one


class Fleet:
    """The fronts and what is served for all of them."""

    def __init__(
        self,
        config: ServerConfig,
        devices: Sequence[FleetDevice],
        directory: SocketDirectory,
        log: _logging.Logger,
    ) -> None:
        self._config = config
        self._group = config.allowed_gids[0] if config.allowed_gids else None
        self._directory = directory
        self._log = log
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._metrics: MetricsServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self._fronts = [
            FleetFront(device, front_config(config, device, place), log, self._changed)
            for place, device in enumerate(devices)
        ]

    async def start(self) -> None:
        """Opens the endpoints and starts the fronts; returns when each has served, or ended before it did.

        Raises:
            FleetError: none has served.
        """
        self._make_folders()
        await self._publish_all()
        await self._health.set(LIVE, _Status.SERVING)
        await self._start_health()
        registry = CollectorRegistry()
        registry.register(FleetCollector(self._figures))
        self._metrics = MetricsServer.open(self._config, registry)
        for front in self._fronts:
            self._run(front.run())
        await asyncio.gather(*(front.settled.wait() for front in self._fronts))
        if not any(front.started for front in self._fronts):
            raise FleetError("no front could start; each has logged why")
        self._log.info(
            "serving",
            socket_dir=str(self._directory.path),
            devices={front.name: front.serving for front in self._fronts},
            metrics_port=self._metrics.port if self._metrics else None,
        )

    def _make_folders(self) -> None:
        """Makes every device's folder, where clients look for it, and removes those of devices that are gone."""
        names = {front.name for front in self._fronts}
        for name, path in device_directories(self._directory.path).items():
            if name not in names:
                with suppress(DirectoryError, OSError), SocketDirectory(path):
                    (path / "lock").unlink()
                    path.rmdir()
        for name in names:
            make_directory(self._directory.path / name, self._group)

    async def _start_health(self) -> None:
        path = self._directory.socket_path(GRPC_SOCKET)
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        server.add_insecure_port(f"unix:{path}")
        self._directory.publish(GRPC_SOCKET)
        await server.start()
        self._servers.append(server)
        if self._config.health_address is not None:
            self._servers.append(await make_health_server(self._config.health_address, self._health))

    def _figures(self) -> list[FrontFigures]:
        return [(front.name, front.serving, front.restarts, front.metrics_port) for front in self._fronts]

    def _changed(self, front: FleetFront) -> None:
        self._log.info("front_changed", front=front.name, serving=front.serving, pid=front.pid)
        if not self._draining:
            self._run(self._publish_all())

    async def _publish_all(self) -> None:
        """Says for every device, and for all of them, how they are now."""
        for front in self._fronts:
            await self._health.set(front.name, _Status.SERVING if front.serving else _Status.NOT_SERVING)
        well = all(front.serving for front in self._fronts)
        await self._health.set("", _Status.SERVING if well else _Status.NOT_SERVING)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def draining(self) -> dict[str, int]:
        """Returns what the log says of it when its end begins."""
        return {"fronts": len(self._fronts)}

    async def stop(self) -> None:
        """Says NOT_SERVING, lets every front drain, closes the endpoints."""
        self._draining = True
        await self._health.enter_graceful_shutdown()
        await asyncio.gather(*(front.stop(self._config.drain_grace_s) for front in self._fronts))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(server.stop(1.0) for server in self._servers))
        if self._metrics is not None:
            self._metrics.close()
