"""From checked requests to kernel families: choose, allocate, run. Process-wide state: the choices that were made."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _env
from ._check_data import check_tables, check_windows, untransformed
from ._chooser import Chooser
from ._cute_compile import failure
from ._errors import ArgumentValueError, KernelUnavailableError, type_error
from ._family import CompiledFamily, Family, Job
from ._overlap import check_batch_overlap
from ._request import SelectRequest, TopKResult
from ._torch_family import TorchFamily
from ._validate import check_select
from .cluster import ClusterFamily
from .radix_register import RadixRegisterFamily
from .radix_wide import RadixWideFamily
from .small import SmallFamily
from .split_merge import SplitMergeFamily

_FAMILIES: tuple[Family, ...] = (
    ClusterFamily(),
    RadixRegisterFamily(),
    SmallFamily(),
    RadixWideFamily(),
    SplitMergeFamily(),
    TorchFamily(),
)
"""All families; the last serves everything. A new one is registered here, and nowhere else."""


def families_to_compile() -> dict[str, Callable[[], CompiledFamily]]:
    """Return the classes of the families that have something to compile, by name."""
    return {family.name: type(family) for family in _FAMILIES if isinstance(family, CompiledFamily)}


def families() -> tuple[Family, ...]:
    """Return the kernel families; the last serves everything."""
    return _FAMILIES


def kernels() -> tuple[str, ...]:
    """Return the names of the kernel families; the last serves everything."""
    return tuple(family.name for family in _FAMILIES)


def _unmet(kernel: str, request: SelectRequest) -> str | None:
    """Return the first condition that keeps `kernel` from serving `request`, or None; "auto" is any family."""
    if kernel == "auto":
        # From the last on, which serves everything, so that mostly the others need not be asked.
        unmet = None
        for family in reversed(_FAMILIES):
            if (unmet := unmet_of(family, request)) is None:
                return None
        return unmet
    for family in _FAMILIES:
        if family.name == kernel:
            return unmet_of(family, request)
    return f"there is no kernel family {kernel!r} on {request.input.device}"


def unmet_of(family: Family, request: SelectRequest) -> str | None:
    """Return the first condition that keeps a family from serving `request`: its own, or that it has no code."""
    unmet = family.unmet(request)
    if unmet is None and (reason := failure(family.name)) is not None:
        return f"{family.name} has no code in this process: {reason}"
    return unmet


_chooser = Chooser(_FAMILIES, unmet_of)


def _check_name(kernel: object) -> None:
    """Check that a kernel's name is a string."""
    if not isinstance(kernel, str):
        raise type_error("kernel", kernel, "a string: " + " or ".join(map(repr, ("auto", *kernels()))))


def supports(kernel: str, input: Tensor, k: int, **options: Any) -> str | None:
    """Say whether a kernel family can serve a selection.

    Args:
        kernel: name of a family, or "auto" for any.
        input: as for `select_topk`, like `k`.
        k: elements selected per row.
        **options: the other arguments of `select_topk`.

    Returns:
        None if it can, else the first unmet condition as text. An unknown name is an unmet condition.

    Raises:
        ArgumentTypeError: as `select_topk`, and where `kernel` is no string.
        ArgumentValueError: as `select_topk`: the arguments are wrong for every family.
    """
    _check_name(kernel)
    return _unmet(kernel, check_select(input, k, **options))


def validate_select(input: Tensor, k: int, **options: Any) -> SelectRequest:
    """Check a selection whole. Allocates, launches and synchronises nothing.

    Args:
        input: as for `select_topk`, like `k`.
        k: elements selected per row.
        **options: the other arguments of `select_topk`.

    Returns:
        The request, normalised; run it by `run_select`, or with others by `run_select_batch`. Outputs that were not
        given are still None in it.

    Raises:
        ArgumentTypeError: an argument has a wrong Python type or dtype.
        ArgumentValueError: an argument is wrong otherwise, or the kernel asked for cannot serve the request.
    """
    return with_kernel_checked(check_select(input, k, **options))


def with_kernel_checked(request: SelectRequest) -> SelectRequest:
    """Return a request whose other arguments were checked; raise if the kernel that it asks for cannot serve it."""
    _check_name(request.kernel)
    check_kernel(request)
    return request


def check_kernel(request: SelectRequest) -> None:
    """Check that the kernel that a request asks for can serve it; raises ArgumentValueError."""
    unmet = _unmet(request.kernel, request)
    if unmet is not None:
        names = ", ".join(map(repr, ("auto", *kernels())))
        message = f"kernel is {request.kernel!r}, which cannot serve this request: {unmet}; there are {names}"
        raise ArgumentValueError("kernel", message)


def choose(request: SelectRequest) -> tuple[str, str]:
    """Return the family that serves a checked request, and the reason for the choice."""
    family, reason = _choose(request)
    return family.name, reason


def _choose(request: SelectRequest) -> tuple[Family, str]:
    """Return the family that serves a checked request, and the reason for the choice."""
    global _chooser
    if _chooser.families is not _FAMILIES:
        _chooser = Chooser(_FAMILIES, unmet_of)
    return _chooser.choose(request)


def only_enqueues(request: SelectRequest) -> bool:
    """Say whether running a checked request does no more than enqueue: it never waits for the stream or the device."""
    return _choose(request)[0].capturable and not _env.check_data()


def warm_select(request: SelectRequest) -> tuple[str, str]:
    """Make the kernel that serves a checked request ready: loaded, or else compiled. Touches none of its tensors.

    Args:
        request: from `validate_select`.

    Returns:
        The family and the reason for the choice. A family without code for this process is passed over from now on.

    Raises:
        KernelUnavailableError: the request names a family that has no code.
        RuntimeError: the current stream is being captured in a CUDA graph and the kernel is cold.
    """
    while True:
        family, reason = _choose(request)
        try:
            if isinstance(family, CompiledFamily):
                family.warm(request)
        except KernelUnavailableError:
            if not _has_other(family, request):
                raise
        else:
            return family.name, reason


def _has_other(family: Family, request: SelectRequest) -> bool:
    """Say whether another family may serve a request whose family turned out to have no code."""
    return request.kernel == "auto" and unmet_of(family, request) is not None


def run_select(request: SelectRequest) -> TopKResult:
    """Run one checked request on the current stream of its device; see `run_select_batch`."""
    family = _choose(request)[0]
    if not family.capturable or _env.check_data():
        return run_select_batch([request], overlap_checked=True)[0]
    job = _job(request)
    if request.input.shape[0]:
        _run_batch(family, [job])
    return job.result


def run_select_batch(
    requests: Sequence[SelectRequest], *, overlap_checked: bool = False, spare: int = 0
) -> list[TopKResult]:
    """Run checked requests; those that share a plan key go to their family as one call.

    Enqueues on the current stream of each request's device and returns without waiting; CPU results are complete on
    return. Outputs that were not given are allocated from torch's allocator. The results' tensors are the given
    outputs themselves where there are any.

    Args:
        requests: from `validate_select`.
        overlap_checked: `check_batch_overlap` has passed on these requests.
        spare: address of spare memory (`spare_bytes`), 16-byte aligned: nothing else is written where its mark is set
            before the kernels look at it; 0: none. Only where `only_enqueues` says so of every request.

    Returns:
        One result per request, in order.

    Raises:
        ArgumentValueError: outputs overlap (before anything runs), or `TOPKD_CHECK_DATA` found bad data; its
            `selection` is the place in the batch.
        RuntimeError: the current stream is being captured in a CUDA graph, or there is spare memory, and the family
            can do with neither; the stream was not touched.
    """
    if not overlap_checked and len(requests) > 1:
        check_batch_overlap(requests)
    families = [_choose(request)[0] for request in requests]
    for family, request in zip(families, requests, strict=True):
        if not family.capturable:
            refuse_capture(family.name, request.input.device)
    if _env.check_data():
        for place, (family, request) in enumerate(zip(families, requests, strict=True)):
            _check_request_data(family, request, place)
    jobs = [_job(request, spare) for request in requests]
    _run_jobs(jobs, families)
    return [job.result for job in jobs]


def _check_request_data(family: Family, request: SelectRequest, place: int) -> None:
    """Check what the device says of a request's rows; selects once without transforms to know which entries count."""
    check_windows(request, place)
    if request.page_table is not None and request.rows:
        bare = _job(untransformed(request))
        family.run([bare])
        check_tables(request, bare.indices, place)


def _run_jobs(jobs: Sequence[Job], families: Sequence[Family]) -> None:
    """Run jobs by the given families, those of one plan key as one call."""
    plans: dict[Any, tuple[Family, list[Job]]] = {}
    for job, family in zip(jobs, families, strict=True):
        if job.spare and not family.capturable:
            raise RuntimeError(f"kernel family {family.name!r} does more than enqueue: it has no use for spare memory")
        if job.request.rows:
            key = (family.name, job.request.plan_key) if len(jobs) > 1 else None
            plans.setdefault(key, (family, []))[1].append(job)
    for family, batch in plans.values():
        _run_batch(family, batch)


def _run_batch(family: Family, batch: Sequence[Job]) -> None:
    """Run jobs of one plan key by a family, or by others if it turns out to have no code."""
    try:
        family.run(batch)
    except KernelUnavailableError:
        if not all(_has_other(family, job.request) for job in batch):
            raise
        _run_jobs(batch, [_choose(job.request)[0] for job in batch])


def _job(request: SelectRequest, spare: int = 0) -> Job:
    """Allocate the outputs that a request lacks."""
    device, indices, values = request.input.device, request.out_indices, request.out_values
    if indices is None:
        indices = torch.empty(request.output_shape, dtype=request.index_dtype, device=device)
    if values is None and request.values:
        values = torch.empty(request.output_shape, dtype=request.input.dtype, device=device)
    return Job(request, indices, values, spare)


def refuse_capture(name: str, device: torch.device) -> None:
    """Raise if the current stream of a CUDA device is being captured."""
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise RuntimeError(
            f"kernel family {name!r} cannot be captured in a CUDA graph: it allocates scratch with each call; "
            "call it outside the capture"
        )
