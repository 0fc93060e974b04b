"""`LaneCall` by its own PTX, run by the interpreter in `ptx`, against a worker that is acted out between its looks."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import ptx
from tests.kernels.emulated_memory import place
from tests.kernels.resources import REPORT
from topkd.kernels._cubin import kernel_name
from topkd.kernels._cute_compile import compile_kernel, installed
from topkd.kernels.lane_call import LaneCall
from topkd.kernels.lane_call_kernel import LOOKS

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl"),
    pytest.mark.filterwarnings("default"),
]
WORDS = ("request", "done", "end", "slow", "told", "ticket", "echo")
PLAN = 3
REGISTERS_OF_AN_SM = 65_536


class World(ptx.GlobalMemory):
    """Words by their names, and who acts on them before each of the kernel's looks at the echo."""

    def __init__(self, act: Callable[[World, int], None], **words: int) -> None:
        super().__init__()
        self.act = act
        self.looks = 0
        self.at = {name: place(self, torch.tensor([words.get(name, 0)]), True) for name in WORDS}
        for address in self.at.values():
            self.readable[address - self.BASE :][:8] = True

    def __getitem__(self, name: str) -> int:
        return int(self.get(self.at[name], np.int64, 1)[0])

    def __setitem__(self, name: str, value: int) -> None:
        start = self.at[name] - self.BASE
        self.bytes[start : start + 8] = np.array([value], np.int64).view(np.uint8)

    def places(self, addresses: Any, size: int, allowed: Any, what: str) -> Any:
        if len(addresses) and int(addresses[0]) == self.at["echo"]:
            self.looks += 1
            assert self.looks < 20 * LOOKS, "it waits for ever"
            self.act(self, self.looks)
        return super().places(addresses, size, allowed, what)

    def answer(self) -> None:
        """What `Answer` does."""
        self["request"] = 0
        self["echo"] = self["ticket"]
        self["done"] = self["ticket"] + 1


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ptx.Kernel:
    folder = tmp_path_factory.mktemp("ptx")
    compile_kernel("lane_call_kernel", "LaneCall", (True,), "sm_90a", f"--keep-ptx --dump-dir {folder}")
    (text,) = folder.glob("*.ptx")
    return ptx.parse(text.read_text())


def call(kernel: ptx.Kernel, world: World) -> World:
    at = [world.at[name] for name in WORDS]
    ptx.Cta(kernel, world, [at[0], PLAN, *at[1:]], 32, 0).run(0)
    return world


@pytest.mark.parametrize("after", [1, 2, 7, 5 * LOOKS])
def test_a_call_waits_for_its_own_echo(kernel: ptx.Kernel, after: int) -> None:
    def act(world: World, look: int) -> None:
        assert world["request"] == PLAN
        if look == after:
            world.answer()

    world = call(kernel, World(act, ticket=40, echo=40, done=41))
    assert (world["ticket"], world["told"], world["request"], world["done"]) == (41, 41, 0, 42)
    assert world.looks == after


@pytest.mark.parametrize("why", [1, 2])
def test_a_broken_lane_lets_it_go(kernel: ptx.Kernel, why: int) -> None:
    def act(world: World, look: int) -> None:
        if look == 5:
            world["end"] = why

    world = call(kernel, World(act, done=1))
    assert world.looks <= LOOKS
    assert world["done"] == 1


def test_a_lane_that_is_not_armed_is_called_as_memory_operations_do(kernel: ptx.Kernel) -> None:
    taken: list[int] = []

    def act(world: World, look: int) -> None:
        """A thread of the worker, which takes the request and, later, is done with it."""
        if world["request"]:
            assert world["request"] == PLAN
            world["request"] = 0
            taken.append(look)
        elif len(taken) == 2 and look > taken[1] + 3 * LOOKS:
            world["done"] = 1

    world = call(kernel, World(act, slow=1, done=1))
    assert len(taken) == 2
    assert taken[1] + 3 * LOOKS < world.looks < taken[1] + 5 * LOOKS, "the done word from before is none of this call's"


def test_a_lane_that_is_no_longer_armed_while_it_waits(kernel: ptx.Kernel) -> None:
    def act(world: World, look: int) -> None:
        if look == 3 * LOOKS:
            world["slow"] = 1
        if look > 3 * LOOKS and not world["done"]:
            world["request"], world["done"] = 0, 1

    assert call(kernel, World(act, done=1)).looks < 6 * LOOKS


def test_a_request_that_an_earlier_answer_has_cleared_is_made_again(kernel: ptx.Kernel) -> None:
    made: list[int] = []

    def act(world: World, look: int) -> None:
        if look == 1:
            world["request"] = 0  # the store of an answer before
        elif world["request"]:
            made.append(look)
            world.answer()

    world = call(kernel, World(act, done=1))
    assert len(made) == 1
    assert LOOKS < made[0] <= 3 * LOOKS
    assert world["request"] == 0


def test_what_the_worker_stores_in_the_upper_half_is_no_request(kernel: ptx.Kernel) -> None:
    def act(world: World, look: int) -> None:
        if look == 1:
            world["request"] = 1 << 62  # given up, with an earlier answer's store behind it
        elif world["request"] == PLAN and look > 1:
            world.answer()

    assert call(kernel, World(act, done=1)).looks <= 3 * LOOKS


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_its_code_is_told_with_its_name(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPKD_CACHE_DIR", str(tmp_path))
    family = LaneCall()
    family.precompile(arch)
    binary = family._codes(arch).binary
    assert "lane_call_kernel" in kernel_name(binary)
    with pytest.raises(ValueError, match="no binary"):
        kernel_name(b"text")


def test_every_large_cluster_fits_beside_kernels_that_wait() -> None:
    """Else so many lanes as there are groups of SMs could wait for clusters of which none finds 16 SMs."""
    lines = REPORT.read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    waiting = {row["arch"]: 32 * int(row["registers"]) for row in rows if row["family"] == "lane_call"}
    large = [row for row in rows if row["family"] == "cluster" and row["variant"].startswith("16 ")]
    assert len(large) > 20
    for row in large:
        taken = int(row["threads"]) * int(row["registers"])
        assert taken + 2 * waiting[row["arch"]] <= REGISTERS_OF_AN_SM, row
        assert int(row["threads"]) + 64 <= 2048
