"""Device operations that the CuTe DSL has no name for, as inline PTX; shared by the kernel families.

Scores travel as *canonical words*. A word holds one f32 or two 16-bit scores (the lower half first); canonical means
that -0.0 has become +0.0 and every NaN the one positive NaN that the hardware makes (0x7fffffff, 0x7fff). One score is
looked at as a *top-aligned* Uint32: its bits at the top, zeros below, so that sign, exponent and fraction mean the same
for every dtype and a 16-bit score is exhausted after two 8-bit digits instead of four.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

BF16, F16, F32 = "bfloat16", "float16", "float32"

ONES = {BF16: 0x3F803F80, F16: 0x3C003C00}
"""1.0 in both halves of a word."""
NEG_INF_WORD = {BF16: 0xFF80FF80, F16: 0xFC00FC00, F32: 0xFF800000}
"""-inf in every score of a word."""
INF_TOP = {BF16: 0x7F800000, F16: 0x7C000000, F32: 0x7F800000}
"""+inf, top-aligned."""
QUIET_NAN_TOP = {BF16: 0x7FC00000, F16: 0x7E000000, F32: 0x7FC00000}
"""The quiet NaN that is written for groups, top-aligned."""
NEVER = 0x80000000
"""-0.0, which no canonical score is: a value that compares equal to none."""


@dsl_user_op
def _pure(ptx: str, constraints: str, *operands, loc=None, ip=None) -> Uint32:
    """Inline PTX without side effects, one 32-bit result; the compiler may move, merge or drop it."""
    values = [operand.ir_value(loc=loc, ip=ip) for operand in operands]
    result = llvm.inline_asm(
        T.i32(),
        values,
        ptx,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Uint32(result)


def canonical(word: Uint32, dtype: str) -> Uint32:
    """Adds +0.0: -0.0 becomes +0.0, NaN of any sign and payload the hardware's one NaN; nothing else changes."""
    if dtype == F32:
        return _pure("{ .reg .f32 t; mov.b32 t, $1; add.rn.f32 t, t, 0f00000000; mov.b32 $0, t; }", "=r,r", word)
    kind = "bf16x2" if dtype == BF16 else "f16x2"
    return _pure(f"fma.rn.{kind} $0, $1, $2, $3;", "=r,r,r,r", word, Uint32(ONES[dtype]), Uint32(0))


def max_nan(a: Uint32, b: Uint32, dtype: str) -> Uint32:
    """The maximum of two words, score by score; NaN if either is NaN (not yet canonical in the sign of zero)."""
    if dtype == F32:
        ptx = "{ .reg .f32 s, t; mov.b32 s, $1; mov.b32 t, $2; max.NaN.f32 s, s, t; mov.b32 $0, s; }"
        return _pure(ptx, "=r,r,r", a, b)
    kind = "bf16x2" if dtype == BF16 else "f16x2"
    return _pure(f"max.NaN.{kind} $0, $1, $2;", "=r,r,r", a, b)


def swap_halves(word: Uint32) -> Uint32:
    """Exchanges the two 16-bit scores of a word."""
    return (word >> Uint32(16)) | (word << Uint32(16))


def or_if_in_range(bits: Uint32, score: Uint32, base: Uint32, span: Uint32, bit: int) -> Uint32:
    """`bits`, with `bit` set where `score - base <= span` in wrapping unsigned arithmetic."""
    ptx = (
        "{ .reg .pred p; .reg .u32 t; sub.u32 t, $1, $2; setp.le.u32 p, t, $3; mov.b32 $0, $5; @p or.b32 $0, $5, $4; }"
    )
    return _pure(ptx, "=&r,r,r,r,n,r", score, base, span, Int32(bit), bits)


def or_if_equal(bits: Uint32, score: Uint32, other: Uint32, bit: int) -> Uint32:
    """`bits`, with `bit` set where `score == other`."""
    ptx = "{ .reg .pred p; setp.eq.u32 p, $1, $2; mov.b32 $0, $4; @p or.b32 $0, $4, $3; }"
    return _pure(ptx, "=&r,r,r,n,r", score, other, Int32(bit), bits)


def or_of_difference(acc: Uint32, a: Uint32, b: Uint32) -> Uint32:
    """acc | (a ^ b), one instruction."""
    return _pure("lop3.b32 $0, $1, $2, $3, 0xF6;", "=r,r,r,r", acc, a, b)


def find_first_set(bits: Uint32) -> Int32:
    """Place of the lowest set bit; `bits` is not 0."""
    return Int32(_pure("{ .reg .b32 t; brev.b32 t, $1; clz.b32 $0, t; }", "=r,r", bits))


def leading_zeros(bits: Uint32) -> Int32:
    """Zero bits above the highest set one; 32 for 0."""
    return Int32(_pure("clz.b32 $0, $1;", "=r,r", bits))


def lanes_below() -> Int32:
    """Mask of the lanes before this one."""
    return Int32(_pure("mov.u32 $0, %lanemask_lt;", "=r"))


# ---------------------------------------------------------------------------------------------------- global memory


@dsl_user_op
def load_words(address: Int64, wanted: Boolean, fill: int, *, loc=None, ip=None) -> tuple[Uint32, ...]:
    """Four words from a 16-byte aligned global address if `wanted`, else `fill`: one load, no branch."""
    ptx = (
        "{ .reg .pred p; .reg .b32 a, b, c, d; setp.ne.s32 p, {$r1}, 0; "
        f"mov.b32 a, {fill:#x}; mov.b32 b, {fill:#x}; mov.b32 c, {fill:#x}; mov.b32 d, {fill:#x}; "
        "@p ld.global.v4.b32 {a, b, c, d}, [{$r0}]; "
        "mov.b32 {$w0}, a; mov.b32 {$w1}, b; mov.b32 {$w2}, c; mov.b32 {$w3}, d; }"
    )
    return cute.arch.inline_ptx(
        ptx, write_only_types=[Uint32] * 4, read_only_args=[address, Int32(wanted)], loc=loc, ip=ip
    )


@dsl_user_op
def load_score(address: Int64, dtype: str, *, loc=None, ip=None) -> Uint32:
    """One score's own bits, in the low end of a word."""
    if dtype == F32:
        ptx = "ld.global.b32 {$w0}, [{$r0}];"
    else:
        ptx = "{ .reg .b16 h; ld.global.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def load_int32(address: Int64, *, loc=None, ip=None) -> Int32:
    """One int32 from global memory."""
    return cute.arch.inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address], loc=loc, ip=ip
    )


@dsl_user_op
def load_int64(address: Int64, *, loc=None, ip=None) -> Int64:
    """One int64 from global memory."""
    return cute.arch.inline_ptx(
        "ld.global.b64 {$w0}, [{$r0}];", write_only_types=[Int64], read_only_args=[address], loc=loc, ip=ip
    )


@dsl_user_op
def load_int64_now(address: Int64, *, loc=None, ip=None) -> Int64:
    """One int64 as it is in memory now, whoever wrote it, on the device or on the host."""
    return cute.arch.inline_ptx(
        "ld.relaxed.sys.global.b64 {$w0}, [{$r0}];",
        write_only_types=[Int64],
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def store_int64_now(address: Int64, value: Int64, *, loc=None, ip=None) -> None:
    """One int64 to where every device and the host sees it."""
    cute.arch.inline_ptx("st.relaxed.sys.global.b64 [{$r0}], {$r1};", read_only_args=[address, value], loc=loc, ip=ip)


@dsl_user_op
def store_int64_last(address: Int64, value: Int64, *, loc=None, ip=None) -> None:
    """The same, for whoever sees it behind everything that was written before."""
    cute.arch.inline_ptx("st.release.sys.global.b64 [{$r0}], {$r1};", read_only_args=[address, value], loc=loc, ip=ip)


@dsl_user_op
def store_int32(address: Int64, value: Int32, *, loc=None, ip=None) -> None:
    """One int32 to global memory."""
    cute.arch.inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value], loc=loc, ip=ip)


@dsl_user_op
def store_int64(address: Int64, value: Int64, *, loc=None, ip=None) -> None:
    """One int64 to global memory."""
    cute.arch.inline_ptx("st.global.b64 [{$r0}], {$r1};", read_only_args=[address, value], loc=loc, ip=ip)


@dsl_user_op
def store_score(address: Int64, bits: Uint32, dtype: str, *, loc=None, ip=None) -> None:
    """One score, from the low end of a word, to global memory."""
    if dtype == F32:
        ptx = "st.global.b32 [{$r0}], {$r1};"
    else:
        ptx = "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.global.b16 [{$r0}], h; }"
    cute.arch.inline_ptx(ptx, read_only_args=[address, bits], loc=loc, ip=ip)


# ---------------------------------------------------------------------------------------------------- shared memory


@dsl_user_op
def count_one(offset: Uint32, base: Uint32, *, loc=None, ip=None) -> None:
    """Adds 1 to the 32-bit counter at a shared-memory address, atomically.

    Constant bases are added last, so that they end up in the instruction's own offset.
    """
    ptx = "{ .reg .b32 t; add.u32 t, {$r0}, {$r1}; red.shared.add.u32 [t], 1; }"
    cute.arch.inline_ptx(ptx, read_only_args=[offset, base], loc=loc, ip=ip)


@dsl_user_op
def count_one_if(offset: Uint32, base: Uint32, wanted: Boolean, *, loc=None, ip=None) -> None:
    """The same where `wanted`."""
    ptx = (
        "{ .reg .pred p; .reg .b32 t; setp.ne.s32 p, {$r2}, 0; add.u32 t, {$r0}, {$r1}; @p red.shared.add.u32 [t], 1; }"
    )
    cute.arch.inline_ptx(ptx, read_only_args=[offset, base, Int32(wanted)], loc=loc, ip=ip)


@dsl_user_op
def load_shared(address: Int32, count: int, *, loc=None, ip=None) -> list[Uint32]:
    """One word of shared memory, or two that are 8-byte aligned."""
    if count == 1:
        ptx = "ld.shared.b32 {$w0}, [{$r0}];"
        word = cute.arch.inline_ptx(ptx, write_only_types=[Uint32], read_only_args=[address], loc=loc, ip=ip)
        return [word]
    ptx = "ld.shared.v2.b32 {{$w0}, {$w1}}, [{$r0}];"
    return list(cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * 2, read_only_args=[address], loc=loc, ip=ip))


@dsl_user_op
def store_shared(address: Int32, words, *, loc=None, ip=None) -> None:
    """One word to shared memory, or two, 8-byte aligned."""
    if len(words) == 1:
        ptx = "st.shared.b32 [{$r0}], {$r1};"
    else:
        ptx = "st.shared.v2.b32 [{$r0}], {{$r1}, {$r2}};"
    cute.arch.inline_ptx(ptx, read_only_args=[address, *words], loc=loc, ip=ip)


@dsl_user_op
def store_zeros_16(address: Int32, *, loc=None, ip=None) -> None:
    """Sixteen bytes of zeros to shared memory, 16-byte aligned."""
    ptx = "st.shared.v4.b32 [{$r0}], {{$r1}, {$r1}, {$r1}, {$r1}};"
    cute.arch.inline_ptx(ptx, read_only_args=[address, Uint32(0)], loc=loc, ip=ip)


@dsl_user_op
def load_shared_half(address: Int32, *, loc=None, ip=None) -> Int32:
    """A 16-bit word of shared memory, zero-extended."""
    ptx = "{ .reg .b16 h; ld.shared.b16 h, [{$r0}]; cvt.u32.u16 {$w0}, h; }"
    return cute.arch.inline_ptx(ptx, write_only_types=[Int32], read_only_args=[address], loc=loc, ip=ip)


@dsl_user_op
def store_shared_half(address: Int32, value: Int32, *, loc=None, ip=None) -> None:
    """The lower 16 bits of a word to shared memory."""
    ptx = "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.shared.b16 [{$r0}], h; }"
    cute.arch.inline_ptx(ptx, read_only_args=[address, value], loc=loc, ip=ip)


# ------------------------------------------------------------------------------------------------------------ scores


def top_aligned(words, dtype: str) -> list[Uint32]:
    """The scores of some words in order, each top-aligned."""
    if dtype == F32:
        return list(words)
    scores = []
    for word in words:
        scores += [word << Uint32(16), word & Uint32(0xFFFF0000)]
    return scores


def order_key(score: Uint32, largest: Boolean) -> Uint32:
    """A key of a canonical, top-aligned score that ascends from the best to the worst.

    If `largest`, NaN (0x7fffffff) comes first; if not, it comes last: both from one formula.
    """
    negative = Uint32(0) - (score >> Uint32(31))
    ascending = score ^ (negative | Uint32(0x80000000))
    return ascending ^ (Uint32(0) - Uint32(largest))


def score_of_key(key: Uint32, largest: Boolean) -> Uint32:
    """The score whose `order_key` is `key`."""
    ascending = key ^ (Uint32(0) - Uint32(largest))
    positive = ascending >> Uint32(31)
    return ascending ^ (Uint32(0x80000000) | (positive - Uint32(1)))


@cute.jit
def value_bits(score: Uint32, dtype: str) -> Uint32:
    """A canonical score as it is written for a group: NaN as the quiet NaN, bits in the low end of the word."""
    nan = (score & Uint32(0x7FFFFFFF)) > Uint32(INF_TOP[dtype])  # f16, top-aligned: 0x7fff0000
    bits = Uint32(QUIET_NAN_TOP[dtype]) if nan else score
    if const_expr(dtype != F32):
        bits = bits >> Uint32(16)
    return bits
