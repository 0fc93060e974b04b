"""The same selections by `topkd.kernels` in this process, while no server is there. Imports torch when called."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from topkd import _arrays, _codec
from topkd._types import Selection, SelectResult
from topkd.errors import ArgumentTypeError, ArgumentValueError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from topkd._plan import PlanState
    from topkd._types import Merge

__all__ = ["merge", "select"]

_TENSORS = frozenset((*_codec.SELECTION_TENSORS, *_codec.MERGE_TENSORS, "out_indices", "out_values")) - {"values"}


def select(entries: Sequence[Selection | PlanState]) -> list[SelectResult]:
    """Selects one after the other. An error leaves the outputs of the entries before it written."""
    kernels = _kernels()

    def run(*arguments: Any, **options: Any) -> tuple[Any, str]:
        request = kernels.validate_select(*arguments, **options)
        return kernels.run_select(request), kernels.choose(request)[0]

    selections = [entry if isinstance(entry, Selection) else entry.selection for entry in entries]
    return [_run(run, selection, place, ("input", "k")) for place, selection in enumerate(selections)]


def merge(merges: Sequence[Merge]) -> list[SelectResult]:
    """Merges one after the other."""
    kernels = _kernels()

    def run(*arguments: Any, **options: Any) -> tuple[Any, str]:
        return kernels.merge_topk(*arguments, **options), "merge"

    return [_run(run, entry, place, ("values", "indices", "k")) for place, entry in enumerate(merges)]


def _kernels() -> Any:
    try:
        import torch  # noqa: F401 - conversions look it up in sys.modules

        from topkd import kernels
    except ImportError as error:
        raise UnavailableError(f"no server is there, and computing locally needs torch: {error}") from None
    return kernels


def _run(
    function: Callable[..., tuple[Any, str]], entry: Selection | Merge, place: int, positional: tuple[str, ...]
) -> SelectResult:
    arguments = {field.name: getattr(entry, field.name) for field in dataclasses.fields(entry)}
    first = arguments[positional[0]]
    numpy = isinstance(first, np.ndarray)
    for name, value in arguments.items():
        if value is not None and (name in _TENSORS or name == positional[0]):
            arguments[name] = _to_torch(name, value, place)
    if "index_dtype" in arguments:
        import torch

        name = _arrays.dtype_name(_arrays.parse_dtype("index_dtype", arguments["index_dtype"], place).code)
        arguments["index_dtype"] = getattr(torch, name)
    given = arguments.get("out_indices"), arguments.get("out_values")
    head = [arguments.pop(name) for name in positional]
    try:
        result, kernel = function(*head, **arguments)
    except (TypeError, ValueError) as error:
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentValueError
        raise kind(str(error), argument=getattr(error, "argument", ""), selection=place) from error
    outputs = (result.indices, result.values)
    originals = (entry.out_indices, entry.out_values)
    indices, values = (
        original if had is not None else _from_torch(output, numpy)
        for output, had, original in zip(outputs, given, originals, strict=True)
    )
    return SelectResult(indices, values, kernel, local=True)


def _to_torch(name: str, value: Any, place: int) -> Any:
    view = _arrays.describe(name, value, place)
    if view.library == "torch":
        return value
    return _arrays.wrap_bits(_arrays.bits(view), view.code, "torch")


def _from_torch(tensor: Any, numpy: bool) -> Any:
    if tensor is None or not numpy:
        return tensor
    view = _arrays.describe("result", tensor)
    return _arrays.wrap_bits(_arrays.bits(view), view.code, "numpy")
