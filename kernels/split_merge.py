"""The `split_merge` family: few very long rows, each cut into parts that CTAs select apart and one merges.

Host side: what the family serves, how a row is cut, its six variants (three dtypes, with and without groups to reduce),
scratch memory, launching. The kernels and how they work are in `split_merge_kernel`; figures are in
docs/kernels/split_merge.md.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from ._cute_compile import processors
from ._cute_launch import ROWS, launches
from ._family import Job
from ._request import SelectRequest
from .radix_wide import RadixWideFamily

MOST_ROWS = 1024
"""With more than 64 a CTA a row keeps half of any device busy, and the merge costs what a cut saves: so many are served
for comparison, and where a table says that it is ahead."""
GRAIN = 64
"""Elements that a part's length is a multiple of: whole 16-byte vectors."""

SCRATCH = 15
"""Place of the scratch memory's addresses among the launch arguments: after the other addresses and strides."""


class Cut(NamedTuple):
    """How a row is cut."""

    parts: int
    elements: int  # of a part; at least k


class SplitMergeFamily(RadixWideFamily):
    """Selections by several CTAs a row; see the module. Owns the variants that were compiled.

    Takes scratch memory for the candidates from torch's allocator and gives it back at once, so that the next call on
    the stream may have it: what runs there runs after this. In a capture by torch it is of the graph's own pool, as
    outputs are that were not given. In a capture that torch knows nothing of, by the CUDA API itself, there is no such
    pool: what such a graph needs at its replays is kept for as long as the process lives.
    """

    name = "split_merge"
    module: ClassVar[tuple[str, str]] = ("split_merge_kernel", "SplitMerge")
    warm_width: ClassVar[int] = 4 * GRAIN

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[torch.Tensor] = []

    def unmet_shape(self, request: SelectRequest) -> str | None:
        """Return the first condition of a request's shape that keeps the family from serving it, or None."""
        if request.rows > MOST_ROWS:
            return f"split_merge serves up to {MOST_ROWS} rows, input has {request.rows}"
        least, most = 2 * request.k, request.element_bound
        if most < least:
            return f"split_merge needs rows of 2 * k = {least} elements, they have at most {most}"
        return super().unmet_shape(request)

    def _enqueue(self, function: Callable[..., None], jobs: Sequence[Job], index: int) -> None:
        """Launch jobs by their variant's launcher."""
        request = jobs[0].request
        stream = torch._C._cuda_getCurrentRawStream(index)
        for arguments, _table in launches(jobs):
            parts, elements = cut(arguments[ROWS], request.element_bound, request.k, processors(index))
            candidates = arguments[ROWS] * parts * request.k
            scratch = torch.empty(candidates * (4 + request.input.element_size()), dtype=torch.uint8, device=index)
            if torch.cuda.is_current_stream_capturing() and not _is_of_a_graph(scratch):
                self._kept.append(scratch)
            at = scratch.data_ptr()  # indices, then values
            function(*arguments[:SCRATCH], at + 4 * candidates, at, *arguments[SCRATCH:], parts, elements, stream)


def _is_of_a_graph(memory: torch.Tensor) -> bool:
    """Say whether memory is of a pool that belongs to a graph, and not of the one that every allocation is from."""
    if torch.cuda.get_allocator_backend() != "native":
        return True  # by cudaMallocAsync it is a node of the graph
    at = memory.data_ptr()
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if segment["address"] <= at < segment["address"] + segment["total_size"]:
            return tuple(segment["segment_pool_id"]) != (0, 0)
    return False


@functools.lru_cache(maxsize=4096)
def cut(rows: int, elements: int, k: int, count: int) -> Cut:
    """Return how rows of up to `elements` elements are cut on `count` SMs.

    A part costs its elements, and the merge parts * k candidates, each about twice as much, since they crowd and need
    another digit: the sum is least near parts^2 = elements / 2k. No more parts than SMs for them, and none shorter than
    k, without which there would be gaps between candidates.
    """
    parts = min(round(math.sqrt(elements / (2 * k))), count // max(rows, 1), elements // k)
    each = -(-elements // max(parts, 2))
    each = -(-each // GRAIN) * GRAIN
    return Cut(-(-elements // each), each)
