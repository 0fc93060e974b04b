"""The `radix_wide` family: one CTA of 1,024 threads a row, rows of any length, index-ordered output in one launch.

Host side: what the family serves, its six variants (three dtypes, with and without groups to reduce), launching.
The kernel and how it works are in `radix_wide_kernel`; figures are in docs/kernels/radix_wide.md.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from ._cute_compile import arch_of, capability, device_index, load_or_compile, unmet_device
from ._cute_launch import launches
from ._family import Job
from ._loaded import Loaded
from ._request import SelectRequest
from ._validate import check_select

LIST_CAPACITY = 8192
"""Elements that shared memory holds: order "value" sorts there."""

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_Variant = tuple[str, str, bool]
"""Architecture, dtype, groups to reduce: all that changes the code."""


class RadixWideFamily:
    """Selections by one CTA a row; see the module. Owns the variants that were compiled."""

    name = "radix_wide"
    capturable = True
    oldest = (8, 0)
    module: ClassVar[tuple[str, str]] = ("radix_wide_kernel", "RadixWide")
    warm_width: ClassVar[int] = 8
    """Scores of a row that warms a variant."""

    def __init__(self) -> None:
        self._launchers = Loaded(self._load)
        self._warm: set[tuple[int, _Variant]] = set()

    def unmet(self, request: SelectRequest) -> str | None:
        """Return the first condition that keeps this family from serving `request`, or None."""
        return unmet_device(self.name, request.input.device, self.oldest) or self.unmet_shape(request)

    def unmet_shape(self, request: SelectRequest) -> str | None:
        """Return the first condition of a request's shape that keeps the family from serving it, or None."""
        if request.order == "value" and request.k > LIST_CAPACITY:
            return f'{self.name} serves order="value" for k <= {LIST_CAPACITY}, k is {request.k}'
        return None

    def precompile(self, arch: str) -> None:
        """Load or compile all variants for an architecture such as "sm_90a"; needs no GPU and replaces nothing."""
        for dtype in DTYPES.values():
            for grouped in (False, True):
                self._launchers((arch, dtype, grouped))

    def warm(self, request: SelectRequest) -> None:
        """Load or compile the request's variant, and launch it on scores of its own, so that the device has it too."""
        index = device_index(request.input.device)
        variant = _variant(request, index)
        if (index, variant) in self._warm:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"kernel family {self.name!r} cannot be warmed while the stream is being captured")
        scores = torch.zeros(1, self.warm_width, dtype=request.input.dtype, device=request.input.device)
        small = check_select(scores, 1, group=2 if variant[2] else 1)
        self.run([Job(small, torch.empty(1, 1, dtype=torch.int32, device=scores.device), None)])
        self._warm.add((index, variant))

    def run(self, jobs: Sequence[Job]) -> None:
        """Launch jobs of one plan key on the current stream of their device; loads or compiles what is still cold.

        Those with as many rows become one launch, for which a table of them is allocated and copied; a single job
        allocates nothing. Waits for nothing, and can be captured in a CUDA graph once the variant is compiled.

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
        variant = _variant(jobs[0].request, index)
        function = self._launchers.find(variant)
        if function is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"kernel family {self.name!r} has not compiled its variant {variant} yet, which cannot be done "
                    "while the stream is being captured: warm it by one call before the capture, or precompile it"
                )
            function = self._launchers(variant)
        self._enqueue(function, jobs, index)

    def _enqueue(self, function: Callable[..., None], jobs: Sequence[Job], index: int) -> None:
        """Launch jobs by their variant's launcher."""
        stream = torch._C._cuda_getCurrentRawStream(index)  # the handle alone; current_stream would build an object
        for arguments, _table in launches(jobs):
            function(*arguments, stream)

    def _load(self, variant: _Variant) -> Callable[..., None]:
        arch, dtype, grouped = variant
        return load_or_compile(*self.module, (dtype, grouped), arch).function


def _variant(request: SelectRequest, index: int) -> _Variant:
    """Return the variant that serves a request on CUDA device `index`."""
    return arch_of(capability(index)), DTYPES[request.input.dtype], request.group > 1 and not request.pooled
