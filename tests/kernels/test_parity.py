"""`topkd parity` at small scale on the CPU: what it compares, that it sees what is wrong, the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from topkd import kernels
from topkd.cli import main
from topkd.kernels import _dispatch, _parity
from topkd.kernels._family import Job
from topkd.kernels._parity import Call, Material, compare, selftest_calls
from topkd.kernels._parity_time import microseconds
from topkd.kernels._torch_family import TorchFamily

CPU = torch.device("cpu")
PROMPT = Call("prompt", 6, 900, 1600, "64 levels", blocks=32)


class Fake(TorchFamily):
    """Serves some of the forms, and may spoil the answer."""

    name = "fake"

    def __init__(self, form: str, spoil: Callable[[Job], object] = lambda job: None) -> None:
        self.form = form
        self.spoil = spoil

    def unmet(self, request: kernels.SelectRequest) -> str | None:
        if self.form != "cells" and request.pooled:
            return "fake serves no pooled scores"
        if self.form == "any order" and (request.order != "any" or request.ties != "any"):
            return "fake serves no order"
        return None

    def run(self, jobs: Sequence[Job]) -> None:
        super().run(jobs)
        for job in jobs:
            self.spoil(job)


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fake], None]:
    def add(family: Fake) -> None:
        monkeypatch.setattr(_dispatch, "_FAMILIES", (family, _dispatch._FAMILIES[-1]))

    return add


def test_the_selftest_is_the_seeds() -> None:
    calls = list(selftest_calls([torch.float32]))
    assert len(calls) == 9 * 2 * 3
    pairs = {(call.context, call.capacity) for call in calls}
    assert {(135_160, 135_160), (135_176, 135_176), (2100, 262_144), (524_288, 524_288)} <= pairs
    assert len(pairs) == 9
    assert {(call.kind, call.queries) for call in calls} == {("decode", 8), ("prompt", 64)}
    assert {call.scores for call in calls} == {"continuous", "64 levels", "equal"}
    assert 135_160 < 4 * 33_792 < 135_176, "both sides of the registers' reach"


def test_small_selftests_have_room_for_their_queries() -> None:
    for call in selftest_calls([torch.float32], 1000):
        assert call.capacity % 4 == 0
        assert call.capacity >= call.context
        Material(call, CPU)


@pytest.mark.parametrize("form", _parity.FORMS)
@pytest.mark.parametrize("kind", ["decode", "prompt"])
def test_a_family_is_compared_in_the_first_form_that_it_serves(
    register: Callable[[Fake], None], form: str, kind: str
) -> None:
    register(Fake(form))
    for scores in _parity.SCORES:
        outcomes = list(compare(PROMPT._replace(kind=kind, scores=scores), CPU))
        assert [one.wrong for one in outcomes] == [0] * len(outcomes)
        assert {one.form for one in outcomes if one.family == "fake"} == {form}
        assert [one.note for one in outcomes if one.family == "fake"] == (["", "bound"] if kind == "prompt" else [""])
        assert {one.family for one in outcomes} == {"auto", "fake", "torch"}


def swap(job: Job) -> None:
    job.indices[2, :2] = job.indices[2, :2].flip(0)


def repeat(job: Job) -> None:
    job.indices[2, 1] = job.indices[2, 0]


def worse(job: Job) -> None:
    job.indices[2, 0] = next(at for at in range(200) if at not in job.indices[2].tolist())


def outside(job: Job) -> None:
    job.indices[2, 0] = 390


def missing(job: Job) -> None:
    job.indices[2, 5] = -1


WRONG = [(form, spoil) for form in _parity.FORMS for spoil in (repeat, worse, outside, missing, swap)]


@pytest.mark.parametrize(("form", "spoil"), WRONG[:-1])  # a swap is right in any order, which comes last
def test_what_is_wrong_is_seen(register: Callable[[Fake], None], spoil: Callable[[Job], object], form: str) -> None:
    register(Fake(form, spoil))
    call = PROMPT._replace(scores="continuous", capacity=1600)
    assert [one.wrong for one in compare(call, CPU, ["fake"])] == [1, 1]


def test_a_family_that_reads_the_whole_row_is_seen(register: Callable[[Fake], None]) -> None:
    class Greedy(Fake):
        def run(self, jobs: Sequence[Job]) -> None:
            super().run([job._replace(request=replace(job.request, lengths=None, max_length=None)) for job in jobs])

    register(Greedy("cells"))
    assert [one.wrong for one in compare(PROMPT, CPU, ["fake"])] == [6, 6]


def test_a_bound_that_changes_an_answer_is_seen(register: Callable[[Fake], None]) -> None:
    def spoil(job: Job) -> None:
        if job.request.max_length is None:
            job.indices.fill_(-1)

    register(Fake("blocks", spoil))
    assert [(one.wrong, one.note) for one in compare(PROMPT, CPU, ["fake"])] == [(0, ""), (6, "bound")]


def test_a_family_is_asked_without_the_bound_only_if_it_serves_that(register: Callable[[Fake], None]) -> None:
    class Short(Fake):
        def unmet(self, request: kernels.SelectRequest) -> str | None:
            reason = "fake serves rows of up to 300 scores" if request.length_bound > 300 else None
            return super().unmet(request) or reason

    register(Short("blocks"))
    assert [(one.wrong, one.note) for one in compare(PROMPT, CPU, ["fake"])] == [(0, "")]


def test_the_command_compares_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "3000", "4", "2", "4096", "--device", "cpu", "--dtype", "bfloat16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["scores"], row["family"]) for row in rows} == {
        (scores, family) for scores in _parity.SCORES for family in ("auto", "torch")
    }
    assert all(row["right"] == 4 and row["us"] > 0 and row["form"] == "cells" for row in rows)
    assert main(["parity", "3000", "4", "2", "4096", "--device", "cpu", "--decode", "--family", "torch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "4 of 4" in lines[1]


def test_the_selftest_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "--selftest", "--shrink", "256", "--device", "cpu", "--dtype", "float32"]) == 0
    output = capsys.readouterr().out
    assert "54 calls on cpu: all answers are right" in output
    assert output.splitlines()[1].split() == ["auto", "81", "0", "cells"]


def test_the_command_fails_where_an_answer_is_wrong(
    register: Callable[[Fake], None], capsys: pytest.CaptureFixture[str]
) -> None:
    register(Fake("cells", swap))
    command = ["parity", "--selftest", "--shrink", "256", "--device", "cpu", "--dtype", "float16", "--family", "fake"]
    assert main(command) == 1
    assert "are WRONG" in capsys.readouterr().out
    assert main([*command, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["calls"], report["comparisons"]) == (54, 81)
    assert report["wrong"][0]["family"] == "fake"
    assert main(["parity", "3000", "4", "2", "4096", "--device", "cpu", "--family", "fake"]) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["1", "2"], "CONTEXT QUERIES REPS CAPACITY"),
        ([], "CONTEXT"),
        (["9", "9", "0", "12"], "at least 1"),
        (["13", "9", "1", "12"], "at least CONTEXT"),
        (["9", "9", "1", "11"], "multiple of 4"),
        (["9", "9", "1", "12", "--selftest"], "sizes of its own"),
        (["--selftest", "--shrink", "0"], "at least 1"),
        (["--selftest", "--family", "fastest"], "no kernel family"),
    ],
)
def test_the_command_says_what_is_wrong_with_it(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", *arguments, "--device", "cpu"]) == 2
    assert text in capsys.readouterr().err


def test_a_kernel_without_code_is_said(register: Callable[[Fake], None], capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: Job) -> None:
        raise kernels.KernelUnavailableError("fake has no code")

    register(Fake("cells", fail))
    assert main(["parity", "3000", "4", "2", "4096", "--device", "cpu", "--family", "fake"]) == 1
    assert "fake has no code" in capsys.readouterr().err


def test_times_are_of_a_call() -> None:
    material = Material(PROMPT, CPU)
    assert 1 < microseconds(material, "torch", "cells", 2) < 1e6


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_every_family_on_the_gpu() -> None:
    device = torch.device("cuda")
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    outcomes = [one for call in selftest_calls(dtypes) for one in compare(call, device)]
    assert [one for one in outcomes if one.wrong] == []
    assert {one.family for one in outcomes} == {"auto", *kernels.kernels()}
