"""The `cluster` family: a thread-block cluster a row, for few long rows of scores.

Host side: what the family serves, which cluster size a launch takes, its variants (up to five sizes, and what `KINDS`
says), launching. The kernels and how they work are in `cluster_kernel` (16-bit scores) and `cluster32_kernel` (f32);
figures are in docs/kernels/cluster.md.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from ._cute_compile import Made, arch_of, capability, device_index, load_or_compile, processors, unmet_device
from ._cute_launch import launch_arguments
from ._devices import shared_bytes
from ._errors import KernelUnavailableError
from ._family import Job
from ._loaded import Loaded
from ._request import SelectRequest
from ._validate import check_select

MAX_K = 4096
MAX_K_BY_VALUE = 2048
"""What one CTA sorts."""
SIZES = (16, 8, 4, 2, 1)
"""CTAs of a cluster, the largest first; 16 is more than every device of an architecture must hold."""
SCORES_A_CTA = 4096
"""A row is spread over no more CTAs than have so many of its scores each: with fewer, messages cost too much."""
SCORES_A_CROWDED_CTA = 32_768
"""The same for clusters of more than `MOST_CROWDED` CTAs, if together they take more than half of the SMs: then some of
a cluster's CTAs share one."""
MOST_CROWDED = 4
CTAS_AN_SM = 2
"""What registers and shared memory allow; the driver may allow less."""
MOST_CHOICES = 4096
"""Shapes for which the chosen variant is remembered."""
SAMPLED = 0
"""A kernel's `path`. Bit 0 lets it count the whole row, to which sampling falls back, at once: for tests."""

KERNELS: dict[torch.dtype, tuple[str, str, str, str]] = {
    torch.bfloat16: ("cluster_kernel", "ClusterSelect", "ClusterSelect", "bfloat16"),
    torch.float16: ("cluster_kernel", "ClusterSelect", "ClusterSelect", "float16"),
    torch.float32: ("cluster32_kernel", "ClusterSelect32", "ClusterSelect32Groups", "float32"),
}
"""By dtype of the scores: module of the kernel, its class for single scores and for groups, the dtype's name."""

_Kind = tuple[bool, torch.dtype, int, bool]
"""Largest, dtype of the scores, group, ordered: with the cluster size all that changes the code.

Groups of f32, of any size that is served, have one code, under GROUP."""
HALVES = (torch.bfloat16, torch.float16)
GROUP = 8
GROUPS32 = (4, 8, 16, 32, 64, 128)
"""Sizes of f32 groups: a vector is of one, and a warp has all vectors of a group."""
KINDS: tuple[_Kind, ...] = (
    *product((True, False), KERNELS, (1,), (False,)),
    *product((True,), HALVES, (1,), (True,)),
    *product((True, False), (torch.float32,), (1,), (True,)),
    *product((True,), HALVES, (GROUP,), (False,)),
    *product((True,), (torch.float32,), (GROUP,), (False, True)),
)

_Shape = tuple[int, int, int, _Kind]
"""What a variant is chosen by: device, rows, bound of their lengths, kind."""


class _Launcher(NamedTuple):
    """A compiled variant on one device."""

    function: Callable[..., None]
    resident: int  # clusters that the device holds at once


class ClusterFamily:
    """Selections by a cluster a row; see the module. Owns the variants that were compiled."""

    name = "cluster"
    capturable = True
    oldest = (9, 0)

    def __init__(self) -> None:
        self._codes = Loaded(self._load)
        self._warm: set[tuple[int, Callable[..., None]]] = set()
        self._launchers = Loaded(self._load_launcher)
        self._choices: dict[_Shape, Callable[..., None]] = {}

    def unmet(self, request: SelectRequest) -> str | None:
        """Return the first condition that keeps this family from serving `request`, or None."""
        return unmet_device(self.name, request.input.device, self.oldest) or unmet_options(request)

    def precompile(self, arch: str) -> None:
        """Load or compile all variants for an architecture such as "sm_90a"; needs no GPU and replaces nothing."""
        for kind in KINDS:
            for size in sizes_of(kind):
                self._codes((arch, size, kind))

    def warm(self, request: SelectRequest) -> None:
        """Load or compile the request's variant, and launch it on scores of its own, so that the device has it too."""
        if not request.rows:
            return
        device = request.input.device
        index = device_index(device)
        with torch.cuda.device(index):
            function = self._choose(_shape(request, index))
            if (index, function) in self._warm:
                return
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("kernel family 'cluster' cannot be warmed while the stream is being captured")
            zeros = torch.zeros(1, 8, dtype=request.input.dtype, device=device)
            small = check_select(zeros, 1, largest=request.largest, group=request.group)
            job = Job(small, torch.empty(1, 1, dtype=torch.int32, device=device), None)
            function(*launch_arguments(job), 0, 0, torch._C._cuda_getCurrentRawStream(index))
            self._warm.add((index, function))

    def run(self, jobs: Sequence[Job], *, dependent: bool = False) -> None:
        """Launch each job on the current stream of its device; compiles what is still cold.

        Allocates nothing, waits for nothing, and can be captured in a CUDA graph once the variant is compiled.

        Args:
            jobs: jobs that `unmet` has nothing against.
            dependent: programmatic dependent launch: the kernel may start while the one before it in the stream ends.
                It waits for that one before it reads anything.

        Raises:
            RuntimeError: the variant is cold and the stream is being captured; the stream was not touched.
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
        rows, width = request.input.shape
        bound = request.max_length
        length = width if bound is None or bound > width else bound
        key = (index, rows, length, kind_of(request))
        function = self._choices.get(key) or self._choose(key)
        stream = torch._C._cuda_getCurrentRawStream(index)  # a fifth of the cost of torch.cuda.current_stream
        function(*launch_arguments(job), SAMPLED, int(dependent), stream)

    def _choose(self, key: _Shape) -> Callable[..., None]:
        """Return the variant for a shape, and remember it.

        It is the largest cluster size that leaves an SM to each CTA and enough scores to each, and of which the device
        holds all rows' clusters at once; of the smallest there may be any number, one after another.
        """
        index, rows, length, kind = key
        launcher = None
        crowded = SCORES_A_CROWDED_CTA if kind[1] in HALVES else SCORES_A_CTA
        for size in sizes(rows, length, processors(index), crowded):
            if size not in sizes_of(kind):
                continue
            larger = self._launcher(index, size, kind)
            if rows <= larger.resident:
                launcher = larger
                break
        launcher = launcher or self._smallest(index, kind)
        if len(self._choices) >= MOST_CHOICES:
            self._choices.clear()
        self._choices[key] = launcher.function
        return launcher.function

    def _smallest(self, index: int, kind: _Kind) -> _Launcher:
        """Return the variant of fewest CTAs that the device can launch; not all have the shared memory for one CTA."""
        for size in reversed(sizes_of(kind)):
            launcher = self._launcher(index, size, kind)
            if launcher.resident:
                return launcher
        raise KernelUnavailableError(f"kernel family 'cluster' has no variant that cuda:{index} can launch")

    def _launcher(self, index: int, size: int, kind: _Kind) -> _Launcher:
        """Return a variant on a device, compiling it if it is cold."""
        launcher = self._launchers.find((index, size, kind))
        if launcher is not None:
            return launcher
        if torch.cuda.is_current_stream_capturing():
            largest, dtype, group, ordered = kind
            raise RuntimeError(
                f"kernel family 'cluster' has not compiled its variant of {size} CTAs (largest={largest}, {dtype}, "
                f"group={group}, ordered={ordered}) yet, which cannot be done while the stream is being captured: warm "
                "it by one call before the capture, or precompile it"
            )
        return self._launchers((index, size, kind))

    def _load_launcher(self, key: tuple[int, int, _Kind]) -> _Launcher:
        index, size, kind = key
        made = self._codes((arch_of(capability(index)), size, kind))
        if made.launch["shared_bytes"] > shared_bytes(capability(index)):
            resident = 0
        else:
            resident = resident_clusters(made.binary, made.launch) if size > 1 else processors(index) * CTAS_AN_SM
        return _Launcher(made.function, resident)

    def _load(self, variant: tuple[str, int, _Kind]) -> Made:
        arch, size, (largest, dtype, *rest) = variant
        module, single, grouped, fact = KERNELS[dtype]
        name = single if rest[0] == 1 else grouped
        return load_or_compile(module, name, (size, largest, fact, *rest), arch)


def _shape(request: SelectRequest, index: int) -> _Shape:
    """Return what a request's variant is chosen by."""
    rows, width = request.input.shape
    bound = request.max_length
    return index, rows, width if bound is None or bound > width else bound, kind_of(request)


def sizes(rows: int, length: int, processors: int, crowded: int = SCORES_A_CROWDED_CTA) -> list[int]:
    """Return the cluster sizes above 1 that suit rows of `length` scores on `processors` SMs, the best first."""
    fitting = [size for size in SIZES[:-1] if rows * size <= processors]

    def least(size: int) -> int:
        return crowded if size > MOST_CROWDED and 2 * rows * size > processors else SCORES_A_CTA

    return [size for size in fitting if size * least(size) <= length]


def sizes_of(kind: _Kind) -> tuple[int, ...]:
    """Return the cluster sizes that a kind has variants of, the largest first.

    An architecture has 120 variants at most, of all families: the smallest in order, which nobody wants of few long
    rows, go without the largest size.
    """
    largest, _, _, ordered = kind
    return SIZES if largest or not ordered else SIZES[1:]


def wants_order(request: SelectRequest) -> bool:
    """Say whether a request's order or ties matter."""
    return request.order != "any" or request.ties != "any"


def kind_of(request: SelectRequest) -> _Kind:
    """Return what of a request changes the code."""
    dtype, group = request.input.dtype, request.group
    if group in GROUPS32 and dtype not in HALVES:
        group = GROUP
    return request.largest, dtype, group, wants_order(request)


def unmet_options(request: SelectRequest) -> str | None:
    """Return the first of a request's options that the family does not serve, or None."""
    if request.input.dtype not in KERNELS:
        return f"cluster serves torch.bfloat16, torch.float16 and torch.float32, input is {request.input.dtype}"
    if request.k > MAX_K:
        return f"cluster serves k <= {MAX_K}, k is {request.k}"
    if request.pooled:
        return "cluster does not serve pooled=True"
    if request.group not in (1, GROUP) and request.input.dtype in HALVES:
        return f"cluster serves group=1 and group={GROUP} of 16-bit scores, group is {request.group}"
    if request.group not in (1, *GROUPS32):
        return f"cluster serves group=1 and groups of 4 to 128 of torch.float32, group is {request.group}"
    if request.pin_newest and request.group == 1:
        return "cluster serves pin_newest=True with groups only"
    if request.drop_neg_inf and request.group == 1:
        return "cluster serves drop_neg_inf=True with groups only"
    if request.order == "value" and request.k > MAX_K_BY_VALUE:
        return f"cluster serves order='value' with k <= {MAX_K_BY_VALUE}, k is {request.k}"
    if kind_of(request) not in KINDS:
        return "cluster serves order and ties of 16-bit scores with largest=True and group=1 only"
    return None


def resident_clusters(binary: bytes, launch: Mapping[str, int]) -> int:
    """Ask the driver how many clusters of a compiled variant the current device holds at once.

    Args:
        binary: cubin of the variant.
        launch: its facts `cluster` (CTAs of a cluster), `threads` and `shared_bytes`.

    Returns:
        The number; 0 where the device cannot hold one.
    """
    driver: Any = importlib.import_module("cuda.bindings.driver")

    def ask(result: tuple[Any, ...]) -> Any:
        status, *values = result
        if int(status) != 0:
            raise RuntimeError(f"the CUDA driver answers {status} to a question about clusters of {launch['cluster']}")
        return values[0] if values else None

    ask(driver.cuInit(0))
    device = ask(driver.cuDeviceGet(torch.cuda.current_device()))
    context = ask(driver.cuDevicePrimaryCtxRetain(device))  # torch makes it current in a thread only when it has to
    try:
        ask(driver.cuCtxPushCurrent(context))
        try:
            return _resident(driver, ask, binary, launch)
        finally:
            ask(driver.cuCtxPopCurrent())
    finally:
        ask(driver.cuDevicePrimaryCtxRelease(device))


def _resident(driver: Any, ask: Callable[[tuple[Any, ...]], Any], binary: bytes, launch: Mapping[str, int]) -> int:
    """Ask for `resident_clusters` in the current context."""
    size, shared_bytes = launch["cluster"], launch["shared_bytes"]
    library = ask(driver.cuLibraryLoadData(binary, None, None, 0, None, None, 0))
    try:
        (entry,) = ask(driver.cuLibraryEnumerateKernels(1, library))
        function = ask(driver.cuKernelGetFunction(entry))
        attributes = driver.CUfunction_attribute
        ask(
            driver.cuFuncSetAttribute(
                function, attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes
            )
        )
        ask(driver.cuFuncSetAttribute(function, attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1))
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = size * 1024, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = launch["threads"], 1, 1
        config.sharedMemBytes = shared_bytes
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = size, 1, 1
        attribute.value = value
        config.attrs = [attribute]
        config.numAttrs = 1
        status, count = driver.cuOccupancyMaxActiveClusters(function, config)
        return int(count) if int(status) == 0 else 0
    finally:
        ask(driver.cuLibraryUnload(library))
