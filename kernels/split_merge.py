"""The `split_merge` family: few very long rows, each cut into parts that CTAs select apart and one merges.

Host side: what the family serves, how a row is cut, its six variants (three dtypes, with and without groups to reduce),
scratch memory, launching. The kernels and how they work are in `split_merge_kernel`; figures are in
docs/kernels/split_merge.md.
"""

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ._cute_compile import arch_of, capability, device_index, load_or_compile, processors, unmet_device
from ._cute_launch import ROWS, launches
from ._family import Job
from ._request import SelectRequest
from ._validate import check_select
from .radix_wide import DTYPES, LIST_CAPACITY

MOST_ROWS = 64
"""With more, a CTA a row keeps more than half of any device busy, and the merge would cost what a cut saves."""
GRAIN = 64
"""Elements that a part's length is a multiple of: whole 16-byte vectors."""

SCRATCH = 14
"""Place of the scratch memory's addresses among the launch arguments: after the other addresses and strides."""

_Variant = tuple[str, str, bool]
"""Architecture, dtype, groups to reduce: all that changes the code."""


class Cut(NamedTuple):
    """How a row is cut."""

    parts: int
    elements: int  # of a part; at least k


class SplitMergeFamily:
    """Selections by several CTAs a row; see the module. Owns the variants that were compiled."""

    name = "split_merge"
    capturable = True
    oldest = (8, 0)

    def __init__(self) -> None:
        self._compiled: dict[_Variant, Callable[..., None]] = {}
        self._warm: set[tuple[int, _Variant]] = set()
        self._lock = threading.Lock()

    def unmet(self, request: SelectRequest) -> str | None:
        """Return the first condition that keeps this family from serving `request`, or None."""
        return unmet_device(self.name, request.input.device, self.oldest) or unmet_shape(request)

    def precompile(self, arch: str) -> None:
        """Load or compile all variants for an architecture such as "sm_90a"; needs no GPU and replaces nothing."""
        for dtype in DTYPES.values():
            for grouped in (False, True):
                self._function((arch, dtype, grouped))

    def warm(self, request: SelectRequest) -> None:
        """Load or compile the request's variant, and launch it on scores of its own, so that the device has it too."""
        index = device_index(request.input.device)
        variant = _variant(request, index)
        if (index, variant) in self._warm:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("kernel family 'split_merge' cannot be warmed while the stream is being captured")
        scores = torch.zeros(1, 4 * GRAIN, dtype=request.input.dtype, device=request.input.device)
        small = check_select(scores, 1, group=2 if variant[2] else 1)
        self.run([Job(small, torch.empty(1, 1, dtype=torch.int32, device=scores.device), None)])
        self._warm.add((index, variant))

    def run(self, jobs: Sequence[Job]) -> None:
        """Launch jobs of one plan key on the current stream of their device; loads or compiles what is still cold.

        Takes scratch memory for the candidates from torch's allocator and gives it back at once, so that the next call
        on the stream may have it: what runs there runs after this. In a capture by `torch.cuda.graph` it is of the
        graph's own pool, as outputs are that were not given. Waits for nothing.

        Raises:
            RuntimeError: the variant is cold and the stream is being captured; the stream was not touched.
            KernelUnavailableError: the variant can be neither loaded nor compiled.
        """
        index = device_index(jobs[0].request.input.device)
        if index == torch.cuda.current_device():
            self._launch(jobs, index)
        else:
            with torch.cuda.device(index):
                self._launch(jobs, index)

    def _launch(self, jobs: Sequence[Job], index: int) -> None:
        """Launch jobs on the current device, which is number `index`."""
        request = jobs[0].request
        variant = _variant(request, index)
        function = self._compiled.get(variant)
        if function is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"kernel family 'split_merge' has not compiled its variant {variant} yet, which cannot be done "
                    "while the stream is being captured: warm it by one call before the capture, or precompile it"
                )
            function = self._function(variant)
        stream = torch._C._cuda_getCurrentRawStream(index)  # the handle alone; current_stream would build an object
        for arguments, _table in launches(jobs):
            parts, elements = cut(arguments[ROWS], request.element_bound, request.k, processors(index))
            candidates = arguments[ROWS] * parts * request.k
            scratch = torch.empty(candidates * (4 + request.input.element_size()), dtype=torch.uint8, device=index)
            at = scratch.data_ptr()  # indices, then values
            function(*arguments[:SCRATCH], at + 4 * candidates, at, *arguments[SCRATCH:], parts, elements, stream)

    def _function(self, variant: _Variant) -> Callable[..., None]:
        """Return the launcher of a variant, compiling it if it is cold."""
        with self._lock:
            function = self._compiled.get(variant)
            if function is None:
                arch, dtype, grouped = variant
                function = load_or_compile("split_merge_kernel", "SplitMerge", (dtype, grouped), arch).function
                self._compiled[variant] = function
        return function


def unmet_shape(request: SelectRequest) -> str | None:
    """Return the first condition of a request's shape that keeps the family from serving it, or None."""
    if request.rows > MOST_ROWS:
        return f"split_merge serves up to {MOST_ROWS} rows, input has {request.rows}"
    if request.element_bound < 2 * request.k:
        return f"split_merge needs rows of 2 * k = {2 * request.k} elements, they have at most {request.element_bound}"
    if request.order == "value" and request.k > LIST_CAPACITY:
        return f'split_merge serves order="value" for k <= {LIST_CAPACITY}, k is {request.k}'
    return None


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


def _variant(request: SelectRequest, index: int) -> _Variant:
    """Return the variant that serves a request on CUDA device `index`."""
    return arch_of(capability(index)), DTYPES[request.input.dtype], request.group > 1 and not request.pooled
