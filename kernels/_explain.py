"""`explain`: which family would serve a selection, why, and what is known of the others; a GPU is not needed."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ._check import MAX_WIDTH, check_int
from ._chooser import Decision, Facts, Unmet, decide, facts_of
from ._cute_compile import pretending
from ._devices import CPU, DeviceKind, kind_named, kind_of
from ._dispatch import check_kernel, families, unmet_of
from ._family import Family
from ._request import SelectRequest
from ._validate import check_select


class Explanation(NamedTuple):
    """What `explain` returns: what the choice went by, and the choice."""

    facts: Facts
    decision: Decision


def explain(
    rows: int, width: int, k: int, *, dtype: torch.dtype = torch.bfloat16, device: str | None = None, **options: Any
) -> Explanation:
    """Say which family serves a selection of a shape, and why. Launches nothing and touches no memory of the shape.

    Args:
        rows: rows of the scores.
        width: capacity of a row.
        k: elements selected per row.
        dtype: of the scores.
        device: kind of device, such as "h200" or "cpu"; None: the GPU that is here, else "cpu".
        **options: those of `select_topk` that are no tensors.

    Raises:
        ArgumentTypeError: as `select_topk`.
        ArgumentValueError: as `select_topk`: also where `kernel` names a family that cannot serve it.
        ValueError: an unknown kind of device.
    """
    for name, number in (("rows", rows), ("width", width)):
        check_int(name, number, 0, MAX_WIDTH)
    # Memory that nobody touches is not there: a row of 2^31 members costs address space only.
    checked = check_select(torch.empty(width, dtype=dtype).expand(rows, width), k, **options)
    if device is None and torch.cuda.is_available():
        place = torch.device("cuda", torch.cuda.current_device())
        return _explain(_placed(checked, place), kind_of(place), unmet_of)
    kind = kind_named(device or CPU.name)
    if kind == CPU:
        return _explain(checked, kind, unmet_of)
    with pretending(kind.capability):
        return _explain(_placed(checked, torch.device("cuda:0")), kind, _unmet_elsewhere)


def _explain(request: SelectRequest, kind: DeviceKind, unmet: Unmet) -> Explanation:
    facts = facts_of(request, kind)
    check_kernel(request)
    return Explanation(facts, decide(families(), request, facts, unmet))


def _unmet_elsewhere(family: Family, request: SelectRequest) -> str | None:
    """Return what keeps a family from serving a request on a device that is not here, as far as that can be known."""
    try:
        return unmet_of(family, request)
    except (AssertionError, RuntimeError) as error:  # torch's answers to questions about a GPU where there is none
        return f"{family.name} asks the device itself, which is not here: {error}"


def _placed(request: SelectRequest, device: torch.device) -> SelectRequest:
    """Return a request whose scores say that they are on a device, which need not be there."""
    scores = request.input
    layout: Any = SimpleNamespace(
        dtype=scores.dtype,
        device=device,
        shape=scores.shape,
        stride=scores.stride,
        data_ptr=lambda: 0,
        element_size=scores.element_size,
        numel=scores.numel,
        dim=scores.dim,
    )
    return replace(request, input=layout)
