"""Device operations of the `cluster` family: keys of 16-bit scores, distributed shared memory, counting barriers.

A *key* is a 16-bit number that ascends from the worst score to the best; equal keys are equal scores: -0.0 has the key
of +0.0, every NaN the same, the best one if the largest are selected, else the worst. Two keys travel in a word.

A *cutoff* is a key that some score has, in the form that words of scores are compared with, two scores at a time.
"""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from . import _cute_ops as ops

BF16, F16 = ops.BF16, ops.F16
KINDS = {BF16: "bf16x2", F16: "f16x2"}
NAN_KEY = 0xFFFF
"""Of the largest; the smallest have its complement."""


class Cutoff(NamedTuple):
    """A cutoff; see the module."""

    low: Int32  # the key
    word: Uint32  # its score in both halves; +inf where the cutoff is NaN
    nan: Boolean  # whether the cutoff is NaN


# --------------------------------------------------------------------------------------------------------------- keys


def word_keys(word: Uint32, largest: bool, dtype: str) -> Uint32:
    """The keys of the two scores of a word, each in its half."""
    score = ops.canonical(word, dtype)
    negative = ((score >> Uint32(15)) & Uint32(0x00010001)) * Uint32(0x7FFF)
    return score ^ negative ^ Uint32(0x80008000 if largest else 0x7FFF7FFF)


def better(a: Uint32, b: Uint32, largest: bool, dtype: str) -> Uint32:
    """The better of two words' scores, half by half; NaN is the best of the largest, the worst of the smallest."""
    kind = "max.NaN" if largest else "min"
    return ops._pure(f"{kind}.{KINDS[dtype]} $0, $1, $2;", "=r,r,r", a, b)


@cute.jit
def cutoff_of(low: Int32, largest: bool, dtype: str) -> Cutoff:
    """The cutoff at a key, or at the next better key that a score can have."""
    infinity = ops.INF_TOP[dtype] >> 16
    worst = Int32(0x7FFF - infinity)  # of the infinities; below it is no key but, of the smallest, NaN's
    no_zero = 0x7FFF if largest else 0x8000  # the key that -0.0 would have
    if low < worst and (low > Int32(0) or largest):
        low = worst
    if low == Int32(no_zero):
        low = low + 1
    if low > Int32(0x8000 | infinity):
        low = Int32(NAN_KEY)
    ascending = low
    if not largest:
        ascending = low ^ 0xFFFF
    nan = ascending == Int32(NAN_KEY)
    score = ascending ^ 0x8000
    if ascending < Int32(0x8000):
        score = ascending ^ 0xFFFF
    if nan:
        score = Int32(infinity)
    return Cutoff(low, Uint32(score) * Uint32(0x00010001), nan)


@dsl_user_op
def either(word: Uint32, other: Uint32, comparison: str, dtype: str, *, loc=None, ip=None) -> Boolean:
    """Whether a comparison holds in either half of two words."""
    ptx = f"{{ .reg .pred p, q; setp.{comparison}.{KINDS[dtype]} p|q, $1, $2; or.pred $0, p, q; }}"
    values = [one.ir_value(loc=loc, ip=ip) for one in (word, other)]
    result = llvm.inline_asm(
        T.bool(),
        values,
        ptx,
        "=b,r,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Boolean(result)


def halves(word: Uint32, other: Uint32, comparison: str, dtype: str) -> Uint32:
    """All bits set in each half of two words in which a comparison holds."""
    return ops._pure(f"set.{comparison}.u32.{KINDS[dtype]} $0, $1, $2;", "=r,r,r", word, other)


def marks(words, other: Uint32, comparison: str, dtype: str) -> Uint32:
    """In which scores of a vector a comparison holds: bit e for score e."""
    bits = Uint32(0)
    for i, word in enumerate(words):
        bits = bits | (halves(word, other, comparison, dtype) & Uint32(0x00020001 << 2 * i))
    return (bits | (bits >> Uint32(16))) & Uint32(0xFF)


@cute.jit
def split(words, cutoff: Cutoff, largest: bool, dtype: str):
    """Which scores of a vector are better than the cutoff, and which are equal to it, as `marks`."""
    above = marks(words, cutoff.word, "gtu" if largest else "lt", dtype)
    equal = marks(words, cutoff.word, "eq", dtype)
    if cutoff.nan:
        if largest:
            equal = above
            above = Uint32(0)
        else:
            above = above | equal
            equal = above ^ Uint32(0xFF)
    return above, equal


def count_not_below(count: Int32, value: Int32, pivot: Int32) -> Int32:
    """`count`, plus 1 where value >= pivot."""
    ptx = "{ .reg .pred p; setp.ge.s32 p, $2, $3; mov.b32 $0, $1; @p add.s32 $0, $1, 1; }"
    return Int32(ops._pure(ptx, "=&r,r,r,r", count, value, pivot))


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
def load_word(address: Int32, *, loc=None, ip=None) -> Uint32:
    """A word of this CTA's shared memory."""
    ptx = "ld.shared.b32 {$w0}, [{$r0}];"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def load_long(address: Int32, *, loc=None, ip=None) -> Int64:
    """Eight bytes of this CTA's shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address], loc=loc, ip=ip
    )


@dsl_user_op
def store_word(address: Int32, word: Uint32, *, loc=None, ip=None) -> None:
    """A word to this CTA's shared memory."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, word], loc=loc, ip=ip)


@dsl_user_op
def mark(address: Int32, bits: Uint32, *, loc=None, ip=None) -> None:
    """Sets bits of a word of this CTA's shared memory, atomically."""
    cute.arch.inline_ptx("red.shared.or.b32 [{$r0}], {$r1};", read_only_args=[address, bits], loc=loc, ip=ip)


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


@cute.jit
def await_first(barrier) -> None:
    """Waits for a barrier's first phase, for a second at most.

    Where a caller writes scores while they are selected from, a row that is read twice may not be the same, and fewer
    messages come than were counted: the answer is then of no use, but there is one. The clock counts and not the tries:
    one may end at any time (under compute-sanitizer at once).
    """
    end = cute.arch.globaltimer() + Int64(1_000_000_000)
    came = cute.arch.mbarrier_try_wait(barrier, 0)
    while not came and cute.arch.globaltimer() < end:
        came = cute.arch.mbarrier_try_wait(barrier, 0)


@dsl_user_op
def barrier_count(wanted: Boolean, *, loc=None, ip=None) -> Int32:
    """A barrier of the CTA; returns in how many of its threads `wanted` is true."""
    ptx = "{ .reg .pred p; setp.ne.s32 p, {$r0}, 0; barrier.cta.red.popc.aligned.u32 {$w0}, 0, p; }"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[Int32(wanted)], loc=loc, ip=ip)


@dsl_user_op
def load_past(address: Int64, wanted: Boolean, *, loc=None, ip=None) -> tuple[Uint32, ...]:
    """Four words from a 16-byte aligned global address if `wanted`, else 0; they are not kept in the L1 cache."""
    ptx = (
        "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.s32 p, {$r1}, 0; "
        "mov.b32 a, 0; mov.b32 b, 0; mov.b32 c, 0; mov.b32 d, 0; "
        "@p ld.global.L1::no_allocate.v4.b32 {a, b, c, d}, [{$r0}]; "
        "mov.b32 {$w0}, a; mov.b32 {$w1}, b; mov.b32 {$w2}, c; mov.b32 {$w3}, d; }"
    )
    return cute.arch.inline_ptx(
        ptx, write_only_types=[Uint32] * 4, read_only_args=[address, Int32(wanted)], loc=loc, ip=ip
    )


@dsl_user_op
def copy_vector(target: Int32, source: Int64, *, loc=None, ip=None) -> None:
    """Begins to copy 16 bytes of global memory into this CTA's shared memory, past the L1 cache."""
    ptx = "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;"
    cute.arch.inline_ptx(ptx, read_only_args=[target, source], loc=loc, ip=ip)


@dsl_user_op
def await_copies(*, loc=None, ip=None) -> None:
    """Waits for this thread's copies."""
    cute.arch.inline_ptx("cp.async.wait_all;", loc=loc, ip=ip)


def load_element(address: Int64, wanted: Boolean) -> Uint32:
    """One 16-bit score, zero-extended, if `wanted`, else 0: one load, no branch."""
    ptx = (
        "{ .reg .pred p; .reg .b32 t; setp.ne.s32 p, {$r1}, 0; mov.b32 t, 0; @p ld.global.u16 t, [{$r0}]; "
        "mov.b32 {$w0}, t; }"
    )
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[address, Int32(wanted)])
