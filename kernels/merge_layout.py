"""Candidates of a merge as numbers that order as they do; part of `merge_kernel`, where it is explained."""

# mypy: ignore-errors

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, Uint64, const_expr

from . import _cute_ops as ops

THREADS = 1024
WARPS = 32
ROUNDS = 4  # candidates of a thread in a tile
BINS = 256
CAPACITY = 4096  # entries of the list
DIGITS = 16  # of a rank; those of the index are 4 .. 11, those of the place 12 .. 15
INDEX_DIGIT, LOW_DIGIT, PLACE_DIGIT = 4, 8, 12


class MergeRow(NamedTuple):
    """One row: where it is, and what is wanted of it."""

    values: Int64  # address of the first candidate's value
    indices: Int64  # address of the first candidate's index
    out_indices: Int64  # address of the first cell
    out_values: Int64
    count: Int32  # candidates, those without an index too
    k: Int32
    largest: Boolean
    by_value: Boolean
    ordered: Boolean  # by index or by value
    any_ties: Boolean
    highest: Boolean


class Shared(NamedTuple):
    """Shared memory."""

    sFirst: cute.Tensor  # (CAPACITY) Uint64, first halves of ranks
    sSecond: cute.Tensor  # (CAPACITY) Uint64, second halves
    sCount: cute.Tensor  # (BINS * 32) Int32, lane l of bin b at b * 32 + l
    sTotal: cute.Tensor  # (BINS) Int32
    sEntries: cute.Tensor  # (2) Int32, entries of the list: when it is collected, when it is compacted


class Rank(NamedTuple):
    """A candidate's rank, 128 bits: the least is the best."""

    first: Uint64  # key of the score << 32 | high half of the index
    second: Uint64  # low half of the index << 32 | place in the row


class Cutoff(NamedTuple):
    """Where the k-th best lies: among `inside` candidates that have these bits; `above` are better."""

    first: Uint64
    second: Uint64
    first_known: Uint64  # which bits are settled
    second_known: Uint64
    digit: Int32  # the next to be counted
    need: Int32  # of those inside
    inside: Int32
    above: Int32


class Layout:
    """Facts of a variant; candidates loaded, ranked and compared."""

    threads = THREADS
    shared_bytes = 16 * CAPACITY + 4 * BINS * 32 + 4 * BINS + 8  # see `allocate`

    def __init__(self, dtype: str, wide: bool):
        self.dtype = dtype
        self.wide = wide
        self.size = 4 if dtype == ops.F32 else 2
        self.index_size = 8 if wide else 4

    @cute.jit
    def allocate(self):
        """Lays out shared memory and clears the counters."""
        smem = cutlass.memory.SmemAllocator()
        shared = Shared(
            sFirst=smem.allocate_tensor(Uint64, cute.make_layout(CAPACITY), byte_alignment=128),
            sSecond=smem.allocate_tensor(Uint64, cute.make_layout(CAPACITY), byte_alignment=128),
            sCount=smem.allocate_tensor(Int32, cute.make_layout(BINS * 32), byte_alignment=128),
            sTotal=smem.allocate_tensor(Int32, cute.make_layout(BINS), byte_alignment=128),
            sEntries=smem.allocate_tensor(Int32, cute.make_layout(2), byte_alignment=8),
        )
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(BINS * 32 // THREADS):
            shared.sCount[tid + i * THREADS] = Int32(0)
        if tid < Int32(2):
            shared.sEntries[tid] = Int32(0)
        cute.arch.sync_threads()
        return shared

    @cute.jit
    def load_tile(self, row: MergeRow, tile: Int32):
        """Loads this thread's candidates of a tile: ROUNDS times the key, the index, the place, and if there is one."""
        tid, _, _ = cute.arch.thread_idx()
        loaded = []
        for j in cutlass.range_constexpr(ROUNDS):
            place = tile * (ROUNDS * THREADS) + j * THREADS + tid
            inside = Uint32(place) < Uint32(row.count)
            place = place if inside else Int32(0)
            score = ops.load_score(row.values + Int64(place) * self.size, self.dtype)
            loaded.append((place, inside, score, self.load_index(row, place)))
        keyed = []
        for j in cutlass.range_constexpr(ROUNDS):
            place, inside, score, index = loaded[j]
            keyed.append((self.key_of(row, score), index, place, inside and index != Int64(-1)))
        return keyed

    @cute.jit
    def load_index(self, row: MergeRow, place: Int32) -> Int64:
        """The index of a candidate."""
        if const_expr(self.wide):
            return ops.load_int64(row.indices + Int64(place) * 8)
        return Int64(ops.load_int32(row.indices + Int64(place) * 4))

    @cute.jit
    def key_of(self, row: MergeRow, score: Uint32) -> Uint32:
        """Makes a key of a score's own bits: the least is the best."""
        key = ops.canonical(score, self.dtype)
        if const_expr(self.size == 2):
            key = key << Uint32(16)
        return ops.order_key(key, row.largest)

    @cute.jit
    def rank(self, row: MergeRow, key: Uint32, index: Int64, place: Int32) -> Rank:
        """Makes a rank of a key, an index and a place."""
        high = Uint32(0)
        low = Uint32(index & Int64(0xFFFFFFFF))
        flip = Uint32(0) - Uint32(row.highest)
        if const_expr(self.wide):
            high = Uint32((index >> Int64(32)) & Int64(0xFFFFFFFF)) ^ Uint32(0x80000000) ^ flip
            low = low ^ flip
        else:
            low = low ^ Uint32(0x80000000) ^ flip
        return Rank(
            first=(Uint64(key) << Uint64(32)) | Uint64(high), second=(Uint64(low) << Uint64(32)) | Uint64(Uint32(place))
        )

    @cute.jit
    def shares(self, rank: Rank, cut: Cutoff) -> Boolean:
        """Whether a rank has the settled bits."""
        differ = (rank.first ^ cut.first) & cut.first_known
        differ = differ | ((rank.second ^ cut.second) & cut.second_known)
        return differ == Uint64(0)

    @cute.jit
    def is_taken(self, rank: Rank, cut: Cutoff) -> Boolean:
        """Whether the settled bits of a rank are not above the cutoff's."""
        first = rank.first & cut.first_known
        second = rank.second & cut.second_known
        return first < cut.first or (first == cut.first and second <= cut.second)

    @cute.jit
    def digit_of(self, rank: Rank, digit: Int32) -> Uint32:
        """One 8-bit digit of a rank."""
        half = rank.first if digit < Int32(LOW_DIGIT) else rank.second
        shift = Int32(56) - ((digit & 7) << 3)
        return Uint32((half >> Uint64(shift)) & Uint64(0xFF))

    @cute.jit
    def following(self, row: MergeRow, digit: Int32) -> Int32:
        """The digit to be counted after another: those that all ranks share are left out."""
        after = digit + Int32(1)
        if const_expr(self.size == 2):
            after = Int32(INDEX_DIGIT) if digit == Int32(1) else after
        if after == Int32(INDEX_DIGIT):
            if const_expr(not self.wide):
                after = Int32(LOW_DIGIT)
            if row.any_ties:
                after = Int32(PLACE_DIGIT)
        while (
            after >= Int32(PLACE_DIGIT)
            and after < Int32(DIGITS - 1)
            and (Uint32(row.count - 1) >> Uint32((Int32(DIGITS - 1) - after) << 3)) == Uint32(0)
        ):
            after = after + Int32(1)
        return after
