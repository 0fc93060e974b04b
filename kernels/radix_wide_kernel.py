"""Device code of the `radix_wide` family: one CTA of 1,024 threads a row, the row read from global memory in each pass.

Idea. A radix select over 8-bit digits finds the k-th best score of a row without a bound on its length; a second
kind of pass, in index order, takes what is at least as good. A row is read once for each digit that is needed to bring
the elements at or above the cutoff digit's bin down to what shared memory holds (mostly one or two), and once more to
collect or to write them. Nothing is sampled and no buffer can overflow: where too many elements share the bin, the
next digit is counted instead, and after the last one the cutoff is exact and the elements are written directly.

Steps, with the names of the methods:

1. `find_row`, `lay_out`: the window is clamped, the newest element set apart if it is pinned, and the row is cut into
   16-byte vectors from the aligned address at or before its start. Those that reach outside are loaded by scores.
2. `count_row`, `find_digit`: counts the digits of the elements that share the prefix found so far, finds the bin in
   which the k-th best lies. Repeats until the bin is taken whole, is exact, or it and all above fit the list.
   Of f32, the bits in which the counted elements differ are gathered too: what they have in common is skipped.
3. `emit_row`: elements in the cutoff's range are put, in index order, into the list in shared memory, or, where k
   exceeds the list, straight into the output.
4. `count_list`, `find_digit`, `compact_list`: if the list holds more than k, the remaining digits in shared memory.
5. `sort_list`: only for order "value": by score, stable, digit by digit; more than 2,048 entries by a bitonic network.
6. `write_row`: all k cells, coalesced, through the page table or offset; -1 where there is nothing.

Threads. Vector v of a row belongs to tile v // 4096, round (v // 1024) % 4, thread v % 1024, so that a CTA reads
16 KiB side by side and each thread has four loads in flight; index order is (tile, round, warp, lane, score):

    tile 0   round 0   |warp 0: lane 0 .. 31|warp 1|...|warp 31|     one 16-byte vector a lane
             round 1   |warp 0: lane 0 .. 31|warp 1|...|warp 31|
             ...
    tile 1   round 0   ...

Counters. 256 bins x 32 lanes: lane l of every warp counts in column l. All lanes of a warp hit different banks
whatever the data, and equal scores cost what random ones do. (A histogram a warp, as in the source, has the same size,
but rows crowd: in the first digit of normal f32 scores two bins hold 57%, and a warp's adds to one address are serial.)

Order. Raw digits are counted, of canonical scores (`_cute_ops`); what is better is decided where 256 totals are
scanned, so `largest` costs nothing. A cutoff becomes a range test, score - base <= span in wrapping arithmetic.

Ordered output. Each thread makes a bit mask of its scores of a tile. A warp scans the four rounds' counts, packed;
one barrier a tile (double-buffered) makes the warps' counts known, and every thread has its first position. What is
collected into the list is read from the row's end to its start, since the end is what the L2 cache still holds.

Shared memory, 98.5 KiB: counters 32 KiB (cleared by the warp that folds them) | list 64 KiB, 8,192 x (score, index)
| totals of a digit 1 KiB | warps' counts 1 KiB, two buffers | warps' differing bits 0.5 KiB.

Barriers. Two a digit (counts complete; totals complete, counters clear), one a tile in `emit_row`, one around the list.

Cost. One launch, no scratch memory, nothing read but the row, its lengths, starts, offsets and pages. With r counting
passes: (r + 1) x bytes of the row, of which at least one from memory; floor = bytes / 4.3 TB/s on an H200.

Groups. With `grouped`, a vector is reduced to its groups' maxima (in the vector, then over lanes) before it is
looked at; scores that do not begin a group are masked by position. `pooled` rows take the other variant.

Limits. sm_80 and up, 1,024 threads and at most 64 registers a thread; order "value" for k <= 8,192.

Source: Strata, pull request 603, "qsa_select: a 1,024-thread top-k past the register kernel's reach" (2026).
"""

# mypy: ignore-errors

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from ._cute_rows import Cells, Row, SelectArguments, find_cells, find_row
from .radix_wide_digits import Digits
from .radix_wide_emit import Emit
from .radix_wide_layout import CAPACITY, THREADS, Cutoff, Shared
from .radix_wide_list import List


class RadixWide(Digits, Emit, List):
    """The kernel for one dtype, with or without groups to reduce."""

    WIDE_ARGUMENTS = 15
    NARROW_ARGUMENTS = 9

    @cute.jit
    def __call__(self, *values):
        """Launches one CTA a row; the arguments are `SelectArguments`, then `rows` and the stream."""
        *fields, rows, stream = values
        self.kernel(SelectArguments(*fields)).launch(
            grid=[rows, 1, 1], block=[THREADS, 1, 1], stream=stream, hint_smem_base_uniform=False
        )

    @cute.kernel
    def kernel(self, arguments: SelectArguments):
        row_index, _, _ = cute.arch.block_idx()
        shared = self.allocate()
        row = find_row(arguments, row_index, self.size)
        cells = find_cells(arguments, row_index, self.dtype, self.size)
        self.serve(arguments, cells, row, shared)

    @cute.jit
    def serve(self, arguments, cells: Cells, row: Row, shared: Shared):
        """Selects from a row, and writes its cells."""
        candidates = row.count - row.pinned
        room = arguments.k - row.pinned
        read = row.drop or row.by_value or (const_expr(self.grouped) and cells.values != Int64(0))
        whole = candidates <= room and not read  # nothing to find out: elements 0 .. candidates - 1
        taken = candidates
        listed = Boolean(True)
        if not whole:
            taken = Int32(0)
            if room > Int32(0) and candidates > Int32(0):
                taken, listed = self.select(arguments, cells, row, shared, candidates, room)
        self.write_row(arguments, cells, row, shared, taken, whole, listed)

    @cute.jit
    def select(self, arguments, cells: Cells, row: Row, shared: Shared, candidates: Int32, room: Int32):
        """Selects `room` of the candidates; returns how many were taken (dropped ones are not) and if into the list."""
        grid = self.lay_out(arguments, row)
        prefix = Uint32(0)
        known = Int32(0)
        need = cutlass.min(room, candidates)
        inside = candidates
        above = Int32(0)
        if inside > need and inside > Int32(CAPACITY):
            self.count_row(grid, shared, prefix, known, True)
            prefix, known, need, inside, above = self.find_digit(
                row, shared, Cutoff(prefix, known, need, inside, above), True
            )
            while inside > need and known < Int32(self.bits) and above + inside > Int32(CAPACITY):
                self.count_row(grid, shared, prefix, known, False)
                prefix, known, need, inside, above = self.find_digit(
                    row, shared, Cutoff(prefix, known, need, inside, above), True
                )
        settled = inside <= need or known >= Int32(self.bits)
        listed = not settled or above + need <= Int32(CAPACITY)
        cut = self.cut(row, Cutoff(prefix, known, need, inside, above), settled)
        taken = self.emit_row(arguments, cells, row, shared, grid, cut, listed, settled, above + inside)
        if not settled:
            entries = taken
            while inside > need and known < Int32(self.bits):
                self.count_list(shared, entries, prefix, known)
                prefix, known, need, inside, above = self.find_digit(
                    row, shared, Cutoff(prefix, known, need, inside, above), False
                )
            cut = self.cut(row, Cutoff(prefix, known, need, inside, above), Boolean(True))
            taken = self.compact_list(shared, cut, entries)
        if row.by_value:
            self.sort_list(row, shared, taken)
        return taken, listed
