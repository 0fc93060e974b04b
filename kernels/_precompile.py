"""`precompile`: kernels compiled ahead of time, on any machine, for processes that then load them."""

import importlib.metadata
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ._cubin import read_resources
from ._cute_cache import open_store, store_in
from ._cute_compile import Made, arch_of, capability, compiler_installed, installed, watch
from ._cute_key import COMPILER, Variant, key_of, runtime_library
from ._cute_kit import write_kit
from ._dispatch import families_to_compile
from ._family import Compiled
from .answer import Answer
from .lane_call import LaneCall
from .latch import Latch
from .merge import MergeKernel

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")
"""Those that the kernels are made for."""


class Precompiled(NamedTuple):
    """A variant that is in the cache."""

    family: str
    arch: str
    variant: str  # its compile-time facts, as text
    source: str  # "compiled", "cache", or in a listing "current" or "stale"
    seconds: float
    size: int  # bytes of the entry; 0: it could not be stored
    resources: dict[str, int]  # those of `_cubin.Resources`, and `threads`, `shared_bytes`, `cluster` where it says so


def precompile(
    arch: str | Sequence[str] | None = None,
    families: Sequence[str] | None = None,
    *,
    directory: Path | None = None,
    jobs: int = 1,
    see: Callable[[Precompiled], None] | None = None,
) -> list[Precompiled]:
    """Compile all variants for some architectures into the cache; needs no GPU. Those that are there are loaded.

    Args:
        arch: one or several of `ARCHITECTURES`, such as "sm_90a"; None: those of the GPUs that are visible.
        families: names of families; None: all that have something to compile and run on the architecture.
        directory: where to store, instead of the cache's directory.
        jobs: processes that compile, started anew (so that a script that asks for more than one needs the guard
            `if __name__ == "__main__"`); 1: this one compiles.
        see: called with each variant as soon as it is there; with several processes, as soon as all of its family and
            architecture are.

    Returns:
        The variants.

    Raises:
        ValueError: an unknown architecture or family, or one that does not run on the other; no GPU where `arch` is
            None; `jobs` below 1.
        RuntimeError: the compiler is not installed.
        KernelUnavailableError: a variant cannot be compiled.
    """
    archs = _visible() if arch is None else [arch] if isinstance(arch, str) else list(arch)
    chosen = [(name, one) for one in archs for name in _families(one, families)]
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}; it must be at least 1")
    if not installed():
        raise RuntimeError("compiling kernels needs the packages nvidia-cutlass-dsl and apache-tvm-ffi")
    if jobs == 1:
        return [row for name, one in chosen for row in _compile(name, one, directory, see)]
    done: list[Precompiled] = []
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks without the threads
    with ProcessPoolExecutor(min(jobs, len(chosen) or 1), mp_context=context) as pool:
        waiting = [pool.submit(_compile, name, one, directory) for name, one in chosen]
        try:
            for future in as_completed(waiting):
                for row in future.result():
                    done.append(row)
                    if see is not None:
                        see(row)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return done


def _compile(
    name: str, arch: str, directory: Path | None, see: Callable[[Precompiled], None] | None = None
) -> list[Precompiled]:
    """Compile a family for an architecture."""
    done: list[Precompiled] = []

    def take(made: Made) -> None:
        row = _row(made.variant, made.source, made.seconds, made.size)
        done.append(row._replace(resources=_resources(made.binary, made.launch)))
        if see is not None:
            see(done[-1])

    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(store_in(directory))
        stack.enter_context(watch(take))
        _kinds()[name]().precompile(arch)
    return done


def keep_runtime(directory: Path) -> None:
    """Put beside compiled kernels what loading them takes where the compiler is not installed.

    Raises:
        RuntimeError: the compiler is not installed.
        OSError: it cannot be written.
    """
    library = runtime_library() if compiler_installed() else None
    if library is None:
        raise RuntimeError(f"the package {COMPILER} is not installed, or has no runtime library")
    write_kit(directory, {COMPILER: importlib.metadata.version(COMPILER)}, library)


def _kinds() -> dict[str, Callable[[], Compiled]]:
    """Return the classes of all that has something to compile, by name."""
    lanes: dict[str, Callable[[], Compiled]] = {Answer.name: Answer, LaneCall.name: LaneCall, Latch.name: Latch}
    return {**families_to_compile(), MergeKernel.name: MergeKernel, **lanes}


def stored(directory: Path | None = None) -> Iterator[Precompiled]:
    """Yield the entries of the cache, or of a directory; an entry is stale if this installation will not use it."""
    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(store_in(directory))
        entries = list(open_store().entries())
    for entry in entries:
        described: dict[str, Any] = dict(entry.header["variant"])
        variant = Variant(**{**described, "facts": tuple(described["facts"])})
        current = installed() and _key(variant) == entry.header["key"]
        row = _row(variant, "current" if current else "stale", 0.0, entry.size)
        yield row._replace(resources=_resources(entry.binary, entry.header["launch"]))


def _key(variant: Variant) -> str | None:
    """Return the key that a variant has now; None if this installation lacks its sources."""
    return key_of(variant) if (Path(__file__).parent / f"{variant.module}.py").is_file() else None


def _row(variant: Variant, source: str, seconds: float, size: int) -> Precompiled:
    facts = " ".join(map(str, variant.facts))
    return Precompiled(variant.family, variant.arch, facts, source, seconds, size, {})


def _resources(binary: bytes, launch: Mapping[str, int]) -> dict[str, int]:
    """Return what a kernel takes; no more than `launch` says where the binary cannot be read."""
    try:
        return {**read_resources(binary)._asdict(), **launch}
    except ValueError:
        return dict(launch)


def _visible() -> list[str]:
    """Return the architectures of the GPUs that are visible."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    archs = sorted({arch_of(capability(index)) for index in range(count)})
    if not archs:
        raise ValueError(f"arch is None and no GPU is visible; name one of {', '.join(ARCHITECTURES)}")
    return archs


def _families(arch: str, asked: Iterable[str] | None) -> list[str]:
    """Return the families to compile for an architecture."""
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch is {arch!r}; it must be one of {', '.join(ARCHITECTURES)}")
    known = _kinds()
    number = int(arch.removeprefix("sm_").rstrip("a"))
    able = [name for name, kind in known.items() if divmod(number, 10) >= kind().oldest]
    names = able if asked is None else list(asked)
    for name in names:
        if name not in able:
            reason = f"does not run on {arch}" if name in known else "has nothing to compile, or is unknown"
            raise ValueError(f"families has {name!r}, which {reason}; there are {', '.join(able)}")
    return names
