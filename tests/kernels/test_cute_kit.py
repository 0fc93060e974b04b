from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from topkd.kernels import _cute_key
from topkd.kernels._cute_kit import Kit, read_kit, write_kit

VERSIONS = {"nvidia-cutlass-dsl": "4.8"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """What is found is remembered for the process's life."""
    cached = (read_kit, _cute_key.runtime_library, _cute_key.versions)
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    library = tmp_path / "installed" / "cu13" / "lib" / "libcute_dsl_runtime.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"code")
    directory = tmp_path / "kernels"
    directory.mkdir(0o755)
    write_kit(directory, VERSIONS, library)
    monkeypatch.setenv("TOPKD_PRECOMPILED_DIR", str(directory))
    return directory


def without_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CUTE_DSL_LIBS", raising=False)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name}-installed")


def test_what_is_written_is_read(kit: Path) -> None:
    found = read_kit()
    assert found == Kit(VERSIONS, kit / "runtime" / "libcute_dsl_runtime.so", "cu13")
    assert found.library.read_bytes() == b"code"


def test_it_stands_in_for_the_compiler(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_the_compiler(monkeypatch)
    assert _cute_key.runtime_library() == kit / "runtime" / "libcute_dsl_runtime.so"
    launcher = "apache-tvm-ffi apache-tvm-ffi-installed"
    assert _cute_key.versions() == ("nvidia-cutlass-dsl 4.8", launcher, "cu13")


def test_an_installed_compiler_comes_first(kit: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_the_compiler(monkeypatch)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))
    assert _cute_key.versions()[0] == "nvidia-cutlass-dsl nvidia-cutlass-dsl-installed"
    assert _cute_key.runtime_library() is None


@pytest.mark.parametrize("place", ["", "runtime", "runtime/libcute_dsl_runtime.so", "runtime/compiler.json"])
def test_one_that_others_can_write_to_is_left_alone(kit: Path, place: str) -> None:
    (kit / place).chmod((kit / place).stat().st_mode | 0o020)
    assert read_kit() is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"versions": [], "flavour": ""}', '{"versions": {}}'])
def test_one_that_is_broken_is_none(kit: Path, text: str) -> None:
    (kit / "runtime/compiler.json").write_text(text)
    assert read_kit() is None


def test_there_may_be_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TOPKD_PRECOMPILED_DIR", str(tmp_path))
    assert read_kit() is None
    read_kit.cache_clear()
    monkeypatch.delenv("TOPKD_PRECOMPILED_DIR")
    assert read_kit() is None
