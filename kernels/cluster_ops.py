"""Device operations of the `cluster` family: keys of bf16 scores, distributed shared memory, counting barriers.

A *key* is a 16-bit number that ascends from the worst score to the best; equal keys are equal scores: -0.0 has the key
of +0.0, every NaN the same, the best one if the largest are selected, else the worst. Two keys travel in a word.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from . import _cute_ops as ops

BF16 = ops.BF16

# --------------------------------------------------------------------------------------------------------------- keys


def word_keys(word: Uint32, largest: bool) -> Uint32:
    """The keys of the two scores of a word, each in its half."""
    score = ops.canonical(word, BF16)
    negative = ((score >> Uint32(15)) & Uint32(0x00010001)) * Uint32(0x7FFF)
    return score ^ negative ^ Uint32(0x80008000 if largest else 0x7FFF7FFF)


def better(a: Uint32, b: Uint32, largest: bool) -> Uint32:
    """The better of two words' scores, half by half; NaN is the best of the largest, the worst of the smallest."""
    kind = "max.NaN" if largest else "min"
    return ops._pure(f"{kind}.bf16x2 $0, $1, $2;", "=r,r,r", a, b)


def best_key(words, largest: bool) -> Int32:
    """The best key of a vector of four words."""
    best = better(better(words[0], words[1], largest), better(words[2], words[3], largest), largest)
    best = better(best, ops.swap_halves(best), largest)
    return Int32(word_keys(best, largest) & Uint32(0xFFFF))


def count_not_below(count: Int32, value: Int32, pivot: Int32) -> Int32:
    """`count`, plus 1 where value >= pivot."""
    ptx = "{ .reg .pred p; setp.ge.s32 p, $2, $3; mov.b32 $0, $1; @p add.s32 $0, $1, 1; }"
    return Int32(ops._pure(ptx, "=&r,r,r,r", count, value, pivot))


def count_equal(count: Int32, value: Int32, other: Int32) -> Int32:
    """`count`, plus 1 where value == other."""
    ptx = "{ .reg .pred p; setp.eq.s32 p, $2, $3; mov.b32 $0, $1; @p add.s32 $0, $1, 1; }"
    return Int32(ops._pure(ptx, "=&r,r,r,r", count, value, other))


def high_product(a: Uint32, b: Uint32) -> Uint32:
    """The upper word of a product."""
    return ops._pure("mul.hi.u32 $0, $1, $2;", "=r,r,r", a, b)


def square_root(x: Float32) -> Float32:
    """The square root, approximately."""
    ptx = "sqrt.approx.ftz.f32 {$w0}, {$r0};"
    return cute.arch.inline_ptx(ptx, write_only_types=[Float32], read_only_args=[x])


def bit_length(x: Int32) -> Int32:
    """The number of bits of x >= 0."""
    return Int32(32) - Int32(ops._pure("clz.b32 $0, $1;", "=r,r", x))


# ------------------------------------------------------------------------------------------------------- shared memory


@dsl_user_op
def load_four(address: Int32, *, loc=None, ip=None) -> tuple[Uint32, ...]:
    """Four words of this CTA's shared memory, 16-byte aligned."""
    ptx = "ld.shared.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * 4, read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def store_four(address: Int32, words, *, loc=None, ip=None) -> None:
    """Four words to this CTA's shared memory, 16-byte aligned."""
    ptx = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};"
    cute.arch.inline_ptx(ptx, read_only_args=[address, *words], loc=loc, ip=ip)


@dsl_user_op
def load_half(address: Int32, *, loc=None, ip=None) -> Int32:
    """A 16-bit word of this CTA's shared memory, zero-extended."""
    ptx = "{ .reg .b16 h; ld.shared.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def send(address: Int32, barrier: Int32, rank: Int32, words, *, loc=None, ip=None) -> None:
    """Sends 1, 2 or 4 words into CTA `rank`'s shared memory, to where `address` is in this CTA's.

    Returns at once; their bytes count at the barrier that CTA `rank` has where `barrier` is in this CTA.
    """
    shape, values = {
        1: ("", "{$r3}"),
        2: (".v2", "{{$r3}, {$r4}}"),
        4: (".v4", "{{$r3}, {$r4}, {$r5}, {$r6}}"),
    }[len(words)]
    ptx = (
        "{ .reg .u32 a, m; mapa.shared::cluster.u32 a, {$r0}, {$r2}; mapa.shared::cluster.u32 m, {$r1}, {$r2}; "
        f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{shape}.b32 [a], {values}, [m]; }}"
    )
    cute.arch.inline_ptx(ptx, read_only_args=[address, barrier, rank, *words], loc=loc, ip=ip)


@dsl_user_op
def barrier_count(wanted: Boolean, *, loc=None, ip=None) -> Int32:
    """A barrier of the CTA; returns in how many of its threads `wanted` is true."""
    ptx = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.popc.aligned.u32 {$w0}, 0, p; }"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[Int32(wanted)], loc=loc, ip=ip)


def load_element(address: Int64, wanted: Boolean) -> Uint32:
    """One 16-bit score, zero-extended, if `wanted`, else 0: one load, no branch."""
    ptx = (
        "{ .reg .pred p; .reg .b32 t; setp.ne.s32 p, {$r1}, 0; mov.b32 t, 0; @p ld.global.u16 t, [{$r0}]; "
        "mov.b32 {$w0}, t; }"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[address, Int32(wanted)])
