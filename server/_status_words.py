"""Numbers as people read them, on the status page."""

import math

__all__ = ["age", "bytes_of", "count", "rate", "seconds"]

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_NONE = "–"


def seconds(value: float | None) -> str:
    """Words a time: "12.3 µs"; a dash for None."""
    if value is None:
        return _NONE
    if math.isinf(value):
        return "> 1 s"
    for size, unit in _UNITS:
        if value >= size:
            return f"{_three(value / size)} {unit}"
    return f"{_three(value * 1e6)} µs"


def count(value: float) -> str:
    """Words a whole number: "12,345"; large ones shortened: "1.23 G"."""
    return f"{value:,.0f}" if abs(value) < 1e6 else _short(value)


def rate(value: float | None) -> str:
    """Words a number a second: "0.25", "12.3 k"; a dash for None."""
    if value is None:
        return _NONE
    return _short(value) if value >= 1000 else _three(value)


def bytes_of(value: float) -> str:
    """Words a number of bytes: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{_three(value)} {unit}" if unit != "B" else f"{value:.0f} B"
        value /= 1024
    return f"{_three(value)} TiB"


def age(value: float) -> str:
    """Words a time that something has run: "3 d 4 h", "12 min"."""
    whole = max(0, int(value))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{whole} s"


def _three(value: float) -> str:
    """Words a number with three digits that count."""
    if value == 0:
        return "0"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _short(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{_three(value / size)} {unit}"
    return _three(value)
