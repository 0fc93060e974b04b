"""The page of words: its layout, and stores and rings between processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

from topkd._words import CLIENT_BELL, LINE, MOST_SLOTS, WORKER_BELL, Failure, Words

OTHER = """
import sys
from topkd._words import CLIENT_BELL, WORKER_BELL, Words
words = Words(int(sys.argv[1]))
for turn in range(1, 51):
    while words.ready(3) < turn:
        words.wait(CLIENT_BELL, words.bell(CLIENT_BELL) if words.ready(3) < turn else -1, 5)
    words.set_done(3, turn)
    words.ring(WORKER_BELL)
"""


def test_every_word_has_a_line_of_its_own(page: int) -> None:
    words = Words(page)
    assert (words.size, words.address % LINE) == (4096, 0)
    offsets = [offset(slot) for slot in range(MOST_SLOTS) for offset in (words.offset_of_ready, words.offset_of_done)]
    assert offsets == [LINE * line for line in range(2 * MOST_SLOTS)]
    assert offsets[-1] < WORKER_BELL * LINE < CLIENT_BELL * LINE < 4096
    for slot in range(MOST_SLOTS):
        words.set_ready(slot, 1000 + slot)
        words.set_done(slot, 2000 + slot)
        words.set_failure(slot, Failure(slot, slot + 1, 2, 3))
    for slot in range(MOST_SLOTS):
        assert (words.ready(slot), words.done(slot), *words.failure(slot)) == (
            1000 + slot,
            2000 + slot,
            slot,
            slot + 1,
            2,
            3,
        )
        raw = os.pread(page, 8, words.offset_of_done(slot))
        assert int.from_bytes(raw, "little") == 2000 + slot
    words.set_done(0, 1 << 62)
    assert words.done(0) == 1 << 62


def test_stores_and_rings_reach_another_process(page: int) -> None:
    words = Words(page)
    with subprocess.Popen([sys.executable, "-c", OTHER, str(page)], pass_fds=[page]) as other:
        slowest = 0.0
        for turn in range(1, 51):
            started = time.monotonic()
            words.set_ready(3, turn)
            words.ring(CLIENT_BELL)
            assert words.wait_done(3, turn, 30)
            if turn > 1:  # the first waits for the process's start
                slowest = max(slowest, time.monotonic() - started)
        assert other.wait(10) == 0
    assert slowest < 2


def test_a_wait_ends_with_its_time_out_or_at_once_if_the_bell_has_rung(page: int) -> None:
    words = Words(page)
    started = time.monotonic()
    words.wait(CLIENT_BELL, words.bell(CLIENT_BELL), 0.1)
    assert 0.09 < time.monotonic() - started < 5
    seen = words.bell(CLIENT_BELL)
    words.ring(CLIENT_BELL)
    started = time.monotonic()
    words.wait(CLIENT_BELL, seen, 30)
    words.wait(CLIENT_BELL, seen, 0)
    assert time.monotonic() - started < 5
    assert not words.wait_done(0, 1, 0.05)


def test_a_store_without_a_ring_is_seen_soon(page: int) -> None:
    words = Words(page)
    later = threading.Timer(0.05, words.set_done, (0, 7))
    later.start()
    started = time.monotonic()
    assert words.wait_done(0, 7, 30)
    assert time.monotonic() - started < 5
    later.join()
