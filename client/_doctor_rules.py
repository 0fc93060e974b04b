"""What the rules of `topkd doctor` share: what is looked up, and what a rule says."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topkd._contexts import Memory

__all__ = [
    "Facts",
    "Finding",
    "GpuDevice",
    "GpuFacts",
    "HostFacts",
    "ServerFacts",
    "State",
    "TorchFacts",
    "fail",
    "ok",
    "skip",
    "warn",
]


class State(enum.Enum):
    """What a rule found."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's answer.

    Attributes:
        rule: The rule's name.
        state: How it stands.
        finding: What was found.
        remedy: What to do; "" where nothing is to be done.
    """

    rule: str
    state: State
    finding: str
    remedy: str = ""


def ok(rule: str, finding: str) -> Finding:
    """All is well."""
    return Finding(rule, State.OK, finding)


def skip(rule: str, finding: str) -> Finding:
    """The rule says nothing here."""
    return Finding(rule, State.SKIP, finding)


def warn(rule: str, finding: str, remedy: str) -> Finding:
    """It works, or may not in a case that the finding names."""
    return Finding(rule, State.WARN, finding, remedy)


def fail(rule: str, finding: str, remedy: str) -> Finding:
    """It cannot work."""
    return Finding(rule, State.FAIL, finding, remedy)


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A GPU that this process can see.

    Attributes:
        name: Model.
        uuid: "GPU-...".
        capability: Compute capability times ten: 90 is 9.0.
        mig: Whether MIG mode is on; None if unknown.
        compute_mode: "default", "exclusive" or "prohibited"; "" if unknown.
        refused: Why it gave this process no CUDA context, by the error's name; "" if it gave one.
        memory: Its memory; None if unknown.
    """

    name: str
    uuid: str
    capability: int
    mig: bool | None = None
    compute_mode: str = ""
    refused: str = ""
    memory: Memory | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The GPUs and their driver.

    Attributes:
        present: Whether the kernel module or a device node of NVIDIA's is there.
        nodes: Device nodes of NVIDIA's, and whether this user can read and write each.
        driver: Version of the kernel driver, "" if unknown.
        cuda: CUDA version that libcuda supports times 1000 (13000 is 13.0), 0 if libcuda cannot be used.
        error: Why libcuda cannot be used, "" if it can.
        devices: Devices that CUDA shows to this process.
        visible: CUDA_VISIBLE_DEVICES, None if it is not set.
        mps_directory: MPS's pipe directory.
        mps_uid: Owner of MPS's control pipe, None where no MPS daemon runs.
        allocator: torch's allocator settings from the environment.
        segments_shared: TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC, which can keep them from being shared; "" if not set.
        connections: CUDA_DEVICE_MAX_CONNECTIONS, "" if not set.
    """

    present: bool = False
    nodes: dict[str, bool] = field(default_factory=dict)
    driver: str = ""
    cuda: int = 0
    error: str = ""
    devices: tuple[GpuDevice, ...] = ()
    visible: str | None = None
    mps_directory: str = ""
    mps_uid: int | None = None
    allocator: str = ""
    segments_shared: str = ""
    connections: str = ""


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """The torch of this environment.

    Attributes:
        version: "" if it is not installed.
        cuda: CUDA version that it was built for times 1000, 0 for a CPU build.
        available: Whether it can use a GPU.
        error: Why it cannot be imported, "" if it can.
    """

    version: str = ""
    cuda: int = 0
    available: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """This process and its host.

    Attributes:
        uid: Effective user.
        pid: Process number in its own PID namespace.
        versions: Versions of the packages, None for one that is not installed.
        shm_free: Free bytes of /dev/shm, None if it cannot be written.
        memfd_error: Why a sealed memfd cannot be made, "" if it can.
        open_files: Soft limit of open files.
    """

    uid: int = 0
    pid: int = 0
    versions: dict[str, str | None] = field(default_factory=dict)
    shm_free: int | None = None
    memfd_error: str = ""
    open_files: int = 0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The server that a client here would use.

    Attributes:
        directory: Socket directory, "" for a TCP target.
        target: What was asked for, for people.
        directory_error: Why the directory cannot be used by a client, "" if it can.
        folders: Those of it that hold a device's server each, if it has several and none was named.
        unsafe: What is unsafe about the directory, "" if nothing is.
        socket_error: Why the side socket cannot be connected, "" if it can.
        socket_missing: Whether the side socket is not there at all.
        peer_uid: User of the server, None if not connected.
        peer_pid: Its process number in this PID namespace, 0 if it is in none that is visible here.
        same_pids: Whether the server counts processes in this process's PID namespace; None if unknown.
        health: Answer of the health service, "" if it was not asked.
        health_detail: What there is to say about it.
        attach_error: Why a session cannot be opened, "" if it can.
        version: The server's version, "" if unknown.
        backend: "cpu" or "cuda", "" if unknown.
        device_uuid: The server's device.
    """

    directory: str = ""
    target: str = ""
    directory_error: str = ""
    folders: tuple[str, ...] = ()
    unsafe: str = ""
    socket_error: str = ""
    socket_missing: bool = False
    peer_uid: int | None = None
    peer_pid: int = 0
    same_pids: bool | None = None
    health: str = ""
    health_detail: str = ""
    attach_error: str = ""
    version: str = ""
    backend: str = ""
    device_uuid: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was looked up."""

    gpu: GpuFacts = field(default_factory=GpuFacts)
    torch: TorchFacts = field(default_factory=TorchFacts)
    host: HostFacts = field(default_factory=HostFacts)
    server: ServerFacts = field(default_factory=ServerFacts)
