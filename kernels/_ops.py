"""`topkd::select_topk` and `topkd::merge_topk`: the in-process calls as operators of torch's dispatcher.

A graph of `torch.compile` or `torch.export` holds operators, not Python code. Each call has two: one that returns new
tensors, and one, `..._out`, that writes given ones. Their schemas have the arguments of the Python functions, which are
the interface, by the same names. When one is traced, its fake implementation checks the arguments as the call does, by
shapes, dtypes and strides alone, and says what the outputs will be.

Registered with `torch.library.Library`: an operator of `torch.library.custom_op` with a list of outputs costs 190 us a
call over its function, these cost 5 (CPU, torch 2.13, 2026-12-01).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._dispatch import run_select, validate_select
from ._merge import run_merge, validate_merge
from ._request import TopKResult
from ._validate import check_merge, check_select

SELECT_OPTIONS = (
    "Tensor? lengths, int next_n, int? max_length, Tensor? row_starts, int group, bool pooled, bool pin_newest, "
    "bool? drop_neg_inf, bool expand, bool largest, str order, str ties, bool values, ScalarType index_dtype, "
    "Tensor? row_offsets, Tensor? page_table, int page_size, Tensor? row_to_table, Tensor? table_starts, str family"
)
"""The options of a selection in a schema. The kernel is its `family`: inductor has an argument `kernel` of its own."""

_MERGE_OPTIONS = "bool largest, str order, str ties"
_OUT = "Tensor(a!) out_indices, Tensor(b!)? out_values"


class Operators:
    """Operators of the namespace `topkd`; they last as long as this object.

    Their tensors come to them with the strides that they had when they were traced. They have no derivative: what they
    return requires no gradient, whatever their arguments do.
    """

    def __init__(self) -> None:
        self._library: Any = torch.library.Library("topkd", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's

    def define(self, schema: str, run: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag) -> None:
        """Defines one by its schema, what it does, and what it does when it is traced; both take names."""
        library, name = self._library, schema.split("(")[0]
        library.define(schema, tags=(torch.Tag.needs_exact_strides, *tags))
        arguments = getattr(torch.ops.topkd, name).default._schema.arguments
        names = ["kernel" if argument.name == "family" else argument.name for argument in arguments]
        library.impl(name, _by_name(run, names), "CompositeExplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"topkd::{name}", _by_name(fake, names), lib=library)
        torch.library.register_vmap(f"topkd::{name}", _refuse_vmap(name), lib=library)


def _by_name(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Returns a function of positional arguments, as the dispatcher calls it."""

    def call(*arguments: Any) -> Any:
        return function(**dict(zip(names, arguments, strict=True)))

    return call


def _refuse_vmap(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"topkd::{name} cannot be mapped by vmap: its rows are a batch already; reshape scores of (batch, rows, "
            "width) to (batch * rows, width)"
        )

    return refuse


def outputs(result: TopKResult) -> list[Tensor]:
    """Returns a result as an operator does: the indices, then the values if there are any."""
    return [result.indices] if result.values is None else [result.indices, result.values]


def fake_select(input: Tensor, k: int, **options: Any) -> list[Tensor]:
    """Checks a selection without data; returns outputs of its shapes and dtypes."""
    request = check_select(input, k, placed=False, **options)
    indices = input.new_empty(request.output_shape, dtype=request.index_dtype)
    return [indices, input.new_empty(request.output_shape)] if request.values else [indices]


def _select(**arguments: Any) -> list[Tensor]:
    return outputs(run_select(validate_select(**arguments)))


def _select_out(**arguments: Any) -> None:
    run_select(validate_select(**arguments))


def _merge(**arguments: Any) -> list[Tensor]:
    return outputs(run_merge(validate_merge(**arguments)))


def _merge_out(**arguments: Any) -> None:
    run_merge(validate_merge(**arguments))


def _fake_select_out(**arguments: Any) -> None:
    check_select(placed=False, **arguments)


def _fake_merge(values: Tensor, indices: Tensor, k: int, **options: Any) -> list[Tensor]:
    request = check_merge(values, indices, k, placed=False, **options)
    return [indices.new_empty(request.output_shape), values.new_empty(request.output_shape)]


def _fake_merge_out(**arguments: Any) -> None:
    check_merge(placed=False, **arguments)


def _define() -> Operators:
    operators = Operators()
    scores, candidates = "Tensor input, int k", "Tensor values, Tensor indices, int k"
    operators.define(f"select_topk({scores}, {SELECT_OPTIONS}) -> Tensor[]", _select, fake_select)
    operators.define(f"select_topk_out({scores}, {_OUT}, {SELECT_OPTIONS}) -> ()", _select_out, _fake_select_out)
    operators.define(f"merge_topk({candidates}, {_MERGE_OPTIONS}) -> Tensor[]", _merge, _fake_merge)
    operators.define(f"merge_topk_out({candidates}, {_OUT}, {_MERGE_OPTIONS}) -> ()", _merge_out, _fake_merge_out)
    return operators


_operators = _define()
