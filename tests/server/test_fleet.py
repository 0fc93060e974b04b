import ctypes
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from topkd.server import _devices
from topkd.server._devices import FleetDevice, find_devices
from topkd.server._fleet_child import decode, encode
from topkd.server._fleet_metrics import _merge
from topkd.server.config import ConfigError, ServerConfig, ServerLimits
from topkd.server.fleet import front_config

UUIDS = ["GPU-a", "GPU-b"]
FULL = ServerConfig(
    device="cpu",
    devices="cpu:2",
    socket_dir=Path("/run/t"),
    allowed_uids=(1, 2),
    allowed_gids=(3,),
    tcp_address="[::1]:9000",
    tcp_token_file=Path("/token"),
    tls_cert=Path("/cert"),
    tls_key=Path("/key"),
    tls_client_ca=Path("/ca"),
    health_address="0.0.0.0:1",
    limits=ServerLimits(max_queue=3),
    cpu_threads=2,
)


def test_a_configuration_reaches_the_front_as_it_is() -> None:
    unset = replace(FULL, allowed_uids=None, tcp_address=None, tcp_token_file=None, metrics_port=None)
    for config in (FULL, unset, ServerConfig()):
        assert decode(encode(config)) == config
    assert {type(getattr(decode(encode(FULL)), field.name)) for field in fields(FULL)} == {
        type(getattr(FULL, field.name)) for field in fields(FULL)
    }


def test_each_front_has_places_of_its_own() -> None:
    one = front_config(FULL, FleetDevice("GPU-b", "GPU-b"), 1)
    assert (one.device, one.devices, one.socket_dir) == ("GPU-b", None, Path("/run/t/GPU-b"))
    assert (one.tcp_address, one.health_address, one.metrics_host, one.metrics_port) == (
        "[::1]:9001",
        None,
        "127.0.0.1",
        0,
    )
    assert one.limits == FULL.limits
    assert front_config(replace(FULL, metrics_port=None), FleetDevice("cpu-0", "cpu"), 0).metrics_port is None


def test_a_late_device_may_have_no_tcp_port() -> None:
    with pytest.raises(ConfigError, match="65536"):
        front_config(replace(FULL, tcp_address="[::1]:65535"), FleetDevice("cpu-1", "cpu"), 1)


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        ("cpu:2", ["cpu-0", "cpu-1"]),
        ("all", UUIDS),
        ("cuda:1", ["GPU-b"]),
        ("cuda:1,GPU-a", ["GPU-b", "GPU-a"]),
        ("GPU-x", ["GPU-x"]),
        ("MIG-y", ["MIG-y"]),
    ],
)
def test_devices_are_named_by_uuid(devices: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_devices, "visible_gpus", lambda: UUIDS)
    ServerConfig(devices=devices).check()
    found = find_devices(devices)
    assert [one.name for one in found] == names
    assert {one.device for one in found} <= {"cpu", *names}


def fake_cuda(uuids: list[bytes], start: int = 0) -> SimpleNamespace:
    """Returns a libcuda with some GPUs; a device's handle is not its ordinal."""

    def count(found: Any) -> int:
        found._obj.value = len(uuids)
        return 0

    def get(device: Any, ordinal: int) -> int:
        device._obj.value = 100 + ordinal
        return 0

    def uuid(raw: Any, device: Any) -> int:
        raw.raw = uuids[device.value - 100]
        return 0

    return SimpleNamespace(cuInit=lambda flags: start, cuDeviceGetCount=count, cuDeviceGet=get, cuDeviceGetUuid=uuid)


def test_the_driver_says_the_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = [bytes(range(16)), bytes(range(0xF0, 0x100))]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake_cuda(raw))
    assert _devices.asked_cuda() == [
        "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f",
        "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff",
    ]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: fake_cuda(raw, start=100))  # CUDA_ERROR_NO_DEVICE
    assert _devices.asked_cuda() == []


def test_a_driver_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def ends(*_: object, **__: object) -> None:
        raise subprocess.CalledProcessError(-11, "python", stderr=b"first\nit crashed\n")

    def hangs(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(subprocess, "run", ends)
    with pytest.raises(ConfigError, match="CUDA cannot be asked which GPUs there are: it crashed"):
        _devices.visible_gpus()
    monkeypatch.setattr(subprocess, "run", hangs)
    with pytest.raises(ConfigError, match="did not say within 60 s"):
        _devices.visible_gpus()


@pytest.mark.parametrize(("devices", "said"), [("cuda:2", "2 GPUs"), ("cuda:0,GPU-a", "GPU-a twice")])
def test_devices_that_are_not_there(devices: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_devices, "visible_gpus", lambda: UUIDS)
    with pytest.raises(ConfigError, match=said):
        find_devices(devices)


@pytest.mark.parametrize(
    "devices", ["", "cpu", "cpu:0", "cpu:65", "cpu:x", "all,cpu:1", "cuda", "cuda:x", "GPU-a,GPU-a", "cpu:1,cpu:1"]
)
def test_devices_that_say_nothing(devices: str) -> None:
    with pytest.raises(ConfigError, match="device"):
        ServerConfig(devices=devices).check()


def test_pages_are_merged_without_loss() -> None:
    pages = []
    for weight in (1, 2):
        registry = CollectorRegistry()
        Counter("t_things", "Things.", ("kind",), registry=registry).labels("a").inc(weight)
        Histogram("t_seconds", "Time.", buckets=(0.1, 1.0), registry=registry).observe(0.5 * weight)
        pages.append(generate_latest(registry).decode())
    merged = {family.name: family for family in _merge(["x", "y", "z"], [*pages, ""])}
    for name, page in zip(("x", "y"), pages, strict=True):
        for family in text_string_to_metric_families(page):
            ours = merged[family.name]
            assert (ours.type, ours.documentation) == (family.type, family.documentation)
            for sample in family.samples:
                labels = {**sample.labels, "device": name}
                assert [s.value for s in ours.samples if (s.name, s.labels) == (sample.name, labels)] == [sample.value]
    assert sum(len(family.samples) for family in merged.values()) == sum(
        len(family.samples) for page in pages for family in text_string_to_metric_families(page)
    )
