"""`Client.stream`: selections over an open stream, one after the other, ahead, and from several threads."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import threading
import time
from typing import Any

import grpc
import numpy as np
import pytest

import topkd
from tests.conftest import Server
from topkd import _stream
from topkd._stream import Transport
from topkd.v1 import selection_pb2

SCORES = np.array([[1, 9, 3, 7]], np.float32)


def test_a_stream_selects_as_the_client_does(client: topkd.Client) -> None:
    scores = client.empty((2, 4), "float32")
    scores[:] = [[1, 9, 3, 7], [4, 0, 8, 6]]
    with client.stream() as stream, client.plan(scores, 2, order="value") as plan:
        for _ in range(3):
            assert stream.select_topk(scores, 2, order="value").indices.tolist() == [[1, 3], [2, 3]]
            assert stream.run(plan).indices.tolist() == [[1, 3], [2, 3]]
        result = stream.select_topk(SCORES, 1, values=True)
        assert (result.indices.tolist(), result.values.tolist()) == ([[1]], [[9.0]])
        assert result.device_time > 0
        batch = stream.select_topk_batch([topkd.Selection(scores, 1), plan, topkd.Selection(SCORES, 1, largest=False)])
        assert [one.indices.tolist() for one in batch] == [[[1], [2]], [[1, 3], [2, 3]], [[0]]]
        assert stream.select_topk_batch([]) == []


def test_errors_are_those_of_the_client_and_end_nothing(client: topkd.Client) -> None:
    with client.stream() as stream:
        with pytest.raises(topkd.ArgumentValueError, match="k") as caught:
            stream.select_topk_batch([topkd.Selection(SCORES, 1), topkd.Selection(SCORES, 0)])
        assert (caught.value.argument, caught.value.selection) == ("k", 1)
        with pytest.raises(topkd.ArgumentTypeError):
            stream.select_topk(SCORES, "1")  # type: ignore[arg-type]
        assert stream.select_topk(SCORES, 1).indices.tolist() == [[1]]


def test_calls_are_sent_ahead_and_their_results_taken_in_any_order(client: topkd.Client) -> None:
    with client.stream() as stream:
        pending = [stream.submit([topkd.Selection(SCORES, 1 + number % 4)]) for number in range(40)]
        for number in (39, 0, *range(1, 39)):
            assert pending[number].result()[0].indices.shape == (1, 1 + number % 4)
        assert pending[0].result() is pending[0].result()
        wrong = stream.submit([topkd.Selection(SCORES, 0)])
        right = stream.submit([topkd.Selection(SCORES, 1)])
        assert right.result()[0].indices.tolist() == [[1]]
        with pytest.raises(topkd.ArgumentValueError):
            wrong.result()
        with pytest.raises(topkd.ClientClosedError):
            wrong.result()


def test_more_calls_than_the_window_hold_back_the_sender_and_lose_nothing(client: topkd.Client) -> None:
    with client.stream() as stream:
        pending = [stream.submit([topkd.Selection(SCORES, 1)]) for _ in range(3 * _stream._WINDOW)]
        assert all(one.result()[0].indices.tolist() == [[1]] for one in pending)


def test_results_that_nobody_takes_are_dropped(client: topkd.Client) -> None:
    with client.stream() as stream:
        for _ in range(2 * _stream._WINDOW):
            stream.submit([topkd.Selection(SCORES, 1)])
        gc.collect()
        assert stream.select_topk(SCORES, 1).indices.tolist() == [[1]]
        assert not stream._opened[0]._answers
        assert not stream._opened[0]._deadlines


def test_threads_share_a_stream(client: topkd.Client) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        scores = np.zeros((1, 64), np.float32)
        for turn in range(40):
            scores[:] = 0
            scores[0, (number * 7 + turn) % 64] = 1
            got = stream.select_topk(scores, 1).indices.tolist()
            if got != [[(number * 7 + turn) % 64]]:
                wrong.append((number, turn, got))

    with client.stream() as stream:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_closed_client_gives_no_stream(server: Server) -> None:
    client = topkd.Client(server.socket_dir)
    client.close()
    with pytest.raises(topkd.ClientClosedError):
        client.stream()


def test_a_closed_stream_takes_no_calls(client: topkd.Client) -> None:
    stream = client.stream()
    stream.select_topk(SCORES, 1)
    under_way = stream.submit([topkd.Selection(SCORES, 1)])
    stream.close()
    stream.close()
    with pytest.raises(topkd.ClientClosedError):
        stream.select_topk(SCORES, 1)
    with contextlib.suppress(topkd.TopkdError):
        assert under_way.result()[0].indices.tolist() == [[1]]
    assert client.select_topk(SCORES, 1).indices.tolist() == [[1]]


def test_a_stream_that_is_closed_under_calls_ends_them_and_leaves_the_session(client: topkd.Client) -> None:
    raised: list[type] = []

    def work(scores: Any) -> None:
        try:
            while True:
                stream.select_topk(scores, 1)
        except topkd.TopkdError as error:
            raised.append(type(error))

    client.select_topk(SCORES, 1)
    session = client._core.session
    for _ in range(5):
        stream = client.stream()
        threads = [threading.Thread(target=work, args=(client.empty((1, 64), "float32"),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.05)
        stream.close()
        for thread in threads:
            thread.join(20)
    assert raised == [topkd.ClientClosedError] * 20
    assert client._core.session is session
    assert session is not None
    assert not session.lost


def test_a_closed_stream_leaves_nothing_of_its_call(client: topkd.Client) -> None:
    stream = client.stream()
    stream.submit([topkd.Selection(SCORES, 1)])
    state = stream._opened[0]._call._state  # type: ignore[attr-defined]
    assert state.due
    stream.close()
    assert not state.due


def test_an_interrupted_thread_breaks_the_stream_off_and_the_next_call_opens_another(
    client: topkd.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    client.select_topk(SCORES, 1)
    session = client._core.session
    with client.stream() as stream:
        ahead = stream.submit([topkd.Selection(SCORES, 1)])
        (transport,) = stream._opened
        with monkeypatch.context() as patched:
            patched.setattr(transport._call, "take", interrupted)
            with pytest.raises(KeyboardInterrupt):
                stream.select_topk(SCORES, 1)
        with pytest.raises(topkd.ServerError, match="interrupted"):
            ahead.result()
        assert stream.select_topk(SCORES, 1).indices.tolist() == [[1]]
        assert stream._opened != [transport]
    assert client._core.session is session


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # a client has threads; that is the test
def test_a_forked_child_ends_though_threads_of_the_parent_use_the_stream(server: Server) -> None:
    with topkd.Client(server.socket_dir) as client, client.stream() as stream:
        stream.select_topk(SCORES, 1)
        (transport,) = stream._opened
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            state = transport._call._state  # type: ignore[attr-defined]
            with stream._lock, transport._changed, transport._ended._cond, state.condition:  # type: ignore[attr-defined]
                held.set()
                done.wait(20)

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait(20)
        child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(10, exit=True)
            with contextlib.suppress(topkd.ForkError):
                stream.select_topk(SCORES, 1)
                os._exit(1)
            stream.close()
            del stream, transport
            gc.collect()
            os._exit(7)
        done.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert stream.select_topk(SCORES, 1).indices.tolist() == [[1]], "the parent goes on"


class Deaf:
    """A session whose server never answers."""

    metadata = ()

    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def select_stream(self, requests: Any, metadata: Any) -> Deaf:
        return self

    def __next__(self) -> Any:
        self.cancelled.wait(30)
        raise Cancelled

    def cancel(self) -> None:
        self.cancelled.set()


class Cancelled(grpc.RpcError):
    pass


def test_a_server_that_hangs_does_not_hang_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_stream, "_GRACE_S", 0.1)
    transport = Transport(Deaf())  # type: ignore[arg-type]
    started = time.monotonic()
    numbers = [
        transport.send(selection_pb2.SelectTopKRequest(), 0.2),
        transport.send(selection_pb2.SelectTopKRequest(), 60),
    ]
    for number in numbers:
        with pytest.raises(_stream.CallFailedError) as caught:
            transport.receive(number)
        assert caught.value.failure.code == "DEADLINE_EXCEEDED"
    assert time.monotonic() - started < 5
    assert transport.broken
    transport.close()
