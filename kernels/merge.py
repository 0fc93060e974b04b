"""The kernel of `merge_topk`: candidates of a row merged by one CTA of 1,024 threads, in one launch.

Host side: what it serves, its six variants (three dtypes of scores, two of indices), launching. The kernel and how it
works are in `merge_kernel`; figures are in docs/kernels/merge.md.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ._cute_compile import arch_of, capability, device_index, failure, load_or_compile, unmet_device
from ._loaded import Loaded
from ._request import MergeRequest

MAX_K = 4096
"""What the list in shared memory holds."""

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_ORDERS = {"any": 0, "index": 1, "value": 2}
_TIES = {"any": 0, "lowest": 1, "highest": 2}
_Variant = tuple[str, str, bool]
"""Architecture, dtype of scores, 64-bit indices: all that changes the code."""


class MergeKernel:
    """Merges by one CTA a row; see the module. Owns the variants that were compiled."""

    name = "merge"
    oldest = (8, 0)

    def __init__(self) -> None:
        self._launchers = Loaded(self._load)

    def unmet(self, request: MergeRequest) -> str | None:
        """Return the first condition that keeps the kernel from serving `request`, or None."""
        unmet = unmet_device(self.name, request.values.device, self.oldest, "values are on")
        if unmet is not None:
            return unmet
        if request.k > MAX_K:
            return f"merge serves k <= {MAX_K}, k is {request.k}"
        if (reason := failure(self.name)) is not None:
            return f"merge has no code in this process: {reason}"
        return None

    def precompile(self, arch: str) -> None:
        """Load or compile all variants for an architecture such as "sm_90a"; needs no GPU and replaces nothing."""
        for dtype in _DTYPES.values():
            for wide in (False, True):
                self._launchers((arch, dtype, wide))

    def prepare(self, request: MergeRequest) -> None:
        """Load or compile the request's variant, if it is cold.

        Raises:
            RuntimeError: it is cold and the stream is being captured; the stream was not touched.
            KernelUnavailableError: the variant can be neither loaded nor compiled.
        """
        index = device_index(request.values.device)
        variant = _variant(request, index)
        if self._launchers.find(variant) is None:
            with torch.cuda.device(index):
                if torch.cuda.is_current_stream_capturing():
                    raise RuntimeError(
                        f"merge_topk has not compiled its variant {variant} yet, which cannot be done while the stream "
                        "is being captured: warm it by one call before the capture, or precompile it"
                    )
            self._launchers(variant)

    def run(self, request: MergeRequest, indices: Tensor, values: Tensor) -> None:
        """Launch a merge that was prepared, on the current stream of its device.

        Allocates nothing, waits for nothing, and can be captured in a CUDA graph.

        Args:
            request: one of at least a row, which `unmet` has nothing against.
            indices: (rows, k), written.
            values: (rows, k), written.
        """
        index = device_index(request.values.device)
        if index == torch.cuda.current_device():
            self._launch(request, (indices, values), index)
        else:
            with torch.cuda.device(index):
                self._launch(request, (indices, values), index)

    def _launch(self, request: MergeRequest, out: tuple[Tensor, Tensor], index: int) -> None:
        """Launch on the current device, which is number `index`."""
        function = self._launchers(_variant(request, index))
        stream = torch._C._cuda_getCurrentRawStream(index)  # the handle alone; current_stream would build an object
        function(*merge_arguments(request, *out), stream)

    def _load(self, variant: _Variant) -> Callable[..., None]:
        arch, dtype, wide = variant
        return load_or_compile("merge_kernel", "Merge", (dtype, wide), arch).function


def merge_arguments(request: MergeRequest, indices: Tensor, values: Tensor) -> tuple[int, ...]:
    """Return a merge into given outputs as the kernel takes it."""
    tensors = (request.values, request.indices, indices, values)
    addresses = [part for one in tensors for part in (one.data_ptr(), one.stride(0))]
    options = (int(request.largest), _ORDERS[request.order], _TIES[request.ties])
    return (*addresses, request.candidates, request.k, *options, request.rows)


def _variant(request: MergeRequest, index: int) -> _Variant:
    """Return the variant that serves a request on CUDA device `index`."""
    return arch_of(capability(index)), _DTYPES[request.values.dtype], request.indices.dtype == torch.int64
