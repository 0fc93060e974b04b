"""Calls of lanes by a kernel of one thread: what a stream needs where memory operations would cost more.

The code comes from the server, which has it compiled for the device that both use; nothing of the compiler is needed
here. Imports `cuda.bindings` when the first of its functions is called.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, Final

from topkd import _mps
from topkd._cuda import CudaMemory, checked, on_device
from topkd._words import SIGNALS_SIZE, offset_of_echo, offset_of_ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from topkd._words import Words

__all__ = ["CallKernel", "Signals", "take_turns"]

_THREADS: Final = 32
_LAUNCHES_EARLY: Final = 9
"""Compute capability from which a kernel can be launched before what is before it has ended; the code waits itself."""

_loaded: Final[dict[tuple[int, bytes], Any]] = {}
"""Kernels by device and code. Never unloaded: that waits for every stream of the process."""


def take_turns(ordinal: int) -> str | None:
    """Returns why kernels of this process and of a server's cannot run side by side on a device; None if they can."""
    from cuda.bindings import driver

    with on_device(ordinal):
        return (
            None
            if _mps.active(driver, ordinal)
            else "this process is not under MPS: its kernels and the server's take turns"
        )


class Signals:
    """Device memory where calls and answers of a session's lanes meet; zeros at first."""

    def __init__(self, ordinal: int) -> None:
        """Raises RegionError if the driver refuses."""
        self._memory = CudaMemory(SIGNALS_SIZE, ordinal)
        self.address = self._memory.address
        self.message = self._memory.share_message
        with on_device(ordinal) as runtime:
            # A stream that nothing ever waits in: another's calls may be under way.
            flags = runtime.cudaStreamNonBlocking
            stream = checked("cudaStreamCreate", runtime.cudaStreamCreateWithFlags(flags))
            checked("cudaMemsetAsync", runtime.cudaMemsetAsync(self.address, 0, self._memory.size, stream))
            checked("cudaStreamSynchronize", runtime.cudaStreamSynchronize(stream))
            runtime.cudaStreamDestroy(stream)


class CallKernel:
    """The kernel that makes and waits for calls, loaded on a device, with a session's words and signals."""

    def __init__(self, code: bytes, name: str, ordinal: int) -> None:
        """Loads the code, unless this process has; waits for streams of the process that wait just now.

        Raises:
            RegionError: The driver refuses it.
        """
        from cuda.bindings import driver

        self._driver = driver
        with on_device(ordinal):
            if (ordinal, code) not in _loaded:
                _loaded[ordinal, code] = _load(driver, code, name)
            major = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            self._early = int(checked("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(major, ordinal)))
        self._function = _loaded[ordinal, code]

    def prepare(self, words: Words, base: int, signals: Signals, slot: int, number: int) -> Callable[[int], None]:
        """Returns what enqueues a lane's call of its plan `number` on a stream: one launch, made ready once.

        Args:
            words: The session's.
            base: Where the page is for the device.
            signals: The session's.
            slot: The lane's line.
            number: Of the plan in the lane's table.
        """
        places = (words.offset_of_done(slot), words.offset_of_end(slot), words.offset_of_slow(slot))
        tickets = (words.offset_of_tickets(slot),)
        own = (offset_of_ticket(slot), offset_of_echo(slot))
        values = (
            base + words.offset_of_ready(slot),
            number,
            *(base + place for place in (*places, *tickets)),
            *(signals.address + place for place in own),
        )
        arguments = (ctypes.c_uint64 * len(values))(*values)
        first = ctypes.addressof(arguments)
        pointers = (ctypes.c_void_p * len(values))(*(first + 8 * at for at in range(len(values))))
        config, function, launch = self._config(), self._function, self._driver.cuLaunchKernelEx

        def enqueue(stream: int, _held: Any = (arguments, pointers)) -> None:
            config.hStream = stream
            checked("cuLaunchKernelEx", launch(config, function, ctypes.addressof(pointers), 0))

        return enqueue

    def _config(self) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX = config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX = _THREADS
        if self._early >= _LAUNCHES_EARLY:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        return config


def _load(driver: Any, code: bytes, name: str) -> Any:
    """Returns the kernel of a binary, with nothing left for its first launch to do."""
    image = ctypes.create_string_buffer(code, len(code))
    module = checked("cuModuleLoadData", driver.cuModuleLoadData(ctypes.addressof(image)))
    function = checked("cuModuleGetFunction", driver.cuModuleGetFunction(module, name.encode()))
    checked("cuFuncLoad", driver.cuFuncLoad(function))
    return function
