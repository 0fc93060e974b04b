"""Variants of a kernel are loaded once, whoever asks."""

from __future__ import annotations

import threading
import time

import pytest

from topkd.kernels._loaded import Loaded


def test_a_variant_is_loaded_at_its_first_use_only() -> None:
    asked: list[str] = []

    def load(variant: str) -> str:
        asked.append(variant)
        return f"code of {variant}"

    loaded = Loaded(load)
    assert loaded.find("a") is None
    assert [loaded("a"), loaded("b"), loaded("a"), loaded.find("b")] == [f"code of {one}" for one in "abab"]
    assert asked == ["a", "b"]


def test_threads_that_ask_together_load_once() -> None:
    asked: list[int] = []

    def load(variant: int) -> int:
        time.sleep(0.05)
        asked.append(variant)
        return variant + 1

    loaded = Loaded(load)
    threads = [threading.Thread(target=loaded, args=(7,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert asked == [7]


def test_what_was_loaded_waits_for_no_other_variant() -> None:
    go = threading.Event()

    def load(variant: str) -> bool:
        return variant == "quick" or go.wait(30)

    loaded = Loaded(load)
    loaded("quick")
    slow = threading.Thread(target=loaded, args=("slow",))
    slow.start()
    try:
        assert loaded("quick")
        assert loaded.find("slow") is None
    finally:
        go.set()
        slow.join()


def test_a_failure_is_tried_again() -> None:
    failures = [ValueError("broken")]

    def load(_: str) -> str:
        if failures:
            raise failures.pop()
        return "code"

    loaded = Loaded(load)
    with pytest.raises(ValueError, match="broken"):
        loaded("a")
    assert loaded("a") == "code"
