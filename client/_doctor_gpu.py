"""The GPU side of `topkd doctor`: driver, devices, MPS, MIG, torch.

libcuda and libnvidia-ml are called by ctypes, so that nothing but the driver has to be installed. This module and
`_doctor_host` read the environment to report it; what the library goes by is read in `_paths` alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from topkd import _contexts, _mps
from topkd._doctor_rules import Facts, Finding, GpuDevice, GpuFacts, TorchFacts, fail, ok, skip, warn
from topkd._gpus import nvml_device, uuid_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["GPU_RULES", "look_at_gpu"]

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_OLDEST_CAPABILITY: Final = 80
_COMPUTE_MODES: Final = {0: "default", 2: "prohibited", 3: "exclusive"}
_OUT_OF_MEMORY: Final = "CUDA_ERROR_OUT_OF_MEMORY"
_NO_GPU: Final = "no NVIDIA GPU on this machine: a server computes on the CPU"


def look_at_gpu() -> tuple[GpuFacts, TorchFacts]:
    """Looks up GPUs, driver, MPS and torch. Imports torch if it is installed."""
    nodes = {
        str(node): os.access(node, os.R_OK | os.W_OK) for node in sorted(Path("/dev").glob("nvidia*")) if _is_used(node)
    }
    driver = ""
    with contextlib.suppress(OSError):
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _DRIVER.read_text())
        driver = match[1] if match else "unknown"
    cuda, error, devices = _ask_cuda()
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    owner = None
    with contextlib.suppress(OSError):
        owner = (Path(pipes) / "control").stat().st_uid
    gpu = GpuFacts(
        present=bool(nodes or driver),
        nodes=nodes,
        driver=driver,
        cuda=cuda,
        error=error,
        devices=devices,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        mps_directory=pipes,
        mps_uid=owner,
        allocator=os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or "",
        segments_shared=os.environ.get("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", ""),
        connections=os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", ""),
    )
    return gpu, _look_at_torch()


def _is_used(node: Path) -> bool:
    """Says whether CUDA opens a device node; the others (nvidia-modeset, caps) may be closed to users."""
    return bool(re.fullmatch(r"nvidia(\d+|ctl|-uvm)", node.name))


def _ask_cuda() -> tuple[int, str, tuple[GpuDevice, ...]]:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return 0, f"libcuda.so.1 cannot be loaded: {error}", ()
    if code := cuda.cuInit(0):
        return 0, f"cuInit fails with {_cuda_error(cuda, code)}", ()
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    return version.value, "", tuple(_describe(cuda, ordinal) for ordinal in range(count.value))


def _cuda_error(cuda: ctypes.CDLL, code: int) -> str:
    name = ctypes.c_char_p()
    if cuda.cuGetErrorName(code, ctypes.byref(name)) or name.value is None:
        return f"error {code}"
    return name.value.decode()


def _describe(cuda: ctypes.CDLL, ordinal: int) -> GpuDevice:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    uuid = uuid_of(cuda, device)
    mig, mode = _ask_nvml(uuid)
    capability, refused = major.value * 10 + minor.value, _try_context(cuda, device)
    return GpuDevice(name.value.decode(), uuid, capability, mig, mode, refused, _contexts.memory_of(uuid))


def _try_context(cuda: ctypes.CDLL, device: ctypes.c_int) -> str:
    """Makes a context and gives it up again; returns the error's name, or "" for none."""
    context = ctypes.c_void_p()
    if code := cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
        return _cuda_error(cuda, code)
    cuda.cuDevicePrimaryCtxRelease_v2(device)
    return ""


def _ask_nvml(uuid: str) -> tuple[bool | None, str]:
    """Returns (MIG mode, compute mode) of a device, (None, "") where NVML does not say."""
    with nvml_device(uuid) as device:
        if device is None:
            return None, ""
        nvml, handle = device
        current, pending, mode = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        has_mig = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending)) == 0
        has_mode = nvml.nvmlDeviceGetComputeMode(handle, ctypes.byref(mode)) == 0
        return has_mig and bool(current.value), _COMPUTE_MODES.get(mode.value, "") if has_mode else ""


def _look_at_torch() -> TorchFacts:
    if importlib.util.find_spec("torch") is None:
        return TorchFacts()
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken install can raise anything, and what it raises is the finding
        return TorchFacts(error=f"{type(error).__name__}: {error}")
    major, _, minor = (torch.version.cuda or "0.0").partition(".")
    cuda = int(major) * 1000 + int(minor.partition(".")[0]) * 10
    return TorchFacts(str(torch.__version__), cuda, torch.cuda.is_available())


def _version(cuda: int) -> str:
    return f"{cuda // 1000}.{cuda % 1000 // 10}"


def driver(facts: Facts) -> Finding:
    """The driver is loaded and libcuda works."""
    rule, gpu = "gpu.driver", facts.gpu
    if gpu.cuda:
        return ok(rule, f"driver {gpu.driver or 'unknown'}, CUDA {_version(gpu.cuda)}")
    if not gpu.present:
        return skip(rule, _NO_GPU)
    return fail(
        rule,
        f"driver {gpu.driver or 'not loaded'}; {gpu.error}",
        "load the NVIDIA driver; in a container, start it with the NVIDIA runtime (--gpus) and the compute capability",
    )


def permissions(facts: Facts) -> Finding:
    """The device nodes can be opened by this user."""
    rule, nodes = "gpu.permissions", facts.gpu.nodes
    if not nodes:
        return skip(rule, _NO_GPU if not facts.gpu.present else "no device nodes in /dev")
    closed = [node for node, opens in nodes.items() if not opens]
    if closed:
        return fail(
            rule,
            f"uid {facts.host.uid} cannot read and write {', '.join(closed)}",
            "add the user to the nodes' group, or give the container these devices",
        )
    return ok(rule, f"{', '.join(nodes)} can be opened")


def devices(facts: Facts) -> Finding:
    """There is a GPU that the kernels run on."""
    rule, gpu = "gpu.devices", facts.gpu
    if not gpu.cuda:
        return skip(rule, "CUDA is not usable here")
    shown = "; ".join(f"{d.name} {d.uuid} (sm_{d.capability})" for d in gpu.devices)
    if not gpu.devices:
        why = f"CUDA_VISIBLE_DEVICES is {gpu.visible!r}" if gpu.visible is not None else "the driver shows none"
        return fail(
            rule, f"no GPU is visible to this process: {why}", "unset CUDA_VISIBLE_DEVICES, or name a GPU in it"
        )
    if all(d.capability < _OLDEST_CAPABILITY for d in gpu.devices):
        return warn(rule, shown, "GPUs older than sm_80 are served by torch alone: exact, slower")
    return ok(rule, shown)


def mig(facts: Facts) -> Finding:
    """MIG does not stand between a client and its server."""
    rule, known = "gpu.mig", [d for d in facts.gpu.devices if d.mig is not None]
    if not known:
        return skip(rule, "no GPU that says")
    if any(d.mig for d in known):
        return warn(
            rule,
            f"MIG is on: {', '.join(d.name for d in known if d.mig)}",
            "CUDA IPC does not cross MIG instances: run a server in the client's own instance (--device MIG-...)",
        )
    return ok(rule, "MIG is off")


def compute_mode(facts: Facts) -> Finding:
    """Several processes may use the GPU."""
    rule, known = "gpu.compute-mode", [d for d in facts.gpu.devices if d.compute_mode]
    if not known:
        return skip(rule, "no GPU that says")
    modes = {d.compute_mode for d in known}
    if "prohibited" in modes or ("exclusive" in modes and facts.gpu.mps_uid is None):
        return fail(
            rule,
            f"compute mode {', '.join(sorted(modes))}: an engine and the server's workers cannot all use the GPU",
            "nvidia-smi -c DEFAULT, or start MPS, which lets processes share an exclusive GPU",
        )
    return ok(rule, f"compute mode {', '.join(sorted(modes))}")


def context(facts: Facts) -> Finding:
    """The GPU gives this process a CUDA context."""
    rule, known = "gpu.context", facts.gpu.devices
    if not known:
        return skip(rule, "no GPU is visible")
    for each in known:
        if each.refused == _OUT_OF_MEMORY:
            meant = _contexts.refusal(each.memory)
            return fail(rule, f"{each.name} {each.uuid} gives no context: {each.refused}, {meant}", _contexts.REMEDY)
        if each.refused:
            remedy = "nvidia-smi says what is wrong with it: another process may hold it, or it needs a reset"
            return fail(rule, f"{each.name} {each.uuid} gives no context: {each.refused}", remedy)
    return ok(rule, f"a context can be made on {'each of them' if len(known) > 1 else 'it'}")


def mps(facts: Facts) -> Finding:
    """MPS, where it runs, is this user's."""
    rule, gpu, uid = "gpu.mps", facts.gpu, facts.host.uid
    if not gpu.cuda and not gpu.present:
        return skip(rule, _NO_GPU)
    if gpu.mps_uid is None:
        return ok(rule, f"no MPS daemon ({gpu.mps_directory}): right, but {_mps.ABSENT}")
    if gpu.mps_uid not in (uid, 0):
        return fail(
            rule,
            f"the MPS daemon of {gpu.mps_directory} is uid {gpu.mps_uid}'s, this process is uid {uid}'s",
            "clients of one MPS server must have one uid: run both as one user, or unset CUDA_MPS_PIPE_DIRECTORY",
        )
    peer = facts.server.peer_uid
    if peer is not None and peer != uid:
        return warn(
            rule,
            f"MPS runs, and the server is uid {peer}'s while this process is uid {uid}'s",
            "clients of one MPS server must have one uid: MPS makes the two take turns. Run both as one user",
        )
    return ok(rule, f"MPS runs ({gpu.mps_directory}): {_mps.PRESENT}")


def allocator(facts: Facts) -> Finding:
    """Torch's allocator makes memory that can be shared."""
    rule = "gpu.allocator"
    if not facts.gpu.cuda:
        return skip(rule, "CUDA is not usable here")
    expandable = re.search(r"expandable_segments\s*:\s*true", facts.gpu.allocator, re.IGNORECASE)
    if expandable and facts.gpu.segments_shared in ("0", "false", "no", "off"):
        return warn(
            rule,
            f"torch's allocator is set to {facts.gpu.allocator}, TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC to "
            f"{facts.gpu.segments_shared}",
            "such segments cannot be shared: unset that variable, or use client.empty for what is shared",
        )
    how = " (expandable segments: by descriptors)" if expandable else ""
    return ok(rule, f"torch's allocator makes memory that can be shared{how}")


def connections(facts: Facts) -> Finding:
    """Streams of a client that wait for selections have hardware queues of their own."""
    rule, gpu = "gpu.connections", facts.gpu
    if not gpu.cuda and not gpu.present:
        return skip(rule, _NO_GPU)
    if gpu.connections.isdecimal() and int(gpu.connections) >= _mps.CONNECTIONS:
        return ok(rule, f"CUDA_DEVICE_MAX_CONNECTIONS is {gpu.connections}")
    found = f"CUDA_DEVICE_MAX_CONNECTIONS is {gpu.connections or 'not set'}"
    remedy = f"set it to {_mps.CONNECTIONS} for engines, before they start CUDA (servers do so themselves)"
    if gpu.mps_uid is None:
        return ok(rule, f"{found}: enough for one or two streams that call; for more, {remedy}")
    return warn(
        rule,
        f"{found}: under MPS the streams of a process share few hardware queues, and one that waits for a selection "
        "holds up the others of its queue",
        remedy,
    )


def torch_install(facts: Facts) -> Finding:
    """Torch is there for a server, and can use the GPU."""
    rule, torch, gpu = "torch", facts.torch, facts.gpu
    if torch.error:
        return fail(rule, f"torch cannot be imported: {torch.error}", "install torch anew")
    if not torch.version:
        return warn(
            rule,
            "torch is not installed",
            "a client with numpy arrays needs none, a server does: pip install 'topkd[server]'",
        )
    built = f"torch {torch.version}" + (f", built for CUDA {_version(torch.cuda)}" if torch.cuda else ", a CPU build")
    if not gpu.devices:
        return ok(rule, built)
    if torch.available:
        return ok(rule, f"{built}, can use the GPU")
    if not torch.cuda:
        return fail(rule, f"{built}, on a machine with a GPU", "install a CUDA build of torch")
    older = f", and the driver supports CUDA {_version(gpu.cuda)}" if gpu.cuda < torch.cuda else ""
    return fail(rule, f"{built}, cannot use the GPU{older}", "update the driver, or install torch for an older CUDA")


GPU_RULES: Final[tuple[Callable[[Facts], Finding], ...]] = (
    driver,
    permissions,
    devices,
    mig,
    compute_mode,
    context,
    mps,
    connections,
    allocator,
    torch_install,
)
