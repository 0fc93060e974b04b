"""The measured table: what each family took on a device, by form of output, dtype, k, rows and bound of their lengths.

`measured.csv` beside this file is made by `python -m tests.bench.kernel_table` from the bench's record, and ships.
Lines are shapes; the last column holds "family=us", the fastest first, medians with a cold L2 cache.

Between measured shapes the *ratio to the fastest* is interpolated, linearly in its logarithm over the logarithms of
rows, bound and k: it changes slowly where times change by orders. Beyond the outermost shape the outermost counts.
"""

import csv
import functools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ._devices import DeviceKind

COLUMNS = ("device", "capability", "form", "dtype", "k", "rows", "bound", "us")
COVERED = 0.25
"""A family must have been measured at corners of this weight together to be ranked between shapes."""

_Point = tuple[int, int, int]
"""k, rows, bound."""


class Estimate(NamedTuple):
    """What the table says of a shape.

    Attributes:
        us: microseconds of each family, the fastest first.
        measured: the shape itself was measured; else it lies between others, or beyond them.
        nearest: the measured shape that counts most: k, rows, bound.
        device: name of the kind of device that was measured.
    """

    us: Mapping[str, float]
    measured: bool
    nearest: _Point
    device: str


class Cells:
    """The shapes of one device, form and dtype."""

    def __init__(self, device: str, points: Mapping[_Point, Mapping[str, float]]) -> None:
        self._device = device
        self._points = points
        self._axes = [sorted({point[axis] for point in points}) for axis in range(3)]
        # Of each shape: the logarithm of the fastest time, and of each family's ratio to it.
        self._logs = {point: _logs_of(us) for point, us in points.items()}

    def estimate(self, k: int, rows: int, bound: int) -> Estimate:
        """Estimate what each family takes."""
        asked = (k, max(1, rows), max(1, bound))
        if asked in self._points:
            return Estimate(self._points[asked], True, asked, self._device)
        corners = self._corners(asked)
        if not corners:
            corners = [(1.0, min(self._points, key=lambda point: math.dist(_logs(point), _logs(asked))))]
        best = total = 0.0
        sums: dict[str, tuple[float, float]] = {}  # of each family: weighted ratios, and the weights
        for weight, at in corners:
            fastest, ratios = self._logs[at]
            total += weight
            best += weight * fastest
            for family, ratio in ratios.items():
                sum_, covered = sums.get(family, (0.0, 0.0))
                sums[family] = (sum_ + weight * ratio, covered + weight)
        us = {
            family: math.exp(best / total + sum_ / covered)
            for family, (sum_, covered) in sums.items()
            if covered >= COVERED * total
        }
        fastest_first = dict(sorted(us.items(), key=itemgetter(1)))
        return Estimate(fastest_first, False, max(corners)[1], self._device)

    def _corners(self, asked: _Point) -> list[tuple[float, _Point]]:
        """Return the measured shapes around a shape, with weights before them; those of weight 0 are left out."""
        ks, rows, bounds = (_bracket(axis, value) for axis, value in zip(self._axes, asked, strict=True))
        return [
            (share * other * third, (k, row, bound))
            for k, share in ks
            for row, other in rows
            for bound, third in bounds
            if (k, row, bound) in self._points
        ]


def _logs_of(us: Mapping[str, float]) -> tuple[float, dict[str, float]]:
    fastest = math.log(min(us.values()))
    return fastest, {family: math.log(one) - fastest for family, one in us.items()}


def _logs(point: _Point) -> tuple[float, ...]:
    return tuple(math.log(value) for value in point)


def _bracket(axis: Sequence[int], value: int) -> list[tuple[int, float]]:
    """Return the neighbours of a value on an axis, with weights that fall with the distance of the logarithms."""
    at = bisect_left(axis, value)
    if at == len(axis) or axis[at] == value or at == 0:
        return [(axis[min(at, len(axis) - 1)], 1.0)]
    low, high = axis[at - 1], axis[at]
    share = math.log(value / low) / math.log(high / low)
    return [(low, 1 - share), (high, share)]


class Table:
    """All that was measured."""

    def __init__(self, lines: Iterable[Mapping[str, str]]) -> None:
        found: dict[tuple[str, str, str], dict[_Point, dict[str, float]]] = {}
        self._capabilities: dict[str, tuple[int, int]] = {}
        for line in lines:
            major, _, minor = line["capability"].partition(".")
            self._capabilities[line["device"]] = (int(major), int(minor))
            point = (int(line["k"]), int(line["rows"]), int(line["bound"]))
            times = dict(pair.split("=") for pair in line["us"].split())
            cells = found.setdefault((line["device"], line["form"], line["dtype"]), {})
            cells[point] = {name: float(us) for name, us in times.items()}
        self._cells = {(device, form, dtype): Cells(device, points) for (device, form, dtype), points in found.items()}

    def cells(self, device: DeviceKind, form: str, dtype: str) -> Cells | None:
        """Return the shapes of a kind of device, or of the measured kind that has its compute capability."""
        same = [name for name, one in self._capabilities.items() if one == device.capability and name != device.name]
        for name in (device.name, *same):
            if cells := self._cells.get((name, form, dtype)):
                return cells
        return None


@functools.cache
def table() -> Table:
    """Return the table that ships."""
    path = Path(__file__).with_name("measured.csv")
    with path.open(newline="", encoding="utf-8") as file:
        return Table(list(csv.DictReader(file)))
