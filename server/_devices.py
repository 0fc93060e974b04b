"""Which devices a server of several has a front for.

CUDA is asked in a process of its own (`python -m topkd.server._devices`), so that the one that asks stays free of it.
"""

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass

from topkd._gpus import uuid_of

from .config import ConfigError

__all__ = ["FleetDevice", "asked_cuda", "find_devices", "visible_gpus"]

_PROBE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class FleetDevice:
    """One of several devices.

    Attributes:
        name: a GPU's UUID, or "cpu-N": its directory of sockets, its label in metrics, its name in health checks.
        device: the option of the front that serves it.
    """

    name: str
    device: str


def find_devices(devices: str) -> list[FleetDevice]:
    """Returns the devices that the option `devices` means. Blocks while CUDA starts.

    Raises:
        ConfigError: there is no such device, or one is named twice.
    """
    if devices.startswith("cpu:"):
        return [FleetDevice(f"cpu-{index}", "cpu") for index in range(int(devices[4:]))]
    names = devices.split(",")
    uuids = visible_gpus() if devices == "all" or any(name.startswith("cuda:") for name in names) else []
    if devices == "all":
        if not uuids:
            raise ConfigError("devices is 'all', but CUDA shows no GPU to this process; cpu:1 serves on the CPU")
        names = uuids
    found: list[FleetDevice] = []
    for name in names:
        uuid = name
        if name.startswith("cuda:"):
            index = int(name[5:])
            if index >= len(uuids):
                raise ConfigError(f"devices names {name!r}, but CUDA shows {len(uuids)} GPUs to this process")
            uuid = uuids[index]
        if any(other.name == uuid for other in found):
            raise ConfigError(f"devices is {devices!r}, which names {uuid} twice")
        found.append(FleetDevice(uuid, uuid))
    return found


def visible_gpus() -> list[str]:
    """Returns the UUIDs of the GPUs that CUDA shows to this process's children, in the order of the bus.

    Raises:
        ConfigError: CUDA does not answer.
    """
    command = [sys.executable, "-m", "topkd.server._devices"]
    environ = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ}
    try:
        asked = subprocess.run(command, capture_output=True, check=True, timeout=_PROBE_TIMEOUT_S, env=environ)
        return [str(uuid) for uuid in json.loads(asked.stdout)]
    except subprocess.TimeoutExpired:
        raise ConfigError(f"CUDA did not say within {_PROBE_TIMEOUT_S:g} s which GPUs there are") from None
    except (subprocess.CalledProcessError, ValueError) as error:
        detail = getattr(error, "stderr", b"").decode(errors="replace").strip().splitlines()
        raise ConfigError(f"CUDA cannot be asked which GPUs there are: {detail[-1] if detail else error}") from None


def asked_cuda() -> list[str]:
    """Returns the UUIDs of the GPUs that this process's libcuda shows, without making a context; no GPU is no error."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_uuid(cuda, ordinal) for ordinal in range(count.value)]


def _uuid(cuda: ctypes.CDLL, ordinal: int) -> str:
    device = ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    return uuid_of(cuda, device)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asked_cuda()))
