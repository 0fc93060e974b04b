"""Rows of scores by bit pattern: every class of input that is known to go wrong somewhere, filled from a seed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.case import FORMATS, Array

Fill = Callable[[str, np.random.Generator, int], Array]


def specials(dtype: str) -> list[int]:
    """Zeros, ones, infinities, NaNs of both signs with payloads, and the ends of the subnormals and normals."""
    layout = FORMATS[dtype]
    low, normal = 1, 1 << layout.fraction
    one = ((1 << (layout.exponent - 1)) - 1) << layout.fraction
    positive = [0, low, normal - 1, normal, one, one + 1, layout.inf - 1, layout.inf]
    positive += [layout.inf + 1, layout.nan, layout.nan + 1, layout.sign - 1]
    return positive + [bits | layout.sign for bits in positive]


def _cast(dtype: str, bits: Array) -> Array:
    return bits.astype(FORMATS[dtype].bits)


def _any_bits(dtype: str, rng: np.random.Generator, size: int) -> Array:
    return _cast(dtype, rng.integers(0, 2 * FORMATS[dtype].sign, size))


def _specials(dtype: str, rng: np.random.Generator, size: int) -> Array:
    return _cast(dtype, rng.choice(specials(dtype), size))


def _nan(dtype: str, rng: np.random.Generator, size: int) -> Array:
    layout = FORMATS[dtype]
    payload = rng.integers(1, 1 << layout.fraction, size)
    return _cast(dtype, layout.inf | payload | layout.sign * rng.integers(0, 2, size))


def _equal(dtype: str, rng: np.random.Generator, size: int) -> Array:
    return np.full(size, rng.choice(specials(dtype)), FORMATS[dtype].bits)


def _zeros(dtype: str, rng: np.random.Generator, size: int) -> Array:
    return _cast(dtype, FORMATS[dtype].sign * rng.integers(0, 2, size))


def _subnormal(dtype: str, rng: np.random.Generator, size: int) -> Array:
    layout = FORMATS[dtype]
    return _cast(dtype, rng.integers(0, 1 << layout.fraction, size) | layout.sign * rng.integers(0, 2, size))


def _levels(dtype: str, rng: np.random.Generator, size: int) -> Array:
    return rng.choice(_any_bits(dtype, rng, 64), size)


def _one_bin(dtype: str, rng: np.random.Generator, size: int) -> Array:
    layout = FORMATS[dtype]
    one = ((1 << (layout.exponent - 1)) - 1) << layout.fraction
    return _cast(dtype, one + rng.integers(0, 1 << (layout.fraction - 2), size))  # [1, 1.25)


def _high_bits(dtype: str, rng: np.random.Generator, size: int) -> Array:
    half = 4 * np.dtype(FORMATS[dtype].bits).itemsize
    high = int(rng.integers(0, 2 * FORMATS[dtype].sign)) >> half << half
    return _cast(dtype, high | rng.integers(0, 1 << half, size))


def _plateau(dtype: str, rng: np.random.Generator, size: int) -> Array:
    bits = _zeros(dtype, rng, size) if rng.integers(2) else np.zeros(size, FORMATS[dtype].bits)
    winners = rng.permutation(size)[: max(1, size // 50)]
    bits[winners] = _one_bin(dtype, rng, len(winners))
    return bits


def _ascending(dtype: str, rng: np.random.Generator, size: int) -> Array:
    return _cast(dtype, np.sort(rng.integers(0, FORMATS[dtype].inf, size)))


def _descending(dtype: str, rng: np.random.Generator, size: int) -> Array:
    return _ascending(dtype, rng, size)[::-1].copy()


def _few_finite(dtype: str, rng: np.random.Generator, size: int) -> Array:
    layout = FORMATS[dtype]
    bits = np.full(size, layout.inf | layout.sign, layout.bits)
    if rng.integers(2):
        bits = np.where(rng.integers(0, 2, size) == 1, bits, _nan(dtype, rng, size))
    finite = rng.permutation(size)[: 1 + size // 20]
    bits[finite] = _one_bin(dtype, rng, len(finite))
    return bits


def _near_one(dtype: str, rng: np.random.Generator, size: int) -> Array:
    layout = FORMATS[dtype]
    octaves = rng.integers(-4, 5, size) + (1 << (layout.exponent - 1)) - 1
    fraction = rng.integers(0, 1 << layout.fraction, size)
    return _cast(dtype, octaves << layout.fraction | fraction | layout.sign * rng.integers(0, 2, size))


FILLS: dict[str, Fill] = {
    "any-bits": _any_bits,
    "specials": _specials,
    "nan": _nan,
    "equal": _equal,
    "zeros": _zeros,
    "subnormal": _subnormal,
    "levels": _levels,
    "one-bin": _one_bin,
    "high-bits": _high_bits,
    "plateau": _plateau,
    "ascending": _ascending,
    "descending": _descending,
    "few-finite": _few_finite,
    "near-one": _near_one,
}


def fill(kind: str, dtype: str, seed: int, size: int) -> Array:
    """`size` bit patterns of a class; the same seed gives the same patterns."""
    return FILLS[kind](dtype, np.random.default_rng(seed), size)


def crowded(dtype: str, seed: int, size: int, k: int, crowd: int, *, equal: bool) -> Array:
    """Scores of which `crowd` lie within 2 ** 16 patterns, or are equal, at the k-th place, and none other near them.

    A `crowd // 2` of them is selected; the others are spread over [2, 4), the best, and over (0, 1).
    """
    rng = np.random.default_rng(seed)
    layout = FORMATS[dtype]
    one = ((1 << (layout.exponent - 1)) - 1) << layout.fraction
    bits = rng.integers(0, one, size)
    places = rng.permutation(size)[: k + crowd]
    bits[places[:k]] = one + (1 << layout.fraction) + rng.integers(0, 1 << layout.fraction, k)
    near = places[k - crowd // 2 :][:crowd]
    bits[near] = one + (1 << (layout.fraction - 1)) + (0 if equal else rng.integers(0, min(1 << 16, one), crowd))
    return _cast(dtype, bits)
