"""How much of a row a CTA of the `radix_register` family holds, and what that takes of shared memory.

Host and device code share it; nothing is imported.
"""

from typing import NamedTuple

VECTOR = 16
"""Bytes."""
BINS = 2048
"""Counters of a count; there are two buffers of them."""
PASSES = 8
"""Most counts of a row: a power of two."""
FEW = 32
"""Keys that a warp looks at by itself."""
LIST_CAPACITY = 8192
"""Most selected elements, which are listed in shared memory."""
_ALIGNMENT = 128


class Shape(NamedTuple):
    """Threads of a CTA, and 16-byte vectors that each holds."""

    threads: int
    vectors: int

    def scores(self, size: int) -> int:
        """Scores of `size` bytes that a CTA holds."""
        return self.threads * self.vectors * VECTOR // size

    def list_capacity(self, size: int) -> int:
        """Entries of the list: a power of two."""
        return min(1 << (self.scores(size) - 1).bit_length(), LIST_CAPACITY)

    def shared_bytes(self, size: int) -> int:
        """Bytes of shared memory: bins, what is before them, places, few keys, bests of warps; and the list."""
        words = (
            2 * BINS,
            self.threads,
            PASSES * 32,
            32,
            FEW + 1,
            self.threads // 16,
            self.list_capacity(size) * size // 2,
        )
        return sum(-(-4 * part // _ALIGNMENT) * _ALIGNMENT for part in words)
