from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import example, given
from hypothesis import strategies as st

from topkd.server._wire import join_response, join_results, split_request
from topkd.v1 import selection_pb2, tensor_pb2

MOST_64 = (1 << 64) - 1
MOST_32 = (1 << 32) - 1

requests = st.lists(st.integers(0, MOST_64), max_size=70).map(
    lambda ids: selection_pb2.SelectTopKRequest(
        items=[selection_pb2.BatchItem(plan=selection_pb2.PlanCall(plan_id=one)) for one in ids]
    )
)


@given(st.integers(0, MOST_64), requests, st.integers(0, MOST_32))
@example(0, selection_pb2.SelectTopKRequest(), 0)
def test_a_request_is_taken_apart(call_id: int, request: selection_pb2.SelectTopKRequest, timeout_ms: int) -> None:
    message = selection_pb2.SelectTopKStreamRequest(call_id=call_id, request=request, timeout_ms=timeout_ms)
    assert split_request(message.SerializeToString()) == (call_id, request.SerializeToString(), timeout_ms)


fields = st.tuples(st.sampled_from([0x08, 0x10, 0x12, 0x18, 0x1A, 0x22, 0x88]), st.binary(max_size=12)).map(
    lambda field: bytes((field[0],)) + field[1]
)


@given(st.one_of(st.binary(max_size=40), st.lists(fields, max_size=5).map(b"".join)))
@example(b"\x12\x02\x12\x00\x12\x02\x0a\x00")
@example(b"\x18\x01\x08\x01")
@example(b"\x08\x80\x00")
@example(b"\x18\xff\xff\xff\xff\x7f")
@example(b"\x12\x05\x00")
@example(b"\x22\x00")
def test_whatever_is_taken_apart_the_generated_code_takes_apart_alike(message: bytes) -> None:
    try:
        call_id, request, timeout_ms = split_request(message)
        inner = selection_pb2.SelectTopKRequest.FromString(request)
    except DecodeError:
        with pytest.raises(DecodeError):
            selection_pb2.SelectTopKStreamRequest.FromString(message)
        return
    whole = selection_pb2.SelectTopKStreamRequest.FromString(message)
    assert (whole.call_id, whole.request, whole.timeout_ms) == (call_id, inner, timeout_ms)


@given(st.integers(0, MOST_64), st.integers(0, 70), st.integers(0, MOST_64))
def test_an_answer_is_put_together(call_id: int, results: int, queued: int) -> None:
    result = selection_pb2.SelectionResult(kernel="cluster", device_time_ns=queued)
    response = selection_pb2.SelectTopKResponse(results=[result] * results, queue_time_ns=queued)
    answer = selection_pb2.SelectTopKStreamResponse.FromString(join_response(call_id, response.SerializeToString()))
    assert (answer.call_id, answer.WhichOneof("outcome"), answer.response) == (call_id, "response", response)


results = st.builds(
    lambda kernel, time, inline: selection_pb2.SelectionResult(
        kernel=kernel, device_time_ns=time, indices=tensor_pb2.Tensor(inline_data=inline) if inline else None
    ),
    st.sampled_from(["", "cluster", "torch"]),
    st.integers(0, MOST_64),
    st.binary(max_size=9),
)


@given(st.lists(st.tuples(results, st.integers(1, 3)), max_size=9), st.integers(0, MOST_64))
@example([], 0)
def test_results_are_put_together(runs: list[tuple[selection_pb2.SelectionResult, int]], queued: int) -> None:
    same = [result for result, times in runs for _ in range(times)]
    data = join_results(same, queued)
    for kind in (selection_pb2.SelectTopKResponse, selection_pb2.MergeTopKResponse):
        assert kind.FromString(data) == kind(results=same, queue_time_ns=queued)
