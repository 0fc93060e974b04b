"""Device operations of the `radix_register` and `small` families: keys of scores, counting them, shared memory.

A *key* ascends from the best score to the worst, equal keys are equal scores, and the highest number, which no score
has, stands for what is no element of the row. Two keys of 16-bit scores travel in a word, the lower half first.
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from . import _cute_ops as ops

# --------------------------------------------------------------------------------------------------------------- keys


@cute.jit
def key_flip(largest: Boolean, dtype: cutlass.Constexpr[str]) -> Uint32:
    """What turns the ascending order of scores into that of keys, for `word_keys`."""
    result = Uint32(0x80000000 if dtype == ops.F32 else 0x80008000)
    if largest:
        result = Uint32(0x7FFFFFFF if dtype == ops.F32 else 0x7FFF7FFF)
    return result


@cute.jit
def key_bias(largest: Boolean, dtype: cutlass.Constexpr[str]) -> Uint32:
    """What keeps the worst score's key below the highest number: only NaN of the smallest would have it."""
    result = Uint32(1 if dtype == ops.F32 else 0x00010001)
    if largest:
        result = Uint32(0)
    return result


def word_keys(word: Uint32, flip: Uint32, bias: Uint32, dtype: str) -> Uint32:
    """The keys of a word of scores."""
    score = ops.canonical(word, dtype)
    if dtype == ops.F32:
        magnitude = Uint32(Int32(score) >> 31) & Uint32(0x7FFFFFFF)
    else:
        magnitude = ops._pure("prmt.b32 $0, $1, 0, 0xBB99;", "=r,r", score) & Uint32(0x7FFF7FFF)
    return (score ^ magnitude ^ flip) - bias


def score_of_key(key: Uint32, largest: Boolean, dtype: str) -> Uint32:
    """The canonical score of one key in the low end of a word, top-aligned."""
    shift = 0 if dtype == ops.F32 else 16
    flip = key_flip(largest, dtype) << Uint32(shift)
    bias = key_bias(largest, dtype) << Uint32(shift)
    score = ((key << Uint32(shift)) - bias) ^ flip
    keep = Uint32(0x7FFFFFFF) if dtype == ops.F32 else Uint32(0x7FFF0000)
    return score ^ (Uint32(Int32(score) >> 31) & keep)


def better_keys(a: Uint32, b: Uint32, dtype: str, packed: bool) -> Uint32:
    """The better of two words' keys, half by half; `packed`: the GPU compares both halves at once."""
    if dtype == ops.F32:
        return ops._pure("min.u32 $0, $1, $2;", "=r,r,r", a, b)
    if packed:
        return min_keys(a, b)
    ptx = (
        "{ .reg .b32 h, l, t; and.b32 h, $1, 0xffff0000; and.b32 t, $2, 0xffff0000; min.u32 h, h, t; "
        "and.b32 l, $1, 0xffff; and.b32 t, $2, 0xffff; min.u32 l, l, t; or.b32 $0, h, l; }"
    )
    return ops._pure(ptx, "=r,r,r", a, b)


def min_keys(a: Uint32, b: Uint32) -> Uint32:
    """The lower halves of two words, half by half; sm_90 and up."""
    return ops._pure("min.u16x2 $0, $1, $2;", "=r,r,r", a, b)


def max_keys(a: Uint32, b: Uint32) -> Uint32:
    """The higher halves of two words, half by half; sm_90 and up."""
    return ops._pure("max.u16x2 $0, $1, $2;", "=r,r,r", a, b)


def bit_length(x: Uint32) -> Int32:
    """The number of bits of x."""
    return Int32(32) - ops.leading_zeros(x)


def or_if_below(bits: Uint32, key: Uint32, bound: Uint32, bit: int) -> Uint32:
    """`bits`, with `bit` set where `key < bound`."""
    ptx = "{ .reg .pred p; setp.lt.u32 p, $1, $2; mov.b32 $0, $4; @p or.b32 $0, $4, $3; }"
    return ops._pure(ptx, "=&r,r,r,n,r", key, bound, Int32(bit), bits)


# ------------------------------------------------------------------------------------------------------ shared memory


@dsl_user_op
def count_key(key: Uint32, low: Uint32, span: Uint32, shift: Uint32, bins: Uint32, *, loc=None, ip=None) -> None:
    """Adds 1 to the bin of a key with key - low <= span: bin (key - low) >> shift."""
    ptx = (
        "{ .reg .pred p; .reg .b32 t, u; sub.u32 t, {$r0}, {$r1}; setp.le.u32 p, t, {$r2}; shr.u32 u, t, {$r3}; "
        "shl.b32 u, u, 2; add.u32 u, u, {$r4}; @p red.shared.add.u32 [u], 1; }"
    )
    cute.arch.inline_ptx(ptx, read_only_args=[key, low, span, shift, bins], loc=loc, ip=ip)


@dsl_user_op
def count_near(
    key: Uint32, compared: Uint32, limit: Uint32, base: Uint32, bins: Uint32, shift: int, *, loc=None, ip=None
) -> None:
    """Adds 1 to the bin of a key if `compared` <= `limit`: that of max(key, base) >> shift."""
    ptx = (
        "{ .reg .pred p; .reg .b32 u; setp.le.u32 p, {$r1}, {$r2}; max.u32 u, {$r0}, {$r3}; "
        f"shr.u32 u, u, {shift}; "
        "shl.b32 u, u, 2; add.u32 u, u, {$r4}; @p red.shared.add.u32 [u], 1; }"
    )
    cute.arch.inline_ptx(ptx, read_only_args=[key, compared, limit, base, bins], loc=loc, ip=ip)


@dsl_user_op
def load_four(address: Uint32, *, loc=None, ip=None) -> tuple[Uint32, ...]:
    """Four words of shared memory, 16-byte aligned."""
    ptx = "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * 4, read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def load_two(address: Uint32, *, loc=None, ip=None) -> tuple[Uint32, ...]:
    """Two words of shared memory, 8-byte aligned."""
    ptx = "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * 2, read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def store_zeros(address: Uint32, *, loc=None, ip=None) -> None:
    """Eight bytes of zeros to shared memory, 8-byte aligned."""
    cute.arch.inline_ptx(
        "st.shared.v2.b32 [{$r0}], {{$r1}, {$r1}};", read_only_args=[address, Uint32(0)], loc=loc, ip=ip
    )


# ------------------------------------------------------------------------------------------------------ global memory


@dsl_user_op
def load_score_if(address: Int64, wanted: Boolean, dtype: str, *, loc=None, ip=None) -> Uint32:
    """One score's own bits, in the low end of a word, if `wanted`, else 0: one load, no branch."""
    kind = "b32" if dtype == ops.F32 else "u16"
    ptx = (
        "{ .reg .pred p; .reg .b32 t; setp.ne.s32 p, {$r1}, 0; mov.b32 t, 0; "
        f"@p ld.global.{kind} t, [{{$r0}}]; mov.b32 {{$w0}}, t; }}"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[address, Int32(wanted)], loc=loc, ip=ip)
