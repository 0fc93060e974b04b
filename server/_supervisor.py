"""The front's workers: spares kept warm, the shared worker, their messages and their ends."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ._control import Message, control_pair, receive, send
from ._directory import SocketDirectory, worker_socket_name
from ._logging import Logger
from .config import ServerConfig
from .errors import StartingError, WorkerLostError
from .metrics import MergedCollector, ServerMetrics

__all__ = ["StartError", "Supervisor", "WorkerProcess"]

_LONGEST_BACKOFF_S = 10.0
_START_TRIES = 3
_STARTS_AT_ONCE = max(2, min(4, len(os.sched_getaffinity(0))))
"""Workers that start together for clients that wait: each start takes a core for seconds, to load torch."""


class StartError(RuntimeError):
    """No worker could be started."""


class WorkerProcess:
    """One worker as the front sees it.

    Attributes:
        address: gRPC address of its endpoint.
        state: "starting", "spare", "busy", "ending" or "dead".
        shared: serves the sessions attached over TCP.
        detached: the client of its session has ended it in order.
        overdue: it was told to end, has not within its grace, and was killed for that.
        on_exit: called in the loop when the process has ended.
    """

    def __init__(self, popen: subprocess.Popen[bytes], control: socket.socket, path: str, shared: bool) -> None:
        self.popen = popen
        self.pidfd = os.pidfd_open(popen.pid)
        self.control = control
        self.path = path
        self.address = f"unix:{path}"
        self.shared = shared
        self.state = "starting"
        self.detached = False
        self.overdue = False
        self.failure = ""
        self.on_exit: Callable[[], None] | None = None
        self._opening: dict[str, asyncio.Future[None]] = {}

    def tell(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a control message; a worker that does not read any more is killed.

        Raises:
            WorkerLostError: it could not be sent.
        """
        try:
            send(self.control, message, fds)
        except OSError:
            self.kill()
            raise WorkerLostError("the worker is gone") from None

    async def open_session(self, session_id: str, token: str, limit_s: float) -> None:
        """Gives the shared worker a session, and waits until it takes the session's calls.

        A worker that does not answer is killed, so that another takes its place: it answers no call either. That is so
        though the caller is cancelled meanwhile.

        Raises:
            WorkerLostError: the worker has ended, or has not answered within `limit_s` seconds.
        """
        self.tell({"t": "session", "id": session_id, "token": token})
        loop = asyncio.get_running_loop()
        opened = self._opening[session_id] = loop.create_future()
        late = loop.call_later(limit_s, self._kill_silent, opened)

        def over(_: object) -> None:
            late.cancel()
            del self._opening[session_id]

        opened.add_done_callback(over)
        await asyncio.shield(opened)

    def _kill_silent(self, opened: asyncio.Future[None]) -> None:
        if not opened.done():
            self.kill()
            opened.set_exception(WorkerLostError("the worker of the sessions over TCP did not answer; attach again"))

    def opened(self, session_id: str) -> None:
        """Notes that the worker takes a session's calls."""
        waiting = self._opening.get(session_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def lose_openings(self) -> None:
        """Fails whoever waits for a session to be opened: the process has ended."""
        for waiting in self._opening.values():
            if not waiting.done():
                waiting.set_exception(WorkerLostError("the worker of the sessions over TCP is gone; attach again"))

    async def how_ended(self) -> str:
        """Says how the session of a worker whose connection has ended came to its end.

        Waits until the worker knows, 2 s at most: its sockets close before it ends.

        Returns:
            "worker_lost": the process has failed, or was killed by others than its front. "detached": its client has
            said that it ends the session. "client_gone": it has not.
        """
        for _ in range(200):
            if self.detached:
                return "detached"
            if self.state == "dead":
                return "worker_lost" if self.popen.returncode != 0 and not self.overdue else "client_gone"
            await asyncio.sleep(0.01)
        return "client_gone"

    def kill(self) -> None:
        """Kills the process, unless its end was noticed; the end is noticed like any other."""
        if self.state != "dead":  # else the descriptor may be another's
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class Supervisor:
    """Starts, hands out, watches and ends workers. Everything runs in the front's loop.

    Attributes:
        facts: the first ready worker's device and kernel families; None before.
        shared: the shared worker, if TCP is on and it is ready.
    """

    def __init__(
        self,
        config: ServerConfig,
        directory: SocketDirectory,
        metrics: ServerMetrics,
        collector: MergedCollector,
        log: Logger,
    ) -> None:
        self._config = config
        self._directory = directory
        self._metrics = metrics
        self._collector = collector
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._workers: set[WorkerProcess] = set()
        self._changed = asyncio.Condition()
        self._failures = 0
        self._retry: asyncio.TimerHandle | None = None  # after a start that failed in this process
        self._waiting = 0  # clients in `take`
        self._stopping = False
        self._failed = ""
        self._last_failure = ""  # of a worker that could not start; "" once one has
        self._tasks: set[asyncio.Task[None]] = set()
        self.facts: Message | None = None
        self.wanted_spares: Callable[[], int] = lambda: config.spares

    @property
    def shared(self) -> WorkerProcess | None:
        """The shared worker, once it is ready."""
        return next((worker for worker in self._workers if worker.shared and worker.state == "busy"), None)

    async def start(self) -> None:
        """Starts the spares and the shared worker; returns when all that serve the first session are warm.

        Raises:
            StartError: a worker said why it cannot start, or none became ready in several tries.
        """
        self.fill()
        async with self._changed:
            await self._changed.wait_for(lambda: self._warm() or bool(self._failed))
        if self._failed:
            raise StartError(self._failed)

    def _warm(self) -> bool:
        spare = any(worker.state == "spare" for worker in self._workers)
        return spare and (self._config.tcp_address is None or self.shared is not None)

    def fill(self) -> None:
        """Starts what is missing: a worker for each client that waits, else spares; the shared worker.

        Spares whose clients have gone away before they were ready are ended.
        """
        if self._stopping:
            return
        own = [worker for worker in self._workers if not worker.shared and worker.state in ("starting", "spare")]
        spares = [worker for worker in own if worker.state == "spare"]
        wanted = self.wanted_spares()
        room = max(_STARTS_AT_ONCE, wanted) - (len(own) - len(spares))
        missing = [False] * min(room, max(wanted, self._waiting) - len(own))
        if self._config.tcp_address is not None and not any(worker.shared for worker in self._workers):
            missing.append(True)
        try:
            for shared in missing:
                self._spawn(shared)
        except OSError as error:
            self._put_off(error)
        for worker in spares[max(self._config.spares, self._waiting) :]:
            self.end(worker, {"t": "drain", "grace_s": 0.0}, self._config.session_grace_s)

    def _put_off(self, error: OSError) -> None:
        """Tries again after a back-off: the machine is out of processes, memory or descriptors, maybe for a moment."""
        self._failures += 1
        self._log.error("worker_start_failed", error=str(error), failures=self._failures)
        self._give_up(f"no worker can be started: {error}")
        self._notify()
        if self._retry is not None:
            self._retry.cancel()
        self._retry = self._loop.call_later(self._backoff(), self.fill)

    def _spawn(self, shared: bool) -> None:
        ours, theirs = control_pair()
        path = self._directory.socket_path(worker_socket_name())
        with contextlib.ExitStack() as failed:
            failed.callback(ours.close)
            with theirs:
                popen = subprocess.Popen(
                    self._command(theirs.fileno(), path, shared), pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
                )
            failed.callback(popen.wait)
            failed.callback(popen.kill)
            worker = WorkerProcess(popen, ours, path, shared)
            failed.pop_all()
        ours.setblocking(False)
        self._workers.add(worker)
        self._metrics.worker_starts.inc()
        self._loop.add_reader(ours, self._read, worker)
        self._loop.add_reader(worker.pidfd, self._exited, worker)
        self._loop.call_later(self._config.start_timeout_s, self._check_started, worker)
        self._count()
        self._log.debug("worker_started", worker=popen.pid, shared=shared)

    def _command(self, control_fd: int, path: str, shared: bool) -> list[str]:
        config = self._config
        command = [sys.executable, "-m", "topkd.server.worker", f"--control-fd={control_fd}", f"--parent={os.getpid()}"]
        command += [f"--socket={path}", f"--device={config.device}", f"--grace-s={config.session_grace_s * 0.8}"]
        command += [f"--limits={json.dumps(dataclasses.asdict(config.limits))}"]
        command += [f"--log-level={config.log_level}", f"--log-format={config.log_format}"]
        if config.cpu_threads is not None:
            command.append(f"--cpu-threads={config.cpu_threads}")
        return [*command, "--shared"] if shared else command

    def _check_started(self, worker: WorkerProcess) -> None:
        if worker.state == "starting":
            self._log.error("worker_start_timeout", worker=worker.popen.pid)
            worker.kill()

    def _read(self, worker: WorkerProcess) -> None:
        """Takes every message that is there; the end of the socket is noticed by the process's end."""
        while True:
            try:
                received = receive(worker.control)
            except BlockingIOError:
                return
            except (OSError, ValueError):
                received = None
            if received is None:
                self._loop.remove_reader(worker.control)
                return
            self._take(worker, received[0])

    def _take(self, worker: WorkerProcess, message: Message) -> None:
        kind = message.get("t")
        if kind == "metrics":
            self._collector.update(worker, message["samples"])
        elif kind == "opened":
            worker.opened(message["id"])
        elif kind == "detached":
            worker.detached = True
        elif kind == "failed":
            worker.failure = message["message"]
        elif kind == "ready":
            self._failures, self._last_failure = 0, ""
            worker.state = "busy" if worker.shared else "spare"
            if self.facts is None:
                self.facts = message
            self._log.debug("worker_ready", worker=worker.popen.pid, shared=worker.shared)
            self._notify()
            self.fill()

    def _exited(self, worker: WorkerProcess) -> None:
        """Reaps a process: its last figures, its socket, whoever waits for it, and its successor."""
        self._loop.remove_reader(worker.pidfd)
        self._read(worker)
        self._loop.remove_reader(worker.control)
        worker.control.close()
        os.close(worker.pidfd)
        code = worker.popen.wait()
        was, worker.state = worker.state, "dead"
        self._workers.discard(worker)
        self._collector.retire(worker)
        Path(worker.path).unlink(missing_ok=True)
        by_itself = was == "busy" and not worker.shared and code == 0  # it saw its client's end before we did
        # Clients hang up at their worker's end: one that failed is often told to end before we know of its failure.
        as_told = was == "ending" and (code == 0 or worker.overdue)
        expected = as_told or self._stopping or by_itself
        report = self._log.debug if expected else self._log.error
        report("worker_ended", worker=worker.popen.pid, state=was, exit_code=code, failure=worker.failure)
        worker.lose_openings()
        if worker.on_exit is not None:
            worker.on_exit()
        if not expected:
            self._metrics.worker_crashes.inc()
        if not expected and was in ("starting", "spare"):
            self._failures += 1
            why = worker.failure or f"the worker ended with {code} before it was ready, {self._failures} times"
            self._give_up(why, at_once=bool(worker.failure))
        self._notify()
        self._loop.call_later(self._backoff(), self.fill)

    def _give_up(self, why: str, at_once: bool = False) -> None:
        """Notes why, for clients that wait; fails the start, if this is one, at once or after several tries."""
        self._last_failure = why
        if self.facts is None and (at_once or self._failures >= _START_TRIES):
            self._failed = why

    def _backoff(self) -> float:
        return min(_LONGEST_BACKOFF_S, 0.1 * 2.0**self._failures) if self._failures else 0.0

    def _notify(self) -> None:
        self._count()

        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        task = self._loop.create_task(notify())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _count(self) -> None:
        for state in ("starting", "spare", "busy", "ending"):
            self._metrics.workers.labels(state).set(sum(worker.state == state for worker in self._workers))

    async def take(self) -> WorkerProcess:
        """Takes a warm spare, waiting for one if there is none, and starts its successor.

        Clients that wait have a worker started for each, several at once.

        Raises:
            StartingError: none became warm in time.
        """
        self._waiting += 1
        try:
            if not self._failures:  # else the next try comes after its back-off
                self.fill()
            async with asyncio.timeout(self._config.attach_timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._spare() is not None)
                worker = self._spare()
        except TimeoutError:
            because = f": {self._last_failure}" if self._last_failure else ""
            raise StartingError(f"no worker became ready in time{because}", retry_after_ms=1000) from None
        finally:
            self._waiting -= 1
            self._loop.call_soon(self.fill)
        if worker is None:
            raise StartingError("no worker is ready", retry_after_ms=1000)
        worker.state = "busy"
        self._count()
        return worker

    def _spare(self) -> WorkerProcess | None:
        return next((worker for worker in self._workers if worker.state == "spare"), None)

    def end(self, worker: WorkerProcess, message: Message, grace_s: float) -> None:
        """Tells a worker to end; kills it if it has not within the grace."""
        if worker.state in ("ending", "dead"):
            return
        worker.state = "ending"
        with contextlib.suppress(WorkerLostError):
            worker.tell(message)
        self._loop.call_later(grace_s, self._kill_late, worker)
        self._count()

    def _kill_late(self, worker: WorkerProcess) -> None:
        if worker.state != "dead":
            worker.overdue = True
            self._metrics.worker_kills.inc()
            self._log.warning("worker_killed", worker=worker.popen.pid)
            worker.kill()

    async def stop(self, grace_s: float) -> None:
        """Drains every worker, waits for their ends, kills what is late."""
        self._stopping = True
        for worker in list(self._workers):
            if worker.state == "starting":
                worker.state = "ending"
                worker.kill()
            else:
                self.end(worker, {"t": "drain", "grace_s": grace_s}, grace_s + 1.5)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._workers)
