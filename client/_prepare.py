"""From arguments to a request that can be sent. `_placer` says where each tensor is."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from topkd import _codec
from topkd._output import Output, check_overlaps
from topkd._placer import Place, Placer, Prepared, library_of, tensor_key
from topkd._types import Merge, Selection
from topkd.errors import ArgumentValueError
from topkd.v1 import selection_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from topkd._arena import Arena
    from topkd._plan import PlanState
    from topkd._session import Session

__all__ = ["Prepared", "prepare_merges", "prepare_plan", "prepare_selections"]

_MAX_K: Final = 1 << 20
_MAX_GROUP: Final = 128


def prepare_plan(session: Session, arena: Arena, selection: Selection, may_grow: bool) -> Prepared:
    """Builds the request of a plan: as `prepare_selections`, but nothing is staged."""
    request = selection_pb2.CreatePlanRequest()
    placer = Placer(session, arena, may_grow, Prepared(request), strict=True)
    request.selection.CopyFrom(_codec.selection_message(selection))
    _place_selection(placer, selection, request.selection)
    return _finish(placer)


def prepare_selections(
    arena: Arena, selections: Sequence[Selection | PlanState], session: Session, may_grow: bool
) -> Prepared:
    """Builds a SelectTopK request.

    Raises:
        Stale: The session changed under way.
        NeedMemory: `may_grow`, and the arena is to be grown first.
        ArgumentError: An argument that cannot be sent.
        CaptureError: The current stream is capturing.
    """
    key = _request_key(session, selections)
    try:
        known = session.index.requests.get(key)
    except TypeError:  # something that cannot be hashed; what is wrong with it is said where it is encoded
        key, known = None, None
    if known is not None:
        return _again(session, known, selections)
    request = selection_pb2.SelectTopKRequest()
    placer = Placer(session, arena, may_grow, Prepared(request))
    for place, selection in enumerate(selections):
        placer.place, placer.device = place, None
        item = request.items.add()
        if isinstance(selection, Selection):
            item.selection.CopyFrom(_codec.selection_message(selection, place))
            _place_selection(placer, selection, item.selection)
        else:
            _place_plan(placer, selection, item)
    prepared = _finish(placer)
    staged = placer.staged_outputs or prepared.held
    if key is not None and not staged and all(_in_regions(item) for item in request.items):
        placer.index.keep_request(key, request)
    return prepared


_tensors = operator.attrgetter(*_codec.SELECTION_TENSORS, "out_indices", "out_values")


def _request_key(session: Session, selections: Sequence[Selection | PlanState]) -> Any:
    """Returns everything that a request is made from; None if that is not known of one of its entries."""
    keys: list[Any] = []
    for selection in selections:
        if not isinstance(selection, Selection):
            keys.append(selection.id_in(session))
        elif (key := _key(selection)) is not None:
            keys.append(key)
        else:
            return None
    return tuple(keys)


def _key(selection: Selection) -> Any:
    """Returns everything that a selection's message is made from; None if its outputs are not given, or cannot be."""
    if selection.out_indices is None:
        return None
    if (selection.out_values is None) == selection.values:
        return None
    try:
        for output in (selection.out_indices, selection.out_values):
            if type(output) is np.ndarray and not output.flags.writeable:
                return None
        tensors = [None if value is None else tensor_key(value) for value in _tensors(selection)]
    except (AttributeError, RuntimeError, TypeError):
        return None  # what is wrong is said where it is encoded
    return _codec.options_key(selection), *tensors


def _in_regions(item: selection_pb2.BatchItem) -> bool:
    """Says whether the server reads and writes memory only that stays where it is."""
    if item.HasField("plan"):
        return True
    message = item.selection
    fields = [field.name for field, _ in message.ListFields() if field.message_type is not None]
    return "out_indices" in fields and all(getattr(message, name).HasField("region") for name in fields)


def _again(
    session: Session, request: selection_pb2.SelectTopKRequest, selections: Sequence[Selection | PlanState]
) -> Prepared:
    """Returns a request that was prepared before, for the same memory."""
    prepared = Prepared(request)
    outputs = prepared.outputs
    for selection in selections:
        if isinstance(selection, Selection):
            given = selection
            library, host = library_of(given.input)
            device = None if host else given.input.device
            outputs.append(Output(library, device, given.out_indices, None, given.out_values, None, in_place=True))
        else:
            given = selection.selection
            outputs.append(selection.output)
        if prepared.stream is None:
            prepared.note_device(session, given.input)
    return prepared


def _place_plan(placer: Placer, plan: PlanState, item: selection_pb2.BatchItem) -> None:
    item.plan.plan_id = plan.id_in(placer.session)
    placer.note_device(plan.selection.input)
    placer.prepared.outputs.append(plan.output)


def _place_selection(placer: Placer, selection: Selection, message: selection_pb2.Selection) -> None:
    for name in _codec.SELECTION_TENSORS:
        value = getattr(selection, name)
        if value is not None or name == "input":
            getattr(message, name).CopyFrom(placer.input(name, value))
    code, index_code = message.input.dtype, message.index_dtype
    shape = _output_shape(message.input.shape, message.k, message.group if message.expand else 1)
    indices = placer.output("out_indices", selection.out_indices, shape and (index_code, shape), selection.input)
    values = None
    if selection.values or selection.out_values is not None:
        values = placer.output("out_values", selection.out_values, shape and (code, shape), selection.input)
    _place_outputs(placer, message, selection.input, indices, values)
    if not selection.values and selection.out_values is not None and values is not None and values.tensor is None:
        raise ArgumentValueError("out_values is given without values", argument="out_values", selection=placer.place)


def _place_outputs(placer: Placer, message: Any, like: Any, indices: Place, values: Place | None) -> None:
    if indices.tensor is not None:
        message.out_indices.CopyFrom(indices.tensor)
    if values is not None and values.tensor is not None:
        message.out_values.CopyFrom(values.tensor)
    device = like.device if getattr(like, "is_cuda", False) else None
    placer.prepared.outputs.append(
        Output(
            library=library_of(like)[0],
            device=device,
            indices=indices.array,
            given_indices=indices.given,
            values=values.array if values else None,
            given_values=values.given if values else None,
            in_place=all(place.tensor is not None and place.given is None for place in (indices, values) if place),
        )
    )


def _output_shape(shape: Sequence[int], k: int, group: int) -> tuple[int, int] | None:
    """Returns the outputs' shape, None if the arguments make no sense: the server says why."""
    if len(shape) != 2 or not 1 <= k <= _MAX_K or not 1 <= group <= _MAX_GROUP:
        return None
    return shape[0], k * group


def prepare_merges(arena: Arena, merges: Sequence[Merge], session: Session, may_grow: bool) -> Prepared:
    """Builds a MergeTopK request. Raises as `prepare_selections`."""
    request = selection_pb2.MergeTopKRequest()
    placer = Placer(session, arena, may_grow, Prepared(request))
    for place, merge in enumerate(merges):
        placer.place, placer.device = place, None
        message = request.items.add()
        message.CopyFrom(_codec.merge_message(merge, place))
        for name in _codec.MERGE_TENSORS:
            getattr(message, name).CopyFrom(placer.input(name, getattr(merge, name)))
        shape = _output_shape(message.values.shape, message.k, 1)
        indices = placer.output(
            "out_indices", merge.out_indices, shape and (message.indices.dtype, shape), merge.values
        )
        values = placer.output("out_values", merge.out_values, shape and (message.values.dtype, shape), merge.values)
        _place_outputs(placer, message, merge.values, indices, values)
    return _finish(placer)


def _finish(placer: Placer) -> Prepared:
    prepared = placer.prepared
    if placer.staged_outputs:
        check_overlaps(placer.views)
    limit = placer.session.info.limits.max_message_bytes
    if limit and (size := prepared.request.ByteSize()) > limit:
        raise ArgumentValueError(
            f"the request takes {size:,} bytes with its tensors inline, the server allows {limit:,}: use session "
            "memory (client.empty), or smaller batches"
        )
    return prepared
