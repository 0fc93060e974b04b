"""The front: one asyncio loop that accepts, attaches, supervises, reports and ends.

It touches neither torch nor CUDA: workers do. `serve` is start, wait, stop.
"""

import asyncio
import contextlib
import dataclasses
import importlib.metadata
import os
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from prometheus_client import CollectorRegistry

from topkd.v1 import control_pb2

from . import _logging
from ._directory import ATTACH_SOCKET, GRPC_SOCKET, DirectoryError, SocketDirectory
from ._front_endpoints import LIVE, bind_tcp, make_health_server, make_server, read_attach_token
from ._front_http import MetricsServer
from ._front_rpc import CONTROL, SELECTION, ControlService, Forwarder, TokenInterceptor
from ._front_sessions import (
    PIDFD_REVISION,
    FrontSession,
    FrontSessions,
    check_attach,
    device_for_logs,
    server_info,
)
from ._front_side import SideConnection, SideListener
from ._life import live
from ._process import ProcessFigures, mps_runs, tell_of_mps
from ._supervisor import StartError, Supervisor, WorkerProcess
from .config import ConfigError, ServerConfig, mps_pipe_directory, split_address
from .errors import DrainingError, StartingError, WorkerLostError
from .metrics import MergedCollector, ServerMetrics

__all__ = ["serve"]


Serving = Callable[[dict[str, Any]], None]


def serve(config: ServerConfig, on_serving: Serving | None = None, **context: object) -> int:
    """Runs a server on one device until SIGTERM or SIGINT. Blocks.

    Writes structured logs to stderr; the event `serving` says that sessions can attach, and where.

    Args:
        config: Options; `devices` is not looked at.
        on_serving: Called with the fields of the event `serving` when sessions can attach.
        context: Keys that every line of the log carries.

    Returns:
        0 after an orderly end; 1 if the server could not start (logged as `start_failed`).
    """
    log = _logging.configure(config.log_level, config.log_format, process="front", pid=os.getpid(), **context)
    try:
        config.check()
        group = config.allowed_gids[0] if config.allowed_gids else None
        with SocketDirectory(config.socket_dir, group) as directory:
            asyncio.run(live(lambda: Front(config, directory, log), log, on_serving))
    except (ConfigError, DirectoryError, StartError, OSError) as error:
        log.error("start_failed", message=str(error))
        return 1
    return 0


class Front:
    """The server's state: sessions, workers, endpoints.

    Attributes:
        sessions: those that are open.
    """

    def __init__(self, config: ServerConfig, directory: SocketDirectory, log: _logging.Logger) -> None:
        self._config = config
        self._directory = directory
        self._log = log
        self._registry = CollectorRegistry()
        self._metrics = ServerMetrics(self._registry)
        self._figures = ProcessFigures(self._metrics, "front")
        self._collector = MergedCollector(self._registry, self._refresh)
        self._epoch = secrets.token_hex(16)
        self._version = _version()
        self._metrics.prepare_front(config.limits.max_sessions, self._version)
        self._limits = control_pb2.Limits(**dataclasses.asdict(config.limits))
        self._draining = asyncio.Event()
        self._warm = False
        self.sessions = FrontSessions(config.limits, self._metrics)
        self._supervisor = Supervisor(config, directory, self._metrics, self._collector, log)
        self._supervisor.wanted_spares = self._wanted_spares
        self.sessions.on_change = self._supervisor.fill
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []
        self._side: SideListener | None = None
        self._metrics_server: MetricsServer | None = None
        self._channel: tuple[WorkerProcess, grpc.aio.Channel] | None = None

    def _wanted_spares(self) -> int:
        room = self._config.limits.max_sessions - len(self.sessions)
        return max(0, min(self._config.spares, room))

    def _info(self) -> control_pb2.ServerInfo:
        return server_info(self._supervisor.facts, self._limits, self._version, self._epoch, self.sessions.attached)

    # Start

    async def start(self) -> dict[str, Any]:
        """Opens the endpoints, waits for warm workers and turns health to SERVING; returns what `serving` says."""
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
        if self._config.health_address is not None:
            self._servers.append(await make_health_server(self._config.health_address, self._health))
        self._metrics_server = MetricsServer.start(self._config, self._collector)
        await self._start_unix()
        tcp_address = await self._start_tcp()
        path = self._directory.socket_path(ATTACH_SOCKET)
        self._side = SideListener(path, self._config, self._metrics, self._log, self._attach_side)
        self._directory.publish(ATTACH_SOCKET)
        await self._supervisor.start()
        self._warm = True
        if self._supervisor.facts is not None:
            self._metrics.set_device(self._supervisor.facts["device"])
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)
        serving = {
            "socket_dir": str(self._directory.path),
            "metrics_port": self._metrics_server.port if self._metrics_server else None,
            "tcp_address": tcp_address,
            "device": device_for_logs(self._supervisor.facts),
            "start_s": self._supervisor.facts["start_s"] if self._supervisor.facts else {},
            "epoch": self._epoch,
            "version": self._version,
        }
        self._log.info("serving", **serving)
        if self._on_gpu():
            tell_of_mps(self._log, mps_pipe_directory())
        return serving

    def _on_gpu(self) -> bool:
        facts = self._supervisor.facts
        return facts is not None and facts["device"]["backend"] == control_pb2.BACKEND_CUDA

    def _refresh(self) -> None:
        """Brings the figures of this process up to date before they are read."""
        self._figures.refresh()
        self._metrics.mps_active.set(self._on_gpu() and mps_runs(mps_pipe_directory()))

    async def _set_health(self, status: Any) -> None:
        self._metrics.ready.set(status == health_pb2.HealthCheckResponse.SERVING)
        for name in ("", CONTROL, SELECTION):
            await self._health.set(name, status)

    async def _start_unix(self) -> None:
        interceptor = TokenInterceptor(lambda token: self.sessions.find(token) is not None, self._metrics)
        service = ControlService(self._info, self._attach_tcp, self._metrics, self._log)
        server = make_server(self._config, interceptor, service, self._health)
        self._servers.append(server)
        path = self._directory.socket_path(GRPC_SOCKET)
        server.add_insecure_port(f"unix:{path}")
        self._directory.publish(GRPC_SOCKET)
        await server.start()

    async def _start_tcp(self) -> str | None:
        config = self._config
        if config.tcp_address is None:
            return None
        attach_digest, certified = read_attach_token(config), config.tls_client_ca is not None
        interceptor = TokenInterceptor(self._is_tcp, self._metrics, attach_digest, certified)
        service = ControlService(self._info, self._attach_tcp, self._metrics, self._log)
        server = make_server(config, interceptor, service, self._health, Forwarder(self._shared_channel))
        self._servers.append(server)
        host, _ = split_address(config.tcp_address)
        port = bind_tcp(server, config, config.tcp_address)
        await server.start()
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _is_tcp(self, token: str | None) -> bool:
        session = self.sessions.find(token)
        return session is not None and session.transport == "tcp"

    def _shared_channel(self) -> grpc.aio.Channel | None:
        """Returns a channel to the shared worker that there is now."""
        worker = self._supervisor.shared
        if worker is None:
            return None
        if self._channel is None or self._channel[0] is not worker:
            size = self._config.limits.max_message_bytes
            options = [("grpc.max_receive_message_length", size), ("grpc.max_send_message_length", size)]
            options += [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
            self._channel = (worker, grpc.aio.insecure_channel(worker.address, options=options))
        return self._channel[1]

    # Sessions

    def _open(self, request: control_pb2.AttachRequest, transport: str) -> FrontSession:
        """Admits a session."""
        if self._draining.is_set():
            raise DrainingError
        if not self._warm or self._supervisor.facts is None:
            raise StartingError("the server is starting", retry_after_ms=500)
        check_attach(request, self._supervisor.facts)
        return self.sessions.open(transport)

    def _count_attach(self, session: FrontSession, request: control_pb2.AttachRequest, started: float) -> None:
        self.sessions.attach(session)
        self._metrics.reattaches.labels(session.transport).inc(request.reattach)
        self._metrics.attach_seconds.labels(session.transport).observe(time.monotonic() - started)

    def _describe(self, session: FrontSession, address: str) -> control_pb2.Session:
        info = self._info()
        info.sessions += not session.attached  # it is as soon as its client has this
        return control_pb2.Session(session_id=session.id, token=session.token, data_address=address, info=info)

    async def _attach_side(
        self, side: SideConnection, request: control_pb2.AttachRequest, log: _logging.Logger
    ) -> None:
        """Runs a session of this host, from the attach to its end."""
        started = time.monotonic()
        session = self._open(request, "unix")
        worker: WorkerProcess | None = None
        log = log.bind(session=session.id, client=request.client_name[:80])
        try:
            worker = await self._take(side)
            if worker is None:
                return
            # A worker that sees its client's end before we do ends in order, by itself.
            worker.on_exit = lambda: self._end(session, "worker_lost" if worker.popen.returncode else "client_gone")
            pidfd = request.protocol_revision >= PIDFD_REVISION
            message = {"t": "session", "id": session.id, "token": session.token, "pidfd": pidfd}
            side.hand_over(worker.tell, message, self._describe(session, worker.address))
            self._count_attach(session, request, started)
            log.info("attached", worker=worker.popen.pid)
            await self._first(side.gone, session.ended)
        finally:
            self._end(session, "client_gone")
            if worker is not None:
                self._supervisor.end(worker, {"t": "close", "id": session.id}, self._config.session_grace_s)
                if session.cause == "client_gone":
                    session.cause = await worker.how_ended()  # a client sees its worker's end first, and hangs up
            self.sessions.count_end(session)
            log.info("session_ended", cause=session.cause)

    async def _take(self, side: SideConnection) -> WorkerProcess | None:
        """Takes a worker; None if the client goes away meanwhile."""
        taking = asyncio.ensure_future(self._supervisor.take())
        gone = asyncio.ensure_future(side.gone.wait())
        try:
            await asyncio.wait((taking, gone), return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else None
        finally:
            gone.cancel()
            taking.cancel()

    def _end(self, session: FrontSession, cause: str) -> None:
        self.sessions.close(session, "drained" if self._draining.is_set() else cause)

    async def _first(self, *events: asyncio.Event) -> None:
        """Waits for the first of several events."""
        tasks = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()

    async def _attach_tcp(self, request: control_pb2.AttachRequest) -> AsyncGenerator[control_pb2.AttachResponse, None]:
        """Runs a session over TCP, from the attach to its end."""
        started = time.monotonic()
        worker = self._supervisor.shared
        session = self._open(request, "tcp")
        log = self._log.bind(session=session.id, client=request.client_name[:80], transport="tcp")
        try:
            if worker is None:
                raise StartingError("the worker of the sessions over TCP is starting", retry_after_ms=1000)
            await worker.open_session(session.id, session.token, self._config.attach_timeout_s)
            self._count_attach(session, request, started)
            log.info("attached", worker=worker.popen.pid)
            yield control_pb2.AttachResponse(session=self._describe(session, ""))
            worker.on_exit = self._lose_tcp
            if worker.state == "dead":
                self._end(session, "worker_lost")
            await self._first(self._draining, session.ended)
            if not session.ended.is_set():
                yield control_pb2.AttachResponse(draining=control_pb2.Draining())
                await session.ended.wait()
            if session.cause == "worker_lost":
                raise WorkerLostError("the worker of the sessions over TCP is gone; attach again")
        finally:
            self._end(session, "client_gone")
            self.sessions.count_end(session)
            if worker is not None and worker.state == "busy":
                with contextlib.suppress(WorkerLostError):
                    worker.tell({"t": "close", "id": session.id})
            log.info("session_ended", cause=session.cause)

    def _lose_tcp(self) -> None:
        """Ends every session over TCP: their worker is gone."""
        for session in self.sessions.all():
            if session.transport == "tcp":
                self._end(session, "worker_lost")

    # Stop

    def draining(self) -> dict[str, int]:
        """Returns what the log says of it when its end begins."""
        return {"sessions": self.sessions.attached}

    async def stop(self) -> None:
        """Refuses new work, lets what runs finish, ends the workers, closes the endpoints."""
        self._draining.set()
        self._metrics.ready.set(0)
        await self._health.enter_graceful_shutdown()
        await self._supervisor.stop(self._config.drain_grace_s)
        for session in self.sessions.all():
            self._end(session, "drained")
        if self._side is not None:
            await self._side.close()
        await asyncio.gather(*(server.stop(1.0) for server in self._servers))
        if self._channel is not None:
            await self._channel[1].close()
        if self._metrics_server is not None:
            self._metrics_server.close()


def _version() -> str:
    try:
        return importlib.metadata.version("topkd")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
