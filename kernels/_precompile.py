"""`precompile`: kernels compiled ahead of time, on any machine, for processes that then load them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ._cute_cache import open_store, store_in
from ._cute_compile import Made, arch_of, capability, installed, watch
from ._cute_key import Variant, key_of
from ._dispatch import families_to_compile

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


def precompile(
    arch: str | None = None,
    families: Sequence[str] | None = None,
    *,
    directory: Path | None = None,
    see: Callable[[Precompiled], None] | None = None,
) -> list[Precompiled]:
    """Compile all variants for an architecture into the cache; needs no GPU. Those that are there are loaded.

    Args:
        arch: one of `ARCHITECTURES`, such as "sm_90a"; None: those of the GPUs that are visible.
        families: names of families; None: all that have something to compile and run on the architecture.
        directory: where to store, instead of the cache's directory.
        see: called with each variant as soon as it is there.

    Returns:
        The variants.

    Raises:
        ValueError: an unknown architecture or family, or one that does not run on the other; no GPU where `arch` is
            None.
        RuntimeError: the compiler is not installed.
        KernelUnavailableError: a variant cannot be compiled.
    """
    archs = [arch] if arch is not None else _visible()
    chosen = [(name, one) for one in archs for name in _families(one, families)]
    if not installed():
        raise RuntimeError("compiling kernels needs the packages nvidia-cutlass-dsl and apache-tvm-ffi")
    done: list[Precompiled] = []

    def take(made: Made) -> None:
        done.append(_row(made.variant, made.source, made.seconds, made.size))
        if see is not None:
            see(done[-1])

    with ExitStack() as stack:
        if directory is not None:
            stack.enter_context(store_in(directory))
        stack.enter_context(watch(take))
        for name, one in chosen:
            families_to_compile()[name]().precompile(one)
    return done


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
        yield _row(variant, "current" if current else "stale", 0.0, entry.size)


def _key(variant: Variant) -> str | None:
    """Return the key that a variant has now; None if this installation lacks its sources."""
    return key_of(variant) if (Path(__file__).parent / f"{variant.module}.py").is_file() else None


def _row(variant: Variant, source: str, seconds: float, size: int) -> Precompiled:
    facts = " ".join(map(str, variant.facts))
    return Precompiled(variant.family, variant.arch, facts, source, seconds, size)


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
    known = families_to_compile()
    number = int(arch.removeprefix("sm_").rstrip("a"))
    able = [name for name, kind in known.items() if divmod(number, 10) >= kind().oldest]
    names = able if asked is None else list(asked)
    for name in names:
        if name not in able:
            reason = f"does not run on {arch}" if name in known else "has nothing to compile, or is unknown"
            raise ValueError(f"families has {name!r}, which {reason}; there are {', '.join(able)}")
    return names
