"""The store of compiled kernels: a directory of entries that any process of the user loads in milliseconds.

An entry is one file: a shared library; behind it, where the dynamic linker does not look, the GPU binary, a header in
JSON and a footer. Its name ends in the key of everything that its code depends on. Whatever is wrong with an entry
(truncated, changed, of another key or another owner) makes it a miss, and the next store replaces it.

Written to a temporary file and renamed, under a lock for each key that other processes wait for.
"""

import fcntl
import hashlib
import json
import os
import struct
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from . import _env
from ._cute_key import FORMAT, Variant
from ._cute_kit import is_trusted

LOCK_SECONDS = 60.0
"""How long a process waits for another that compiles the same variant; then it compiles for itself."""

UNUSED_SECONDS = 60 * 86400.0
"""Entries that were not used for so long are removed when another is stored."""

_FOOTER = struct.Struct("<8s I 32s")  # magic, bytes of the header, SHA-256 of all before the footer
_MAGIC = b"topkd\0\0" + bytes([FORMAT])
_DIRECTORY: ContextVar[Path | None] = ContextVar("topkd_cache_directory", default=None)
_WARNED: set[str] = set()


class Entry(NamedTuple):
    """A checked entry."""

    path: Path  # of the file, which is a shared library
    binary: bytes  # for the GPU
    header: dict[str, Any]  # key, variant, launch: see `Store.store`
    size: int  # bytes of the file


class Store:
    """One directory of entries, and directories that are read only.

    Args:
        directory: where entries are written; None keeps nothing.
        others: searched after it.
    """

    def __init__(self, directory: Path | None, others: tuple[Path, ...] = ()) -> None:
        # Absolute, because the dynamic linker takes a name without a slash for one of the system's libraries.
        self.directory = directory.absolute() if directory is not None and _prepare(directory) else None
        self._searched = tuple(path for path in (self.directory, *(other.absolute() for other in others)) if path)

    def find(self, variant: Variant, key: str) -> Entry | None:
        """Return the entry of a key, or None."""
        for directory in self._searched:
            path = directory / file_name(variant, key)
            entry = read_entry(path)
            if entry is not None and entry.header.get("key") == key and _is_private(directory):
                with suppress(OSError):
                    os.utime(path)
                return entry
        return None

    @contextmanager
    def lock(self, variant: Variant, key: str) -> Iterator[bool]:
        """Hold the lock of a key between processes, if it can be had in time; yields whether it is held."""
        descriptor = self._lock_file(file_name(variant, key))
        if descriptor is None:
            yield False
            return
        try:
            yield _acquire(descriptor)
        finally:
            os.close(descriptor)  # which unlocks it

    def _lock_file(self, name: str) -> int | None:
        if self.directory is None:
            return None
        try:
            (self.directory / "locks").mkdir(mode=0o700, exist_ok=True)
            return os.open(self.directory / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError:
            return None

    def store(self, variant: Variant, key: str, library: bytes, binary: bytes, launch: dict[str, int]) -> Entry | None:
        """Write an entry, replacing what is there.

        Args:
            variant: what was compiled.
            key: its key.
            library: the shared library.
            binary: what it holds for the GPU.
            launch: what the host must know to launch it, such as the bytes of shared memory.

        Returns:
            The entry; None, after one warning, if it cannot be written.
        """
        if self.directory is None:
            return None
        header: dict[str, Any] = {"key": key, "variant": variant.described, "launch": launch}
        header |= {"library_bytes": len(library), "binary_bytes": len(binary)}
        text = json.dumps(header).encode()
        body = library + binary + text
        data = body + _FOOTER.pack(_MAGIC, len(text), hashlib.sha256(body).digest())
        path = self.directory / file_name(variant, key)
        try:
            _write(path, data)
        except OSError as error:
            warn_once(f"compiled kernels are not kept: {path}: {error.strerror or error}")
            return None
        self._remove_unused()
        return Entry(path, binary, header, len(data))

    def _remove_unused(self) -> None:
        """Remove entries, locks and abandoned temporary files that nobody used for long."""
        if self.directory is None:
            return
        oldest = time.time() - UNUSED_SECONDS
        for pattern in ("*.so", "*.tmp", "locks/*"):
            for path in self.directory.glob(pattern):
                with suppress(OSError):
                    if path.stat().st_mtime < oldest:
                        path.unlink()

    def entries(self) -> Iterator[Entry]:
        """Yield the valid entries of all directories, in order of their names."""
        for directory in self._searched:
            for path in sorted(directory.glob("*.so")):
                entry = read_entry(path)
                if entry is not None and path.name.endswith(f"{entry.header.get('key')}.so"):
                    yield entry


def open_store() -> Store:
    """Open the store that the environment names, or the one of `store_in`."""
    named = _DIRECTORY.get()
    if named is not None:
        return Store(named)
    precompiled = _env.precompiled_directory()
    return Store(_env.cache_directory(), () if precompiled is None else (precompiled,))


@contextmanager
def store_in(directory: Path) -> Iterator[None]:
    """Use one directory, and no other, for what this thread compiles meanwhile."""
    token = _DIRECTORY.set(directory)
    try:
        yield
    finally:
        _DIRECTORY.reset(token)


def file_name(variant: Variant, key: str) -> str:
    """Return the name of an entry's file."""
    return f"{variant.family}-{variant.arch}-{key}.so"


def read_entry(path: Path) -> Entry | None:
    """Read and check a file; None if it is no entry, not whole, or open to others than its owner and root."""
    try:
        with path.open("rb") as file:
            if not is_trusted(os.fstat(file.fileno())):
                return None
            data = file.read()
        magic, length, digest = _FOOTER.unpack(data[-_FOOTER.size :])
        body = data[: -_FOOTER.size]
        if magic != _MAGIC or hashlib.sha256(body).digest() != digest:
            return None
        header = json.loads(body[len(body) - length :])
        library, binary = header["library_bytes"], header["binary_bytes"]
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return Entry(path, body[library : library + binary], header, len(data))


def warn_once(message: str) -> None:
    """Warn of something that a process would otherwise repeat with every kernel."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _is_private(directory: Path) -> bool:
    try:
        return is_trusted(directory.stat())
    except OSError:
        return False


def _prepare(directory: Path) -> bool:
    """Make a directory if it is missing; say, and warn once if not, whether it can be used."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        warn_once(f"compiled kernels are not kept: {directory}: {error.strerror or error}")
        return False
    if not _is_private(directory):
        warn_once(f"compiled kernels are not kept: {directory} is open to other users, or another's")
        return False
    return True


def _acquire(descriptor: int) -> bool:
    """Lock a file, waiting up to `LOCK_SECONDS` for who holds it."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.05)
        except OSError:  # a file system without locks
            return False


def _write(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
