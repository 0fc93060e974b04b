"""The `radix_register` family: one CTA a row, the row's keys in registers, for rows of up to 33,792 scores.

Host side: what the family serves, its variants (dtypes, groups to reduce or not, threads and vectors a thread),
which of them a launch takes, launching. The kernel and how it works are in `radix_register_kernel`; figures are in
docs/kernels/radix_register.md. The `small` family is the same code with CTAs of 256 threads.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from ._cute_compile import arch_of, capability, device_index, load_or_compile, unmet_device
from ._cute_launch import launch_arguments
from ._family import Job
from ._loaded import Loaded
from ._request import SelectRequest
from ._validate import check_select
from .radix_register_shape import LIST_CAPACITY, VECTOR, Shape

MOST_CHOICES = 4096
"""Shapes of requests for which the chosen variant is remembered."""
ANY = 1
"""Bit of the kernel's `path`: order and ties are "any"."""

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


class Variant(NamedTuple):
    """All that changes the code."""

    arch: str
    dtype: str
    grouped: bool
    shape: Shape


class RadixRegisterFamily:
    """Selections by one CTA a row that holds it; see the module. Owns the variants that were compiled."""

    name = "radix_register"
    capturable = True
    oldest = (8, 0)
    module: ClassVar[tuple[str, str]] = ("radix_register_kernel", "RadixRegister")
    most: ClassVar[int] = 33_792
    """Scores of a row, wherever it begins."""
    shapes: ClassVar[dict[int, tuple[Shape, ...]]] = {
        2: (Shape(512, 1), Shape(512, 2), Shape(512, 4), Shape(1024, 5)),
        4: (Shape(512, 2), Shape(512, 4), Shape(512, 8), Shape(1024, 9)),
    }
    """By bytes of a score, the smallest first."""

    def __init__(self) -> None:
        self._launchers = Loaded(self._load)
        self._warm: set[tuple[int, Variant]] = set()
        self._choices: dict[tuple[int, torch.dtype, bool, int], Callable[..., None]] = {}

    def unmet(self, request: SelectRequest) -> str | None:
        """Return the first condition that keeps this family from serving `request`, or None."""
        return unmet_device(self.name, request.input.device, self.oldest) or self.unmet_shape(request)

    def unmet_shape(self, request: SelectRequest) -> str | None:
        """Return the first condition on a request's shape that is not met, or None; it does not go by alignment."""
        slots = request.element_bound if request.pooled else request.length_bound
        if slots > self.most:
            return f"{self.name} serves rows of up to {self.most} scores, these have up to {slots}"
        if min(request.k, request.element_bound) > LIST_CAPACITY:
            return f"{self.name} serves k <= {LIST_CAPACITY}, k is {request.k}"
        return None

    def precompile(self, arch: str) -> None:
        """Load or compile all variants for an architecture such as "sm_90a"; needs no GPU and replaces nothing."""
        for dtype, name in _DTYPES.items():
            for grouped in (False, True):
                for shape in self.shapes[dtype.itemsize]:
                    self._launchers(Variant(arch, name, grouped, shape))

    def warm(self, request: SelectRequest) -> None:
        """Load or compile the request's variant, and launch it on scores of its own, so that the device has it too."""
        if not request.rows:
            return
        index = device_index(request.input.device)
        variant = self.variant(request, index)
        if (index, variant) in self._warm:
            return
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"kernel family {self.name!r} cannot be warmed while the stream is being captured")
        scores = torch.zeros(1, 8, dtype=request.input.dtype, device=request.input.device)
        small = check_select(scores, 1, group=2 if variant.grouped else 1)
        job = Job(small, torch.empty(1, 1, dtype=torch.int32, device=scores.device), None)
        with torch.cuda.device(index):
            function = self._launchers(variant)
            function(*arguments_of(job), 0, torch._C._cuda_getCurrentRawStream(index))
        self._warm.add((index, variant))

    def run(self, jobs: Sequence[Job], *, dependent: bool = False) -> None:
        """Launch each job on the current stream of its device; loads or compiles what is still cold.

        Allocates nothing, waits for nothing, and can be captured in a CUDA graph once the variant is compiled.

        Args:
            jobs: jobs that `unmet` has nothing against.
            dependent: programmatic dependent launch (sm_90 and up): the kernel may start while the one before it in
                the stream ends. It waits for that one before it reads anything.

        Raises:
            RuntimeError: the variant is cold and the stream is being captured; the stream was not touched.
            KernelUnavailableError: the variant can be neither loaded nor compiled.
        """
        for job in jobs:
            index = device_index(job.request.input.device)
            if index == torch._C._cuda_getDevice():  # torch.cuda.current_device without its checks
                self._launch(job, index, dependent)
            else:
                with torch.cuda.device(index):
                    self._launch(job, index, dependent)

    def _launch(self, job: Job, index: int, dependent: bool) -> None:
        """Launch one job on the current device, which is number `index`."""
        request = job.request
        key = (index, request.input.dtype, request.group > 1 and not request.pooled, vectors_of(request))
        function = self._choices.get(key) or self._choose(request, key)
        stream = torch._C._cuda_getCurrentRawStream(index)  # a fifth of the cost of torch.cuda.current_stream
        function(*arguments_of(job), int(dependent), stream)

    def _choose(self, request: SelectRequest, key: tuple[int, torch.dtype, bool, int]) -> Callable[..., None]:
        """Return the launcher of a request's variant, compiling it if it is cold, and remember it."""
        variant = self.variant(request, key[0])
        if self._launchers.find(variant) is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"kernel family {self.name!r} has not compiled its variant {variant} yet, which cannot be done "
                "while the stream is being captured: warm it by one call before the capture, or precompile it"
            )
        if len(self._choices) >= MOST_CHOICES:
            self._choices.clear()
        function = self._choices[key] = self._launchers(variant)
        return function

    def variant(self, request: SelectRequest, index: int) -> Variant:
        """Return the variant that serves a request on CUDA device `index`: the smallest that holds its rows."""
        return self.variant_on(request, arch_of(capability(index)))

    def variant_on(self, request: SelectRequest, arch: str) -> Variant:
        """Return the variant that serves a request on an architecture."""
        needed = vectors_of(request)
        shapes = self.shapes[request.input.element_size()]
        shape = next(one for one in shapes if one.threads * one.vectors >= needed)
        return Variant(arch, _DTYPES[request.input.dtype], request.group > 1 and not request.pooled, shape)

    def _load(self, variant: Variant) -> Callable[..., None]:
        return load_or_compile(*self.module, facts_of(variant), variant.arch).function


def facts_of(variant: Variant) -> tuple[str, bool, int, int, bool]:
    """Return a variant's compile-time facts."""
    recent = int(variant.arch.removeprefix("sm_").rstrip("a")) >= 90
    return variant.dtype, variant.grouped, *variant.shape, recent


def vectors_of(request: SelectRequest) -> int:
    """Return how many aligned 16-byte vectors a row's window can touch."""
    source, bound = request.input, request.max_length
    size = source.element_size()
    slots = source.shape[1]
    if bound is not None:
        slots = min(slots, -(-bound // request.group) if request.pooled else bound)
    aligned = request.row_starts is None and (source.data_ptr() | source.stride(0) * size) % VECTOR == 0
    return -(-slots * size // VECTOR) + (0 if aligned else 1)


def arguments_of(job: Job) -> tuple[int, ...]:
    """Return what the kernel takes before `dependent` and the stream."""
    request = job.request
    path = ANY if request.order == "any" and request.ties == "any" else 0
    return *launch_arguments(job), path, request.length_bound
