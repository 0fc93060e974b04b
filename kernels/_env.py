"""The one place of `topkd.kernels` that reads the environment."""

import functools
import os
from pathlib import Path

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@functools.cache
def check_data() -> bool:
    """Say whether `TOPKD_CHECK_DATA` asks for data checks; read once per process.

    With data checks, lengths, starts and tables that would have to be clamped or skipped raise `ValueError`.
    The checks synchronise with the device: they are for debugging.

    Raises:
        ValueError: the variable is set to something that is neither yes nor no.
    """
    text = os.environ.get("TOPKD_CHECK_DATA", "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"TOPKD_CHECK_DATA={text!r}: allowed are {sorted(_TRUE)} and {sorted(_FALSE)}")


@functools.cache
def forced_kernel() -> str | None:
    """Return the family that `TOPKD_KERNEL` names, which `kernel="auto"` takes where it can; read once per process."""
    named = os.environ.get("TOPKD_KERNEL", "").strip()
    return None if named in ("", "auto") else named


@functools.cache
def dispatch() -> str:
    """Return what `kernel="auto"` goes by, from `TOPKD_DISPATCH`; read once per process.

    Returns:
        "measured": the measured table, by the bound of the rows' lengths (the default); "active": the seed's rule, by
        that bound alone; "capacity": as measured, but by the rows' capacity, as if no call said how long its rows are.

    Raises:
        ValueError: the variable is set to something else.
    """
    text = os.environ.get("TOPKD_DISPATCH", "").strip().lower() or "measured"
    if text not in ("measured", "active", "capacity"):
        raise ValueError(f"TOPKD_DISPATCH={text!r}: allowed are measured, active and capacity")
    return text


def cache_directory() -> Path | None:
    """Return the directory of compiled kernels; None where `TOPKD_CACHE_DIR` is "off", or there is no home."""
    named = os.environ.get("TOPKD_CACHE_DIR", "").strip()
    if named.lower() == "off":
        return None
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if Path(base).is_absolute():
        return Path(base) / "topkd"
    try:
        return Path.home() / ".cache" / "topkd"
    except RuntimeError:
        return None


def precompiled_directory() -> Path | None:
    """Return the directory of kernels that were compiled ahead of time, which is only read: `TOPKD_PRECOMPILED_DIR`."""
    named = os.environ.get("TOPKD_PRECOMPILED_DIR", "").strip()
    return Path(named) if named else None


def compiler_libraries() -> list[str]:
    """Return the libraries that `CUTE_DSL_LIBS` names, as the compiler reads it."""
    return os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep)


def compiler_settings() -> tuple[tuple[str, str], ...]:
    """Return the compiler's own variables, which may change the code that it makes, but for where its libraries are."""
    settings = {name: text for name, text in os.environ.items() if name.startswith("CUTE_DSL_")}
    settings.pop("CUTE_DSL_LIBS", None)
    return tuple(sorted(settings.items()))
