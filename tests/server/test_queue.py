import threading
import time
from collections.abc import Callable

import pytest

from topkd.server._queue import Account, TurnQueue
from topkd.server.errors import CallCancelledError, DeadlinePassedError, QueueFullError, WorkerLostError


def waiting(queue: TurnQueue, count: int) -> None:
    while queue.depth != count + 1:
        time.sleep(0.001)


def test_turns_are_in_order_of_arrival() -> None:
    queue, account, order = TurnQueue(), Account(10), list[int]()
    queue.enter(account)

    def run(number: int) -> None:
        queue.enter(account)
        order.append(number)
        queue.leave(account)

    threads = []
    for number in range(5):
        threads.append(threading.Thread(target=run, args=(number,)))
        threads[-1].start()
        waiting(queue, number + 1)
    queue.leave(account)
    for thread in threads:
        thread.join()
    assert order == list(range(5))
    assert account.pending == 0
    assert queue.depth == 0


def test_the_fullest_account_is_remembered_until_it_is_read() -> None:
    queue, small, large = TurnQueue(), Account(2), Account(8)
    assert queue.fullest() == 0
    queue.enter(large)
    queue.leave(large)
    assert queue.fullest() == 1 / 8
    assert queue.fullest() == 0
    queue.enter(large)
    thread = threading.Thread(target=lambda: (queue.enter(small), queue.leave(small)))
    thread.start()
    waiting(queue, 1)
    assert queue.fullest() == 1 / 2
    assert queue.fullest() == 1 / 2, "it still waits"
    queue.leave(large)
    thread.join()
    assert queue.fullest() == 1 / 2
    assert queue.fullest() == 0


def test_full_account_is_refused_at_once_and_others_are_not() -> None:
    queue, one, other = TurnQueue(), Account(1), Account(1)
    queue.enter(one)
    with pytest.raises(QueueFullError) as caught:
        queue.enter(one)
    assert caught.value.retry_after_ms > 0
    with pytest.raises(DeadlinePassedError):
        queue.enter(other, timeout=0.01)
    queue.leave(one)
    queue.enter(other)
    queue.leave(other)


def test_the_turn_is_taken_only_where_nobody_has_it() -> None:
    queue, account, other = TurnQueue(), Account(2), Account(1)
    assert queue.take(account)
    assert (account.pending, queue.depth, queue.fullest()) == (1, 1, 1 / 2)
    assert not queue.take(other)
    assert other.pending == 0
    with pytest.raises(DeadlinePassedError):
        queue.enter(other, timeout=0.01)
    queue.leave(account)
    queue.close(other)
    assert not queue.take(other)
    assert queue.take(account)
    queue.leave(account)
    assert queue.wait_idle(account, 0)
    assert queue.depth == 0


def test_cancellation_wakes_a_waiter() -> None:
    queue, account = TurnQueue(), Account(4)
    queue.enter(account)
    timers: list[threading.Timer] = []

    def watch(wake: Callable[[], None]) -> bool:
        timers.append(threading.Timer(0.02, wake))
        timers[-1].start()
        return True

    with pytest.raises(CallCancelledError):
        queue.enter(account, timeout=10, watch=watch)
    with pytest.raises(CallCancelledError):
        queue.enter(account, timeout=10, watch=lambda wake: False)
    assert account.pending == 1
    queue.leave(account)


def test_endless_deadlines_and_failures_of_the_watch_leave_the_line_whole() -> None:
    queue, account = TurnQueue(), Account(4)
    queue.enter(account)
    timer = threading.Timer(0.02, queue.leave, (account,))
    timer.start()
    queue.enter(account, timeout=float("inf"))

    def fail(_: Callable[[], None]) -> bool:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        queue.enter(account, watch=fail)
    assert (queue.depth, account.pending) == (1, 1)
    queue.leave(account)
    assert (queue.depth, account.pending) == (0, 0)


def test_end_of_a_session_sends_its_waiters_away() -> None:
    queue, account, other = TurnQueue(), Account(4), Account(4)
    queue.enter(other)
    failures: list[Exception] = []

    def run() -> None:
        try:
            queue.enter(account)
        except WorkerLostError as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    waiting(queue, 1)
    queue.close(account)
    thread.join(5)
    assert len(failures) == 1
    assert queue.wait_idle(account, 1)
    assert not queue.wait_idle(other, 0.01)
    queue.leave(other)
    with pytest.raises(WorkerLostError):
        queue.enter(account)


def test_many_threads() -> None:
    queue, account, inside, most = TurnQueue(), Account(100), 0, 0

    def run() -> None:
        nonlocal inside, most
        for _ in range(200):
            queue.enter(account)
            inside += 1
            most = max(most, inside)
            inside -= 1
            queue.leave(account)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert account.pending == 0
