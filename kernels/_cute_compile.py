"""Host side of kernels in CuTe DSL: what is installed, names of architectures, and compiling one variant at a time.

What was compiled once is loaded from the cache (`_cute_cache`). Nothing here imports cutlass before something is
compiled; a GPU is not needed to compile.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ._cute_cache import Entry, Store, open_store, warn_once
from ._cute_key import Variant, key_of
from ._cute_kit import read_kit
from ._cute_link import SYMBOL, LinkError, link, load
from ._errors import KernelUnavailableError

_COMPILING = threading.Lock()
"""The compiler is one per process and not made for threads; all families share this lock."""

_LOADED: list[Any] = []
"""Everything compiled. Dropping one would unload its code, which waits for every blocked stream of the process."""

_COUNTS: Counter[tuple[str, str]] = Counter()
_FAILURES: dict[str, str] = {}
_WATCHERS: list[Callable[["Made"], None]] = []
_PRETENDED: ContextVar[tuple[int, int] | None] = ContextVar("topkd_capability", default=None)

_ACCELERATED = frozenset({(9, 0), (10, 0), (10, 3), (12, 0), (12, 1)})
"""Compute capabilities whose code is built with the architecture's own features (sm_90a)."""

_LAUNCH_FACTS = ("threads", "shared_bytes", "cluster")
"""Attributes of a kernel, where it has them, that a host may want without importing the compiler."""


class Made(NamedTuple):
    """A variant that is ready, and how it became so."""

    variant: Variant
    function: Callable[..., None]  # of the arguments as ints and the stream's handle
    binary: bytes  # code for the GPU
    launch: dict[str, int]  # see `_LAUNCH_FACTS`
    source: str  # "compiled" or "cache"
    seconds: float
    size: int  # bytes of the entry, 0 if there is none


class _Compiled(NamedTuple):
    """What the compiler made."""

    function: Callable[..., None]
    compiled: bytes  # object file; empty if it could not be exported
    binary: bytes
    launch: dict[str, int]


@contextmanager
def pretending(capability: tuple[int, int]) -> Iterator[None]:
    """Let every CUDA device have a compute capability, and the compiler be installed, for what this thread asks."""
    token = _PRETENDED.set(capability)
    try:
        yield
    finally:
        _PRETENDED.reset(token)


def installed() -> bool:
    """Say whether the launcher is installed, and the CuTe DSL or a kit in its place, without importing them."""
    return _PRETENDED.get() is not None or _installed()


@functools.cache
def compiler_installed() -> bool:
    """Say whether the CuTe DSL is installed, without importing it."""
    return importlib.util.find_spec("cutlass") is not None


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("tvm_ffi") is not None and (compiler_installed() or read_kit() is not None)


def capability(index: int) -> tuple[int, int]:
    """Return the compute capability of a CUDA device."""
    return _PRETENDED.get() or _capability(index)


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def arch_of(capability: tuple[int, int]) -> str:
    """Return the compiler's name of a compute capability, such as "sm_90a"."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if capability in _ACCELERATED else "")


def device_index(device: torch.device) -> int:
    """Return the number of a CUDA device; "cuda" alone is the current one."""
    index: Any = device.index  # torch's stub leaves out that it may be None
    return torch.cuda.current_device() if index is None else int(index)


@functools.cache
def processors(index: int) -> int:
    """Return the number of multiprocessors of a CUDA device."""
    count: int = torch.cuda.get_device_properties(index).multi_processor_count
    return count


def unmet_device(name: str, device: torch.device, oldest: tuple[int, int], where: str = "input is on") -> str | None:
    """Return the first condition that keeps a compiled family from running on a device at all, or None.

    Args:
        name: the family.
        device: of the request's scores, which `where` speaks of.
        oldest: the lowest compute capability that the family runs on.
        where: words between the condition and the device.
    """
    if device.type != "cuda":
        return f"{name} needs a CUDA device, {where} {device}"
    if not installed():
        return f"{name} needs the packages nvidia-cutlass-dsl and apache-tvm-ffi"
    found = capability(device_index(device))
    if found < oldest:
        return f"{name} needs compute capability {'.'.join(map(str, oldest))}, {device} has {'.'.join(map(str, found))}"
    return None


def compiles() -> dict[tuple[str, str], int]:
    """Return how many variants this process made ready, by family and by source: "compiled" or "cache"."""
    return dict(_COUNTS)


@contextmanager
def watch(see: Callable[[Made], None]) -> Iterator[None]:
    """Call `see` with every variant that becomes ready meanwhile, in any thread."""
    _WATCHERS.append(see)
    try:
        yield
    finally:
        _WATCHERS.remove(see)


def compile_kernel(module: str, name: str, facts: tuple[Any, ...], arch: str, options: str = "") -> Callable[..., None]:
    """Compile one variant anew, past the cache, and return its launcher; arguments as `load_or_compile`'s.

    For the files that the compiler keeps on request (`--keep-ptx --dump-dir=...`).
    """
    with _COMPILING:
        return _compile(Variant(module, name, facts, arch, options)).function


def load_or_compile(module: str, name: str, facts: tuple[Any, ...], arch: str, options: str = "") -> Made:
    """Make one variant ready whose launcher takes Int64s, then Int32s, then a stream: from the cache, or by compiling.

    Args:
        module: device module of this package, such as "radix_wide_kernel".
        name: its kernel class; `WIDE_ARGUMENTS` and `NARROW_ARGUMENTS` are how many of each its launcher takes.
        facts: compile-time facts, arguments of the class: strings, numbers and booleans.
        arch: as from `arch_of`.
        options: further options of the compiler, which must not name files.

    Returns:
        The variant; its launcher launches on the current CUDA device, and lives as long as the process.

    Raises:
        KernelUnavailableError: the compiler cannot be imported, or failed; `failure` says so from now on.
    """
    variant, started = Variant(module, name, facts, arch, options), time.perf_counter()
    with _COMPILING:
        try:
            made = _find_or_make(variant, started)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:500]
            _FAILURES[variant.family] = text
            raise KernelUnavailableError(f"kernel family {variant.family!r} has no code: {text}") from error
        _COUNTS[variant.family, made.source] += 1
    for see in tuple(_WATCHERS):
        see(made)
    return made


def failure(family: str) -> str | None:
    """Return why a family has no code in this process, or None if nothing has failed."""
    return _FAILURES.get(family)


def failures() -> dict[str, str]:
    """Return the families that have no code in this process, and why."""
    return dict(_FAILURES)


def failure_count() -> int:
    """Return how many families have no code in this process."""
    return len(_FAILURES)


def _find_or_make(variant: Variant, started: float) -> Made:
    """Load a variant from the cache, or compile it into the cache while other processes wait for it."""
    try:
        key = key_of(variant)
    except importlib.metadata.PackageNotFoundError as error:
        warn_once(f"compiled kernels are not kept: the version of {error.name} is unknown")
        return _made(variant, _compile(variant), None, started)
    store = open_store()
    made = _load(variant, store.find(variant, key), started)
    if made is not None:
        return made
    with store.lock(variant, key) as locked:
        # Whoever held the lock has stored it by now; without a lock there was nobody to wait for.
        made = _load(variant, store.find(variant, key), started) if locked else None
        if made is None:
            compiled = _compile(variant)
            made = _made(variant, compiled, _keep(store, variant, key, compiled), started)
    return made


def _load(variant: Variant, entry: Entry | None, started: float) -> Made | None:
    """Load an entry; None without one, or if it cannot be loaded here."""
    if entry is None:
        return None
    try:
        function = load(entry.path)
    except Exception as error:  # noqa: BLE001  # whatever it is, the kernel can still be compiled
        warn_once(f"{entry.path} cannot be loaded and is compiled anew: {error}")
        return None
    seconds = time.perf_counter() - started
    return Made(variant, function, entry.binary, entry.header["launch"], "cache", seconds, entry.size)


def _keep(store: Store, variant: Variant, key: str, compiled: _Compiled) -> Entry | None:
    """Store what was compiled, if it can be linked and written; a failure costs the next process a compile."""
    if store.directory is None:
        return None
    try:
        library = link(compiled.compiled)
    except LinkError as error:
        warn_once(f"compiled kernels are not kept: {error}")
        return None
    return store.store(variant, key, library, compiled.binary, compiled.launch)


def _made(variant: Variant, compiled: _Compiled, entry: Entry | None, started: float) -> Made:
    """Say that a variant was compiled."""
    seconds, size = time.perf_counter() - started, 0 if entry is None else entry.size
    return Made(variant, compiled.function, compiled.binary, compiled.launch, "compiled", seconds, size)


def _compile(variant: Variant) -> _Compiled:
    """Compile a variant; the caller holds `_COMPILING`. With options of its own there is no binary and no object."""
    with warnings.catch_warnings():
        # The compiler warns of its own deprecations; where warnings are errors, no kernel would compile.
        warnings.simplefilter("ignore")
        return _compile_quietly(variant)


def _compile_quietly(variant: Variant) -> _Compiled:
    """Compile for `_compile`."""
    cutlass = importlib.import_module("cutlass")
    cute = importlib.import_module("cutlass.cute")
    runtime = importlib.import_module("cutlass.cute.runtime")
    kernel = getattr(importlib.import_module(f".{variant.module}", __package__), variant.name)
    instance = kernel(*variant.facts)
    launch = {name: getattr(instance, name) for name in _LAUNCH_FACTS if isinstance(getattr(instance, name, None), int)}
    wide = [cutlass.Int64(0)] * kernel.WIDE_ARGUMENTS
    narrow = [cutlass.Int32(1)] * kernel.NARROW_ARGUMENTS
    text = f"--enable-tvm-ffi --gpu-arch {variant.arch} {variant.options}"
    with tempfile.TemporaryDirectory(prefix="topkd-") as folder:
        keeps = "--dump-dir" not in variant.options
        if keeps:
            text += f" --dump-dir={folder} --keep-cubin"
        compiled = cute.compile(instance, *wide, *narrow, runtime.make_fake_stream(), options=text)
        _LOADED.append(compiled)
        binary = b"".join(path.read_bytes() for path in Path(folder).glob("*.cubin"))
        exported = _export(compiled, Path(folder, "kernel.o")) if keeps else b""
    # The object itself wraps the call for keyword arguments; the function inside takes positions only and is faster.
    function: Callable[..., None] = getattr(compiled, "_tvm_ffi_function", None) or compiled
    return _Compiled(function, exported, binary, launch)


def _export(compiled: Any, path: Path) -> bytes:
    """Return what was compiled as an object file."""
    compiled.export_to_c(object_file_path=str(path), function_name=SYMBOL, export_only_tvm_ffi_symbols=True)
    return path.read_bytes()
