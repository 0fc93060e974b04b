"""The same selections by `topkd.kernels` in this process, while no server is there. Imports torch when called."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from topkd import _arrays, _codec
from topkd._types import Selection, SelectResult
from topkd.errors import ArgumentError, ArgumentTypeError, ArgumentValueError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from topkd._plan import PlanState
    from topkd._types import Merge

__all__ = ["merge", "select"]

_TENSORS = frozenset((*_codec.SELECTION_TENSORS, *_codec.MERGE_TENSORS, "out_indices", "out_values")) - {"values"}


def select(entries: Sequence[Selection | PlanState]) -> list[SelectResult]:
    """Selects. The batch is checked whole first: after an ArgumentError all outputs are as they were."""
    kernels = _kernels()
    selections = [entry if isinstance(entry, Selection) else entry.selection for entry in entries]
    requests = _checked(kernels, kernels.validate_select, selections, ("input", "k"))
    with _as_ours():
        results = kernels.run_select_batch(requests, overlap_checked=True)
    families = [kernels.choose(request)[0] for request in requests]
    return list(map(_result, selections, results, families))


def merge(merges: Sequence[Merge]) -> list[SelectResult]:
    """Merges. Checked as `select` does."""
    kernels = _kernels()
    requests = _checked(kernels, kernels.validate_merge, merges, ("values", "indices", "k"))
    results = map(kernels.run_merge, requests)
    return [_result(entry, result, "merge") for entry, result in zip(merges, results, strict=True)]


def _kernels() -> Any:
    try:
        import torch  # noqa: F401 - conversions look it up in sys.modules

        from topkd import kernels
    except ImportError as error:
        raise UnavailableError(f"no server is there, and computing locally needs torch: {error}") from None
    return kernels


def _checked(
    kernels: Any, validate: Callable[..., Any], entries: Sequence[Selection | Merge], positional: tuple[str, ...]
) -> list[Any]:
    """Returns the requests of a batch, each checked by itself and its outputs against all other tensors."""
    requests = []
    for place, entry in enumerate(entries):
        arguments = _arguments(entry, place, positional[0])
        head = [arguments.pop(name) for name in positional]
        with _as_ours(place):
            requests.append(validate(*head, **arguments))
    with _as_ours():
        kernels.check_batch_overlap(requests)
    return requests


@contextlib.contextmanager
def _as_ours(place: int | None = None) -> Iterator[None]:
    """Raises refused arguments as the client's classes; `place` is the entry's unless the error names it."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if isinstance(error, ArgumentError):
            raise
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        selection = (getattr(error, "selection", None) or 0) if place is None else place
        raise kind(str(error), argument=getattr(error, "argument", ""), selection=selection) from error


def _arguments(entry: Selection | Merge, place: int, first: str) -> dict[str, Any]:
    """Returns the arguments of an entry as `topkd.kernels` takes them."""
    arguments = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    for name, value in arguments.items():
        if value is not None and (name in _TENSORS or name == first):
            arguments[name] = _to_torch(name, value, place)
    if "index_dtype" in arguments:
        import torch

        name = _arrays.dtype_name(_arrays.parse_dtype("index_dtype", arguments["index_dtype"], place).code)
        arguments["index_dtype"] = getattr(torch, name)
    return arguments


def _result(entry: Selection | Merge, result: Any, kernel: str) -> SelectResult:
    numpy = isinstance(entry.input if isinstance(entry, Selection) else entry.values, np.ndarray)
    indices = _from_torch(result.indices, numpy) if entry.out_indices is None else entry.out_indices
    values = _from_torch(result.values, numpy) if entry.out_values is None else entry.out_values
    return SelectResult(indices, values, kernel, local=True)


def _to_torch(name: str, value: Any, place: int) -> Any:
    view = _arrays.describe(name, value, place)
    if view.library == "torch":
        return value
    _arrays.check_strides(name, view, place)
    if name.startswith("out_") and not value.flags.writeable:
        raise ArgumentValueError(f"{name} is read-only", argument=name, selection=place)
    return _arrays.wrap_bits(_arrays.memory(view), view.code, "torch")


def _from_torch(tensor: Any, numpy: bool) -> Any:
    if tensor is None or not numpy:
        return tensor
    view = _arrays.describe("result", tensor)
    return _arrays.wrap_bits(_arrays.bits(view), view.code, "numpy")
