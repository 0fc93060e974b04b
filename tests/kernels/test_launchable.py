"""No variant asks for more than its architecture has: shared memory of a CTA, CTAs of a cluster, variants in all.

The kernels' classes are asked, nothing is compiled; `make precompile` compiles every variant for every architecture.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from topkd.kernels import _cute_compile, _precompile, cluster
from topkd.kernels._cute_compile import Made
from topkd.kernels._cute_key import Variant
from topkd.kernels._devices import LEAST_SHARED_BYTES, shared_bytes
from topkd.kernels._errors import KernelUnavailableError
from topkd.kernels._loaded import Loaded
from topkd.kernels._precompile import ARCHITECTURES
from topkd.kernels.cluster import SIZES, ClusterFamily, sizes_of

compiler = pytest.mark.skipif(not _cute_compile.compiler_installed(), reason="needs nvidia-cutlass-dsl")
KIND = (True, torch.bfloat16, 1, False)


def capability_of(arch: str) -> tuple[int, int]:
    number = int(arch.removeprefix("sm_").rstrip("a"))
    return number // 10, number % 10


def variants(arch: str, monkeypatch: pytest.MonkeyPatch) -> list[Variant]:
    """Returns what would be compiled for an architecture."""
    found: list[Variant] = []

    def find(variant: Variant, _: float) -> Made:
        found.append(variant)
        return Made(variant, lambda *_: None, b"", {}, "cache", 0.0, 0)

    monkeypatch.setattr(_cute_compile, "_find_or_make", find)
    for kind in _precompile._kinds().values():
        if capability_of(arch) >= kind().oldest:
            kind().precompile(arch)
    return found


def fact(variant: Variant, name: str) -> int:
    module = importlib.import_module(f"topkd.kernels.{variant.module}")
    return int(getattr(getattr(module, variant.name)(*variant.facts), name, 0))


@compiler
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_can_launch_what_is_compiled_for_it(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, room = variants(arch, monkeypatch), shared_bytes(capability_of(arch))
    assert 20 < len(found) <= 120
    taken = {variant: fact(variant, "shared_bytes") for variant in found}
    held: dict[Any, list[int]] = {}
    for variant, size in taken.items():
        if variant.family != "cluster":
            assert size <= room, variant
            continue
        assert fact(variant, "cluster") in SIZES
        kind = (variant.module, variant.facts[1:])
        held.setdefault(kind, []).extend([variant.facts[0]] if size <= room else [])
    assert all(held.values()), "each kind of cluster has a size that fits"
    if room > LEAST_SHARED_BYTES:
        assert all(sorted(sizes, reverse=True) == list(sizes_of(kind)) for (_, kind), sizes in held.items())


def family_on(
    shared: dict[int, int], resident: dict[int, int], found: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> ClusterFamily:
    """Returns a cluster family on a device that is not there, with variants that take so much."""
    family = ClusterFamily()

    def code(variant: tuple[str, int, Any]) -> Made:
        _, size, kind = variant
        function: Any = (size, kind)
        launch = {"shared_bytes": shared[size], "cluster": size, "threads": 512}
        return Made(Variant("cluster_kernel", "", (), ""), function, b"", launch, "cache", 0.0, 0)

    monkeypatch.setattr(family, "_codes", Loaded(code))
    monkeypatch.setattr(cluster, "capability", lambda _: found)
    monkeypatch.setattr(cluster, "processors", lambda _: 132)
    monkeypatch.setattr(cluster, "resident_clusters", lambda _, launch: resident[launch["cluster"]])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return family


NEEDED = {16: 93_520, 8: 85_328, 4: 81_232, 2: 99_664, 1: 110_928}
HELD = {16: 7, 8: 30, 4: 60, 2: 130}


def chosen(family: ClusterFamily, rows: int, length: int) -> int:
    function: Any = family._choose((0, rows, length, KIND))
    return int(function[0])


def test_a_device_with_less_shared_memory_takes_the_sizes_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    large = family_on(NEEDED, HELD, (9, 0), monkeypatch)
    assert [chosen(large, rows, 131_072) for rows in (1, 16, 500)] == [16, 4, 1]
    small = family_on(NEEDED, {**HELD, 16: 0}, (12, 0), monkeypatch)
    assert [chosen(small, rows, 131_072) for rows in (1, 16, 500)] == [8, 4, 2]


def test_a_device_that_can_launch_none_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    family = family_on(dict.fromkeys(SIZES, 150_000), HELD, (12, 0), monkeypatch)
    with pytest.raises(KernelUnavailableError, match="cuda:0"):
        chosen(family, 1, 131_072)
