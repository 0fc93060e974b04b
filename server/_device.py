"""Which device a worker runs on."""

import os

from topkd import _contexts, _mps

from ._devices import asked_cuda
from ._memory import Backend

__all__ = ["DeviceError", "open_backend"]


class DeviceError(RuntimeError):
    """The device asked for cannot be used."""


def select_device(device: str) -> None:
    """Narrows what CUDA will show this process to the device asked for; must come before CUDA starts."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", str(_mps.CONNECTIONS))
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if device.startswith(("GPU-", "MIG-")):
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    elif device in ("cuda", "auto") or device.startswith("cuda:"):
        index = int(device.partition(":")[2] or 0)
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        if visible and index >= len(visible):
            raise DeviceError(f"device is {device!r}; CUDA_VISIBLE_DEVICES shows {len(visible)} devices")
        if visible or device.startswith("cuda:"):
            os.environ["CUDA_VISIBLE_DEVICES"] = visible[index] if visible else str(index)


def open_backend(device: str, cpu_threads: int | None) -> Backend:
    """Opens the backend of a device option.

    Raises:
        DeviceError: there is no such device, or CUDA cannot start.
    """
    if device != "cpu":
        select_device(device)
        import torch

        if torch.cuda.is_available() and torch.cuda.device_count():
            return _open_cuda(device)
        if device != "auto":
            raise DeviceError(f"device is {device!r}, but CUDA shows no such device to this process")
    from ._memory_host import HostBackend

    return HostBackend(cpu_threads)


def _open_cuda(device: str) -> Backend:
    try:
        from ._memory_cuda import CudaBackend

        backend = CudaBackend()
        backend.enter_thread()
    except (ImportError, RuntimeError) as error:
        raise DeviceError(f"device {device!r} cannot be used: {_why(error)}") from error
    return backend


def _why(error: Exception) -> str:
    """Words why CUDA cannot start. Of "out of memory" it says how much there is: contexts can be too many as well."""
    text = str(error)
    if "out of memory" not in text:
        return text
    uuids = asked_cuda()
    meant = _contexts.refusal(_contexts.memory_of(uuids[0]) if uuids else None)
    return f"{text.splitlines()[0]}, {meant}; {_contexts.REMEDY}"
