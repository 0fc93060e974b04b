"""Real servers and bare clients (side socket and gRPC stubs, no client library) for the tests of the server."""

import array
import contextlib
import fcntl
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
from google.rpc import error_details_pb2, status_pb2

from topkd.v1 import control_pb2, selection_pb2, selection_pb2_grpc, side_pb2, tensor_pb2

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
DTYPES = {"float32": tensor_pb2.D_TYPE_FLOAT32, "float16": tensor_pb2.D_TYPE_FLOAT16, "int32": tensor_pb2.D_TYPE_INT32}
_SERVE = (
    "import json, sys; from topkd.server.config import ServerConfig; from topkd.server.front import serve; "
    "sys.exit(serve(ServerConfig.from_environment({}, **json.loads(sys.argv[1]))))"
)


class ServerProcess:
    """A server in a process of its own; its log lines are kept.

    Attributes:
        lines: parsed log lines.
        serving: the `serving` event.
    """

    def __init__(self, socket_dir: Path, before: str = "", **options: Any) -> None:
        """Starts it; `before` is what the front runs first, the others are options of its configuration."""
        self.socket_dir = socket_dir
        given = {"device": "cpu", "metrics_port": 0, "cpu_threads": 1, "socket_dir": str(socket_dir), **options}
        self.popen = subprocess.Popen(
            [sys.executable, "-c", before + _SERVE, json.dumps(given)], stderr=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        self.lines: list[dict[str, Any]] = []
        self.text: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.serving: dict[str, Any] = {}

    def wait_serving(self, timeout: float = 90) -> "ServerProcess":
        self.serving = self.wait_event("serving", timeout)
        return self

    def _read(self) -> None:
        assert self.popen.stderr is not None
        for raw in self.popen.stderr:
            with self._changed:
                self.text.append(raw.decode(errors="replace"))
                with contextlib.suppress(ValueError):
                    self.lines.append(json.loads(raw))
                self._changed.notify_all()
        with self._changed:
            self.lines.append({"event": "EOF"})
            self._changed.notify_all()

    def wait_event(self, event: str, timeout: float = 60, **fields: Any) -> dict[str, Any]:
        def find() -> dict[str, Any] | None:
            for line in self.lines:
                if line.get("event") == event and all(line.get(key) == value for key, value in fields.items()):
                    return line
            return next((line for line in self.lines if line.get("event") == "EOF"), None)

        with self._changed:
            self._changed.wait_for(find, timeout)
            found = find()
        assert found is not None, f"{event!r} did not come in time"
        assert found["event"] == event, f"no {event!r} in: {''.join(self.text)[-3000:]}"
        return found

    @property
    def attach_path(self) -> str:
        return str(self.socket_dir / "attach.sock")

    def metrics(self) -> dict[str, float]:
        """Reads /metrics: every sample by its whole name with labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.serving['metrics_port']}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def children(self) -> list[int]:
        """Pids of the workers."""
        task = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        return [int(pid) for pid in task.read_text().split()]

    def stop(self, timeout: float = 30) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
        try:
            return self.popen.wait(timeout)
        finally:
            if self.popen.poll() is None:
                self.popen.kill()
            self._reader.join(10)
            if self.popen.stderr is not None:
                self.popen.stderr.close()


class Session:
    """A session attached by the side socket."""

    def __init__(self, server: ServerProcess, **attach: Any) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(100)
        self.sock.connect(server.attach_path)
        reply, fds = self.ask(side_pb2.SideRequest(attach=control_pb2.AttachRequest(client_name="test", **attach)))
        if reply.WhichOneof("reply") == "error":
            self.sock.close()
            raise SideRefusedError(reply.error)
        self.info = reply.session
        self.registered: list[int] = []
        self.words = fds[0]
        self.metadata = (("topkd-token", self.info.token),)
        self.channel = grpc.insecure_channel(self.info.data_address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = selection_pb2_grpc.SelectionServiceStub(self.channel)

    def ask(self, request: side_pb2.SideRequest, fds: Sequence[int] = ()) -> tuple[side_pb2.SideReply, list[int]]:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.sock.sendmsg([request.SerializeToString()], rights)
        data, got, _, _ = socket.recv_fds(self.sock, 65536, 4)
        assert data, "the connection ended"
        return side_pb2.SideReply.FromString(data), list(got)

    def register(self, size: int, seals: int = SEALS, claim: int | None = None) -> "Memory":
        fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        try:
            message = side_pb2.RegisterMemfd(size=size if claim is None else claim)
            reply, _ = self.ask(side_pb2.SideRequest(register_memfd=message), [fd])
            if reply.WhichOneof("reply") == "error":
                raise SideRefusedError(reply.error)
            self.registered.append(reply.registered_memfd.region_id)
            return Memory(reply.registered_memfd.region_id, mmap.mmap(fd, size))
        finally:
            os.close(fd)

    def clean(self) -> None:
        """Releases the regions that a test has left."""
        for region_id in self.registered:
            request = selection_pb2.ReleaseRegionRequest(region_id=region_id)
            with contextlib.suppress(grpc.RpcError):
                self.stub.ReleaseRegion(request, metadata=self.metadata)
        self.registered.clear()

    def select(self, *items: selection_pb2.BatchItem, timeout: float = 30) -> selection_pb2.SelectTopKResponse:
        request = selection_pb2.SelectTopKRequest(items=items)
        reply: selection_pb2.SelectTopKResponse = self.stub.SelectTopK(request, timeout=timeout, metadata=self.metadata)
        return reply

    def close(self) -> None:
        self.channel.close()
        self.sock.close()
        os.close(self.words)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SideRefusedError(Exception):
    def __init__(self, error: side_pb2.SideError) -> None:
        super().__init__(f"{error.reason}: {error.message}")
        self.error = error


class Memory:
    """A registered region and this process's mapping of it."""

    def __init__(self, region_id: int, mapping: mmap.mmap) -> None:
        self.region_id = region_id
        self.mapping = mapping

    def array(self, dtype: str, shape: Sequence[int], offset: int = 0) -> np.ndarray[Any, Any]:
        count = int(np.prod(shape))
        return np.frombuffer(self.mapping, dtype, count, offset).reshape(shape)

    def tensor(self, dtype: str, shape: Sequence[int], offset: int = 0, **fields: Any) -> tensor_pb2.Tensor:
        place = tensor_pb2.RegionSlice(region_id=self.region_id, offset=offset)
        return tensor_pb2.Tensor(dtype=DTYPES[dtype], shape=shape, region=place, **fields)


def inline(values: np.ndarray[Any, Any]) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=DTYPES[str(values.dtype)], shape=values.shape, inline_data=values.tobytes())


def select(**fields: Any) -> selection_pb2.BatchItem:
    return selection_pb2.BatchItem(selection=selection_pb2.Selection(**fields))


def read(tensor: tensor_pb2.Tensor) -> np.ndarray[Any, Any]:
    names = {number: name for name, number in DTYPES.items()}
    return np.frombuffer(tensor.inline_data, names[tensor.dtype]).reshape(tuple(tensor.shape))


def details(error: grpc.RpcError) -> tuple[str, str, float]:
    """Returns reason, field path and retry delay of a failed call."""
    reason, field, retry = "", "", 0.0
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key != "grpc-status-details-bin":
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info, bad, delay = (
                error_details_pb2.ErrorInfo(),
                error_details_pb2.BadRequest(),
                error_details_pb2.RetryInfo(),
            )
            if detail.Unpack(info):
                reason = info.reason
            elif detail.Unpack(bad):
                field = bad.field_violations[0].field
            elif detail.Unpack(delay):
                retry = delay.retry_delay.ToTimedelta().total_seconds()
    return reason, field, retry


@contextlib.contextmanager
def refused(code: grpc.StatusCode) -> Iterator[list[Any]]:
    """Expects a call to fail with a code; the list gets reason, field path, retry delay and message."""
    found: list[Any] = []
    try:
        yield found
    except grpc.RpcError as error:
        if error.code() is not code:
            raise AssertionError(f"{error.code()}: {error.details()}") from error
        found.extend((*details(error), error.details()))
    else:
        raise AssertionError(f"nothing was raised; {code} was expected")


def eventually(check: Any, timeout: float = 10.0) -> float:
    """Waits until `check()` is true; returns the seconds that it took."""
    started = time.monotonic()
    while not check():
        assert time.monotonic() - started < timeout, "it did not come true in time"
        time.sleep(0.02)
    return time.monotonic() - started
