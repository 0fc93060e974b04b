"""The compile cache: entries and what makes one a miss, directories, locks."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from pathlib import Path

import pytest

from topkd.kernels import _cute_cache
from topkd.kernels._cute_cache import Store, file_name, open_store, read_entry, store_in
from topkd.kernels._cute_key import Variant

VARIANT = Variant("radix_wide_kernel", "RadixWide", ("bfloat16", False), "sm_90a")
KEY = "0" * 64


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache, and nothing warned of."""
    monkeypatch.setenv("TOPKD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TOPKD_PRECOMPILED_DIR", raising=False)
    monkeypatch.setattr(_cute_cache, "_WARNED", set())


def put(store: Store, library: bytes = b"library", key: str = KEY) -> Path:
    entry = store.store(VARIANT, key, library, b"binary", {"threads": 512})
    assert entry is not None
    return entry.path


def test_an_entry_comes_back_whole() -> None:
    store = open_store()
    assert store.find(VARIANT, KEY) is None
    path = put(store)
    entry = open_store().find(VARIANT, KEY)
    assert entry is not None
    assert (entry.path, entry.binary, entry.size) == (path, b"binary", path.stat().st_size)
    assert entry.header["launch"] == {"threads": 512}
    assert path.read_bytes().startswith(b"library")
    assert [one.path for one in store.entries()] == [path]


def test_only_its_user_can_read_it() -> None:
    path = put(open_store())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", [0, 8, -40, -1])
def test_a_changed_byte_is_a_miss_and_the_next_store_mends_it(place: int) -> None:
    store = open_store()
    path = put(store)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert store.find(VARIANT, KEY) is None
    put(store)
    assert store.find(VARIANT, KEY) is not None


def test_every_truncation_is_a_miss() -> None:
    store = open_store()
    path = put(store)
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        assert store.find(VARIANT, KEY) is None


def test_an_entry_of_another_key_is_a_miss() -> None:
    store = open_store()
    put(store).rename(store.directory / file_name(VARIANT, "1" * 64))  # type: ignore[operator]
    assert store.find(VARIANT, "1" * 64) is None
    assert list(store.entries()) == []


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"x" * 1000])
def test_what_is_no_entry_is_a_miss(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.so").write_bytes(data)
    assert read_entry(tmp_path / "a.so") is None
    assert read_entry(tmp_path) is None
    assert read_entry(tmp_path / "missing.so") is None


def test_an_entry_that_others_can_write_is_a_miss() -> None:
    store = open_store()
    path = put(store)
    path.chmod(0o622)
    assert store.find(VARIANT, KEY) is None


def test_an_entry_of_another_user_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    path = put(store)
    owner = path.stat().st_uid
    if owner == 0:
        if not hasattr(os, "chown"):
            pytest.skip("files cannot be given away here")
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert store.find(VARIANT, KEY) is None


def test_a_directory_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="open to other users"):
        store = open_store()
    assert store.directory is None
    assert store.store(VARIANT, KEY, b"library", b"binary", {}) is None


def test_a_directory_that_cannot_be_made_is_warned_of_once(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.warns(RuntimeWarning, match="not kept"):
        store = open_store()
    assert store.directory is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_store().find(VARIANT, KEY) is None


def test_a_failed_write_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert store.store(VARIANT, KEY, b"library", b"binary", {}) is None
    assert store.directory is not None
    assert list(store.directory.iterdir()) == []


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TOPKD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert open_store().directory == tmp_path / "xdg" / "topkd"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_store().directory == tmp_path / "home" / ".cache" / "topkd"
    monkeypatch.setenv("TOPKD_CACHE_DIR", "off")
    assert open_store().directory is None
    with store_in(tmp_path / "named"):
        assert open_store().directory == tmp_path / "named"


def test_a_second_directory_is_read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    image = tmp_path / "image"
    put(Store(image))
    monkeypatch.setenv("TOPKD_PRECOMPILED_DIR", str(image))
    entry = open_store().find(VARIANT, KEY)
    assert entry is not None
    assert entry.path.parent == image
    assert put(open_store()).parent == tmp_path / "cache"


def test_what_nobody_used_for_long_is_removed() -> None:
    store = open_store()
    old, used = put(store), put(store, key="2" * 64)
    long_ago = time.time() - _cute_cache.UNUSED_SECONDS - 60
    for path in (old, used):
        os.utime(path, (long_ago, long_ago))
    assert store.find(VARIANT, "2" * 64) is not None  # which is a use
    put(store, key="3" * 64)
    assert not old.exists()
    assert used.exists()


def _locked(directory: Path, order: multiprocessing.Queue[str], seconds: float) -> None:  # pragma: no cover
    with Store(directory).lock(VARIANT, KEY) as held:
        order.put(f"in {held}")
        time.sleep(seconds)
        order.put("out")


def test_one_process_at_a_time_holds_a_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    order: multiprocessing.Queue[str] = context.Queue()
    both = [context.Process(target=_locked, args=(tmp_path, order, 0.3)) for _ in range(2)]
    for process in both:
        process.start()
    assert [order.get(timeout=60) for _ in range(4)] == ["in True", "out", "in True", "out"]
    for process in both:
        process.join(30)
        assert process.exitcode == 0


def test_a_lock_that_is_not_given_up_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_cute_cache, "LOCK_SECONDS", 0.1)
    with open_store().lock(VARIANT, KEY) as first, open_store().lock(VARIANT, KEY) as second:
        assert (first, second) == (True, False)
    with open_store().lock(VARIANT, KEY) as third:
        assert third
