"""A stream's call: read and written by its callers' threads, or as grpcio does it."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from topkd import _stream_call
from topkd._stream_call import open_call
from topkd.v1 import selection_pb2, selection_pb2_grpc

METHOD = "/topkd.v1.SelectionService/SelectTopKStream"


class Echo:
    """Answers with the number of each message.

    Attributes:
        hold: set: messages are taken.
        ended: set when the caller has gone or ended the stream.
    """

    def __init__(self) -> None:
        self.hold = threading.Event()
        self.hold.set()
        self.ended = threading.Event()
        self.metadata: dict[str, Any] = {}

    def serve(self, messages: Iterator[Any], context: Any) -> Iterator[Any]:
        context.add_callback(self.ended.set)
        self.metadata = dict(context.invocation_metadata())
        self.hold.wait(20)
        for message in messages:
            if message.call_id == 0:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "enough")
            if message.call_id == 99:
                return
            if message.call_id == 98:
                yield b"\xff"
                continue
            yield selection_pb2.SelectTopKStreamResponse(call_id=message.call_id)


@pytest.fixture
def echo() -> Echo:
    return Echo()


@pytest.fixture
def channel(echo: Echo) -> Iterator[grpc.Channel]:
    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.stream_stream_rpc_method_handler(
        echo.serve,
        selection_pb2.SelectTopKStreamRequest.FromString,
        lambda answer: answer if isinstance(answer, bytes) else answer.SerializeToString(),
    )
    generic = grpc.method_handlers_generic_handler(METHOD.split("/")[1], {METHOD.split("/")[2]: handler})
    server.add_generic_rpc_handlers((generic,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as opened:
        yield opened
    server.stop(0).wait(10)


class Conversation:
    """A call, and the answers that came while messages were sent."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.came: deque[int] = deque()

    def send(self, call_id: int, request: Any = None) -> None:
        while not self.call.ready:
            self.take()
        self.call.send(selection_pb2.SelectTopKStreamRequest(call_id=call_id, request=request))

    def take(self) -> None:
        taken = self.call.take()
        if taken is not None:
            self.came.append(taken.call_id)

    def answer(self) -> int:
        while not self.came:
            self.take()
        return self.came.popleft()


@pytest.fixture(params=["callers", "own"])
def call(request: pytest.FixtureRequest, channel: grpc.Channel, monkeypatch: pytest.MonkeyPatch) -> Conversation:
    method: Any = selection_pb2_grpc.SelectionServiceStub(channel).SelectTopKStream
    if request.param == "own":
        monkeypatch.setattr(_stream_call, "grpcio", SimpleNamespace())
    made = open_call(method, (("topkd-token", "t"),))
    assert type(made).__name__ == {"callers": "_CallersThreads", "own": "_OwnThreads"}[request.param]
    return Conversation(made)


def test_answers_come_to_who_takes_them(call: Conversation, echo: Echo) -> None:
    for number in range(1, 40):
        call.send(number)
        assert call.answer() == number
    assert echo.metadata["topkd-token"] == "t"


def test_messages_are_sent_ahead(call: Conversation) -> None:
    for number in range(1, 40):
        call.send(number)
    assert [call.answer() for _ in range(1, 40)] == list(range(1, 40))


def test_a_failure_of_the_call_is_raised_with_its_status(call: Conversation) -> None:
    call.send(1)
    assert call.answer() == 1
    call.send(0)
    for _ in range(2):
        with pytest.raises(grpc.RpcError) as caught:
            call.answer()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
        assert caught.value.details() == "enough"  # type: ignore[attr-defined]
        assert caught.value.trailing_metadata() == ()  # type: ignore[attr-defined]


def test_the_servers_end_is_told(call: Conversation) -> None:
    call.send(99)
    for _ in range(2):
        with pytest.raises(StopIteration):
            call.answer()
        call.call.send(selection_pb2.SelectTopKStreamRequest(call_id=5))


def test_an_answer_that_cannot_be_read_ends_the_call(call: Conversation, echo: Echo) -> None:
    call.send(98)
    with pytest.raises(grpc.RpcError) as caught:
        call.answer()
    assert caught.value.code() is grpc.StatusCode.INTERNAL  # type: ignore[attr-defined]
    call.call.cancel()


def test_a_cancellation_wakes_who_takes(call: Conversation, echo: Echo) -> None:
    call.send(1)
    assert call.answer() == 1
    timer = threading.Timer(0.05, call.call.cancel)
    timer.start()
    with pytest.raises(grpc.RpcError) as caught:
        call.answer()
    assert caught.value.code() is grpc.StatusCode.CANCELLED  # type: ignore[attr-defined]
    timer.join()
    call.call.cancel()
    assert echo.ended.wait(20)


def test_a_signals_handler_that_raises_ends_the_call(call: Conversation, echo: Echo) -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError

    call.send(1)
    assert call.answer() == 1
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(InterruptedError):
            call.answer()
    finally:
        signal.signal(signal.SIGUSR1, before)
    call.call.cancel()
    call.call.send(selection_pb2.SelectTopKStreamRequest(call_id=2))
    with pytest.raises(grpc.RpcError) as caught:
        call.answer()
    assert caught.value.code() is grpc.StatusCode.CANCELLED  # type: ignore[attr-defined]
    assert echo.ended.wait(20)


def test_a_channel_that_closes_ends_the_call(call: Conversation, channel: grpc.Channel) -> None:
    call.send(1)
    assert call.answer() == 1
    channel.close()
    with pytest.raises(grpc.RpcError):
        call.answer()


def test_a_server_that_takes_nothing_holds_back_the_sender(channel: grpc.Channel, echo: Echo) -> None:
    echo.hold.clear()
    call = Conversation(open_call(selection_pb2_grpc.SelectionServiceStub(channel).SelectTopKStream, ()))
    item = selection_pb2.BatchItem(plan=selection_pb2.PlanCall(plan_id=1 << 63))
    large = selection_pb2.SelectTopKRequest(items=[item] * 100_000)
    sent: list[int] = []

    def send_all() -> None:
        for number in range(1, 30):
            call.send(number, large)
            sent.append(number)

    thread = threading.Thread(target=send_all)
    thread.start()
    thread.join(1)
    assert thread.is_alive()
    assert len(sent) < 29
    echo.hold.set()
    thread.join(20)
    assert [call.answer() for _ in range(1, 30)] == list(range(1, 30))
    call.call.cancel()
