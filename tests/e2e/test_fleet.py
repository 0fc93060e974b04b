"""`topkd serve --devices`: a front for each device, one page of metrics, one answer of health, restarts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import topkd
from tests.e2e import answers, processes, raw, scrape
from tests.e2e.answers import UNIQUE, best
from topkd._options import directory_of_device
from topkd.v1 import control_pb2, control_pb2_grpc

pytestmark = pytest.mark.timeout(180)
DEVICES = ("cpu-0", "cpu-1")
GPUS = ("GPU-5d1fa0c2-1b7e-4c8e-9f11-0123456789ab", "GPU-77ac2f4e-22d0-4b1a-8d5c-ba9876543210")
START_TIMEOUT = 90.0
WITH_GPUS = """
import dataclasses, sys
from topkd import cli
from topkd.server import _devices, fleet

find = fleet.find_devices
_devices.visible_gpus = lambda: {gpus!r}
fleet.find_devices = lambda devices: [dataclasses.replace(one, device="cpu") for one in find(devices)]
sys.exit(cli.main(sys.argv[1:]))
"""
"""The command on a machine where CUDA shows some GPUs, each served by the CPU."""


@dataclass
class Fleet:
    """A server of two devices that a test may harm.

    Attributes:
        socket_dir: where its devices' folders are.
        gpus: UUIDs of GPUs that there are to be; none: two devices of the CPU.
    """

    socket_dir: Path
    gpus: tuple[str, ...] = ()
    metrics_port: int = field(default_factory=processes.free_port)
    health_port: int = field(default_factory=processes.free_port)
    process: subprocess.Popen[bytes] | None = None

    def command(self, devices: str = "") -> list[str]:
        asked = devices or ("all" if self.gpus else "cpu:2")
        options = {"devices": asked, "socket-dir": self.socket_dir, "metrics-port": self.metrics_port}
        options["health-address"] = f"127.0.0.1:{self.health_port}"
        program = ["-c", WITH_GPUS.format(gpus=list(self.gpus))] if self.gpus else ["-m", "topkd"]
        return [sys.executable, *program, "serve", *(f"--{name}={value}" for name, value in options.items())]

    def start(self) -> Fleet:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd="/",
                env=os.environ | {"TOPKD_FRONT_TIMEOUT_S": "6"},
            )
        processes.wait_until(lambda: self.health() == "SERVING" or self._check_alive(), START_TIMEOUT, "all serve")
        return self

    def _check_alive(self) -> None:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()

    @property
    def log(self) -> Path:
        return self.socket_dir.with_name("fleet.log")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def said(self, event: str) -> list[dict[str, Any]]:
        """Returns the fleet's own log lines of one event."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event and line["process"] == "fleet"]

    def health(self, service: str = "", address: str = "") -> str:
        """Returns the health status, or the name of the call's failure."""
        with grpc.insecure_channel(address or f"127.0.0.1:{self.health_port}", options=raw.OPTIONS) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            try:
                status = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status
            except grpc.RpcError as error:
                return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))

    def front(self, name: str) -> int:
        """Returns the process that serves a device."""
        return processes.listener(self.socket_dir / name / "grpc.sock")

    def metrics(self) -> scrape.Samples:
        return scrape.scrape(self.metrics_port)

    def stop(self) -> int:
        if self.process is None:
            return 0
        self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(10)


@contextmanager
def _fleet(gpus: tuple[str, ...] = ()) -> Iterator[Fleet]:
    folder = Path(tempfile.mkdtemp(prefix="topkd-"))
    own = Fleet(folder / "s", gpus)
    try:
        yield own
    finally:
        own.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with _fleet() as own:
        yield own.start()


def _select(client: topkd.Client, seed: int) -> None:
    scores = client.empty((4, 500), "float32")
    scores[...] = answers.rows(seed, 4, 500)
    assert np.array_equal(client.select_topk(scores, 7, **UNIQUE).indices, best(np.asarray(scores), 7))


def test_every_device_has_a_server_of_its_own(fleet: Fleet) -> None:
    assert fleet.front("cpu-0") != fleet.front("cpu-1")
    epochs = set()
    for seed, name in enumerate(DEVICES):
        with topkd.Client(fleet.socket_dir / name, attach_timeout=60) as client:
            _select(client, seed)
            epochs.add(client.info().epoch)
    assert len(epochs) == 2


def test_a_client_of_all_must_say_which(fleet: Fleet) -> None:
    for device in (None, "cpu", "GPU-1"):
        with (
            topkd.Client(fleet.socket_dir, device=device) as client,
            pytest.raises(topkd.ArgumentValueError, match="cpu-0, cpu-1"),
        ):
            client.connect()


def test_metrics_of_all_are_on_one_page_by_device(fleet: Fleet) -> None:
    before = fleet.metrics()
    with topkd.Client(fleet.socket_dir / "cpu-1", attach_timeout=60) as client:
        _select(client, 3)
    rows = "topkd_rows_total"

    def counted() -> bool:
        return scrape.total(fleet.metrics(), rows, device="cpu-1") == scrape.total(before, rows, device="cpu-1") + 4

    processes.wait_until(counted, 10, "the rows are counted under their device")
    after = fleet.metrics()
    assert scrape.total(after, rows, device="cpu-0") == scrape.total(before, rows, device="cpu-0")
    assert {dict(labels).get("device") for _, labels in after} == set(DEVICES)
    names = {device: {name for name, labels in after if dict(labels)["device"] == device} for device in DEVICES}
    assert names["cpu-0"] >= {"topkd_device_up", "topkd_device_restarts_total", "topkd_build_info", rows}
    assert scrape.total(after, "topkd_device_up") == 2


@pytest.mark.parametrize("over", ["tcp", "unix"])
def test_health_answers_for_each_and_for_all(fleet: Fleet, over: str) -> None:
    address = f"unix:{fleet.socket_dir / 'grpc.sock'}" if over == "unix" else ""
    answer = {name: fleet.health(name, address) for name in ("", "live", *DEVICES, "GPU-1")}
    assert answer == {"": "SERVING", "live": "SERVING", "cpu-0": "SERVING", "cpu-1": "SERVING", "GPU-1": "NOT_FOUND"}


def test_the_health_port_tells_nothing_else(fleet: Fleet) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{fleet.health_port}", options=raw.OPTIONS) as channel:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetServerInfo(control_pb2.GetServerInfoRequest(), timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_command_shows_every_device(fleet: Fleet) -> None:
    command = [sys.executable, "-m", "topkd", "health", "--json", "--target", str(fleet.socket_dir)]
    asked = subprocess.run(command, capture_output=True, check=True, timeout=60, cwd="/")
    devices = {"cpu-0": "SERVING", "cpu-1": "SERVING"}
    assert json.loads(asked.stdout) == {"status": "SERVING", "detail": "", "devices": devices}


def test_a_second_one_on_the_directory_is_refused(fleet: Fleet) -> None:
    ended = subprocess.run(fleet.command(), capture_output=True, timeout=60, check=False, cwd="/")
    assert ended.returncode == 1
    assert f"pid {fleet.pid}" in ended.stderr.decode()
    assert fleet.health() == "SERVING"


def test_a_killed_front_is_started_anew_and_the_other_undisturbed(fleet: Fleet) -> None:
    with topkd.Client(fleet.socket_dir / "cpu-0", attach_timeout=60) as hit, _attached(fleet, "cpu-1") as spared:
        _select(hit, 1)
        epoch, other = hit.info().epoch, spared.info().epoch
        before = scrape.total(fleet.metrics(), "topkd_device_restarts_total", device="cpu-0")
        killed = fleet.front("cpu-0")
        workers = processes.children(killed)
        processes.kill(killed)
        processes.wait_until(lambda: fleet.health("cpu-0") == "NOT_SERVING", 5, "the device is NOT_SERVING")
        assert (fleet.health(), fleet.health("live"), fleet.health("cpu-1")) == ("NOT_SERVING", "SERVING", "SERVING")
        assert scrape.total(fleet.metrics(), "topkd_device_up", device="cpu-0") == 0
        _select(spared, 2)
        processes.wait_until(lambda: not any(map(processes.alive, workers)), 5, "its workers are gone")
        processes.wait_until(lambda: not hit.attached, 5, "the client has noticed")
        _select(hit, 3)  # waits for the next one
        processes.wait_until(lambda: fleet.health() == "SERVING", START_TIMEOUT, "all serve again")
        assert hit.info().epoch != epoch
        assert spared.info().epoch == other
        samples = fleet.metrics()
        assert scrape.total(samples, "topkd_device_restarts_total", device="cpu-0") == before + 1
        assert scrape.total(samples, "topkd_device_restarts_total", device="cpu-1") == 0


@contextmanager
def _attached(fleet: Fleet, name: str) -> Iterator[topkd.Client]:
    with topkd.Client(fleet.socket_dir / name, attach_timeout=60) as client:
        client.connect()
        yield client


def test_a_front_that_is_told_to_end_drains_and_is_started_anew(fleet: Fleet) -> None:
    """As an upgrade does it: SIGTERM to one front after another."""
    seen = len(fleet.said("front_ended"))
    with topkd.Client(fleet.socket_dir / "cpu-1", attach_timeout=60) as hit, _attached(fleet, "cpu-0") as spared:
        _select(hit, 1)
        epoch, other = hit.info().epoch, spared.info().epoch
        ended = fleet.front("cpu-1")
        workers = processes.children(ended)
        os.kill(ended, signal.SIGTERM)
        processes.wait_until(lambda: fleet.said("front_ended")[seen:], 30, "the front has ended")
        _select(spared, 2)
        assert not any(map(processes.alive, workers))
        _select(hit, 3)  # waits for the next one
        processes.wait_until(lambda: fleet.health() == "SERVING", START_TIMEOUT, "all serve again")
        assert (hit.info().epoch != epoch, spared.info().epoch) == (True, other)
    [end] = fleet.said("front_ended")[seen:]
    assert (end["front"], end["exit_code"]) == ("cpu-1", 0)
    lines = [json.loads(line) for line in fleet.log.read_text().splitlines() if line.startswith("{")]
    said = [line["event"] for line in lines if (line["process"], line["pid"]) == ("front", ended)]
    assert ("draining" in said, said[-1]) == (True, "stopped")
    assert fleet.front("cpu-1") != ended


def test_gpus_are_served_by_their_uuids() -> None:
    with _fleet(GPUS) as own:
        own.start()
        assert {path.name for path in own.socket_dir.iterdir() if path.is_dir()} == set(GPUS)
        assert {own.health(name) for name in ("", *GPUS)} == {"SERVING"}
        assert [dict(line["devices"]) for line in own.said("serving")] == [dict.fromkeys(GPUS, True)]
        with topkd.Client(own.socket_dir / GPUS[1], attach_timeout=60) as client:
            _select(client, 1)
        processes.wait_until(
            lambda: scrape.total(own.metrics(), "topkd_rows_total", device=GPUS[1]) == 4, 10, "its rows are counted"
        )
        assert scrape.total(own.metrics(), "topkd_rows_total", device=GPUS[0]) == 0
        assert scrape.total(own.metrics(), "topkd_device_up", device=GPUS[0]) == 1
        for uuid in GPUS:  # the client finds the server of its GPU by the UUID, of several
            assert directory_of_device(own.socket_dir, uuid) == own.socket_dir / uuid
        with pytest.raises(topkd.ArgumentValueError, match=f"no server of 'GPU-0'; there are {GPUS[0]}, {GPUS[1]}"):
            directory_of_device(own.socket_dir, "GPU-0")
        killed = own.front(GPUS[0])
        processes.kill(killed)
        processes.wait_until(lambda: own.health(GPUS[0]) == "NOT_SERVING", 5, "the device is NOT_SERVING")
        assert (own.health(), own.health(GPUS[1])) == ("NOT_SERVING", "SERVING")
        processes.wait_until(lambda: own.health() == "SERVING", START_TIMEOUT, "all serve again")
        assert scrape.total(own.metrics(), "topkd_device_restarts_total", device=GPUS[0]) == 1


def test_a_front_that_hangs_is_replaced(fleet: Fleet) -> None:
    stopped = fleet.front("cpu-1")
    os.kill(stopped, signal.SIGSTOP)
    processes.wait_until(lambda: not processes.alive(stopped), 30, "the front that does not answer is killed")
    processes.wait_until(lambda: fleet.health() == "SERVING", START_TIMEOUT, "all serve again")
    assert [line["pid"] for line in fleet.said("front_killed")] == [stopped]
    assert fleet.front("cpu-1") != stopped


def test_a_front_that_keeps_ending_is_started_less_and_less_often(fleet: Fleet) -> None:
    seen = len(fleet.said("front_ended"))
    for _ in range(2):
        processes.wait_until(lambda: fleet.health("cpu-0") == "SERVING", START_TIMEOUT, "it serves")
        killed = fleet.front("cpu-0")
        processes.kill(killed)
        processes.wait_until(lambda: fleet.health("cpu-0") == "NOT_SERVING", 5, "the device is NOT_SERVING")
    processes.wait_until(lambda: fleet.health() == "SERVING", START_TIMEOUT, "all serve again")
    first, second = (line["next_start_s"] for line in fleet.said("front_ended")[seen:])
    assert second == 2 * first


def test_the_fronts_say_how_long_their_workers_took_to_start(fleet: Fleet) -> None:
    lines = [json.loads(line) for line in fleet.log.read_text().splitlines() if line.startswith("{")]
    serving = [line for line in lines if line["event"] == "serving" and line["process"] == "front"]
    assert {line["front"] for line in serving} == set(DEVICES)
    for line in serving:
        assert set(line["start_s"]) == {"imports", "device", "kernels", "endpoint"}
        assert 0 < sum(line["start_s"].values()) < START_TIMEOUT


def test_sigterm_ends_all_in_order() -> None:
    with _fleet() as own:
        own.start()
        fronts = [own.front(name) for name in DEVICES]
        below = {*fronts, *(pid for front in fronts for pid in processes.children(front))}
        assert own.stop() == 0
        assert not [pid for pid in below if processes.alive(pid)]
        assert not list(own.socket_dir.rglob("*.sock"))
        assert [line["event"] for line in map(json.loads, own.log.read_text().splitlines())].count("stopped") == 3


def test_a_killed_fleet_leaves_nothing_and_the_next_one_starts() -> None:
    with _fleet() as own:
        own.start()
        (own.socket_dir / "cpu-7").mkdir(0o750)  # of a device that is gone
        fronts = [own.front(name) for name in DEVICES]
        below = {*fronts, *(pid for front in fronts for pid in processes.children(front))}
        processes.kill(own.pid)
        assert own.process is not None
        own.process.wait(5)
        processes.wait_until(lambda: not any(map(processes.alive, below)), 15, "fronts and workers end")
        own.start()
        assert {path.name for path in own.socket_dir.iterdir() if path.is_dir()} == set(DEVICES)
        with topkd.Client(own.socket_dir / "cpu-0", attach_timeout=60) as client:
            _select(client, 1)


@pytest.mark.parametrize(
    ("devices", "said"),
    [("all", "CUDA shows no GPU"), ("cuda:0", "CUDA shows 0 GPUs"), ("GPU-1,GPU-2", "no front could start")],
)
def test_what_cannot_be_served_ends_with_status_1(devices: str, said: str) -> None:
    with _fleet() as own:
        own.socket_dir.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(
            own.command(devices), capture_output=True, timeout=120, check=False, cwd="/", env=environ
        )
        assert ended.returncode == 1, ended.stderr
        [last] = [json.loads(line) for line in ended.stderr.splitlines() if b'"fleet"' in line and b"failed" in line]
        assert last["event"] == "start_failed"
        assert said in last["message"], f"{last} after {time.monotonic() - started:.0f} s"
