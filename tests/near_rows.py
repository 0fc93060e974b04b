"""Rows of 16-bit scores against how `radix_register` counts keys once: far bests, the ends of its bins, zeros between.

A key ascends from the best score to the worst; see `kernels/radix_register_near.py`, whose sizes are here in keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tests.case import FORMATS, Array, Case

FORE, REACH, BINS = 1024, 512, 2048
STEP = {"bfloat16": 1, "float16": 8}
"""Keys of a bin."""


def of_keys(dtype: str, keys: Array) -> Array:
    """The bits of keys, none of which is that of -0.0."""
    sign = FORMATS[dtype].sign
    return np.where(keys < sign, sign - 1 - keys, keys).astype(FORMATS[dtype].bits)


def key_of(dtype: str, score: float) -> int:
    """The key of a score that is not negative."""
    bits = np.float32(score).view(np.uint32) >> 16 if dtype == "bfloat16" else np.float16(score).view(np.uint16)
    return FORMATS[dtype].sign - 1 - int(bits)


def _normal(dtype: str, rng: np.random.Generator, width: int) -> Array:
    scores = rng.standard_normal(width)
    if dtype == "float16":
        return scores.astype(np.float16).view(np.uint16)
    return (scores.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _outliers(count: int, bits: str) -> Callable[[str, np.random.Generator, int], Array]:
    def fill(dtype: str, rng: np.random.Generator, width: int) -> Array:
        row = _normal(dtype, rng, width)
        row[rng.permutation(width)[:count]] = {"inf": FORMATS[dtype].inf, "nan": FORMATS[dtype].nan}[bits]
        return row

    return fill


def _relu(dtype: str, rng: np.random.Generator, width: int) -> Array:
    row = _normal(dtype, rng, width)
    return np.where(row < FORMATS[dtype].sign, row, 0).astype(row.dtype)


def _plateau_above_negatives(dtype: str, rng: np.random.Generator, width: int) -> Array:
    row = _normal(dtype, rng, width)
    return np.where((row < FORMATS[dtype].sign) & (rng.random(width) < 0.9), 0, row).astype(row.dtype)


def _two_levels(dtype: str, rng: np.random.Generator, width: int) -> Array:
    return of_keys(dtype, np.where(rng.random(width) < 0.3, 10, FORMATS[dtype].sign + 20_000))


def _descending(dtype: str, rng: np.random.Generator, width: int) -> Array:
    bits = _normal(dtype, rng, width).astype(np.int64)
    sign = FORMATS[dtype].sign
    return bits[np.argsort(np.where(bits < sign, sign - 1 - bits, bits))].astype(np.uint16)


def _ends(shift: int) -> Callable[[str, np.random.Generator, int], Array]:
    """Scores at the ends of bins, `shift` keys on: a sixteenth of the row each; the rest at the far end, or further."""

    def fill(dtype: str, rng: np.random.Generator, width: int) -> Array:
        base, step = key_of(dtype, 1.5), STEP[dtype]
        base = base // step * step
        places = [0, 1, FORE - 1, FORE, FORE + 1, BINS - REACH - 1, BINS - 2, BINS - 1, BINS, BINS + 1]
        places += [2 * BINS, 2 * BINS + FORE - 1, 2 * BINS + FORE]
        keys = base + step * rng.choice(places, width) + shift
        return of_keys(dtype, np.clip(keys, 0, FORMATS[dtype].sign - 1))

    return fill


def _around_zero(dtype: str, rng: np.random.Generator, width: int) -> Array:
    """Subnormals and zeros of both signs, from few of each of which half is taken, under some ordinary scores."""
    row = rng.integers(0, 40, width) | FORMATS[dtype].sign * rng.integers(0, 2, width)
    ordinary = rng.random(width) < 0.2
    return np.where(ordinary, _normal(dtype, rng, width), row).astype(np.uint16)


def _bound_within_a_bin(dtype: str, rng: np.random.Generator, width: int) -> Array:
    """One key of each aligned vector is good, the worst of them amid a bin in which there are worse keys too."""
    best = key_of(dtype, 1.5) // 8 * 8
    vectors = -(-width // 8)
    keys = np.full((vectors, 8), best + 8 * 3000)
    few = rng.permutation(vectors)[:24]
    keys[:, 2] = best
    keys[few[:14], 2] = best + 8 * 100 + 3
    keys[few[14:], 5] = best + 8 * 100 + 5
    return of_keys(dtype, keys.ravel()[:width])


KINDS: dict[str, Callable[[str, np.random.Generator, int], Array]] = {
    "normal": _normal,
    "one-outlier": _outliers(1, "inf"),
    "three-outliers": _outliers(3, "nan"),
    "forty-outliers": _outliers(40, "inf"),
    "relu": _relu,
    "plateau-above-negatives": _plateau_above_negatives,
    "two-levels": _two_levels,
    "descending": _descending,
    "around-zero": _around_zero,
    "bound-within-a-bin": _bound_within_a_bin,
    "ends": _ends(0),
    "before-ends": _ends(-1),
    "behind-ends": _ends(1),
}


def near_cases(kind: str, dtype: str, width: int) -> Iterator[Case]:
    """Rows of a kind, in both directions, with k at the places where their scores change, and at halves of the row."""
    rng = np.random.default_rng(width)
    bits = KINDS[kind](dtype, rng, width)
    sign = FORMATS[dtype].sign
    keys = np.sort(np.where(bits < sign, sign - 1 - bits.astype(np.int64), bits))
    changes = 1 + np.flatnonzero(np.diff(keys))
    chosen = rng.permutation(changes)[:6] if len(changes) else []
    ks = {1, width // 8, width // 3, width // 2 - 1, width // 2, width // 2 + 1, width - 1}
    ks |= {int(place) + near for place in chosen for near in (-1, 0, 1)}
    for k in sorted(k for k in ks if 0 < k < width):
        yield Case(storage=bits, dtype=dtype, rows=1, width=width, k=k)
        order = {"order": "index", "ties": "lowest" if k % 2 else "highest"}
        flipped = (bits ^ sign).astype(bits.dtype)
        yield Case(storage=flipped, dtype=dtype, rows=1, width=width, k=k, largest=False, values=True, **order)
