"""The host side of `topkd doctor`: packages, shared memory, sockets, PID namespaces, the server itself."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import socket
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from topkd._doctor_rules import Facts, Finding, HostFacts, ServerFacts, fail, ok, skip, warn
from topkd._paths import ATTACH_SOCKET

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

__all__ = ["HOST_RULES", "look_at_host"]

_PACKAGES: Final = ("topkd", "grpcio", "protobuf", "numpy")
_LITTLE_SHM: Final = 64 << 20
_FEW_FILES: Final = 1024


def look_at_host(args: argparse.Namespace) -> tuple[HostFacts, ServerFacts]:
    """Looks up this process, its host, and the server that `args` names. Opens and ends a session if one is offered."""
    host = HostFacts(
        uid=os.geteuid(),
        pid=os.getpid(),
        versions={name: _installed(name) for name in _PACKAGES},
        shm_free=_shm_free(),
        memfd_error=_memfd_error(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
    return host, ServerFacts(**_look_at_server(args))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _shm_free() -> int | None:
    if not os.access("/dev/shm", os.W_OK | os.X_OK):
        return None
    info = os.statvfs("/dev/shm")
    return info.f_bavail * info.f_frsize


def _memfd_error() -> str:
    from topkd._memory import HostMemory

    try:
        HostMemory(4096)
    except (OSError, AttributeError) as error:
        return str(error)
    return ""


def _look_at_server(args: argparse.Namespace) -> dict[str, Any]:
    from topkd._cli_info import health_status
    from topkd._options import directory_of_device, target_directory
    from topkd._paths import device_directories, find_socket_dir
    from topkd.errors import ArgumentValueError, PermissionDeniedError

    try:
        directory = target_directory(args.target)
    except PermissionDeniedError as refusal:
        found = str(find_socket_dir())
        return {"target": found, "directory": found, "directory_error": str(refusal)}
    facts: dict[str, Any] = {"target": str(directory or args.target)}
    if directory is not None:
        try:
            directory = directory_of_device(directory, "")
        except ArgumentValueError:
            folders = tuple(device_directories(directory))
            error = f"has servers of several devices: {', '.join(folders)}"
            return facts | {"directory": str(directory), "directory_error": error, "folders": folders}
        facts |= {"directory": str(directory), **_look_at_directory(directory)}
        if facts["directory_error"] or facts["socket_error"]:
            return facts
    facts["health"], facts["health_detail"] = health_status(args)
    if facts["health"] == "SERVING":
        facts |= _attach(args)
    return facts


def _look_at_directory(directory: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"directory_error": "", "socket_error": ""}
    try:
        info = directory.lstat()
    except OSError as error:
        return facts | {"directory_error": f"{error.strerror}"}
    if not stat.S_ISDIR(info.st_mode):
        return facts | {"directory_error": "not a directory"}
    if info.st_mode & 0o022:
        facts["unsafe"] = f"mode {stat.S_IMODE(info.st_mode):04o}: others can write to it and replace the sockets"
    if not os.access(directory, os.X_OK):
        facts["directory_error"] = (
            f"closed to uid {os.geteuid()}: {stat.filemode(info.st_mode)}, uid {info.st_uid}, gid {info.st_gid}"
        )
        return facts
    return facts | _look_at_socket(directory / ATTACH_SOCKET)


def _look_at_socket(path: Path) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(5)
        try:
            connection.connect(str(path))
        except OSError as error:
            return {"socket_error": error.strerror or str(error), "socket_missing": not path.exists()}
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    return {"peer_uid": uid, "peer_pid": pid, "same_pids": _same_pids(pid)}


def _same_pids(pid: int) -> bool | None:
    """Says whether a process counts processes as this one does."""
    if pid == 0:
        return False  # it is in no PID namespace that can be seen from here
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/ns/pid").readlink() == Path("/proc/self/ns/pid").readlink()
    with contextlib.suppress(OSError):
        # The link needs the right to trace the process, its numbers do not: one for each namespace that it is in.
        numbers = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("NSpid:")]
        return len(numbers[0].split()) == 2 if numbers else None
    return None


def _attach(args: argparse.Namespace) -> dict[str, Any]:
    from topkd._cli_common import CommandError, connect
    from topkd.errors import TopkdError

    try:
        with connect(args) as client:
            info = client.info()
    except (CommandError, TopkdError) as error:
        return {"attach_error": str(error)}
    return {"version": info.version, "backend": info.device.backend.value, "device_uuid": info.device.uuid}


def packages(facts: Facts) -> Finding:
    """The packages are there."""
    versions = facts.host.versions
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return fail("packages", f"not installed: {', '.join(missing)}", "pip install topkd")
    return ok("packages", ", ".join(f"{name} {version}" for name, version in versions.items()))


def memfd(facts: Facts) -> Finding:
    """Host memory can be shared: sealed memfds."""
    if facts.host.memfd_error:
        return fail(
            "host.memfd",
            f"a sealed memfd cannot be made: {facts.host.memfd_error}",
            "allow memfd_create and F_ADD_SEALS (a seccomp profile may forbid them; Linux 3.17 or newer)",
        )
    return ok("host.memfd", "sealed memfds can be made")


def shm(facts: Facts) -> Finding:
    """/dev/shm is there and has room."""
    free = facts.host.shm_free
    remedy = "give the container a larger one (--shm-size=1g; an emptyDir of medium Memory at /dev/shm)"
    if free is None:
        return warn("host.shm", "/dev/shm cannot be written", remedy)
    if free < _LITTLE_SHM:
        return warn("host.shm", f"/dev/shm has {free >> 20} MiB free; CUDA and torch keep shared state there", remedy)
    return ok("host.shm", f"/dev/shm has {free >> 20} MiB free")


def open_files(facts: Facts) -> Finding:
    """A process may open enough files."""
    limit = facts.host.open_files
    if 0 <= limit < _FEW_FILES:
        return warn(
            "host.open-files",
            f"a process may open {limit} files; every region takes one",
            f"ulimit -n {_FEW_FILES} or more",
        )
    return ok("host.open-files", f"a process may open {limit} files" if limit >= 0 else "no limit of open files")


def directory(facts: Facts) -> Finding:
    """The socket directory is there, open to this user and safe."""
    rule, server = "socket.directory", facts.server
    if not server.directory:
        return skip(rule, f"the target is {server.target}")
    if server.folders:
        found = f"{server.directory} {server.directory_error}"
        return fail(rule, found, f"name one: topkd doctor --target {server.directory}/{server.folders[0]}")
    if server.directory_error:
        return fail(
            rule,
            f"{server.directory}: {server.directory_error}",
            "start a server there, or name or mount its directory (--target, TOPKD_SOCKET_DIR); its group may enter",
        )
    if server.unsafe:
        return fail(rule, f"{server.directory}: {server.unsafe}", f"chmod 0750 {server.directory}, or take another")
    return ok(rule, server.directory)


def side_socket(facts: Facts) -> Finding:
    """The side socket accepts."""
    rule, server = "socket.attach", facts.server
    if not server.directory or server.directory_error:
        return skip(rule, "no socket directory")
    if server.socket_missing:
        return fail(rule, f"no {ATTACH_SOCKET} in {server.directory}: no server runs there", "topkd serve")
    if server.socket_error:
        return fail(
            rule,
            f"{ATTACH_SOCKET} in {server.directory}: {server.socket_error}",
            "refused: the server is gone, start it anew; denied: run as a user of the socket's group",
        )
    return ok(rule, f"connected to uid {server.peer_uid}, pid {server.peer_pid}")


def pid_namespaces(facts: Facts) -> Finding:
    """Client and server cannot have the same process number, which CUDA IPC takes for the same process."""
    rule, server = "ipc.pid-collision", facts.server
    if server.peer_uid is None:
        return skip(rule, "no server on this host")
    if server.same_pids:
        return ok(rule, "client and server share a PID namespace: their process numbers differ")
    which = "may be" if server.same_pids is None else "are"
    finding = f"client and server {which} in different PID namespaces"
    if server.backend == "cpu":
        return ok(rule, f"{finding}; the CPU backend does not mind")
    return warn(
        rule,
        f"{finding}: a worker with this process's number ({facts.host.pid}) could not open its CUDA IPC handles",
        "share one: docker run --pid=host or --pid=container:NAME; in Kubernetes shareProcessNamespace or hostPID",
    )


def health(facts: Facts) -> Finding:
    """The server is ready."""
    rule, server = "server.health", facts.server
    if not server.health:
        return skip(rule, "no server to ask")
    if server.health == "SERVING":
        return ok(rule, "SERVING")
    detail = f"{server.health}{': ' + server.health_detail if server.health_detail else ''}"
    return fail(
        rule, detail, "NOT_SERVING: it starts or drains, read its log; UNREACHABLE: check address, port and TLS"
    )


def session(facts: Facts) -> Finding:
    """The server lets this process attach, and is of this version."""
    rule, server = "server.session", facts.server
    if server.attach_error:
        return fail(
            rule,
            server.attach_error,
            "see the message; --allow-uid and --allow-gid of topkd serve admit users and groups",
        )
    if not server.version:
        return skip(rule, "no server that serves")
    mine = facts.host.versions.get("topkd")
    if server.version != mine:
        return warn(rule, f"the server is topkd {server.version}, the client {mine}", "use one version where you can")
    return ok(rule, f"a session can be opened; the server is topkd {server.version}, backend {server.backend}")


def device(facts: Facts) -> Finding:
    """The server's GPU is visible here."""
    rule, server = "server.device", facts.server
    if server.backend != "cuda":
        return skip(rule, "the server's device is the CPU" if server.backend else "no server that serves")
    if any(d.uuid == server.device_uuid for d in facts.gpu.devices):
        return ok(rule, f"{server.device_uuid} is visible to this process")
    return fail(
        rule,
        f"the server's {server.device_uuid} is not visible to this process",
        "show it to the process (CUDA_VISIBLE_DEVICES, --gpus), or use the server of the process's own GPU",
    )


HOST_RULES: Final[tuple[Callable[[Facts], Finding], ...]] = (
    packages,
    memfd,
    shm,
    open_files,
    directory,
    side_socket,
    health,
    session,
    device,
    pid_namespaces,
)
