"""A client process with two lanes, which calls plans of several shapes and checks every bit of their outputs.

One lane is over one plan, which another client has another of: on a GPU it is armed. The other is over all, and polled.

`python -m tests.bench.service_client SOCKET_DIR DEVICE SEED SECONDS WAITS_BY`. Once a second, and at its end, it writes
a line of JSON: calls so far, wrong ones among them, and whether it is over.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import topkd
from tests.case import FORMATS, Case
from tests.oracle import expected

SHAPES = ((4, 4096, 256, "float32"), (1, 8192, 2048, "float32"), (7, 1000, 64, "float32"), (2, 4096, 2048, "float32"))
"""Rows, width, k and dtype of the plans; the last two hold equal scores, NaN and infinities."""

INPUTS = 3
_ATTACH_S = 120.0
"""Many workers that start at once keep a small machine busy for long."""

_GRACE_S = 60.0
_CAPTURED = 64

Options = dict[str, Any]
UNIQUE: Options = {"order": "index", "ties": "lowest"}


def bits_of(rows: int, width: int, dtype: str, rng: np.random.Generator, plain: bool) -> Any:
    """Returns scores: normal ones, or bit patterns of which many are equal and some are NaN or infinite."""
    if plain:
        return rng.standard_normal(rows * width, np.float32).view(np.uint32)
    layout = FORMATS[dtype]
    few = rng.integers(0, 1 << 32, 97, dtype=np.uint64).astype(layout.bits)
    few[:3] = layout.inf, layout.inf | layout.sign, layout.nan
    return rng.choice(few, rows * width)


class Checked:
    """A plan, inputs for it, and what each must give."""

    def __init__(self, client: topkd.Client, shape: tuple[int, int, int, str], rng: np.random.Generator) -> None:
        rows, width, k, dtype = shape
        self.scores = client.empty((rows, width), dtype)
        self.plan = client.plan(self.scores, k, **UNIQUE)
        self.inputs: list[Any] = []
        self.wanted: list[Any] = []
        for _ in range(INPUTS):
            bits = bits_of(rows, width, dtype, rng, plain=shape in SHAPES[:2])
            case = Case(storage=bits, dtype=dtype, rows=rows, width=width, k=k, **UNIQUE)
            answer = expected(case)
            if not all(answer.unique):
                raise RuntimeError("more than one output would be right")
            self.inputs.append(bits.view(np.float32).reshape(rows, width))
            self.wanted.append(answer.indices)

    def to_device(self) -> None:
        """Moves inputs and answers to the device."""
        import torch

        device = self.scores.device
        self.inputs = [torch.from_numpy(array).to(device) for array in self.inputs]
        self.wanted = [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in self.wanted]


class Lanes:
    """A lane of one plan, and one of all plans for the others."""

    def __init__(self, client: topkd.Client, checked: list[Checked], own: int, waits_by: Any) -> None:
        self._own = checked[own].plan
        self._lanes = [self._own.lane(waits_by=waits_by), client.lane(*(one.plan for one in checked))]

    def __call__(self, one: Checked) -> Any:
        """Enqueues a call."""
        return self._of(one)(one.plan)

    def call_host(self, one: Checked) -> Any:
        """Waits for a call."""
        return self._of(one).call_host(one.plan)

    def _of(self, one: Checked) -> topkd.Lane:
        return self._lanes[0 if one.plan is self._own else 1]

    def check(self) -> None:
        """Raises if a call failed."""
        for lane in self._lanes:
            lane.check()

    def close(self) -> None:
        """Gives both up."""
        for lane in self._lanes:
            lane.close()


class Report:
    """What was called, written as it goes."""

    def __init__(self) -> None:
        self.calls = 0
        self._next = time.monotonic() + 1

    def say(self, wrong: int, *, over: bool = False) -> None:
        """Writes a line."""
        print(json.dumps({"calls": self.calls, "wrong": wrong, "over": over}), flush=True)

    def due(self) -> bool:
        """Says once a second that a line is due."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + 1
        return True


def run_cpu(lanes: Lanes, checked: list[Checked], ends: float) -> None:
    """Calls from the host, with arrays."""
    report, wrong = Report(), 0
    rng = np.random.default_rng(5)
    while time.monotonic() < ends:
        one, place = checked[rng.integers(len(checked))], rng.integers(INPUTS)
        one.scores[:] = one.inputs[place]
        wrong += not np.array_equal(lanes.call_host(one).indices, one.wanted[place])
        report.calls += 1
        if report.due():
            report.say(wrong)
    report.say(wrong, over=True)


def run_cuda(lanes: Lanes, checked: list[Checked], ends: float) -> None:
    """Eager calls, replays of a graph, and calls from the host, by turns; compared on the device."""
    import torch

    for one in checked:
        one.to_device()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        report, rng = Report(), np.random.default_rng(5)

        def check(one: Checked, place: int, call: Callable[[], Any]) -> None:
            one.scores.copy_(one.inputs[place])
            wrong.add_((call().indices != one.wanted[place]).any())

        def some(captured: int) -> None:
            for at in range(captured):
                one = checked[at % len(checked)]
                check(one, at % INPUTS, lambda one=one: lanes(one))

        some(len(checked) * INPUTS)  # loads what first calls load
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        some(_CAPTURED)
        graph.capture_end()
        while time.monotonic() < ends:
            graph.replay()
            some(int(rng.integers(1, 2 * len(checked))))
            one, place = checked[rng.integers(len(checked))], int(rng.integers(INPUTS))
            one.scores.copy_(one.inputs[place])
            stream.synchronize()
            check(one, place, lambda one=one: lanes.call_host(one))
            report.calls += _CAPTURED + len(checked)
            if report.due():
                stream.synchronize()
                lanes.check()
                report.say(int(wrong))
        stream.synchronize()
        lanes.check()
        report.say(int(wrong), over=True)


def main(socket_dir: str, device: str, seed: int, seconds: float, waits_by: str) -> None:
    """Calls for some seconds."""
    run = {"cpu": run_cpu, "cuda": run_cuda}[device]
    faulthandler.dump_traceback_later(seconds + _ATTACH_S + _GRACE_S, exit=True)
    rng = np.random.default_rng(seed)
    with topkd.Client(socket_dir, attach_timeout=_ATTACH_S) as client:
        client.connect(timeout=_ATTACH_S)
        checked = [Checked(client, shape, rng) for shape in SHAPES]
        with contextlib.closing(Lanes(client, checked, seed % len(checked), waits_by)) as lanes:
            run(lanes, checked, time.monotonic() + seconds)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
