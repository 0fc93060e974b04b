"""Health, reflection, metrics, logs, the start, the drain, and the front's death."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.server.harness import ServerProcess, Session, SideRefusedError, eventually, inline, refused, select
from topkd.server import worker
from topkd.v1 import control_pb2, control_pb2_grpc, selection_pb2

SMALL = select(input=inline(np.ones((1, 8), dtype=np.float32)), k=1)
SERVICES = ("", "topkd.v1.ControlService", "topkd.v1.SelectionService")


def health(channel: grpc.Channel, name: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=name)
    return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=5).status)


def test_front_imports_neither_torch_nor_cuda() -> None:
    script = (
        "import sys, topkd.server.front; print([m for m in ('torch', 'cuda', 'topkd.kernels') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_grpc_knows_what_the_workers_ask_of_it(front: ServerProcess, session: Session) -> None:
    """It says on standard error which names of experiments it does not know, and does without them."""
    assert worker._GRPC_EXPERIMENTS
    assert "experiment" not in "".join(front.text)


def test_health_needs_no_token(front: ServerProcess) -> None:
    for target in (f"unix:{front.socket_dir}/grpc.sock", front.serving["tcp_address"]):
        with grpc.insecure_channel(target) as channel:
            assert [health(channel, name) for name in SERVICES] == [health_pb2.HealthCheckResponse.SERVING] * 3
            with refused(grpc.StatusCode.NOT_FOUND):
                health(channel, "no.such.Service")


def test_everything_else_on_the_front_needs_one(front: ServerProcess, session: Session) -> None:
    with grpc.insecure_channel(f"unix:{front.socket_dir}/grpc.sock") as channel:
        control = control_pb2_grpc.ControlServiceStub(channel)
        listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        asks = [reflection_pb2.ServerReflectionRequest(list_services="")]
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            control.GetServerInfo(control_pb2.GetServerInfoRequest())
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            list(listing(iter(asks)))
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            unknown: Any = channel.unary_unary("/no.such/Method")
            unknown(b"")
        info = control.GetServerInfo(control_pb2.GetServerInfoRequest(), metadata=session.metadata).info
        assert info.epoch == session.info.info.epoch
        reply = next(listing(iter(asks), metadata=session.metadata))
        names = {service.name for service in reply.list_services_response.service}
        assert set(SERVICES[1:]) <= names
        with refused(grpc.StatusCode.UNAUTHENTICATED) as found:
            list(control.Attach(control_pb2.AttachRequest(), metadata=session.metadata))
        assert "side socket" in found[3]


def test_metrics_tell_of_calls(front: ServerProcess, session: Session) -> None:
    before = front.metrics()
    for _ in range(3):
        session.select(SMALL, SMALL)
    names = {
        'topkd_requests_total{code="OK",method="SelectTopK"}': 3,
        'topkd_request_seconds_count{method="SelectTopK"}': 3,
        'topkd_kernel_seconds_count{dtype="float32",k="<=64",kernel="torch"}': 3,
        "topkd_queue_seconds_count": 3,
        "topkd_batch_items_sum": 6,
        "topkd_rows_total": 6,
        "topkd_input_bytes_total": 192,
        "topkd_output_bytes_total": 24,
    }

    def counted() -> bool:
        now = front.metrics()
        return all(now.get(name, 0) - before.get(name, 0) == value for name, value in names.items())

    eventually(counted, 3)
    now = front.metrics()
    compiles = [value for name, value in now.items() if name.startswith("topkd_compiles_total{")]
    assert compiles
    assert not any(compiles)
    assert now["topkd_device_wait_seconds_count"] == now["topkd_queue_seconds_count"]
    assert now["topkd_ready"] == 1
    assert abs(now["topkd_start_time_seconds"] - time.time()) < 3600
    assert now["topkd_max_sessions"] == 6
    assert any(name.startswith("topkd_build_info{") for name in now)
    assert any(name.startswith('topkd_device_info{backend="cpu"') for name in now)
    for process in ("front", "worker"):
        figures = [f'topkd_process_{what}{{process="{process}"}}' for what in ("cpu_seconds_total", "resident_bytes")]
        assert all(now[name] > 0 for name in [*figures, f'topkd_process_open_fds{{process="{process}"}}'])


def test_request_ids_reach_the_log(front: ServerProcess, session: Session) -> None:
    bad = selection_pb2.SelectTopKRequest()
    for given, kept in (("req-42", True), ("x" * 100, False), ("new\\line {}", False)):
        with refused(grpc.StatusCode.INVALID_ARGUMENT):
            session.stub.SelectTopK(bad, metadata=(*session.metadata, ("topkd-request-id", given)))
        if kept:
            assert front.wait_event("request_refused", 5, request_id=given)["session"] == session.info.session_id
        else:
            assert all(line.get("request_id") != given for line in front.lines)


def test_second_server_on_the_directory_is_refused(front: ServerProcess) -> None:
    second = ServerProcess(front.socket_dir)
    failure = second.wait_event("start_failed", 20)
    assert "another server" in failure["message"]
    assert second.popen.wait(10) == 1
    second.stop()


def test_missing_device_is_said(short_dir: Path) -> None:
    server = ServerProcess(short_dir / "s", device="cuda")
    assert "CUDA" in server.wait_event("start_failed", 60)["message"]
    assert server.popen.wait(10) == 1
    server.stop()


_SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/bin")  # one that other users can run


@pytest.mark.skipif(os.geteuid() != 0 or _SYSTEM_PYTHON is None, reason="only root can become another user")
def test_peers_are_checked(short_dir: Path) -> None:
    short_dir.chmod(0o755)
    server = ServerProcess(short_dir / "s", allowed_uids=[4242], allowed_gids=[4343]).wait_serving()
    for path in (server.socket_dir, server.socket_dir / "attach.sock"):
        path.chmod(0o777)  # so that modes are not what keeps them out
    script = (
        "import os, sys, socket; os.setgroups([int(g) for g in sys.argv[3].split(',') if g]);"
        "os.setgid(12345); os.setuid(int(sys.argv[2])); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.settimeout(60); s.connect(sys.argv[1]); s.send(b'\\x0a\\x00'); print(s.recv(65536).hex())"
    )
    try:
        from topkd.v1 import side_pb2

        for uid, groups, allowed in (("4242", "", True), ("1", "4343", True), ("1", "1", False)):
            command = [str(_SYSTEM_PYTHON), "-c", script, server.attach_path, uid, groups]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            reply = side_pb2.SideReply.FromString(bytes.fromhex(output))
            assert reply.HasField("session") == allowed, reply
            if not allowed:
                assert (reply.error.code, reply.error.reason) == (7, "PEER_NOT_ALLOWED")
    finally:
        assert server.stop() == 0


def test_sigterm_drains(short_dir: Path) -> None:
    server = ServerProcess(short_dir / "s", cpu_threads=1).wait_serving()
    session = Session(server)
    memory = session.register(8192 + 400_000 * 4)
    rows = memory.tensor("float32", (400_000, 2000), strides=[0, 1])
    slow = select(input=rows, k=1, out_indices=memory.tensor("int32", (400_000, 1), 8192))
    running = session.stub.SelectTopK.future(selection_pb2.SelectTopKRequest(items=[slow]), metadata=session.metadata)
    time.sleep(0.2)
    with grpc.insecure_channel(f"unix:{server.socket_dir}/grpc.sock") as channel:
        assert health(channel) == health_pb2.HealthCheckResponse.SERVING
        server.popen.send_signal(signal.SIGTERM)
        server.wait_event("draining", 5)
        assert not running.done(), "the call must outlast the signal for this test"
        assert health(channel) == health_pb2.HealthCheckResponse.NOT_SERVING
        with refused(grpc.StatusCode.UNAVAILABLE) as found:
            session.select(SMALL)
        assert found[0] == "DRAINING"
        with pytest.raises(SideRefusedError, match="DRAINING"):
            Session(server)
        assert len(running.result(20).results) == 1
        assert server.popen.wait(10) == 0
    session.close()
    assert [entry.name for entry in server.socket_dir.iterdir()] == ["lock"]
    server.stop()


def test_killed_front_takes_its_workers_along_and_can_be_restarted(short_dir: Path) -> None:
    server = ServerProcess(short_dir / "s").wait_serving()
    session = Session(server)
    eventually(lambda: len(server.children()) == 2, 20)
    workers = server.children()
    server.popen.kill()
    server.popen.wait()
    started = time.monotonic()
    session.sock.settimeout(5)
    assert session.sock.recv(10) == b""
    alive = [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    eventually(lambda: not any(_runs(pid) for pid in alive), 1.0)
    assert time.monotonic() - started < 1.5
    session.close()
    server.stop()
    again = ServerProcess(short_dir / "s").wait_serving()
    with Session(again) as session:
        session.select(SMALL)
    assert again.stop() == 0


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_dead_spare_is_replaced_and_attaching_waits(short_dir: Path) -> None:
    server = ServerProcess(short_dir / "s").wait_serving()
    (spare,) = server.children()
    os.kill(spare, signal.SIGKILL)
    server.wait_event("worker_ended", 5)
    with Session(server) as session:
        session.select(SMALL)
    assert server.stop() == 0


def test_gone_client_does_not_keep_a_worker(short_dir: Path) -> None:
    server = ServerProcess(short_dir / "s", max_sessions=2).wait_serving()
    first = Session(server)
    threads = []
    for _ in range(3):  # these come and go while no worker is warm

        def visit() -> None:
            import socket

            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(server.attach_path)
                sock.send(b"\x0a\x00")
                time.sleep(0.02)

        threads.append(threading.Thread(target=visit))
        threads[-1].start()
    for thread in threads:
        thread.join()
    eventually(lambda: server.metrics()['topkd_sessions{transport="unix"}'] == 1)
    with Session(server) as session:
        session.select(SMALL)
    first.close()
    assert server.stop() == 0
