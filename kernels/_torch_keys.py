"""Order-preserving integer keys of bf16, f16 and f32 scores, for torch operations.

A score's bits, read as a signed integer, become a signed integer of the same width that orders as rule 4 of the
contract has it, the better the greater:

    masked < everything else                      masked: the dtype's least value, for what is no candidate
    largest:   -inf .. -0.0 == +0.0 .. +inf < NaN < newest
    smallest:  NaN < +inf .. +0.0 == -0.0 .. -inf

With m the bits without their sign, a positive score's key is m and a negative one's is -m, so both zeros are 0; NaN of
either sign is infinity + 1 (largest) or -(infinity + 1); the pinned newest element is infinity + 2. All of it fits in
16 bits for the 16-bit types, so that no operation is wider than its input.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KeyCode:
    """How the scores of one dtype become keys, and back.

    Attributes:
        dtype: the signed integer dtype of bits and keys.
        infinity: bits of +inf, and its key (largest).
        quiet_nan: bits of the quiet NaN.
    """

    dtype: torch.dtype
    infinity: int
    quiet_nan: int

    @property
    def bits(self) -> int:
        """Bits of a score."""
        return 32 if self.dtype == torch.int32 else 16

    @property
    def masked(self) -> int:
        """Key below all others."""
        return -(1 << (self.bits - 1))

    @property
    def newest(self) -> int:
        """Key above all others."""
        return self.infinity + 2

    def padding(self, largest: bool) -> int:
        """Bits of the value that stands beside an index of -1: -inf, or +inf if not `largest`."""
        return self.infinity + self.masked if largest else self.infinity

    def encode(self, bits: Tensor, largest: bool) -> Tensor:
        """Return the keys of scores given by their bits, as a new tensor; the input is not modified."""
        sign = bits >> (self.bits - 1)
        magnitude = bits & ~self.masked
        keys = (magnitude ^ sign).sub_(sign)
        if not largest:
            keys.neg_()
        nan = self.infinity + 1
        return keys.masked_fill_(magnitude > self.infinity, nan if largest else -nan)

    def decode(self, keys: Tensor) -> Tensor:
        """Return the bits of keys made with `largest`: +0.0 where zero, the quiet NaN where NaN, +inf of the newest."""
        bits = torch.where(keys < 0, self.masked - keys, keys)
        bits.masked_fill_(keys == self.infinity + 1, self.quiet_nan)
        return bits.masked_fill_(keys == self.newest, self.infinity)


CODES = {
    torch.float32: KeyCode(torch.int32, 0x7F800000, 0x7FC00000),
    torch.float16: KeyCode(torch.int16, 0x7C00, 0x7E00),
    torch.bfloat16: KeyCode(torch.int16, 0x7F80, 0x7FC0),
}


def composite(keys: Tensor, positions: Tensor, highest: bool) -> Tensor:
    """Return int64 keys, unique in a row: key above, position below, so that the greater is the better.

    Args:
        keys: (rows, n) keys of any code.
        positions: int64, broadcastable to `keys`, each of 0 .. 2^31-1.
        highest: of equal keys the highest position is the better, else the lowest.
    """
    tie = positions if highest else _LAST - positions
    return (keys.to(torch.int64) << 32) | tie


def split(composites: Tensor, highest: bool) -> tuple[Tensor, Tensor]:
    """Return keys and positions (int64) of composites."""
    tie = composites & _LAST
    return composites >> 32, tie if highest else _LAST - tie


_LAST = (1 << 31) - 1
