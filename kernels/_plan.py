"""`plan`: a selection that is checked, warmed and captured once, for callers that make it again and again.

`select_topk` checks its arguments in every call, which takes the host longer than the launch. A plan's run launches one
CUDA graph and does nothing else. A remote `topkd.Client.plan` is the same thing, of a server.
"""

import ctypes
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from . import _env
from ._check import check_bool
from ._cute_compile import capability
from ._dispatch import choose, families, run_select, validate_select, warm_select
from ._errors import value_error
from ._family import Family, Job
from ._request import SelectRequest, TopKResult

_OLDEST_DEPENDENT = (9, 0)
_INVALID_CONTEXT = 201
"""What the driver answers a thread in which nothing has used the device yet."""


class SelectPlan:
    """A selection whose arguments are fixed. Made by `plan`; usable as a context manager.

    Runs of one plan that has a graph go one after another on the device, on whichever streams they are; runs of several
    plans are independent. Any thread may run it.

    Attributes:
        kernel: the kernel family that runs it.
        reason: why that one.
        result: the outputs, which every run overwrites.
    """

    _launch: Callable[[ctypes.c_void_p, int], int]
    _handle: ctypes.c_void_p

    def __init__(self, job: Job, family: Family, reason: str, *, dependent: bool) -> None:
        """Capture a warm job, whose device is the current one."""
        request = job.request
        self.kernel, self.reason, self.result = family.name, reason, job.result
        self._job: Job | None = job
        self._launching = threading.Lock()
        self._graph: torch.cuda.CUDAGraph | None = None
        self._dependent: Any = family if dependent else None
        on_cuda = request.input.device.type == "cuda"
        self._index = request.input.device.index if on_cuda else -1
        if on_cuda and request.rows and family.capturable and not dependent and not _env.check_data():
            self._graph = _captured(request)
            self._launch, self._handle = _launcher(), ctypes.c_void_p(self._graph.raw_cuda_graph_exec())

    def run(self) -> TopKResult:
        """Select from what the tensors hold now, into the plan's outputs.

        Enqueues on the current stream of the device and returns without waiting; on the CPU the result is complete on
        return. Under capture the selection itself becomes part of the graph that is captured.

        Raises:
            RuntimeError: the plan is closed; or the kernel cannot be captured, and the current stream is.
        """
        graph = self._graph  # held to the end of the launch: another thread may close the plan
        if graph is None or self._index != torch._C._cuda_getDevice():
            return self._run_otherwise()
        if torch.cuda.is_current_stream_capturing():
            run_select(self._open().request)
            return self.result
        with self._launching:  # the driver leaves it to its callers that no two threads launch one graph at once
            status = self._launch(self._handle, torch._C._cuda_getCurrentRawStream(self._index))
            if status:
                self._launch_again(status)
        return self.result

    __call__ = run

    def _run_otherwise(self) -> TopKResult:
        """Run what has no graph, or is of another device than the current one."""
        job = self._open()
        if self._graph is not None:
            with torch.cuda.device(self._index):
                return self.run()
        dependent = self._dependent
        if dependent is None or not job.request.rows:
            run_select(job.request)
            return self.result
        with torch.cuda.device(self._index):
            dependent.run([job], dependent=True)
        return self.result

    def _launch_again(self, status: int) -> None:
        """Launch in a thread that has no context yet; raise what else is wrong."""
        if status == _INVALID_CONTEXT:
            torch.cuda.set_device(self._index)
            status = self._launch(self._handle, torch._C._cuda_getCurrentRawStream(self._index))
        if status:
            raise RuntimeError(f"the CUDA driver answers {status} to the launch of a plan's graph")

    def _open(self) -> Job:
        """Return the job; raise if the plan is closed."""
        if self._job is None:
            raise RuntimeError("the plan is closed")
        return self._job

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._job is None

    def close(self) -> None:
        """Give up the graph and the hold on the tensors. Idempotent. Runs that are enqueued end as they would."""
        self._job = self._graph = self._dependent = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<topkd.kernels.SelectPlan: {'closed' if self.closed else self.kernel}>"


def plan(input: Tensor, k: int, *, dependent: bool = False, **options: Any) -> SelectPlan:
    """Fix a selection's arguments once: checked, its kernel chosen, warmed and captured in a CUDA graph of its own.

    May compile, and wait for the device. Outputs that are not given are the plan's own.

    Args:
        input: as for `select_topk`, like `k`; the contents of all tensors are read anew in every run.
        k: elements selected per row.
        dependent: programmatic dependent launch (sm_90 and up): the kernel may start while the one before it in the
            stream ends, and waits for that one before it reads anything, also where a run is captured in a graph. Such
            a plan has no graph of its own.
        **options: the other arguments of `select_topk`.

    Returns:
        The plan. It holds all tensors, whose storage must stay as it is.

    Raises:
        ArgumentTypeError: as `select_topk`.
        ArgumentValueError: as `select_topk`; or `dependent` for a kernel that cannot be launched so.
        RuntimeError: the current stream is being captured in a CUDA graph.

    Example:
        >>> scores = torch.empty(1, 4)
        >>> selection = plan(scores, 1)
        >>> scores[:] = torch.tensor([3.0, 1.0, 4.0, 1.0])
        >>> selection.run().indices.tolist()
        [[2]]
    """
    check_bool("dependent", dependent)
    request = validate_select(input, k, **options)
    if request.input.device.type != "cuda":
        return _plan(request, dependent)
    with torch.cuda.device(request.input.device):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a plan cannot be made while the current stream is being captured: make it before that")
        return _plan(request, dependent)


def _plan(request: SelectRequest, dependent: bool) -> SelectPlan:
    """Make the plan of a checked request, whose device is the current one."""
    kernel, reason = warm_select(request) if request.rows else choose(request)
    family = next(one for one in families() if one.name == kernel)
    if dependent and not _takes_dependent(family, request):
        raise value_error("dependent", dependent, f"False: kernel {kernel!r} has no dependent launch here")
    shape, device, indices, values = request.output_shape, request.input.device, request.out_indices, request.out_values
    if indices is None:
        indices = torch.empty(shape, dtype=request.index_dtype, device=device)
    if values is None and request.values:
        values = torch.empty(shape, dtype=request.input.dtype, device=device)
    job = Job(dataclasses.replace(request, out_indices=indices, out_values=values), indices, values)
    return SelectPlan(job, family, reason, dependent=dependent)


def _takes_dependent(family: Family, request: SelectRequest) -> bool:
    """Say whether a family has programmatic dependent launch on the request's device."""
    if "dependent" not in inspect.signature(family.run).parameters:
        return False
    return capability(request.input.device.index) >= _OLDEST_DEPENDENT


def _captured(request: SelectRequest) -> torch.cuda.CUDAGraph:
    """Return a graph of a warm request's launch."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):  # torch.cuda.graph would collect garbage and empty the allocator's cache
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            run_select(request)
        finally:
            graph.capture_end()
    return graph


@functools.cache
def _launcher() -> Callable[[ctypes.c_void_p, int], int]:
    """Return the driver's function that launches a graph; torch's replay takes longer."""
    launch = ctypes.CDLL("libcuda.so.1").cuGraphLaunch
    launch.argtypes, launch.restype = (ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
    return launch
