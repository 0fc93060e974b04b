"""Device code of the `radix_register` and `small` families: one CTA a row, the whole row in its registers.

Idea. A row of up to 33,792 scores is read once, before anything else is known of it, and everything happens in
registers and shared memory; what is left is latency, so barriers and dependent steps are what is saved. Keys are
counted in bins near the k-th best, fine enough that its bin holds equal keys (16 bits) or a few (f32). Of bf16 2,048
bins reach from a row's best to a *bound* that the k-th best does not exceed: the worst of the bests of k *groups* of
keys, found by two reductions. For others that is too far: there the bests of more groups are counted first, and the
k-th best of them ends the bins. Nothing is sampled and no buffer bounds correctness: wherever the range of the
k-th best stays wide, the keys in it are counted again, 11 bits at a time.

Steps, with the names of the methods:

1. `find_memory`, `find_place`, `load`: each thread's vectors, as far as they lie in the row's memory, whatever the
   row's length. Only then `start` (clears the bins) and `find_window` (reads the length).
2. `keys_of`: scores become keys that ascend from the best to the worst; vectors at the ends of the tensor are loaded by
   scores, groups reduced; what is no element of the row gets the highest number, which is no score's key.
3. Of bf16, and of f16 in rows of up to 4,096, where no more than a third of the row is selected: `note_bests`, the best
   key of each warp and the worst of the bests of its groups (one, two or four a thread), before the first barrier;
   `find_near`, from these which bins suit the row; `count_nearest`, all keys. See `radix_register_near`.
4. Of others: `count_bests`, the best of each group of keys (one of each of the thread's vectors, so that neighbours are
   in different groups) by its first 11 bits; the bin of the k-th best of them ends at the bound. `count_near`, keys up
   to the bound in 2,048 bins, of a key each (f16) or of 2^11 (f32), the worst at the bound, all that is better than the
   bins in the first. Left out where a thread has one vector, or where k is not small against the number of groups.
5. `narrow`: more counts, while the k-th best's bin holds more than 32 keys that are not equal. Up to 32 are gathered
   and compared by every warp (`gather`, `find_few`).
6. `take_any`: each warp reserves places with one atomic. Or, where order or ties matter, `take`: in the order of the
   row, by prefix sums over lanes and warps. Elements go into a list in shared memory, which `sort_list` sorts for
   order "value", and `write_plain` or `write_row` (values, transforms, int64) writes side by side. Up to 1,024 plain
   ones of rows of up to 4,096 in any order are written straight.

Threads. With T threads and V vectors each (16 bytes, 8 or 4 scores), vector v of a row belongs to

    any order       |thread 0: v = 0|thread 1: 1| .. |T - 1|    then T, T + 1, ...: thread (v - 72 j) mod T in round j
    index order     |warp 0: v = 0 .. 32 R - 1|warp 1: 32 R ..|  R = rounds that the bound of the lengths needs;
                     lane = v mod 32, so that (warp, round, lane, score) is the order of the row

`find`. Each warp scans its part of the bins and adds its sum to what every later part has before it; after a barrier
each warp finds the part and the bin by two votes. It clears the other buffer of bins meanwhile, which nobody has read
since the barrier.

Shared memory, 35 to 86 KiB: two buffers of 2,048 bins 16 KiB | what the bins of each thread have before them, 4 bytes a
thread | what each warp's part has before it, for each of 8 counts, 1 KiB | places, few keys, bests of
warps | the list: up to 8,192 entries of 4 bytes, of 8 for f32.

Barriers. One when the bins are cleared, two a count, one for the last few keys, one for the list, and in index order
one for the warps' counts.

Cost. One launch, no scratch memory. Bytes: the row once. Floor of a CTA of 1,024 threads that reads 64 KiB, on an H200:
1.5 us for 1 row, 2.1 us for 64.

Limits. sm_80 and up; rows of up to 33,792 scores (`small`: 4,608); k <= 8,192, or rows that have no more elements.

Source: Strata, pull request 512 (`block_topk_reg_kernel`: keys in registers, dispatch by the active bound), and its
original `block_topk_kernel` of 256 threads, which is `small` here. Different: the bound from groups of keys, 16-byte
loads, one histogram, any dtype.
"""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32, const_expr

from . import _cute_ops as ops
from ._cute_rows import Row, SelectArguments
from .radix_register_digits import Range
from .radix_register_layout import Memory, Place, Shared
from .radix_register_list import List

STRAIGHT = 1024  # most elements that are written without a list: scattered, which is slow for many
ANY = 1  # bit of `path`: order and ties are "any"


class RadixRegister(List):
    """The kernel for one dtype and one number of threads and of vectors a thread."""

    WIDE_ARGUMENTS = 15
    NARROW_ARGUMENTS = 12

    @cute.jit
    def __call__(self, *values):
        """Launches one CTA a row.

        The arguments are `SelectArguments`, then `rows`, `path` (bit ANY), `bound` (the most members of a row), whether
        the grid may start before the one before it in the stream has ended (programmatic dependent launch; sm_90 and
        up), and the stream.
        """
        *fields, rows, path, bound, dependent, stream = values
        self.kernel(SelectArguments(*fields), path, bound).launch(
            grid=[rows, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=dependent if const_expr(self.recent) else False,
            min_blocks_per_mp=self.residents,
            hint_smem_base_uniform=False,
            preferred_smem_carveout=-1,  # the driver's default; unset, the compiler would ask a device
        )

    @cute.kernel
    def kernel(self, arguments: SelectArguments, path: Int32, bound: Int32):
        k = arguments.k
        row_index, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        any_ = (path & Int32(ANY)) != Int32(0)
        if const_expr(self.recent):
            cute.arch.griddepcontrol_wait()
        memory = self.find_memory(arguments, row_index, bound)
        shift = arguments.group_shift
        short = (bound + ((Int32(1) << shift) - 1)) >> shift <= k
        place = self.find_place(tid, memory, not any_ or short)
        loaded = self.load(memory, place)
        shared = self.start(tid)
        row = self.find_window(arguments, row_index, bound, memory)
        candidates = row.count - row.pinned
        room = arguments.k - row.pinned
        keyed = row.by_value
        if const_expr(self.grouped):
            keyed = keyed or arguments.out_values != Int64(0)
        whole = candidates <= room and not (row.drop or keyed)  # nothing to find out: elements 0 .. candidates - 1
        plain = self.is_plain(arguments)
        loose = any_ and candidates > room and not (row.drop or keyed)
        straight = Int64(0)
        if const_expr(self.straight):
            if loose and plain and k <= Int32(STRAIGHT):
                straight = self.plain_cells(arguments, row_index)
        taken = candidates
        if not whole:
            taken = Int32(0)
            if room > Int32(0) and candidates > Int32(0):
                taken = self.select(arguments, row, shared, memory, place, loaded, loose, straight, keyed)
        if straight != Int64(0) and taken > Int32(0):
            if row.pinned != Int32(0) and tid == Int32(0):
                ops.store_int32(straight + Int64(taken) * 4, row.count - Int32(1))
        elif plain:
            self.write_plain(arguments, row, row_index, shared, tid, taken, whole, keyed)
        else:
            self.write_row(arguments, row, row_index, shared, tid, taken, whole, keyed)

    @cute.jit
    def select(
        self,
        arguments,
        row: Row,
        shared: Shared,
        memory: Memory,
        place: Place,
        loaded,
        loose: Boolean,
        straight: Int64,
        keyed: Boolean,
    ) -> Int32:
        """Puts the best of the row into the list; returns how many were taken (dropped ones are not).

        Args:
            arguments: `SelectArguments`.
            row: the row.
            shared: shared memory.
            memory: where the row's vectors are.
            place: this thread.
            loaded: its vectors.
            loose: any order does.
            straight: where elements are written if there need be no list, else 0.
            keyed: keys are listed too.
        """
        candidates = row.count - row.pinned
        room = arguments.k - row.pinned
        grid = self.lay_out(arguments, row)
        keys = self.keys_of(grid, memory, place, loaded, row.largest)
        if const_expr(self.near):
            self.note_bests(shared, place, grid, keys, room)
        cute.arch.sync_threads()
        if const_expr(self.recent):
            cute.arch.griddepcontrol_launch_dependents()
        found = Range(Uint32(0), Uint32(self.none - 1), candidates, candidates)
        if candidates > room:
            found = self.narrow(shared, place, grid, keys, room, candidates)
        cut = self.cut(row, found)
        taken = room
        if loose:
            self.take_any(shared, place, grid, keys, cut, (room - cut.need, found.inside), straight)
        else:
            taken = self.take(shared, place, grid, keys, cut, keyed)
            if row.by_value:
                self.sort_list(shared, place, taken, found.high)
        return taken
