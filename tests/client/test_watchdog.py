"""The watchdog: a real process, over a page and a process that stands for the worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import topkd
from tests.e2e import processes
from topkd import _guard, _watchdog
from topkd._guard import Guard
from topkd._words import FIRST_LANE, MOST_LANES, MOST_SLOTS, POISON, Words

LANE = FIRST_LANE + 3
IN_TIME = 10.0


@pytest.fixture
def words(page: int) -> Words:
    return Words(page)


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def guard(page: int, worker: subprocess.Popen[bytes]) -> Guard:
    made = Guard(page, os.pidfd_open(worker.pid))
    made.start()
    return made


def dog() -> int:
    """Returns the watchdog's process."""
    process = _guard._kennel._process
    assert process is not None
    return process.pid


def until(probe: Callable[[], Any], what: str = "") -> None:
    processes.wait_until(probe, IN_TIME, what)


def test_a_dead_worker_lets_every_wait_go_and_says_why(
    guard: Guard, words: Words, worker: subprocess.Popen[bytes]
) -> None:
    for slot in range(MOST_SLOTS):
        words.set_done(slot, slot * 5)
    words.set_done(2, POISON)  # ended in order before
    words.set_done(LANE, 1)
    time.sleep(0.1)
    assert [words.done(slot) for slot in (0, 1, LANE, LANE + 1)] == [0, 5, 1, 0]
    worker.kill()
    until(lambda: words.done(LANE + 1) == 1, "the lanes are let go")
    assert [words.done(slot) for slot in range(MOST_SLOTS)] == [POISON] * MOST_SLOTS
    assert [words.end(slot) for slot in range(MOST_SLOTS)] == [s * 5 + 1 if s != 2 else 0 for s in range(MOST_SLOTS)]
    assert {words.end(FIRST_LANE + lane) for lane in range(MOST_LANES)} == {_watchdog.LOST}
    assert words.ready(LANE) == 0


def test_a_graph_of_64_calls_is_let_go_call_by_call(
    guard: Guard, words: Words, worker: subprocess.Popen[bytes]
) -> None:
    worker.kill()
    until(lambda: words.done(LANE))
    for _ in range(2):
        started = time.monotonic()
        for _ in range(64):
            words.set_done(LANE, 0)
            assert words.wait_done(LANE, 1, IN_TIME)
        assert time.monotonic() - started < IN_TIME / 2
        time.sleep(0.3)


def test_a_call_that_comes_to_no_end_is_late(guard: Guard, words: Words) -> None:
    words.set_done(LANE, 1)
    words.set_done(LANE + 1, 1)
    guard.lane(LANE, 0.3)
    guard.lane(LANE + 1, 0.3)
    time.sleep(0.8)  # nobody calls: nobody is late
    assert (words.end(LANE), words.end(LANE + 1)) == (0, 0)
    started = time.monotonic()
    words.set_done(LANE, 0)
    assert words.wait_done(LANE, 1, IN_TIME)
    assert time.monotonic() - started > 0.2
    assert (words.end(LANE), words.end(LANE + 1)) == (_watchdog.LATE, 0)
    words.set_done(LANE, 0)  # what is in the stream behind it
    assert words.wait_done(LANE, 1, IN_TIME)
    guard.forget(LANE)
    time.sleep(0.2)
    words.set_done(LANE, 0)
    assert not words.wait_done(LANE, 1, 0.2)


def test_a_call_by_a_kernel_is_late_by_its_request_and_reads_why(guard: Guard, words: Words) -> None:
    words.set_done(LANE, 1)  # which such a call leaves as it is
    words.set_ready(LANE, 1 << 62)  # the worker's half of the word
    guard.lane(LANE, 0.3)
    time.sleep(0.8)
    assert words.end(LANE) == 0
    started = time.monotonic()
    words.set_ready(LANE, 1)
    until(lambda: words.end(LANE) == _watchdog.LATE, "the call is late")
    assert time.monotonic() - started > 0.2


def test_calls_that_come_through_are_not_late_although_one_is_always_under_way(guard: Guard, words: Words) -> None:
    words.set_done(LANE, 0)  # as it stands at every look
    guard.lane(LANE, 2.0)
    for calls in range(50):
        words.set_calls(LANE, calls)
        time.sleep(0.05)
        assert (words.end(LANE), words.done(LANE)) == (0, 0)
    assert words.wait_done(LANE, 1, IN_TIME)
    assert words.end(LANE) == _watchdog.LATE


def test_nobody_waits_any_more(page: int, words: Words, worker: subprocess.Popen[bytes]) -> None:
    Guard(page, os.pidfd_open(worker.pid)).start()  # there is a watchdog, and it has nothing to do
    time.sleep(0.5)
    before = processes.descriptors(dog())
    made = Guard(page, os.pidfd_open(worker.pid))
    made.start()
    until(lambda: processes.descriptors(dog()) > before, "the watchdog watches")
    del made
    until(lambda: processes.descriptors(dog()) == before, "the watchdog has let go of the session")
    worker.kill()
    worker.wait()
    assert not words.wait_done(LANE, 1, 0.3)


def test_a_guard_that_was_never_needed_starts_nothing_and_keeps_nothing(
    page: int, worker: subprocess.Popen[bytes]
) -> None:
    before = processes.descriptors(os.getpid())
    made = Guard(page, os.pidfd_open(worker.pid))
    made.lost()
    del made
    assert processes.descriptors(os.getpid()) == before


def test_sessions_share_one_watchdog_and_are_apart(guard: Guard, words: Words, worker: subprocess.Popen[bytes]) -> None:
    first = dog()
    other_page = os.memfd_create("other")
    os.ftruncate(other_page, 4096)
    others = Words(other_page)
    living = Guard(other_page, os.pidfd_open(os.getpid()))
    living.start()
    assert dog() == first
    worker.kill()
    until(lambda: words.done(LANE) == 1)
    time.sleep(0.1)
    assert (others.done(LANE), others.done(0)) == (0, 0)
    del living
    os.close(other_page)


@pytest.mark.parametrize("killed_first", [True, False])
def test_a_watchdog_that_was_killed_is_replaced_at_a_loss(
    guard: Guard, words: Words, worker: subprocess.Popen[bytes], killed_first: bool
) -> None:
    guard.lane(LANE, 60.0)
    first = dog()
    for pid in (first, worker.pid) if killed_first else (worker.pid, first):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not processes.alive(first))
    guard.lost()
    until(lambda: words.done(LANE) == 1)
    assert dog() != first
    assert words.done(0) == POISON


def test_it_is_a_small_process_that_no_signal_of_the_group_reaches(guard: Guard) -> None:
    assert os.getpgid(dog()) != os.getpgid(os.getpid())
    maps = Path(f"/proc/{dog()}/maps").read_text()
    assert not any(name in maps for name in ("torch", "numpy", "grpc", "libcuda"))
    assert processes.memory_bytes(dog()) < 40 << 20
    began = processes.cpu_seconds(dog())
    time.sleep(1.0)
    assert processes.cpu_seconds(dog()) - began < 0.1


PARENT = """
import os, sys, time
from topkd._guard import Guard, _kennel
page = os.memfd_create("page"); os.ftruncate(page, 4096)
guard = Guard(page, os.pidfd_open(os.getppid())); guard.start()
child = os.fork() if sys.argv[1] == "forks" else 1
if child == 0:
    time.sleep(60)
print(_kennel._process.pid, child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("what", ["alone", "forks"])
def test_it_ends_with_its_parent(what: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, what], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    watchdog, child = map(int, parent.stdout.readline().split())
    assert processes.alive(watchdog)
    parent.kill()
    parent.wait()
    until(lambda: not processes.alive(watchdog), "the watchdog ends")
    if child != 1:
        assert processes.alive(child)
        os.kill(child, signal.SIGKILL)
    parent.stdout.close()


def test_an_interpreter_that_cannot_be_started_is_named(
    page: int, worker: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_guard, "_kennel", _guard._Kennel())
    made = Guard(page, os.pidfd_open(worker.pid))
    for executable in ("/nowhere/python", "/bin/false"):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(topkd.RegionError, match=executable):
            made.start()
        assert not _guard._kennel._guards, "the descriptors are the guard's to close"
