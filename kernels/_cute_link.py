"""Between the compiler's object and a function: linking a shared library, and loading that without the compiler."""

import ctypes
import functools
import importlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._cute_key import runtime_library

SYMBOL = "topkd_launch"
"""The launcher's name in every library; each is looked up in its own."""

_LINKERS = ("ld", "gcc", "cc", "clang", "ld.lld")
_TIMEOUT_S = 60.0

_LOADED: list[Any] = []
"""Modules and the runtime library. Unloading one would wait for every blocked stream of the process."""


class LinkError(RuntimeError):
    """An object cannot be made a library here."""


@functools.cache
def linker() -> tuple[str, str] | None:
    """Return the path of a linker, or of a compiler that calls one, and the prefix of options for it; None without."""
    for name in _LINKERS:
        path = shutil.which(name)
        if path is not None:
            return path, "" if name.startswith("ld") else "-Wl,"
    return None


def link(compiled: bytes) -> bytes:
    """Make a shared library of an object file.

    Args:
        compiled: object file.

    Returns:
        The library. It needs the runtime library by name only, so it moves to other machines.

    Raises:
        LinkError: there is no linker or no runtime library, or the linker failed.
    """
    found, runtime = linker(), runtime_library()
    if found is None:
        raise LinkError(f"there is no linker: none of {', '.join(_LINKERS)} is on the path")
    if runtime is None:
        raise LinkError("libcute_dsl_runtime.so is not installed beside cutlass")
    path, prefix = found
    with tempfile.TemporaryDirectory(prefix="topkd-") as folder:
        source, target = Path(folder, "kernel.o"), Path(folder, "kernel.so")
        source.write_bytes(compiled)
        options = [prefix + option for option in ("--no-as-needed", "-Bsymbolic", "-znoexecstack")]
        options += ["-nostdlib"] if prefix else []
        libraries = [f"-L{runtime.parent}", "-lcute_dsl_runtime"]
        command = [path, "-shared", *options, "-o", str(target), str(source), *libraries]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
            return target.read_bytes()
        except subprocess.CalledProcessError as error:
            raise LinkError(f"{path} failed: {error.stderr.decode(errors='replace').strip()[:500]}") from error
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LinkError(f"{path} failed: {error}") from error


def load(library: Path) -> Callable[..., None]:
    """Load a library made by `link`. Imports the launcher (and torch with it), not the compiler.

    Args:
        library: its file, which must have been checked: a broken one ends the process.

    Returns:
        The launcher. It lives as long as the process.

    Raises:
        Exception: of the dynamic linker's, if it cannot be loaded.
    """
    tvm_ffi = importlib.import_module("tvm_ffi")
    runtime = runtime_library()
    if runtime is not None:
        _LOADED.append(ctypes.CDLL(str(runtime)))  # found by its name from now on, without entering the global scope
    module = tvm_ffi.load_module(str(library))
    function: Callable[..., None] = module[SYMBOL]
    _LOADED.append(module)
    return function
