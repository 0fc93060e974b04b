"""Rows whose best scores are hard to sort: kinds that the sorts of order "value" treat differently."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tests.case import FORMATS, Array, Case
from tests.patterns import fill

COUNTS = (1, 2, 31, 33, 1024, 2047, 2048)
"""Elements to sort: around a warp, a CTA's threads, the most there are."""


def _bits(dtype: str, values: Array) -> Array:
    """Float32 numbers as a dtype's bits; what a bfloat16 cannot hold is cut off."""
    numbers = values.astype(np.float32)
    if dtype == "float32":
        return numbers.view(np.uint32)
    if dtype == "float16":
        return numbers.clip(-60000, 60000).astype(np.float16).view(np.uint16)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _different(dtype: str, rng: np.random.Generator, size: int) -> Array:
    return rng.permutation(FORMATS[dtype].inf if dtype != "float32" else 1 << 24)[:size].astype(FORMATS[dtype].bits)


def _outlier(dtype: str, rng: np.random.Generator, size: int) -> Array:
    values = rng.standard_normal(size)
    values[rng.integers(size)] = 1e30 if dtype != "float16" else 5e4
    return _bits(dtype, values)


def _clusters(dtype: str, rng: np.random.Generator, size: int) -> Array:
    return _bits(dtype, rng.choice([1.0, 3e4], size) * (1 + rng.random(size) / 1024))


def _powers(dtype: str, rng: np.random.Generator, size: int) -> Array:
    """At most three steps from a power of two."""
    exponents = rng.integers(-3, 4, size) + (1 << (FORMATS[dtype].exponent - 1)) - 1
    around = (exponents << FORMATS[dtype].fraction) + rng.integers(-3, 4, size)
    return (around | FORMATS[dtype].sign * rng.integers(0, 2, size)).astype(FORMATS[dtype].bits)


VALUE_KINDS: dict[str, Callable[[str, np.random.Generator, int], Array]] = {
    "normal": lambda dtype, rng, size: _bits(dtype, rng.standard_normal(size)),
    "different": _different,
    "few": lambda dtype, rng, size: _bits(dtype, rng.integers(1, 4, size)),
    "equal": lambda dtype, rng, size: _bits(dtype, np.full(size, 1.5)),
    "outlier": _outlier,
    "clusters": _clusters,
    "powers": _powers,
    "signs": lambda dtype, rng, size: _bits(dtype, rng.uniform(-1e-3, 1e-3, size)),
    "specials": lambda dtype, rng, size: fill("specials", dtype, int(rng.integers(99)), size),
    "sorted": lambda dtype, rng, size: _bits(dtype, np.sort(rng.standard_normal(size))),
}


def case_of(kind: str, dtype: str, width: int, k: int, *, largest: bool, ties: str) -> Case:
    """One row of a kind, to be sorted."""
    storage = VALUE_KINDS[kind](dtype, np.random.default_rng(k), width)
    return Case(storage=storage, dtype=dtype, rows=1, width=width, k=k, order="value", ties=ties, largest=largest)


def cases_of(kind: str, dtype: str, width: int) -> Iterator[Case]:
    """Rows of a kind with every count, in both directions, ties in turns."""
    for i, k in enumerate(COUNTS):
        for largest in (True, False):
            ties = "lowest" if i % 2 == largest else "highest"
            yield case_of(kind, dtype, width, k, largest=largest, ties=ties)
