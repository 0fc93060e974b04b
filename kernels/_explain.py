"""`explain`: which family would serve a selection, why, and what is known of the others; a GPU is not needed."""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ._chooser import Decision, Facts, decide, facts_of
from ._cute_compile import pretending
from ._devices import CPU, kind_named, kind_of
from ._dispatch import check_kernel, families, unmet_of
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
    # Memory that nobody touches is not there: a row of 2^31 members costs address space only.
    checked = check_select(torch.empty(width, dtype=dtype).expand(rows, width), k, **options)
    with ExitStack() as stack:
        if device is None and torch.cuda.is_available():
            place = torch.device("cuda", torch.cuda.current_device())
            kind = kind_of(place)
        else:
            kind = kind_named(device or CPU.name)
            place = torch.device("cpu" if kind == CPU else "cuda:0")
            if kind != CPU:
                stack.enter_context(pretending(kind.capability))
        request = _placed(checked, place)
        check_kernel(request)
        facts = facts_of(request, kind)
        return Explanation(facts, decide(families(), request, facts, unmet_of))


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
