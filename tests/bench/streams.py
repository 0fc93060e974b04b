"""What a selection on an open stream costs beyond the selection itself, beside a bare gRPC stream of messages as large.

Three processes, as in `overhead`. Messages of all kinds take turns; each is answered before the next is sent. From each
selection's round trip the device time that the server reports is subtracted.

    python -m tests.bench.streams [--device cpu|cuda] [--calls N]
"""

from __future__ import annotations

import argparse
import queue
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import topkd
from tests.bench.echo import STREAM_METHOD
from tests.bench.overhead import CHANNEL_OPTIONS, WARM, WIDTH, K, message_sizes, take_turns
from tests.e2e.servers import Running

GOAL = 1.15
_EXTRA = 12
"""Bytes that a stream's messages have beyond those of a unary call: number and time-out."""


@dataclass(frozen=True)
class Streams:
    """What was measured; times in microseconds.

    Attributes:
        device: the server's device.
        calls: of each kind.
        echo_p50, echo_p90: a message of the bare stream, there and back.
        select_p50, select_p90: `SelectStream.select_topk` less its device time.
        plan_p50: `SelectStream.run` less its device time.
        unary_p50: `Client.select_topk` less its device time.
        ratio, plan_ratio: of `select_p50` and `plan_p50` to `echo_p50`.
        ordered_p50, ordered_stream_p50: until a call that is ordered on the CUDA stream returns, unary and on the
            open stream; 0 on the CPU.
    """

    device: str
    calls: int
    echo_p50: float
    echo_p90: float
    select_p50: float
    select_p90: float
    plan_p50: float
    unary_p50: float
    ratio: float
    plan_ratio: float
    ordered_p50: float = 0.0
    ordered_stream_p50: float = 0.0

    def __str__(self) -> str:
        return "\n".join(
            (
                f"a selection on a stream, {WIDTH} f32, k={K}, {self.device}, {self.calls} of each kind, us",
                f"  bare gRPC stream        p50 {self.echo_p50:7.0f}  p90 {self.echo_p90:7.0f}",
                f"  select_topk - compute   p50 {self.select_p50:7.0f}  p90 {self.select_p90:7.0f}"
                f"  ratio {self.ratio:.2f}",
                f"  ratio {self.ratio:.2f}",
                f"  plan - compute          p50 {self.plan_p50:7.0f}               ratio {self.plan_ratio:.2f}",
                f"  unary - compute         p50 {self.unary_p50:7.0f}",
                f"  ordered on the device, unary {self.ordered_p50:.0f}, open stream {self.ordered_stream_p50:.0f}",
            )
        )


@contextmanager
def echo_stream(folder: Path) -> Iterator[Callable[[], float]]:
    """Starts the bare server; yields a function that sends a message and waits for the answer."""
    request_bytes, reply_bytes = message_sizes()
    path = folder / "echo.sock"
    command = [sys.executable, str(Path(__file__).with_name("echo.py")), str(path), str(reply_bytes + _EXTRA)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"ready\n":
                raise RuntimeError("the bare server did not start")
            with grpc.insecure_channel(f"unix:{path}", CHANNEL_OPTIONS) as channel:
                outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
                method: Any = channel.stream_stream(STREAM_METHOD)
                answers = method(iter(outgoing.get, None))
                request = bytes(request_bytes + _EXTRA)

                def send() -> float:
                    outgoing.put(request)
                    next(answers)
                    return 0.0

                yield send
                outgoing.put(None)
                answers.cancel()
        finally:
            process.kill()


def measure(device: str = "cpu", calls: int = 2000) -> Streams:
    """Starts the servers and measures."""
    folder = Path(tempfile.mkdtemp(prefix="topkd-"))
    server = Running(folder / "s", device)
    try:
        server.start()
        with topkd.Client(server.socket_dir) as client, client.stream() as stream, echo_stream(folder) as echo:
            scores, out = client.empty((1, WIDTH), "float32"), client.empty((1, K), "int32")
            values = np.random.default_rng(1).standard_normal((1, WIDTH), np.float32)
            if device == "cpu":
                scores[:] = values
            else:
                import torch

                scores.copy_(torch.from_numpy(values))
            plan = client.plan(scores, K, out_indices=out)
            kinds: dict[str, Callable[[], float]] = {
                "echo": echo,
                "select": lambda: stream.select_topk(scores, K, out_indices=out, wait="host").device_time,
                "plan": lambda: stream.run(plan, wait="host").device_time,
                "unary": lambda: client.select_topk(scores, K, out_indices=out, wait="host").device_time,
            }
            if device != "cpu":
                kinds |= {
                    "ordered": lambda: client.select_topk(scores, K, out_indices=out).device_time,
                    "ordered_stream": lambda: stream.select_topk(scores, K, out_indices=out).device_time,
                }
            take_turns(kinds, WARM)
            times = {name: beyond * 1e6 for name, (beyond, _) in take_turns(kinds, calls).items()}
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    p50 = {name: float(np.median(values)) for name, values in times.items()}
    return Streams(
        device=device,
        calls=calls,
        echo_p50=p50["echo"],
        echo_p90=float(np.percentile(times["echo"], 90)),
        select_p50=p50["select"],
        select_p90=float(np.percentile(times["select"], 90)),
        plan_p50=p50["plan"],
        unary_p50=p50["unary"],
        ratio=p50["select"] / p50["echo"],
        plan_ratio=p50["plan"] / p50["echo"],
        ordered_p50=p50.get("ordered", 0.0),
        ordered_stream_p50=p50.get("ordered_stream", 0.0),
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description="What a selection on an open stream costs.")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--calls", type=int, default=2000)
    args = parser.parse_args()
    print(measure(args.device, args.calls))


if __name__ == "__main__":
    main()
