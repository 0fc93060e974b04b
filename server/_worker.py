"""A worker at work: the process that owns a session's device context, mappings and plans, and serves its calls.

One worker serves one session and ends with it; the shared worker serves every session attached over TCP and ends with
the front. What to do it is told over the control socket.

Its end, whatever the cause, is one path: refuse new work, let what runs finish, close the mappings, send the last
figures, exit.
"""

import argparse
import contextlib
import gc
import json
import os
import socket
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from topkd._words import Words
from topkd.v1 import tensor_pb2

from . import _logging
from ._control import Message, receive, send, send_packet, unpack_bytes
from ._device import open_backend
from ._directory import SOCKET_MODE
from ._memory import DTYPES, Backend
from ._process import Phases, ProcessFigures
from .config import ServerLimits
from .metrics import ServerMetrics, Snapshot

__all__ = ["Worker", "warm_up"]

PUSH_SECONDS = 0.25
_SAMPLES_PER_PACKET = 200
_STOP_S = 1.0
"""That the thread which serves has to end its last call; it does not if the device hangs."""


class Worker:
    """The process's state: one backend, one gRPC server, sessions."""

    def __init__(self, options: argparse.Namespace, control: socket.socket, log: _logging.Logger) -> None:
        self._phases = Phases()
        from ._rpc import SelectionService, TokenInterceptor, make_server
        from ._state import SessionTable

        self._phases.end("imports")
        self._options = options
        self._control = control
        self._log = log
        self._limits = ServerLimits(**json.loads(options.limits))
        self._metrics = ServerMetrics(CollectorRegistry())
        self._snapshot = Snapshot(self._metrics.registry)
        self._figures = ProcessFigures(self._metrics, "worker")
        self._push_lock = threading.Lock()
        self._ending = threading.Lock()
        self._backend = open_backend(options.device, options.cpu_threads)
        self._phases.end("device")
        self._sessions = SessionTable()
        self._service = SelectionService(self._backend, self._limits, self._metrics, log)
        interceptor = TokenInterceptor(self._sessions, self._metrics)
        address = f"unix:{options.socket}"
        self._server = make_server(self._service, interceptor, self._limits, address, shared=options.shared)
        Path(options.socket).chmod(SOCKET_MODE)

    def start(self) -> None:
        """Warms the kernels, starts to serve and tells the front."""
        self._backend.enter_thread()
        families = warm_up(self._backend, self._log)
        self._phases.end("kernels")
        self._service.start_figures()
        self._server.start()
        gc.collect()
        gc.freeze()
        info = self._backend.info
        device = {name.name: getattr(info, name.name) for name in info.DESCRIPTOR.fields}
        self._phases.end("endpoint")
        send(self._control, {"t": "ready", "device": device, "kernels": families, "start_s": self._phases.seconds})
        threading.Thread(target=self._push_forever, name="topkd-metrics", daemon=True).start()

    def run(self) -> None:
        """Does what the front says until it is gone or says to end. Does not return."""
        while True:
            try:
                received = receive(self._control)
            except OSError:
                received = None
            if received is None:
                os._exit(0)  # the front is gone: at once
            self._obey(*received)

    def _obey(self, message: Message, fds: list[int]) -> None:
        kind = message["t"]
        if kind == "session":
            self._open(message, fds)
        elif kind == "close":
            threading.Thread(target=self._close, args=(message["id"],), name="topkd-close", daemon=True).start()
        elif kind == "drain":
            self._service.draining = True
            self.finish("drain", message["grace_s"])

    def _open(self, message: Message, fds: list[int]) -> None:
        """Opens a session. One of its own comes with the connection and the words; the reply goes out here."""
        from ._state import Session
        from ._worker_side import serve_side

        remote = "reply" not in message
        session = Session(message["id"], self._limits, self._metrics, remote)
        self._sessions.add(message["token"], session)
        if remote:
            with contextlib.suppress(OSError):  # the front is gone; the control loop sees it
                send(self._control, {"t": "opened", "id": session.id})
            return
        self._log = self._log.bind(session=session.id)
        connection = socket.socket(fileno=fds[0])
        connection.setblocking(True)
        session.words = Words(fds[1])
        session.timeline = self._service.open_timeline(session.words)  # before the client can make an ordered call
        given = [fds[1], *([os.pidfd_open(os.getpid())] if message["pidfd"] else [])]
        try:
            send_packet(connection, unpack_bytes(message["reply"]), given)
        except OSError:
            self.finish("client_gone", 0.0)
        finally:
            for fd in given:
                os.close(fd)
        arguments = (connection, session, self._backend, self._log, self._client_gone)
        threading.Thread(target=serve_side, args=arguments, name="topkd-side", daemon=True).start()

    def _client_gone(self, cause: str) -> None:
        if cause == "detached":
            with contextlib.suppress(OSError):
                send(self._control, {"t": "detached"})
        self.finish(cause, self._options.grace_s)

    def _close(self, session_id: str) -> None:
        """Ends a session; a worker of its own ends with it."""
        if not self._options.shared:
            self.finish("front", self._options.grace_s)
        session = self._sessions.remove(session_id)
        if session is not None:
            self._service.queue.close(session.account)
            self._service.queue.wait_idle(session.account, self._options.grace_s)
            session.close()

    def finish(self, cause: str, grace_s: float) -> None:
        """Ends the worker in order. Does not return; a second caller waits for the exit.

        Args:
            cause: for the log.
            grace_s: seconds that requests that run have to finish; with "drain" those that wait run too.
        """
        self._ending.acquire()  # never released: the process ends here
        deadline = time.monotonic() + grace_s
        self._log.debug("worker_ends", cause=cause)
        sessions = self._sessions.all()
        if cause != "drain":
            for session in sessions:
                self._sessions.remove(session.id)
                self._service.queue.close(session.account)
        for session in sessions:
            self._service.queue.wait_idle(session.account, max(0.0, deadline - time.monotonic()))
            if cause == "drain":
                session.settle(max(0.0, deadline - time.monotonic()))
        pause = max(0.05, min(1.0, deadline - time.monotonic()))
        self._server.stop(pause).wait(pause + _STOP_S)
        for session in sessions:
            try:
                session.close()
            except Exception as error:  # noqa: BLE001  # the driver frees it at the exit
                self._log.warning("region_close_failed", error=str(error))
        Path(self._options.socket).unlink(missing_ok=True)
        self._push()
        os._exit(0)

    def _push_forever(self) -> None:
        while True:
            time.sleep(PUSH_SECONDS)
            self._push()

    def _push(self) -> None:
        """Sends the figures that changed."""
        with self._push_lock:
            for session in self._sessions.all():
                session.flush()
            self._service.flush_figures()
            self._figures.refresh()
            changed = self._snapshot.changes()
            try:
                for first in range(0, len(changed), _SAMPLES_PER_PACKET):
                    send(self._control, {"t": "metrics", "samples": changed[first : first + _SAMPLES_PER_PACKET]})
            except OSError:
                return  # the front is gone; the control loop sees it


def warm_up(backend: Backend, log: _logging.Logger) -> list[dict[str, Any]]:
    """Runs a selection of every family and dtype that the device serves.

    A family whose kernels can be neither loaded nor compiled is logged and left out; the server goes on without it.

    Returns:
        The families and their dtypes.
    """
    from topkd import kernels

    families = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in kernels.kernels():
            numbers = (tensor_pb2.D_TYPE_BFLOAT16, tensor_pb2.D_TYPE_FLOAT16, tensor_pb2.D_TYPE_FLOAT32)
            dtypes = [int(number) for number in numbers if _warm_up(backend, log, name, number)]
            if dtypes:
                families.append({"name": name, "dtypes": dtypes})
    for warning in caught:
        log.warning("warm_up_warning", message=str(warning.message)[:500])
    try:
        backend.warm()
    except Exception as error:  # noqa: BLE001  # whatever it is, calls are launched when their ready words have come
        log.warning("giving_up_unavailable", message=f"{type(error).__name__}: {error}"[:500])
    backend.run([])
    return families


def _warm_up(backend: Backend, log: _logging.Logger, name: str, dtype: int) -> bool:
    """Runs selections of one family and dtype; returns whether it serves them."""
    import torch

    from topkd import kernels

    scores = torch.zeros((2, 256), dtype=DTYPES[dtype], device=backend.device)
    if kernels.supports(name, scores, 16) is not None:
        return False
    try:
        for order in ("any", "value"):
            if kernels.supports(name, scores, 16, order=order, values=True) is None:
                kernels.select_topk(scores, 16, order=order, values=True, kernel=name)
    except Exception as error:  # noqa: BLE001  # whatever it is, the other families serve
        log.warning("kernel_unavailable", kernel=name, message=f"{type(error).__name__}: {error}"[:500])
        return False
    return True
