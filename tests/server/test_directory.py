import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from topkd.server._directory import DirectoryError, SocketDirectory, worker_socket_name


def test_is_made_with_its_mode(short_dir: Path) -> None:
    with SocketDirectory(short_dir / "a" / "b"):
        assert stat.S_IMODE((short_dir / "a" / "b").stat().st_mode) == 0o750


def test_group_is_inherited_by_sockets(short_dir: Path) -> None:
    with SocketDirectory(short_dir / "d", group=os.getegid()) as directory:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o2750


@pytest.mark.parametrize("mode", [0o770, 0o752, 0o777])
def test_writable_by_others_is_refused(short_dir: Path, mode: int) -> None:
    (short_dir / "d").mkdir()
    (short_dir / "d").chmod(mode)
    with pytest.raises(DirectoryError, match="others can write"):
        SocketDirectory(short_dir / "d")


def test_readable_by_others_is_tightened(short_dir: Path) -> None:
    (short_dir / "d").mkdir(mode=0o755)
    with SocketDirectory(short_dir / "d"):
        assert stat.S_IMODE((short_dir / "d").stat().st_mode) == 0o750


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_of_another_owner_is_refused(short_dir: Path) -> None:
    (short_dir / "d").mkdir()
    os.chown(short_dir / "d", 12345, -1)
    with pytest.raises(DirectoryError, match="belongs to uid 12345"):
        SocketDirectory(short_dir / "d")


def test_symbolic_link_is_refused(short_dir: Path) -> None:
    (short_dir / "d").mkdir(mode=0o750)
    (short_dir / "link").symlink_to(short_dir / "d")
    with pytest.raises(DirectoryError, match="symbolic links"):
        SocketDirectory(short_dir / "link")


def test_second_server_is_refused_and_named(short_dir: Path) -> None:
    with SocketDirectory(short_dir / "d"), pytest.raises(DirectoryError, match=f"pid {os.getpid()}"):
        SocketDirectory(short_dir / "d")
    SocketDirectory(short_dir / "d").close()


def test_stale_lock_and_sockets_are_replaced(short_dir: Path) -> None:
    path = short_dir / "d"
    script = "import sys, os; from topkd.server._directory import SocketDirectory; from pathlib import Path;"
    script += "SocketDirectory(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script, str(path)], check=False)
    stale = [path / "attach.sock", path / worker_socket_name()]
    for name in stale:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(name))
    (path / "w-note").write_text("not a socket")
    with SocketDirectory(path):
        assert not any(name.exists() for name in stale)
    assert (path / "w-note").exists()


def test_close_removes_sockets(short_dir: Path) -> None:
    directory = SocketDirectory(short_dir / "d")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(directory.socket_path("grpc.sock"))
        directory.publish("grpc.sock")
        assert stat.S_IMODE((directory.path / "grpc.sock").stat().st_mode) == 0o660
    directory.close()
    directory.close()
    assert [entry.name for entry in directory.path.iterdir()] == ["lock"]
