"""Remote selections as operators of torch's dispatcher, for compiled code.

`torch.compile` cannot trace a client; it can put an operator into its graph. `PlanOperator` makes one of a plan, by a
lane or without, `ClientOperator` of a client's `select_topk`:

    from topkd import torch_ops

    plan = client.plan(scores, 2048)
    select = torch_ops.PlanOperator(plan, plan.lane())

    @torch.compile(fullgraph=True)
    def step(x):
        return cache[select(input=x @ weight).indices]

An operator does in a graph what the call does outside of one, on the current stream. A CUDA graph can hold the calls of
a lane. Others send a request: inductor leaves them out of the CUDA graphs that it captures.

The only module of the client that imports torch, and `topkd.kernels`, when it is imported itself; nothing of the client
imports it.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from topkd import _codec, kernels
from topkd._client import Client, Plan
from topkd._lane import Lane
from topkd._types import Selection, SelectResult
from topkd.errors import ArgumentTypeError, ArgumentValueError, ClientClosedError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Unpack

    from topkd._types import SelectOptions

__all__ = ["ClientOperator", "PlanOperator"]

_T = TypeVar("_T")

_numbers = itertools.count(1)
_bound: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""What the number in a graph stands for. Numbers are never used again; who holds the object keeps it."""


def _number(bound: object) -> int:
    number = next(_numbers)
    _bound[number] = bound
    return number


def _find(number: int, kind: type[_T]) -> _T:
    bound = _bound.get(number)
    if not isinstance(bound, kind):
        raise ClientClosedError(
            f"the {kind.__name__} that this graph was made with is gone: keep it as long as the graph"
        )
    return bound


class PlanOperator:
    """A plan's calls in compiled code.

    Reads and writes the plan's tensors, which the graph knows as its arguments: what it writes to them before a call is
    selected from, and what it reads from the outputs afterwards is the result. Their addresses are marked as fixed, for
    CUDA graphs that inductor captures around the call.

    Attributes:
        inputs: The tensors that the plan reads, by the names of `select_topk`.
        indices: Where it writes indices.
        values: Where it writes values, or None.
    """

    def __init__(self, plan: Plan, lane: Lane | None = None) -> None:
        """Makes an operator of a plan of torch tensors, and keeps the plan and the lane.

        Args:
            plan: Of a `Client`.
            lane: One that the plan belongs to; calls go by it. With CPU tensors each waits for its end.

        Raises:
            ArgumentTypeError: It is no plan of a `Client`, its tensors are numpy's, or the lane is none.
            ArgumentValueError: The plan is none of the lane's.
        """
        import torch._dynamo

        if not isinstance(plan, Plan):
            raise ArgumentTypeError(f"plan must be a topkd.Plan, not {type(plan).__name__}", argument="plan")
        if lane is not None:
            if not isinstance(lane, Lane):
                raise ArgumentTypeError(f"lane must be a topkd.Lane, not {type(lane).__name__}", argument="lane")
            lane.check_plan(plan)
        selection = plan._state.selection
        named = {name: getattr(selection, name) for name in (*_codec.SELECTION_TENSORS, "out_indices", "out_values")}
        tensors = {name: _torch_only(tensor) for name, tensor in named.items() if tensor is not None}
        for tensor in tensors.values():
            torch._dynamo.mark_static_address(tensor)
        self.indices = tensors.pop("out_indices")
        self.values = tensors.pop("out_values", None)
        self.inputs = tensors
        self._outputs = (self.indices,) if self.values is None else (self.indices, self.values)
        self._names = tuple(self.inputs)
        self._memory = tuple(self.inputs.values())
        self._plan, self._lane = plan, lane
        self._kernel = plan.kernel
        self._number = _number(self)

    def __call__(self, **tensors: torch.Tensor) -> SelectResult:
        """Selects into the plan's outputs, which the next call overwrites.

        Args:
            **tensors: By the names of `inputs`: copied to the plan's tensors first, without a copy in between.

        Raises:
            ArgumentTypeError: A name that the plan has no tensor for, no tensor, or another dtype than its tensor's.
            ArgumentValueError: Another shape or device than the plan's tensor has.
            TopkdError: As `Plan.run`, or as a call of the lane.
        """
        self._run(tensors, self._outputs)
        return SelectResult(self.indices, self.values, self._kernel)

    def new(self, **tensors: torch.Tensor) -> SelectResult:
        """Does the same, and returns copies of the outputs: new tensors, of torch's allocator."""
        outputs = tuple(torch.empty_like(tensor) for tensor in self._outputs)
        self._run(tensors, outputs)
        return SelectResult(outputs[0], outputs[1] if len(outputs) > 1 else None, self._kernel)

    def _run(self, tensors: dict[str, torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name not in self._names:
                text = f"{name} is no tensor of the plan; it has {', '.join(self._names)}"
                raise ArgumentTypeError(text, argument=name)
            _check_tensor(name, tensor)
        given = [tensors.get(name, mine) for name, mine in self.inputs.items()]
        places = [place for place, name in enumerate(self._names) if name in tensors]
        written = [self._memory[place] for place in places]
        operator = torch.ops.topkd.run_plan if self._lane is None else torch.ops.topkd.run_lane
        operator(self._number, given, places, written, outputs)

    def check(self, given: Sequence[torch.Tensor]) -> None:
        """Raises unless tensors are like the plan's."""
        for name, mine, other in zip(self._names, self._memory, given, strict=True):
            if other.dtype != mine.dtype:
                raise ArgumentTypeError(f"{name} has dtype {other.dtype}; it must be {mine.dtype}", argument=name)
            if other.shape != mine.shape or other.device != mine.device:
                is_now, must_be = (f"{tuple(one.shape)} on {one.device}" for one in (other, mine))
                raise ArgumentValueError(f"{name} is of shape {is_now}; it must be {must_be}", argument=name)

    def run(
        self,
        given: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        places: Sequence[int],
        outputs: Sequence[torch.Tensor],
    ) -> None:
        """Does a call of the graph's. Where the graph has moved a tensor of the plan's elsewhere, both are written."""
        self.check(given)
        for mine, other in zip(self._memory, given, strict=True):
            _copy(mine, other)
        for place, other in zip(places, written, strict=True):
            _copy(other, self._memory[place])
        self._call()
        for mine, other in zip(self._outputs, outputs, strict=True):
            _copy(other, mine)

    def _call(self) -> None:
        if self._lane is None:
            self._plan.run()
        elif self._memory[0].is_cuda:
            self._lane(self._plan)
        else:
            self._lane.call_host(self._plan)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}", argument=name)


def _torch_only(array: Any) -> torch.Tensor:
    if not isinstance(array, torch.Tensor):
        text = "the plan's arrays are numpy's: plan tensors (client.empty with a torch dtype)"
        raise ArgumentTypeError(text, argument="plan")
    return array


def _copy(to: torch.Tensor, of: torch.Tensor) -> None:
    if to.data_ptr() != of.data_ptr() or to.stride() != of.stride():
        to.copy_(of)


class ClientOperator:
    """A client's `select_topk` in compiled code, for tensors of any memory."""

    def __init__(self, client: Client) -> None:
        """Makes operators of a client, and keeps it.

        Raises:
            ArgumentTypeError: It is no `topkd.Client`.
        """
        if not isinstance(client, Client):
            raise ArgumentTypeError(f"client must be a topkd.Client, not {type(client).__name__}", argument="client")
        self._client = client
        self._number = _number(self)

    def select_topk(self, input: torch.Tensor, k: int, **options: Unpack[SelectOptions]) -> SelectResult:
        """Selects as `Client.select_topk` does, of torch tensors; `kernel` of the result is empty.

        Raises:
            TopkdError: As `Client.select_topk`; while the graph is traced, `topkd.kernels`' classes for arguments.
        """
        arguments: dict[str, Any] = {**_DEFAULTS, **options}
        if not torch.compiler.is_compiling():
            _check_options(Selection(input, k, **arguments))
        arguments["family"] = arguments.pop("kernel")
        indices, values = arguments.pop("out_indices"), arguments.pop("out_values")
        found: Any
        if indices is None and values is None:
            found = torch.ops.topkd.select_remotely(self._number, input, k, **arguments)
            return SelectResult(found[0], found[1] if len(found) > 1 else None)
        if indices is None:
            columns = k * arguments["group"] if arguments["expand"] else k
            indices = input.new_empty((input.shape[0], columns), dtype=arguments["index_dtype"])
        if values is None and arguments["values"]:
            values = input.new_empty((input.shape[0], k))
        torch.ops.topkd.select_remotely_out(self._number, input, k, indices, values, **arguments)
        return SelectResult(indices, values)

    def run(self, arguments: dict[str, Any]) -> list[torch.Tensor]:
        """Does a call of a graph's."""
        result: Any = self._client.select_topk(**arguments)
        return [result.indices] if result.values is None else [result.indices, result.values]


def _check_options(selection: Selection) -> None:
    """Raises for what the dispatcher would refuse by its own texts, or take for something else."""
    for name in (*_codec.SELECTION_TENSORS, "out_indices", "out_values"):
        tensor = getattr(selection, name)
        if tensor is not None or name == "input":
            _check_tensor(name, tensor)
    if not isinstance(selection.index_dtype, torch.dtype):
        text = f"index_dtype must be a torch.dtype, not {type(selection.index_dtype).__name__}"
        raise ArgumentTypeError(text, argument="index_dtype")
    _codec.selection_message(selection)


_DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in dataclasses.fields(Selection) if field.name not in ("input", "k")
} | {"index_dtype": torch.int32}


def _run_plan(number: int, given: Any, places: Any, written: Any, outputs: Any) -> None:
    _find(number, PlanOperator).run(given, written, places, outputs)


def _fake_run_plan(number: int, given: Any, places: Any, written: Any, outputs: Any) -> None:
    _find(number, PlanOperator).check(given)


def _select(number: int, **arguments: Any) -> list[torch.Tensor]:
    return _find(number, ClientOperator).run(arguments)


def _fake_select(number: int, **arguments: Any) -> list[torch.Tensor]:
    _find(number, ClientOperator)
    return kernels.fake_select(**arguments)


def _select_out(number: int, **arguments: Any) -> None:
    _find(number, ClientOperator).run(arguments)


def _fake_select_out(number: int, **arguments: Any) -> None:
    _fake_select(number, **arguments)


def _define() -> kernels.Operators:
    operators = kernels.Operators()
    request = torch.Tag.cudagraph_unsafe
    call = "int number, Tensor[] given, int[] places, Tensor(a!)[] written, Tensor(b!)[] outputs"
    operators.define(f"run_plan({call}) -> ()", _run_plan, _fake_run_plan, request)
    operators.define(f"run_lane({call}) -> ()", _run_plan, _fake_run_plan)
    scores, out = "int number, Tensor input, int k", "Tensor(a!) out_indices, Tensor(b!)? out_values"
    options = kernels.SELECT_OPTIONS
    operators.define(f"select_remotely({scores}, {options}) -> Tensor[]", _select, _fake_select, request)
    operators.define(f"select_remotely_out({scores}, {out}, {options}) -> ()", _select_out, _fake_select_out, request)
    return operators


_operators = _define()
