"""Host memory that a server can map: sealed memfds."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from typing import Any, Final

import numpy as np

from topkd._arrays import HOST

__all__ = ["HostMemory"]

# linux/fcntl.h; Python 3.11's fcntl module has them as well, but not in every build.
_F_ADD_SEALS: Final = 1033
_F_SEAL_SEAL: Final = 1
_F_SEAL_SHRINK: Final = 2
_F_SEAL_GROW: Final = 4


class HostMemory:
    """A memfd of fixed size, mapped.

    Sealed against shrinking, growing and further seals: neither side can make the other's access fault. The mapping
    lives as long as this object or any array over it.

    Attributes:
        fd: The memfd, for the server.
        size: Bytes.
        address: Of the mapping.
    """

    device: Final = HOST

    __slots__ = ("_bytes", "address", "fd", "size")

    def __init__(self, size: int) -> None:
        self.fd = -1
        self.size = size
        self.fd = os.memfd_create("topkd-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size)
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
        self._bytes: np.ndarray[Any, Any] = np.frombuffer(mmap.mmap(self.fd, size), np.uint8)
        self.address = int(self._bytes.__array_interface__["data"][0])

    def __del__(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self.fd)
