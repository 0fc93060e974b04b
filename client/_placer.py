"""Where each tensor of a request is: in a region, in a staged copy, or in the message.

A tensor that lies in a region goes by reference. Another one is staged: copied into session memory, or into the message
where the session shares no memory of its kind. Outputs that the caller gave and that lie in no region are written from
a staged copy after the call.
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from topkd import _arrays, _codec
from topkd._arena import NeedMemory, Stale, take_over, tensor_over
from topkd._arrays import HOST, View
from topkd._output import check_given
from topkd.errors import ArgumentValueError, CaptureError, ProtocolError

if TYPE_CHECKING:
    from topkd._arena import Arena
    from topkd._output import Output
    from topkd._session import Session
    from topkd._types import SelectResult
    from topkd.v1 import tensor_pb2

__all__ = ["Place", "Placer", "Prepared", "library_of", "tensor_key"]

_first_byte: Final[Any] = ctypes.c_char.from_buffer
_INLINE: Final = 4096
"""Host tensors up to so many bytes are staged in the message: cheaper than a slot and no slower to read."""


class Prepared:
    """A request and what belongs to it.

    Attributes:
        request: The message.
        outputs: What becomes of each entry's reply.
        stream: The CUDA stream that the call belongs to, or None.
        carried: Whether a tensor travels in the message or the reply.
        held: What must stay until the server has answered.
    """

    __slots__ = ("carried", "held", "outputs", "request", "stream")

    def __init__(self, request: Any) -> None:
        self.request = request
        self.outputs: list[Output] = []
        self.stream: Any = None
        self.carried = False
        self.held: list[Any] = []

    def note_device(self, session: Session, value: Any) -> None:
        """Remembers the stream to wait for."""
        if session.memory_device != HOST and self.stream is None and getattr(value, "is_cuda", False):
            self.stream = _current_stream(value)

    def results(self, reply: Any) -> list[SelectResult]:
        """Reads the reply, copies staged outputs back, in the call's stream.

        Raises:
            ProtocolError: The reply has another number of results.
        """
        queued, results = reply.queue_time_ns * 1e-9, reply.results
        if len(results) != len(self.outputs):
            raise ProtocolError(f"the server sent {len(results)} results for {len(self.outputs)} entries")
        entries = list(zip(self.outputs, results, strict=True))
        if self.stream is None or all(output.in_place or output.is_there(entry) for output, entry in entries):
            return [output.result(entry, queued) for output, entry in entries]
        import torch

        with torch.cuda.stream(self.stream):
            return [output.result(entry, queued) for output, entry in entries]


def tensor_key(value: Any) -> tuple[Any, ...]:
    """Returns what tells where an array or tensor is, and how it lies there. Raises for anything else."""
    if type(value) is np.ndarray:
        return _address(value), value.shape, value.strides, value.dtype
    if value.is_neg():
        raise TypeError("the bits of a lazily negated view are not its elements")
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _address(array: np.ndarray[Any, Any]) -> int:
    """Returns where an array begins: by its buffer, where it has one, in a quarter of the time that numpy takes."""
    try:
        return ctypes.addressof(_first_byte(array))
    except (TypeError, ValueError):  # not contiguous, read-only, without elements, of a dtype that buffers do not know
        return int(array.__array_interface__["data"][0])


class Placer:
    """Places the tensors of one request."""

    __slots__ = (
        "_arena",
        "_may_grow",
        "device",
        "index",
        "place",
        "prepared",
        "session",
        "staged_outputs",
        "strict",
        "views",
    )

    def __init__(
        self, session: Session, arena: Arena, may_grow: bool, prepared: Prepared, strict: bool = False
    ) -> None:
        self.session = session
        self._arena = arena
        self.index = session.index
        self._may_grow = may_grow
        self.prepared = prepared
        self.strict = strict
        self.place = 0
        self.device: int | None = None
        self.staged_outputs = False
        self.views: list[tuple[int, str, View]] = []

    def known(self, value: Any) -> tensor_pb2.Tensor | None:
        """Returns the encoded tensor if the very same one was found in a region before."""
        try:
            return self.index.cache.get(tensor_key(value))
        except (AttributeError, RuntimeError, TypeError):
            return None  # what it is instead is said where it is described

    def locate(self, view: View) -> tensor_pb2.Tensor | None:
        """Returns the encoded tensor if it lies in a region."""
        value = view.array
        strides = value.strides if view.library == "numpy" else view.strides
        return self.index.locate((view.address, value.shape, strides, value.dtype), view)

    def input(self, name: str, value: Any) -> tensor_pb2.Tensor:
        """Places a tensor that is read."""
        if (tensor := self.known(value)) is not None and self.device in (None, self.session.memory_device):
            self.device = self.session.memory_device
            self.note_device(value)
            return tensor
        view = _arrays.describe(name, value, self.place)
        self._check(name, view)
        tensor = self.locate(view)
        self.views.append((self.place, name, view))
        return self._stage(name, view) if tensor is None else tensor

    def note_device(self, value: Any) -> None:
        """Remembers the stream to wait for."""
        self.prepared.note_device(self.session, value)

    def _check(self, name: str, view: View) -> None:
        """Raises for what no request can carry: other dimensions, and memory of another device."""
        if len(view.shape) not in (1, 2):
            raise ArgumentValueError(
                f"{name} has shape {view.shape}; it must have one or two dimensions",
                argument=name,
                selection=self.place,
            )
        if self.device is None:
            self.device = view.device
        if view.device != self.device:
            names = ["host memory" if device == HOST else f"cuda:{device}" for device in (view.device, self.device)]
            raise ArgumentValueError(
                f"{name} is in {names[0]}, the tensors before it in {names[1]}; all must be on one device",
                argument=name,
                selection=self.place,
            )
        if view.device == HOST:
            return
        self.note_device(view.array)
        shared = self.session.memory_device
        if shared == HOST or (shared is not None and shared != view.device):
            here = "computes on the CPU" if shared == HOST else f"is cuda:{shared} here"
            raise ArgumentValueError(
                f"{name} is on {view.array.device}, but the server's device {self.session.info.device.uuid} {here}",
                argument=name,
                selection=self.place,
            )

    def _stage(self, name: str, view: View) -> tensor_pb2.Tensor:
        self._check_staging(name, view)
        shared = self.session.memory_device
        nbytes = _arrays.itemsize(view.code) * math.prod(view.shape)
        if shared == view.device and not (view.device == HOST and nbytes <= _INLINE):
            copy = self.memory(view.code, view.shape, "torch" if view.device != HOST else view.library)
            if copy is not None:
                _copy(copy, view)
                self.prepared.held.append(copy)
                return self._found(name, copy)
        self.prepared.carried = True
        host = view if view.device == HOST else _arrays.describe(name, view.array.cpu(), self.place)
        return _codec.inline(host)

    def _check_staging(self, name: str, view: View) -> None:
        """Refuses what staging would hide from the server: bad strides, and copies made only once for a plan."""
        if self.strict:
            raise ArgumentValueError(
                f"{name} is not in session memory: a plan uses it in every run; allocate it with client.empty or "
                "share it with client.register",
                argument=name,
            )
        _arrays.check_strides(name, view, self.place)

    def _found(self, name: str, copy: Any) -> tensor_pb2.Tensor:
        tensor = self.known(copy) or self.locate(_arrays.describe(name, copy, self.place))
        if tensor is None:  # the index was replaced in between: build the request again
            raise Stale
        return tensor

    def memory(self, code: int, shape: tuple[int, ...], library: str) -> Any:
        """Returns a new array in session memory, None if there is no more."""
        nbytes = _arrays.itemsize(code) * math.prod(shape)
        try:
            slot = self._arena.take(nbytes)
        except NeedMemory:
            if self._may_grow:
                raise
            return None
        if self.prepared.stream is not None:
            take_over(slot, self.prepared.stream, self.session)
        return tensor_over(slot, code, shape, library)

    def output(self, name: str, given: Any, wanted: tuple[int, tuple[int, ...]] | None, like: Any) -> Place:
        """Places a tensor that is written: the given one, a staged copy of it, a new one, or the reply."""
        place = self._output(name, given, wanted, like)
        self.prepared.carried = self.prepared.carried or place.tensor is None
        return place

    def _output(self, name: str, given: Any, wanted: tuple[int, tuple[int, ...]] | None, like: Any) -> Place:
        if given is not None:
            return self._given(name, given, wanted)
        library, host = library_of(like)
        if wanted is not None and wanted[1][0] == 0:
            return Place(None, _without_elements(*wanted, like), None)
        shared = self.session.memory_device
        if wanted is None or shared is None or host != (shared == HOST):
            return Place(None, None, None)
        fresh = self.memory(*wanted, library)
        return Place(None, None, None) if fresh is None else Place(self._found(name, fresh), fresh, None)

    def _given(self, name: str, given: Any, wanted: tuple[int, tuple[int, ...]] | None) -> Place:
        writeable = type(given) is not np.ndarray or given.flags.writeable
        if writeable and self.device == self.session.memory_device and (known := self.known(given)) is not None:
            self.note_device(given)
            return Place(known, given, None)
        view = _arrays.describe(name, given, self.place)
        self._check(name, view)
        if view.library == "numpy" and not given.flags.writeable:
            raise ArgumentValueError(f"{name} is read-only", argument=name, selection=self.place)
        self.views.append((self.place, name, view))
        if (tensor := self.locate(view)) is not None:
            return Place(tensor, given, None)
        self._check_staging(name, view)
        check_given(name, view, wanted, self.place)
        self.staged_outputs = True
        if self.session.memory_device != view.device:
            return Place(None, None, view)
        copy = self.memory(view.code, view.shape, "torch" if view.device != HOST else view.library)
        return Place(None, None, view) if copy is None else Place(self._found(name, copy), copy, view)


class Place:
    """Where an output is: its reference (None: the reply), the array there, and the caller's view to copy it to."""

    __slots__ = ("array", "given", "tensor")

    def __init__(self, tensor: tensor_pb2.Tensor | None, array: Any, given: View | None) -> None:
        self.tensor = tensor
        self.array = array
        self.given = given


def _without_elements(code: int, shape: tuple[int, ...], like: Any) -> Any:
    empty = _arrays.wrap_bits(np.empty(shape, _arrays.bits_dtype(code)), code, library_of(like)[0])
    return empty.to(like.device) if getattr(like, "is_cuda", False) else empty


def library_of(like: Any) -> tuple[str, bool]:
    """Returns the library of results, and whether they are host memory."""
    return ("numpy", True) if isinstance(like, np.ndarray) else ("torch", not like.is_cuda)


def _copy(target: Any, view: View) -> None:
    if view.device == HOST:
        np.copyto(_arrays.bits(_arrays.describe("copy", target)), _arrays.bits(view))
    else:
        target.copy_(view.array)


def _current_stream(tensor: Any) -> Any:
    """Returns the tensor's device's current stream.

    Raises:
        CaptureError: It is capturing a CUDA graph.
    """
    import torch

    device = tensor.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return _current_stream(tensor)
    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "a remote call during CUDA graph capture: it cannot be captured, and nothing was sent. Call it before "
            "or after the capture, or capture topkd.kernels.select_topk"
        )
    return torch.cuda.current_stream(device)
