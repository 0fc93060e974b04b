"""Messages that are answered on the thread that receives them, where an answer is near.

grpcio gives each call to a thread of a pool, and that thread waits for the message: twice a call, once a message of a
stream, one thread wakes another, 50 us and more each. Here the message comes first; the thread that has received it
answers if that takes no waiting, and only else is a thread of the pool woken.

All that is used of grpcio beyond its interface is in this file: what it gives its pool to run, and of a call `_state`
(who waits for what, under a lock) and `_rpc_event.call` (which takes operations). grpcio 1.72 and 1.85 have the same.
"""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from grpc import _server as grpcio
from grpc._cython import cygrpc  # type: ignore[attr-defined, unused-ignore]  # its stubs are empty

__all__ = ["DirectPool", "Messages", "open_messages"]

_TOKEN = "message"
"""Of an operation that is under way, in the call's state: the call is not over before it is."""
_KNOWN = all(
    hasattr(grpcio, name) for name in ("_unary_response_in_pool", "_possibly_finish_call", "_is_rpc_state_active")
)
_STARTED: Future[None] = Future()
_STARTED.set_result(None)


class DirectPool(ThreadPoolExecutor):
    """A server's pool. It receives the message of a unary call whose behavior has an attribute `direct`.

    `direct(message)` returns the behavior for a message that is answered at once, on the thread that serves, and None
    for another one, which goes to a thread. It does not raise.
    """

    def submit(self, run: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Takes what grpcio gives it to run: a function, the event of the call, its state, the behavior, and more."""
        if not _takes_message(args):
            return super().submit(run, *args, **kwargs)
        function, event, state, behavior, take, *rest = args
        submit = super().submit

        def received(reception: Any) -> Any:
            message = reception.batch_operations[0].message()
            if message is None:  # the caller has gone, or sent none: grpcio knows what to do then
                submit(run, function, event, state, behavior, take, *rest)
            elif (direct := behavior.direct(message)) is not None:
                run(function, event, state, direct, lambda: message, *rest)
            else:
                submit(run, function, event, state, behavior, lambda: message, *rest)
            with state.condition:
                return grpcio._possibly_finish_call(state, _TOKEN)

        state.due.add(_TOKEN)  # the caller has the lock
        event.call.start_server_batch((cygrpc.ReceiveMessageOperation(0),), received)
        return _STARTED


def _takes_message(args: tuple[Any, ...]) -> bool:
    """Says whether a pool is given what is known to run a unary call, of a behavior that can answer at once."""
    known = _KNOWN and len(args) == 7 and args[0] is grpcio._unary_response_in_pool
    return known and hasattr(args[3], "direct")


class Messages:
    """The messages of a stream that a thread has to answer, each before the next is received; the others are answered.

    `direct(message)` returns the answer to a message that is answered at once, on the thread that serves, and None for
    another one. It does not raise.
    """

    def __init__(self, context: Any, direct: Callable[[bytes], bytes | None]) -> None:
        self._call = context._rpc_event.call
        self._state = context._state
        self._direct = direct
        self._left: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        context.send_initial_metadata(())

    def __iter__(self) -> Iterator[bytes]:
        """Returns those that are left, until the caller ends the stream or has gone; `answer` must follow each."""
        self._start()
        return iter(self._left.get, None)

    def answer(self, answer: bytes) -> None:
        """Sends an answer, and has the next message received."""
        self._start(cygrpc.SendMessageOperation(answer, 0))

    def _start(self, *sending: Any) -> None:
        with self._state.condition:
            if not grpcio._is_rpc_state_active(self._state):
                self._left.put(None)
                return
            self._state.due.add(_TOKEN)
            self._call.start_server_batch((*sending, cygrpc.ReceiveMessageOperation(0)), self._received)

    def _received(self, event: Any) -> Any:
        message = event.batch_operations[-1].message()
        answer = None if message is None else self._direct(message)
        with self._state.condition:
            finished = grpcio._possibly_finish_call(self._state, _TOKEN)
            if answer is None:
                self._left.put(message)
            else:
                self.answer(answer)
            return finished


def open_messages(context: Any, direct: Callable[[bytes], bytes | None]) -> Messages | None:
    """Begins to receive the messages of a stream; None where grpcio is not built as known."""
    if _KNOWN and hasattr(context, "_state") and hasattr(context, "_rpc_event"):
        return Messages(context, direct)
    return None
