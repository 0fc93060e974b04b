"""SelectTopKStream: in order, failures of single calls, limits, ends."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from tests.server.harness import ServerProcess, Session, eventually, inline, read, refused, select
from tests.server.test_tcp import attached
from topkd._words import Words
from topkd.v1 import selection_pb2, selection_pb2_grpc

SCORES = np.array([[1, 9, 3, 7]], np.float32)


class Stream:
    """A stream whose requests a test sends when it likes."""

    def __init__(self, stub: selection_pb2_grpc.SelectionServiceStub, metadata: Any) -> None:
        self.outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.call: Any = stub.SelectTopKStream(iter(self.outgoing.get, None), metadata=metadata)

    def send(self, call_id: int, *items: selection_pb2.BatchItem, timeout_ms: int = 0, **fields: Any) -> None:
        request = selection_pb2.SelectTopKRequest(items=items, **fields)
        message = selection_pb2.SelectTopKStreamRequest(call_id=call_id, request=request, timeout_ms=timeout_ms)
        self.outgoing.put(message)

    def answer(self) -> selection_pb2.SelectTopKStreamResponse:
        reply: selection_pb2.SelectTopKStreamResponse = next(self.call)
        return reply

    def close(self) -> None:
        self.outgoing.put(None)
        self.call.cancel()


@pytest.fixture
def stream(session: Session) -> Iterator[Stream]:
    opened = Stream(session.stub, session.metadata)
    yield opened
    opened.close()


def test_answers_come_in_the_order_of_the_requests(stream: Stream) -> None:
    for call_id in (7, 3, 3, 1 << 60):
        stream.send(call_id, select(input=inline(SCORES), k=1 + call_id % 4))
    for call_id in (7, 3, 3, 1 << 60):
        reply = stream.answer()
        assert reply.call_id == call_id
        assert read(reply.response.results[0].indices).shape == (1, 1 + call_id % 4)
    assert reply.response.results[0].device_time_ns > 0


def test_a_call_that_fails_ends_nothing(stream: Stream) -> None:
    stream.send(1, select(input=inline(SCORES), k=2), select(input=inline(SCORES), k=0))
    stream.send(2)
    stream.send(3, select(input=inline(SCORES), k=2))
    wrong, empty, right = (stream.answer() for _ in range(3))
    assert (wrong.call_id, wrong.error.reason, wrong.error.field) == (1, "ARGUMENT_VALUE", "items[1].selection.k")
    assert wrong.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert "k" in wrong.error.message
    assert (empty.call_id, empty.error.field) == (2, "items")
    assert read(right.response.results[0].indices).tolist() == [[1, 3]]


def test_bytes_that_are_no_message_are_answered(session: Session) -> None:
    method: Any = session.channel.stream_stream("/topkd.v1.SelectionService/SelectTopKStream")
    good = selection_pb2.SelectTopKStreamRequest(
        call_id=5, request=selection_pb2.SelectTopKRequest(items=[select(input=inline(SCORES), k=1)])
    )
    sent = iter([b"\xff\xff", good.SerializeToString()])
    first, second = (
        selection_pb2.SelectTopKStreamResponse.FromString(one) for one in method(sent, metadata=session.metadata)
    )
    assert (first.call_id, first.error.reason, first.error.field) == (0, "ARGUMENT_VALUE", "SelectTopKStreamRequest")
    assert second.call_id == 5


def test_a_stream_needs_a_token(session: Session) -> None:
    for metadata in ((), (("topkd-token", "wrong"),)):
        with refused(grpc.StatusCode.UNAUTHENTICATED) as found:
            list(session.stub.SelectTopKStream(iter([]), metadata=metadata))
        assert found[0] == "TOKEN_INVALID"


def test_only_so_many_streams_may_be_open(session: Session, stream: Stream) -> None:
    most = session.info.info.limits.max_streams
    assert most == 4
    others = [Stream(session.stub, session.metadata) for _ in range(most)]
    try:
        stream.send(1, select(input=inline(SCORES), k=1))
        stream.answer()
        for number, other in enumerate(others):
            other.send(number, select(input=inline(SCORES), k=1))
            if number < most - 1:
                assert other.answer().call_id == number
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED) as found:
            others[-1].answer()
        assert found[0] == "QUEUE_FULL"
        assert found[2] > 0
        others[0].close()

        def opens() -> bool:
            again = Stream(session.stub, session.metadata)
            again.send(9, select(input=inline(SCORES), k=1))
            try:
                return again.answer().call_id == 9
            except grpc.RpcError:
                return False
            finally:
                again.close()

        eventually(opens)
    finally:
        for other in others:
            other.close()


def test_a_stream_and_unary_calls_take_turns(session: Session, stream: Stream) -> None:
    done: list[int] = []

    def call() -> None:
        for _ in range(30):
            session.select(select(input=inline(SCORES), k=1))
            done.append(1)

    thread = threading.Thread(target=call)
    thread.start()
    for call_id in range(100):
        stream.send(call_id, select(input=inline(SCORES), k=1))
    assert [stream.answer().call_id for _ in range(100)] == list(range(100))
    thread.join(20)
    assert len(done) == 30


def test_ordered_calls_are_accepted_on_a_stream(front: ServerProcess) -> None:
    with Session(front) as session:
        stream, words, memory = Stream(session.stub, session.metadata), Words(session.words), session.register(4096)
        memory.array("float32", (1, 4))[:] = SCORES
        out = memory.array("int32", (1, 1), 2048)
        out[:] = -7
        item = select(input=memory.tensor("float32", (1, 4)), k=1, out_indices=memory.tensor("int32", (1, 1), 2048))
        for turn in (1, 2, 3):
            stream.send(turn, item, ordering=selection_pb2.Ordering(slot=0, ready=turn, done=turn))
        assert [stream.answer().response.results[0].kernel for _ in range(3)] == ["torch"] * 3
        assert out.tolist() == [[-7]]
        words.set_ready(0, 3)
        assert words.wait_done(0, 3, 5)
        assert out.tolist() == [[1]]
        stream.close()


def test_streams_are_forwarded_to_sessions_over_tcp(front: ServerProcess) -> None:
    with attached(front) as (info, channel, _):
        stream = Stream(selection_pb2_grpc.SelectionServiceStub(channel), (("topkd-token", info.token),))
        for call_id in range(20):
            stream.send(call_id, select(input=inline(SCORES), k=call_id % 3))
        replies = [stream.answer() for _ in range(20)]
        assert [reply.call_id for reply in replies] == list(range(20))
        assert [reply.HasField("error") for reply in replies] == [call_id % 3 == 0 for call_id in range(20)]
        stream.close()
        with refused(grpc.StatusCode.UNAUTHENTICATED):
            list(selection_pb2_grpc.SelectionServiceStub(channel).SelectTopKStream(iter([]), metadata=()))


def test_open_streams_are_counted_and_end_with_their_caller(front: ServerProcess, session: Session) -> None:
    eventually(lambda: front.metrics().get("topkd_streams", 0.0) == 0)
    stream = Stream(session.stub, session.metadata)
    stream.send(1, select(input=inline(SCORES), k=1))
    stream.answer()
    name = 'topkd_requests_total{code="OK",method="SelectTopKStream"}'
    eventually(lambda: front.metrics().get("topkd_streams") == 1 and front.metrics().get(name, 0) >= 1)
    stream.close()
    eventually(lambda: front.metrics().get("topkd_streams") == 0)


def test_an_open_stream_does_not_hold_up_the_end_of_its_session(front: ServerProcess) -> None:
    session = Session(front)
    stream = Stream(session.stub, session.metadata)
    stream.send(1, select(input=inline(SCORES), k=1))
    stream.answer()
    worker = front.wait_event("attached", session=session.info.session_id)["worker"]
    session.sock.close()
    started = time.monotonic()
    with pytest.raises(grpc.RpcError):
        stream.answer()
    eventually(lambda: worker not in front.children(), 5)
    assert time.monotonic() - started < 4
    session.channel.close()
