"""Sessions over TCP: the stream is the lease, the front forwards."""

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.server.conftest import ATTACH_TOKEN
from tests.server.harness import ServerProcess, Session, eventually, inline, read, refused, select
from topkd.v1 import control_pb2, control_pb2_grpc, selection_pb2, selection_pb2_grpc

GOOD = (("topkd-attach-token", ATTACH_TOKEN),)
SCORES = np.array([[1, 9, 3]], dtype=np.float32)


@contextmanager
def attached(front: ServerProcess) -> Iterator[tuple[control_pb2.Session, grpc.Channel, Any]]:
    with grpc.insecure_channel(front.serving["tcp_address"]) as channel:
        stream = control_pb2_grpc.ControlServiceStub(channel).Attach(control_pb2.AttachRequest(), metadata=GOOD)
        yield next(stream).session, channel, stream
        stream.cancel()


def call(channel: grpc.Channel, token: str, timeout: float = 20) -> selection_pb2.SelectTopKResponse:
    stub = selection_pb2_grpc.SelectionServiceStub(channel)
    request = selection_pb2.SelectTopKRequest(items=[select(input=inline(SCORES), k=1)])
    reply: selection_pb2.SelectTopKResponse = stub.SelectTopK(
        request, metadata=(("topkd-token", token),), timeout=timeout
    )
    return reply


def test_calls_are_forwarded_with_their_errors(front: ServerProcess) -> None:
    with attached(front) as (info, channel, _):
        assert info.data_address == ""
        assert read(call(channel, info.token).results[0].indices).tolist() == [[1]]
        stub = selection_pb2_grpc.SelectionServiceStub(channel)
        bad = selection_pb2.SelectTopKRequest(items=[select(input=inline(SCORES), k=0)])
        with refused(grpc.StatusCode.INVALID_ARGUMENT) as found:
            stub.SelectTopK(bad, metadata=(("topkd-token", info.token),))
        assert found[:2] == ["ARGUMENT_VALUE", "items[0].selection.k"]
        with refused(grpc.StatusCode.FAILED_PRECONDITION):
            memory = selection_pb2.CudaIpcMemory(handle=b"\0" * 64, size=1)
            stub.RegisterRegion(
                selection_pb2.RegisterRegionRequest(cuda_ipc=memory), metadata=(("topkd-token", info.token),)
            )


@pytest.mark.parametrize("metadata", [(), (("topkd-attach-token", "wrong"),), (("topkd-token", ATTACH_TOKEN),)])
def test_attach_needs_the_attach_token(front: ServerProcess, metadata: tuple[tuple[str, str], ...]) -> None:
    with grpc.insecure_channel(front.serving["tcp_address"]) as channel:
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            list(control_pb2_grpc.ControlServiceStub(channel).Attach(control_pb2.AttachRequest(), metadata=metadata))
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            call(channel, ATTACH_TOKEN)


def test_end_of_the_stream_ends_the_session(front: ServerProcess) -> None:
    with attached(front) as (info, channel, stream):
        call(channel, info.token)
        stream.cancel()

        def refuses() -> bool:
            try:
                call(channel, info.token)
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.UNAUTHENTICATED
            return False

        assert eventually(refuses, 2) < 2
    eventually(lambda: front.metrics().get('topkd_sessions{transport="tcp"}') == 0)


def test_sessions_of_both_transports_are_apart(front: ServerProcess, session: Session) -> None:
    memory = session.register(4096)
    with attached(front) as (info, channel, _):
        stub = selection_pb2_grpc.SelectionServiceStub(channel)
        request = selection_pb2.SelectTopKRequest(items=[select(input=memory.tensor("float32", (1, 4)), k=1)])
        with refused(grpc.StatusCode.NOT_FOUND):
            stub.SelectTopK(request, metadata=(("topkd-token", info.token),))
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            stub.SelectTopK(request, metadata=session.metadata)
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            session.stub.SelectTopK(request, metadata=(("topkd-token", info.token),))


def test_killed_shared_worker_is_replaced(front: ServerProcess) -> None:
    with attached(front) as (info, channel, stream):
        call(channel, info.token)
        shared = next(pid for pid in front.children() if "--shared" in Path(f"/proc/{pid}/cmdline").read_text())
        os.kill(shared, signal.SIGKILL)
        started = time.monotonic()
        with refused(grpc.StatusCode.UNAVAILABLE) as found:
            list(stream)
        assert time.monotonic() - started < 2
        assert found[0] == "WORKER_LOST"

    def again() -> bool:
        try:
            with attached(front) as (info, channel, _):
                call(channel, info.token)
        except grpc.RpcError:
            return False
        return True

    eventually(again, 30)


def _certificates(path: Path) -> None:
    """Makes an authority, and a server's and a client's certificate of it."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=path, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    (path / "san").write_text("subjectAltName=IP:127.0.0.1\n")
    for name in ("server", "client"):
        openssl("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "san")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")
def test_a_client_certificate_attaches_without_a_token(short_dir: Path) -> None:
    _certificates(short_dir)
    files = {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "ca.pem"}
    options = {name: str(short_dir / file) for name, file in files.items()}
    server = ServerProcess(short_dir / "s", tcp_address="127.0.0.1:0", **options).wait_serving()
    authority = (short_dir / "ca.pem").read_bytes()
    pair = ((short_dir / "client.key").read_bytes(), (short_dir / "client.pem").read_bytes())
    try:
        address = server.serving["tcp_address"]
        with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority, *pair)) as channel:
            stream = control_pb2_grpc.ControlServiceStub(channel).Attach(control_pb2.AttachRequest())
            assert len(call(channel, next(stream).session.token).results) == 1
            stream.cancel()
        with (
            grpc.secure_channel(address, grpc.ssl_channel_credentials(authority)) as channel,
            refused(grpc.StatusCode.UNAVAILABLE),
        ):
            list(control_pb2_grpc.ControlServiceStub(channel).Attach(control_pb2.AttachRequest(), metadata=GOOD))
    finally:
        assert server.stop() == 0


def _shared(server: ServerProcess) -> int:
    return next(pid for pid in server.children() if "--shared" in Path(f"/proc/{pid}/cmdline").read_text())


def test_attach_answers_when_the_worker_has_the_session(front: ServerProcess) -> None:
    worker = _shared(front)
    with grpc.insecure_channel(front.serving["tcp_address"]) as channel:
        os.kill(worker, signal.SIGSTOP)
        try:
            stream = control_pb2_grpc.ControlServiceStub(channel).Attach(control_pb2.AttachRequest(), metadata=GOOD)
            answers: list[control_pb2.AttachResponse] = []
            reading = threading.Thread(target=lambda: answers.append(next(stream)))
            reading.start()
            reading.join(1)
            assert not answers, "its token would not be valid yet"
        finally:
            os.kill(worker, signal.SIGCONT)
        reading.join(10)
        assert len(call(channel, answers[0].session.token).results) == 1
        stream.cancel()


def test_a_worker_that_does_not_answer_is_replaced(short_dir: Path) -> None:
    (short_dir / "token").write_text(ATTACH_TOKEN)
    options = {"tcp_token_file": str(short_dir / "token"), "attach_timeout_s": 2.0}
    server = ServerProcess(short_dir / "s", tcp_address="127.0.0.1:0", **options).wait_serving()
    with attached(server) as (_, channel, earlier):
        attach = control_pb2_grpc.ControlServiceStub(channel).Attach
        for end in (lambda worker: None, lambda worker: os.kill(worker, signal.SIGKILL)):
            worker = _shared(server)
            os.kill(worker, signal.SIGSTOP)
            stream = attach(control_pb2.AttachRequest(), metadata=GOOD, timeout=20)
            end(worker)
            with refused(grpc.StatusCode.UNAVAILABLE) as found:
                next(stream)
            assert found[0] == "WORKER_LOST"
            eventually(lambda halted=worker: halted not in server.children(), 30)
            eventually(lambda: server.metrics()['topkd_workers{state="busy"}'] == 1, 30)
        with refused(grpc.StatusCode.UNAVAILABLE):
            list(earlier)  # its session was lost with the worker
        eventually(lambda: server.metrics()['topkd_sessions{transport="tcp"}'] == 0)
    with attached(server) as (session, channel, _):
        assert len(call(channel, session.token).results) == 1
    assert server.stop() == 0


def test_a_worker_that_does_not_answer_is_replaced_though_its_callers_wait_no_longer(short_dir: Path) -> None:
    """As clients do whose time-out is shorter than the server's."""
    (short_dir / "token").write_text(ATTACH_TOKEN)
    options = {"tcp_token_file": str(short_dir / "token"), "attach_timeout_s": 2.0}
    server = ServerProcess(short_dir / "s", tcp_address="127.0.0.1:0", **options).wait_serving()
    worker = _shared(server)
    os.kill(worker, signal.SIGSTOP)
    with grpc.insecure_channel(server.serving["tcp_address"]) as channel:
        attach = control_pb2_grpc.ControlServiceStub(channel).Attach
        with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
            next(attach(control_pb2.AttachRequest(), metadata=GOOD, timeout=0.5))
    eventually(lambda: worker not in server.children(), 30)
    eventually(lambda: server.metrics()['topkd_workers{state="busy"}'] == 1, 30)
    with attached(server) as (session, channel, _):
        assert len(call(channel, session.token).results) == 1
    assert server.stop() == 0


def test_sigterm_tells_the_streams(short_dir: Path) -> None:
    (short_dir / "token").write_text(ATTACH_TOKEN)
    token_file = str(short_dir / "token")
    server = ServerProcess(short_dir / "s", tcp_address="127.0.0.1:0", tcp_token_file=token_file).wait_serving()
    with attached(server) as (_, _, stream):
        server.popen.send_signal(signal.SIGTERM)
        assert next(stream).WhichOneof("event") == "draining"
        assert server.popen.wait(15) == 0
    server.stop()


def test_many_threads_share_the_worker(front: ServerProcess) -> None:
    with attached(front) as (one, channel, _), attached(front) as (two, other, _):
        done: list[int] = []

        def run(where: grpc.Channel, token: str) -> None:
            done.extend(len(call(where, token).results) for _ in range(20))

        pairs = [(channel, one.token), (other, two.token)] * 2
        threads = [threading.Thread(target=run, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert done == [1] * 80
