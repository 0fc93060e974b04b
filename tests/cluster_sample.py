"""Where the `cluster` family's kernel samples a row, for rows that are built against it."""

from __future__ import annotations

import numpy as np

from tests.case import Array


def sampled_elements(width: int, sets: int) -> Array:
    """The elements of an aligned row of `width` scores that `load_sample` looks at, with 512 threads a CTA."""
    thread, one = np.meshgrid(np.arange(512), np.arange(sets))
    band = ((thread >> 1) + one) & 7
    stratum = (band * 32 + (((thread >> 4) + band * 11 + one * 13) & 31)).astype(np.uint64)
    within = ((stratum + one.astype(np.uint64) * 256) * 0x9E3779B1 & 0xFFFFFFFF) >> 8
    vectors = ((stratum << 24 | within) * (width // 16) >> 32).astype(int) * 2 + (thread & 1)
    return np.unique((vectors.reshape(-1, 1) * 8 + np.arange(8)).ravel())


def sampled_groups(groups: int, pairs: bool, attempt: int) -> np.ndarray:
    """Which groups of 8 f32 scores of a row are sampled, two neighbours a unit: `cluster32_groups`.

    Args:
        groups: of the row, all of them whole.
        pairs: a sample is the best of two.
        attempt: 0, or 1 where the row is sampled again.
    """
    number = np.arange(512)
    places = []
    band = groups >> (2 if pairs else 1)
    for j in range(2 if pairs else 1):
        mix = (number & 3) * 4 + j
        stratum = (number & 3) * 64 + (((number >> 3) * (2 * mix + 5) + mix * 11) & 63)
        salt = (stratum * 4 + j + attempt * 0x51ED27) * 0x9E3779B1 & 0xFFFFFFFF
        within = ((salt ^ salt >> 15) * 0x85EBCA77 & 0xFFFFFFFF) >> 8
        unit = ((stratum << 24 | within) * band >> 32) + band * j
        places.append(unit * 2 + ((number >> 2) & 1))
    return np.unique(np.concatenate(places))
