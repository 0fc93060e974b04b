"""Messages with what is inside left as bytes.

A SelectTopKStreamRequest holds a whole SelectTopKRequest, which the worker finds prepared by its bytes if it has seen
it before; entries of a batch that ran in one kernel call have results of the same bytes. Protobuf writes a message
inside another as it writes bytes, so the messages made here, with bytes in its place, are the same on the wire
(Protocol Buffers documentation, "Encoding", section "Submessages").
"""

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from topkd.v1 import selection_pb2

__all__ = ["join_response", "join_results", "split_request"]

_KINDS = {
    selection_pb2.SelectTopKStreamRequest.DESCRIPTOR: ("call_id", "request", "timeout_ms"),
    selection_pb2.SelectTopKStreamResponse.DESCRIPTOR: ("call_id", "response"),
    selection_pb2.SelectTopKResponse.DESCRIPTOR: ("results", "queue_time_ns"),
}


def _make() -> list[Any]:
    """Makes the kinds of messages, with the numbers and types of the generated ones."""
    file = descriptor_pb2.FileDescriptorProto(name="topkd/server/wire.proto", package="topkd.server", syntax="proto2")
    for descriptor, names in _KINDS.items():
        kind = file.message_type.add(name=descriptor.name)
        for name in names:
            field = descriptor.fields_by_name[name]
            written = field.type if field.message_type is None else field.TYPE_BYTES
            label = field.LABEL_REPEATED if name == "results" else field.LABEL_OPTIONAL
            kind.field.add(name=name, number=field.number, type=written, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{file.package}.{kind.name}") for kind in file.message_type)
    return [message_factory.GetMessageClass(descriptor) for descriptor in found]


_Request, _Response, _Results = _make()


def split_request(message: bytes) -> tuple[int, bytes, int]:
    """Returns `call_id`, the bytes of `request` and `timeout_ms`.

    Raises:
        DecodeError: the message is no SelectTopKStreamRequest.
    """
    outer = _Request.FromString(message)
    if outer.ByteSize() == len(message):
        return outer.call_id, outer.request, outer.timeout_ms
    # Written in an unusual way: the field may be there twice, and its parts are to be merged.
    whole = selection_pb2.SelectTopKStreamRequest.FromString(message)
    return whole.call_id, whole.request.SerializeToString(), whole.timeout_ms


def join_response(call_id: int, response: bytes) -> bytes:
    """Returns the bytes of an answer from those of its response."""
    written: bytes = _Response(call_id=call_id, response=response).SerializeToString()
    return written


def join_results(results: Iterable[selection_pb2.SelectionResult], queue_time_ns: int) -> bytes:
    """Returns the bytes of a SelectTopKResponse, or of a MergeTopKResponse, which has the same fields.

    A result that is the same object as the one before it is not written anew.
    """
    parts: list[bytes] = []
    last, data = None, b""
    for result in results:
        if result is not last:
            last, data = result, result.SerializeToString()
        parts.append(data)
    written: bytes = _Results(results=parts, queue_time_ns=queue_time_ns).SerializeToString()
    return written
