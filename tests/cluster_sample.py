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
