"""Device operations of the `cluster` family for f32 scores: their keys, and comparing these.

A *key* is a 32-bit number that ascends from the worst score to the best; equal keys are equal scores: -0.0 has the key
of +0.0, every NaN the same, the best one if the largest are selected, else the worst.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32
from cutlass.cutlass_dsl import dsl_user_op

from . import _cute_ops as ops

NEG_INF_KEY = 0x007FFFFF
"""Of -inf, where the largest are selected: no score has a lower one."""
NEG_INF = ops.NEG_INF_WORD[ops.F32]


def key_of(score: Uint32, largest: bool) -> Uint32:
    """The key of a score."""
    score = ops.canonical(score, ops.F32)
    sign = Uint32(Int32(score) >> Int32(31))
    if largest:
        return score ^ (sign | Uint32(0x80000000))
    return score ^ (~sign & Uint32(0x7FFFFFFF))


def better(a: Uint32, b: Uint32, largest: bool) -> Uint32:
    """The better of two scores; NaN is the best of the largest, the worst of the smallest."""
    if largest:
        return ops.max_nan(a, b, ops.F32)
    ptx = "{ .reg .f32 s, t; mov.b32 s, $1; mov.b32 t, $2; min.f32 s, s, t; mov.b32 $0, s; }"
    return ops._pure(ptx, "=r,r,r", a, b)


def best_key(words, largest: bool) -> Uint32:
    """The best key of a vector of four scores."""
    best = better(better(words[0], words[1], largest), better(words[2], words[3], largest), largest)
    return key_of(best, largest)


@dsl_user_op
def load_scores(address: Int64, count: Int32, *, loc=None, ip=None) -> tuple[Uint32, ...]:
    """The first `count` of four scores, one by one, and -inf for the others; no branch."""
    words = "abcd"
    ptx = "{ .reg .pred p, q, r, s; .reg .b32 a, b, c, d; "
    for i, (word, predicate) in enumerate(zip(words, "pqrs", strict=True)):
        ptx += f"setp.gt.s32 {predicate}, {{$r1}}, {i}; mov.b32 {word}, {NEG_INF:#x}; "
    for i, (word, predicate) in enumerate(zip(words, "pqrs", strict=True)):
        ptx += f"@{predicate} ld.global.b32 {word}, [{{$r0}}+{4 * i}]; "
    ptx += " ".join(f"mov.b32 {{$w{i}}}, {word};" for i, word in enumerate(words)) + " }"
    return cute.arch.inline_ptx(ptx, write_only_types=[Uint32] * 4, read_only_args=[address, count], loc=loc, ip=ip)


def count_not_below(count: Int32, value: Uint32, pivot: Uint32) -> Int32:
    """`count`, plus 1 where value >= pivot."""
    ptx = "{ .reg .pred p; setp.ge.u32 p, $2, $3; mov.b32 $0, $1; @p add.s32 $0, $1, 1; }"
    return Int32(ops._pure(ptx, "=&r,r,r,r", count, value, pivot))


def count_above(count: Int32, value: Uint32, other: Uint32) -> Int32:
    """`count`, plus 1 where value > other."""
    ptx = "{ .reg .pred p; setp.gt.u32 p, $2, $3; mov.b32 $0, $1; @p add.s32 $0, $1, 1; }"
    return Int32(ops._pure(ptx, "=&r,r,r,r", count, value, other))


def count_equal(count: Int32, value: Uint32, other: Uint32) -> Int32:
    """`count`, plus 1 where value == other."""
    ptx = "{ .reg .pred p; setp.eq.u32 p, $2, $3; mov.b32 $0, $1; @p add.s32 $0, $1, 1; }"
    return Int32(ops._pure(ptx, "=&r,r,r,r", count, value, other))


def or_if_above(bits: Uint32, key: Uint32, other: Uint32, bit: int) -> Uint32:
    """`bits`, with `bit` set where key > other."""
    ptx = "{ .reg .pred p; setp.gt.u32 p, $1, $2; mov.b32 $0, $4; @p or.b32 $0, $4, $3; }"
    return ops._pure(ptx, "=&r,r,r,n,r", key, other, Int32(bit), bits)


def scrambled(number: Uint32) -> Uint32:
    """A number that looks random, the same for the same `number`."""
    number = number * Uint32(0x9E3779B1)
    return (number ^ (number >> Uint32(15))) * Uint32(0x85EBCA77)
