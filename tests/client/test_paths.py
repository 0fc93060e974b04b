from __future__ import annotations

import os
from pathlib import Path

import pytest

from topkd import _paths
from topkd._options import directory_of_device, target_directory
from topkd.errors import ArgumentValueError, PermissionDeniedError


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TOPKD_SOCKET_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(_paths, "_SYSTEM_DIR", tmp_path / "run")


def test_the_environment_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("TOPKD_SOCKET_DIR", "/somewhere")
    assert _paths.default_socket_dir() == _paths.find_socket_dir() == Path("/somewhere")


def test_then_the_system_directory_if_there_is_one(tmp_path: Path) -> None:
    assert _paths.default_socket_dir() == Path(f"/tmp/topkd-{os.getuid()}")
    (tmp_path / "run").mkdir()
    assert _paths.default_socket_dir() == tmp_path / "run"


def test_then_the_users_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert _paths.default_socket_dir() == Path("/run/user/7/topkd")


def test_a_client_goes_where_a_socket_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "topkd").mkdir()
    assert _paths.find_socket_dir() == tmp_path / "run"
    (tmp_path / "topkd" / _paths.GRPC_SOCKET).touch()
    assert _paths.find_socket_dir() == tmp_path / "topkd"


def test_a_default_directory_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whoever makes /tmp/topkd-UID first is asked for by the clients of that user."""
    monkeypatch.setattr(_paths, "_public_dir", lambda: tmp_path / "public")
    assert target_directory(None) == tmp_path / "public"
    (tmp_path / "public").mkdir()
    assert target_directory(None) == tmp_path / "public"
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    for make in (lambda: None, (tmp_path / "public" / _paths.GRPC_SOCKET).touch):
        make()
        with pytest.raises(PermissionDeniedError, match=f"uid {user}.*TOPKD_SOCKET_DIR"):
            target_directory(None)
    assert target_directory(tmp_path / "public") == tmp_path / "public"  # named: the caller's own decision


@pytest.mark.parametrize(
    ("target", "directory"),
    [
        ("/run/topkd", "/run/topkd"),
        ("unix:/run/topkd", "/run/topkd"),
        (Path("sockets"), "sockets"),
        ("./here:1", "./here:1"),
        ("host:9470", None),
        ("[::1]:9470", None),
        ("10.0.0.1:9470", None),
    ],
)
def test_targets(target: str | Path, directory: str | None) -> None:
    assert target_directory(target) == (Path(directory) if directory else None)


def test_a_server_of_several_devices_has_a_folder_for_each(tmp_path: Path) -> None:
    assert directory_of_device(tmp_path, "GPU-a") == tmp_path
    assert directory_of_device(tmp_path / "absent", "") == tmp_path / "absent"
    (tmp_path / "GPU-a").mkdir()
    (tmp_path / "other").mkdir()
    assert directory_of_device(tmp_path, "") == directory_of_device(tmp_path, "GPU-a") == tmp_path / "GPU-a"
    (tmp_path / "GPU-b").mkdir()
    assert directory_of_device(tmp_path, "GPU-b") == tmp_path / "GPU-b"
    for device in ("", "GPU-c", "CPU"):
        with pytest.raises(ArgumentValueError, match="GPU-a, GPU-b"):
            directory_of_device(tmp_path, device)
    (tmp_path / "cpu-0").mkdir()
    assert directory_of_device(tmp_path, "CPU") == tmp_path / "cpu-0"


def test_a_server_of_one_device_has_none(tmp_path: Path) -> None:
    (tmp_path / "GPU-a").mkdir()
    (tmp_path / _paths.ATTACH_SOCKET).touch()
    assert directory_of_device(tmp_path, "GPU-a") == tmp_path
