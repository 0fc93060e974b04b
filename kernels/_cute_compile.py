"""Host side of kernels in CuTe DSL: what is installed, names of architectures, and compiling one variant at a time.

Nothing here imports cutlass before something is compiled; a GPU is not needed to compile.
"""

import functools
import importlib
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

import torch

_COMPILING = threading.Lock()
"""The compiler is one per process and not made for threads; all families share this lock."""

_LOADED: list[Any] = []
"""Everything compiled. Dropping one would unload its code, which waits for every blocked stream of the process."""

_ACCELERATED = frozenset({(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)})
"""Compute capabilities whose code is built with the architecture's own features (sm_90a)."""


@functools.cache
def installed() -> bool:
    """Say whether the CuTe DSL and its launcher are installed, without importing them."""
    return all(importlib.util.find_spec(name) is not None for name in ("cutlass", "tvm_ffi"))


@functools.cache
def capability(index: int) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(index)


def arch_of(capability: tuple[int, int]) -> str:
    """Return the compiler's name of a compute capability, such as "sm_90a"."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if capability in _ACCELERATED else "")


def device_index(device: torch.device) -> int:
    """Return the number of a CUDA device; "cuda" alone is the current one."""
    index: Any = device.index  # torch's stub leaves out that it may be None
    return torch.cuda.current_device() if index is None else int(index)


def compile_kernel(module: str, name: str, facts: tuple[Any, ...], arch: str, options: str = "") -> Callable[..., None]:
    """Compile one variant of a kernel whose launcher takes Int64s, then Int32s, then a stream.

    Args:
        module: device module of this package, such as "radix_wide_kernel".
        name: its kernel class; `WIDE_ARGUMENTS` and `NARROW_ARGUMENTS` are how many of each its launcher takes.
        facts: compile-time facts, arguments of the class.
        arch: as from `arch_of`.
        options: further options of the compiler.

    Returns:
        A function of the arguments as ints and the stream's handle, launching on the current CUDA device.
    """
    with _COMPILING:
        cutlass = importlib.import_module("cutlass")
        cute = importlib.import_module("cutlass.cute")
        runtime = importlib.import_module("cutlass.cute.runtime")
        kernel = getattr(importlib.import_module(f".{module}", __package__), name)
        wide = [cutlass.Int64(0)] * kernel.WIDE_ARGUMENTS
        narrow = [cutlass.Int32(1)] * kernel.NARROW_ARGUMENTS
        stream = runtime.make_fake_stream()
        text = f"--enable-tvm-ffi --gpu-arch {arch} {options}"
        compiled = cute.compile(kernel(*facts), *wide, *narrow, stream, options=text)
        _LOADED.append(compiled)
    # The object itself wraps the call for keyword arguments; the function inside takes positions only and is faster.
    function: Callable[..., None] = getattr(compiled, "_tvm_ffi_function", None) or compiled
    return function
