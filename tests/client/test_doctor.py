from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import Server
from topkd import _paths
from topkd._contexts import Memory
from topkd._doctor import examine
from topkd._doctor_host import _same_pids
from topkd._doctor_rules import Facts, Finding, GpuDevice, GpuFacts, HostFacts, ServerFacts, State, TorchFacts
from topkd.cli import main

H200 = GpuDevice("NVIDIA H200", "GPU-1", 90, mig=False, compute_mode="default")
OUT = "CUDA_ERROR_OUT_OF_MEMORY"
FREE, FULL = Memory(123 << 30, 140 << 30), Memory(1 << 20, 140 << 30)
GPU = GpuFacts(present=True, nodes={"/dev/nvidia0": True}, driver="580.1", cuda=13000, devices=(H200,))
TORCH = TorchFacts("2.13.0", 13000, available=True)
HOST = HostFacts(uid=1000, pid=42, versions={"topkd": "0.1.0"}, shm_free=1 << 30, open_files=4096)
SERVER = ServerFacts(
    directory="/run/topkd",
    target="/run/topkd",
    peer_uid=1000,
    peer_pid=7,
    same_pids=True,
    health="SERVING",
    version="0.1.0",
    backend="cuda",
    device_uuid="GPU-1",
)
GOOD = Facts(GPU, TORCH, HOST, SERVER)


def by_rule(facts: Facts) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(facts)}


def test_all_is_well_on_a_good_machine() -> None:
    assert {finding.state for finding in examine(GOOD)} == {State.OK}


def test_every_rule_has_a_name_of_its_own() -> None:
    rules = [finding.rule for finding in examine(GOOD)]
    assert len(set(rules)) == len(rules)


def test_a_machine_without_a_gpu_or_a_server_fails_only_for_the_server() -> None:
    facts = Facts(
        torch=TorchFacts("2.13.0+cpu"),
        host=HOST,
        server=ServerFacts(directory="/run/topkd", directory_error="No such file or directory"),
    )
    failed = [finding.rule for finding in examine(facts) if finding.state is State.FAIL]
    assert failed == ["socket.directory"]
    assert by_rule(facts)["gpu.driver"].state is State.SKIP


def changed(**parts: dict[str, object]) -> Facts:
    return replace(GOOD, **{name: replace(getattr(GOOD, name), **fields) for name, fields in parts.items()})


def refusing(error: str, memory: Memory | None) -> Facts:
    return changed(gpu={"devices": (replace(H200, refused=error, memory=memory),)})


@pytest.mark.parametrize(
    ("facts", "rule", "state", "said"),
    [
        (changed(gpu={"cuda": 0, "error": "no libcuda", "devices": ()}), "gpu.driver", State.FAIL, "no libcuda"),
        (changed(gpu={"nodes": {"/dev/nvidia0": False}}), "gpu.permissions", State.FAIL, "uid 1000 cannot"),
        (changed(gpu={"devices": (), "visible": ""}), "gpu.devices", State.FAIL, "CUDA_VISIBLE_DEVICES is ''"),
        (changed(gpu={"devices": (replace(H200, capability=75),)}), "gpu.devices", State.WARN, "sm_75"),
        (changed(gpu={"devices": (replace(H200, mig=True),)}), "gpu.mig", State.WARN, "MIG is on"),
        (
            changed(gpu={"devices": (replace(H200, compute_mode="exclusive"),)}),
            "gpu.compute-mode",
            State.FAIL,
            "exclusive",
        ),
        (
            changed(gpu={"devices": (replace(H200, compute_mode="exclusive"),), "mps_uid": 1000}),
            "gpu.compute-mode",
            State.OK,
            "exclusive",
        ),
        (refusing(OUT, FREE), "gpu.context", State.FAIL, "no more CUDA"),
        (refusing(OUT, FULL), "gpu.context", State.FAIL, "a worker takes"),
        (refusing(OUT, None), "gpu.context", State.FAIL, "for want of device memory"),
        (refusing("X", FREE), "gpu.context", State.FAIL, "GPU-1 gives no context: X"),
        (changed(gpu={"mps_uid": 1001}), "gpu.mps", State.FAIL, "uid 1001's"),
        (changed(gpu={"mps_uid": 0}, server={"peer_uid": 5}), "gpu.mps", State.WARN, "uid 5's"),
        (changed(gpu={"mps_uid": 1000}), "gpu.mps", State.OK, "fatal GPU fault"),
        (changed(gpu={"mps_uid": 1000}), "gpu.mps", State.OK, "must run as one user"),
        (changed(gpu={"mps_uid": None}), "gpu.mps", State.OK, "387 us instead of 101"),
        (changed(gpu={"mps_uid": None}), "gpu.connections", State.OK, "not set: enough for one or two streams"),
        (changed(gpu={"mps_uid": 1000}), "gpu.connections", State.WARN, "not set: under MPS"),
        (changed(gpu={"mps_uid": 1000, "connections": "8"}), "gpu.connections", State.WARN, "is 8: under MPS"),
        (changed(gpu={"mps_uid": 1000, "connections": "32"}), "gpu.connections", State.OK, "is 32"),
        (changed(gpu={"allocator": "expandable_segments:True"}), "gpu.allocator", State.OK, "by descriptors"),
        (
            changed(gpu={"allocator": "expandable_segments:True", "segments_shared": "0"}),
            "gpu.allocator",
            State.WARN,
            "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC",
        ),
        (changed(torch={"available": False, "cuda": 0}), "torch", State.FAIL, "a CPU build, on a machine with a GPU"),
        (changed(torch={"available": False, "cuda": 13020}), "torch", State.FAIL, "driver supports CUDA 13.0"),
        (changed(torch={"version": ""}), "torch", State.WARN, "not installed"),
        (changed(torch={"error": "ImportError: x"}), "torch", State.FAIL, "ImportError: x"),
        (changed(host={"versions": {"topkd": "0.1.0", "grpcio": None}}), "packages", State.FAIL, "grpcio"),
        (changed(host={"memfd_error": "denied"}), "host.memfd", State.FAIL, "denied"),
        (changed(host={"shm_free": 1 << 20}), "host.shm", State.WARN, "1 MiB"),
        (changed(host={"shm_free": None}), "host.shm", State.WARN, "cannot be written"),
        (changed(host={"open_files": 256}), "host.open-files", State.WARN, "256"),
        (changed(host={"open_files": -1}), "host.open-files", State.OK, "no limit"),
        (changed(server={"directory_error": "closed"}), "socket.directory", State.FAIL, "closed"),
        (changed(server={"unsafe": "mode 0777"}), "socket.directory", State.FAIL, "mode 0777"),
        (changed(server={"directory": ""}), "socket.directory", State.SKIP, "the target is"),
        (changed(server={"socket_missing": True}), "socket.attach", State.FAIL, "no server runs there"),
        (changed(server={"socket_error": "Connection refused"}), "socket.attach", State.FAIL, "refused"),
        (changed(server={"same_pids": False}), "ipc.pid-collision", State.WARN, "are in different PID namespaces"),
        (changed(server={"same_pids": None}), "ipc.pid-collision", State.WARN, "may be in different"),
        (changed(server={"same_pids": False, "backend": "cpu"}), "ipc.pid-collision", State.OK, "does not mind"),
        (changed(server={"health": "NOT_SERVING"}), "server.health", State.FAIL, "NOT_SERVING"),
        (changed(server={"attach_error": "not allowed"}), "server.session", State.FAIL, "not allowed"),
        (changed(server={"version": "0.2.0"}), "server.session", State.WARN, "0.2.0"),
        (changed(server={"device_uuid": "GPU-2"}), "server.device", State.FAIL, "GPU-2"),
    ],
)
def test_a_rule_says_what_is_wrong_and_what_to_do(facts: Facts, rule: str, state: State, said: str) -> None:
    finding = by_rule(facts)[rule]
    assert finding.state is state
    assert said in finding.finding
    assert bool(finding.remedy) == (state in (State.WARN, State.FAIL))


def test_a_process_of_this_namespace_shares_it() -> None:
    assert _same_pids(1) is not False
    assert _same_pids(0) is False


def test_doctor_of_a_running_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--target", str(server.socket_dir), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    states = {rule["rule"]: rule["state"] for rule in report["rules"]}
    assert report["ok"]
    assert report["failed"] == []
    for rule in ("socket.directory", "socket.attach", "server.health", "server.session", "ipc.pid-collision"):
        assert states[rule] == "ok"


def test_doctor_names_what_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    directory.chmod(0o777)
    assert main(["doctor", "--target", str(directory), "--quiet"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^fail  socket\.directory .* mode 0777: others can write", out, re.MULTILINE)
    assert re.search(r"^fail  socket\.attach .* no server runs there\n +-> topkd serve$", out, re.MULTILINE)
    assert out.splitlines()[-1].startswith("failed: socket.directory, socket.attach")


def test_doctor_of_several_servers_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("cpu-0", "cpu-1"):
        (tmp_path / name).mkdir()
    assert main(["doctor", "--target", str(tmp_path), "--quiet"]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path} has servers of several devices: cpu-0, cpu-1\n" in out
    assert f"-> name one: topkd doctor --target {tmp_path}/cpu-0\n" in out
    assert out.splitlines()[-1].startswith("failed: socket.directory")


def test_doctor_names_a_default_directory_of_another_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("TOPKD_SOCKET_DIR", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_paths, "_SYSTEM_DIR", tmp_path / "run")
    monkeypatch.setattr(_paths, "_public_dir", lambda: tmp_path)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert main(["doctor", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^fail  socket\.directory .* belongs to uid {user}, not to this user", out, re.MULTILINE), out
