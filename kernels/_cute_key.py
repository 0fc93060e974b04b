"""What a compiled variant depends on, as a key: the variant, the compiler, its settings, the kernel's sources.

Nothing here imports cutlass: a hit in the cache must not.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

from . import _env
from ._cute_kit import read_kit

FORMAT = 1
"""Of an entry; raised when entries of before cannot be read, or are called otherwise."""

COMPILER, LAUNCHER = "nvidia-cutlass-dsl", "apache-tvm-ffi"
_COMPILES = "_cute_compile"
"""How kernels are compiled changes their code as well."""

_IMPORT = re.compile(r"^[ \t]*from \.(\w*) import (\([^)]*\)|.*)$", re.MULTILINE)


class Variant(NamedTuple):
    """All that is chosen of a kernel when it is compiled."""

    module: str  # device module of this package
    name: str  # its kernel class
    facts: tuple[Any, ...]  # strings, numbers and booleans
    arch: str
    options: str = ""

    @property
    def family(self) -> str:
        """The stem of its files, without the width of the scores that a kernel of another width has behind it."""
        return self.module.removesuffix("_kernel").rstrip("0123456789")

    @property
    def described(self) -> dict[str, Any]:
        """The variant as JSON holds it."""
        return {**self._asdict(), "facts": list(self.facts)}


@functools.cache
def runtime_library() -> Path | None:
    """Return the library that compiled code calls: the compiler's, of the newest CUDA, or a kit's; else None."""
    named = [Path(name) for name in _env.compiler_libraries() if name.endswith("libcute_dsl_runtime.so")]
    spec = importlib.util.find_spec("cutlass")
    if not named and spec is not None and spec.origin is not None:
        root = Path(spec.origin).parents[2]
        flavours = root.glob("cu*/lib/libcute_dsl_runtime.so")
        named = sorted(flavours, key=lambda path: int(re.sub(r"\D", "", path.parts[-3]) or 0), reverse=True)
        named.append(root / "lib" / "libcute_dsl_runtime.so")
    kit = read_kit()
    named += [kit.library] if spec is None and kit is not None else []
    return next((path for path in named if path.is_file()), None)


@functools.cache
def versions() -> tuple[str, ...]:
    """Return the versions of the compiler and the launcher, and the CUDA flavour; the packages are not imported.

    Without the compiler they are those that a kit tells of.

    Raises:
        PackageNotFoundError: one has no metadata, so that its version is unknown.
    """
    kit = read_kit() if importlib.util.find_spec("cutlass") is None else None
    if kit is not None:
        compiler, flavour = kit.versions.get(COMPILER, ""), kit.flavour
    else:
        runtime = runtime_library()
        compiler, flavour = importlib.metadata.version(COMPILER), "" if runtime is None else runtime.parent.parent.name
    return f"{COMPILER} {compiler}", f"{LAUNCHER} {importlib.metadata.version(LAUNCHER)}", flavour


def sources(module: str) -> tuple[str, ...]:
    """Return the modules of this package that a device module imports, itself included, in order of their names."""
    folder = Path(__file__).parent
    found: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = folder / f"{name}.py"
        if name in found or not path.is_file():
            continue
        found.add(name)
        for package, names in _IMPORT.findall(path.read_text(encoding="utf-8")):
            waiting += [package] if package else re.findall(r"(\w+)(?:\s+as\s+\w+)?", names)
    return tuple(sorted(found))


@functools.cache
def fingerprint(module: str) -> str:
    """Return a SHA-256 of a device module's sources as they stood at the first question."""
    digest = hashlib.sha256()
    for name in (*sources(module), _COMPILES):
        text = (Path(__file__).parent / f"{name}.py").read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def key_of(variant: Variant) -> str:
    """Return a SHA-256 of everything that the compiled code of a variant depends on.

    Raises:
        PackageNotFoundError: as `versions`.
    """
    parts = [FORMAT, platform.machine(), variant, versions(), _env.compiler_settings(), fingerprint(variant.module)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
