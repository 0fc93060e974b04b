"""What a remote selection costs beyond the selection itself, beside a bare gRPC call of the same size.

Three processes: this one, a topkd server, and a grpcio server that answers with bytes (`echo`). Calls of all kinds
take turns, so that whatever else the machine does meets all alike. From each selection's round trip the device time
that the server reports for it is subtracted. Of the bare calls one is through a channel as `grpc.insecure_channel`
makes it; one through a channel with the client library's options, which make it faster; and one whose server is kept
busy for as long as a selection takes (subtracted too): a process that has waited longer wakes more slowly.

    python -m tests.bench.overhead [--device cpu|cuda] [--calls N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import topkd
from tests.bench.echo import METHOD
from tests.e2e import raw
from tests.e2e.servers import Running
from topkd.v1 import selection_pb2

WIDTH, K, BATCH = 4096, 512, 64
BLOCK = 10
"""Calls of one kind before the other kind's turn."""

WARM = 200
GOAL = 1.3
CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True)
class Overhead:
    """What was measured; times in microseconds.

    Attributes:
        device: the server's device.
        calls: of each kind.
        echo_p50, echo_p90: the bare call.
        tuned_p50: the bare call through a channel with the client's options.
        busy_p50: the same with a server that is busy for as long as a selection computes, less that time.
        select_p50, select_p90: `select_topk` less its device time.
        plan_p50: a plan's run less its device time.
        batch_p50: `select_topk_batch` of 64 less its device time.
        device_p50: device time of one selection.
        ratio, plan_ratio: of `select_p50` and `plan_p50` to `echo_p50`.
        tuned_ratio, busy_ratio: of `select_p50` to `tuned_p50` and `busy_p50`.
    """

    device: str
    calls: int
    echo_p50: float
    echo_p90: float
    tuned_p50: float
    busy_p50: float
    select_p50: float
    select_p90: float
    plan_p50: float
    batch_p50: float
    device_p50: float
    ratio: float
    plan_ratio: float
    tuned_ratio: float
    busy_ratio: float

    def __str__(self) -> str:
        lines = (
            f"overhead of a remote selection, {WIDTH} f32, k={K}, {self.device}, {self.calls} calls of each kind, us",
            f"  bare gRPC call          p50 {self.echo_p50:7.0f}  p90 {self.echo_p90:7.0f}",
            f"    with client's options p50 {self.tuned_p50:7.0f}               to it {self.tuned_ratio:.2f}",
            f"    and as long a compute p50 {self.busy_p50:7.0f}               to it {self.busy_ratio:.2f}",
            f"  select_topk - compute   p50 {self.select_p50:7.0f}  p90 {self.select_p90:7.0f}  ratio {self.ratio:.2f}",
            f"  plan - compute          p50 {self.plan_p50:7.0f}               ratio {self.plan_ratio:.2f}",
            f"  batch of {BATCH} - compute   p50 {self.batch_p50:7.0f}               {self.batch_p50 / BATCH:.1f} each",
            f"  compute of one          p50 {self.device_p50:7.0f}",
        )
        return "\n".join(lines)


def message_sizes() -> tuple[int, int]:
    """Returns the bytes of a request of one selection in session memory, and of its reply."""
    big = (1 << 64) - 1
    selection = selection_pb2.Selection(
        input=raw.placed(big, 1 << 20, (1, WIDTH)), k=K, out_indices=raw.placed(big, 1 << 20, (1, K), "INT32")
    )
    result = selection_pb2.SelectionResult(kernel="torch", device_time_ns=100_000)
    reply = selection_pb2.SelectTopKResponse(results=[result], queue_time_ns=10_000)
    return raw.batch(selection).ByteSize(), reply.ByteSize()


@contextmanager
def echo_calls(folder: Path, busy: Callable[[], float]) -> Iterator[dict[str, Callable[[], float]]]:
    """Starts the bare server; yields calls of it, which return the seconds that it was busy.

    Args:
        folder: for its socket.
        busy: returns the seconds for which the server of the call `busy` is to be busy.
    """
    request_bytes, reply_bytes = message_sizes()
    path = folder / "echo.sock"
    command = [sys.executable, str(Path(__file__).with_name("echo.py")), str(path), str(reply_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or process.stdout.readline() != b"ready\n":
                raise RuntimeError("the bare server did not start")
            target = f"unix:{path}"
            with grpc.insecure_channel(target) as bare, grpc.insecure_channel(target, CHANNEL_OPTIONS) as tuned:
                request = bytes(request_bytes)

                def call(method: Any) -> float:
                    method(request, timeout=30.0)
                    return 0.0

                def call_busy(method: Any) -> float:
                    nanoseconds = int(busy() * 1e9)
                    method(nanoseconds.to_bytes(8, "little") + request[8:], timeout=30.0)
                    return nanoseconds * 1e-9

                yield {
                    "echo": partial(call, bare.unary_unary(METHOD)),
                    "tuned": partial(call, tuned.unary_unary(METHOD)),
                    "busy": partial(call_busy, tuned.unary_unary(METHOD)),
                }
        finally:
            process.kill()


def selection_calls(client: topkd.Client, device: str) -> dict[str, Callable[[], float]]:
    """Returns the calls that are measured; each returns the seconds that the server computed."""
    rng = np.random.default_rng(1)
    scores = client.empty((1, WIDTH), "float32")
    values = rng.standard_normal((1, WIDTH), np.float32)
    if device == "cpu":
        scores[:] = values
    else:
        import torch

        scores.copy_(torch.from_numpy(values))
    out = client.empty((1, K), "int32")
    plan = client.plan(scores, K, out_indices=out)
    entries = [topkd.Selection(scores, K) for _ in range(BATCH)]

    def batch() -> float:
        # Entries that ran in one kernel call all report its time.
        return float(client.select_topk_batch(entries, wait="host")[0].device_time)

    return {
        "select": lambda: float(client.select_topk(scores, K, out_indices=out, wait="host").device_time),
        "plan": lambda: float(plan(wait="host").device_time),
        "batch": batch,
    }


def take_turns(calls: dict[str, Callable[[], float]], count: int) -> dict[str, tuple[Any, Any]]:
    """Makes `count` calls of each kind in turns; returns arrays of seconds beyond the compute, and of the compute."""
    beyond: dict[str, list[float]] = {name: [] for name in calls}
    compute: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(-(-count // BLOCK)):
        for name, call in calls.items():
            for _ in range(BLOCK):
                started = time.perf_counter()
                computed = call()
                beyond[name].append(time.perf_counter() - started - computed)
                compute[name].append(computed)
    return {name: (np.array(beyond[name]), np.array(compute[name])) for name in calls}


def measure(device: str = "cpu", calls: int = 2000) -> Overhead:
    """Starts the servers, measures, and stops them."""
    folder = Path(tempfile.mkdtemp(prefix="topkd-"))
    server = Running(folder / "0", device)
    try:
        server.start()
        computed = [0.0]
        with echo_calls(folder, lambda: computed[0]) as echoes, topkd.Client(server.socket_dir) as client:
            kinds = echoes | selection_calls(client, device)
            server.settle()
            batch = {"batch": kinds.pop("batch")}  # by itself: it is too long to stand between the others
            for turns in (kinds, batch):
                warm = take_turns(turns, WARM)
                if "select" in warm:
                    computed[0] = float(np.median(warm["select"][1]))
            taken = take_turns(kinds, calls) | take_turns(batch, calls // 4)
            name = client.info().device.name
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

    def us(kind: str, percent: int) -> float:
        return float(np.percentile(taken[kind][0], percent)) * 1e6

    return Overhead(
        device=name,
        calls=calls,
        echo_p50=us("echo", 50),
        echo_p90=us("echo", 90),
        tuned_p50=us("tuned", 50),
        busy_p50=us("busy", 50),
        select_p50=us("select", 50),
        select_p90=us("select", 90),
        plan_p50=us("plan", 50),
        batch_p50=us("batch", 50),
        device_p50=float(np.median(taken["select"][1])) * 1e6,
        ratio=us("select", 50) / us("echo", 50),
        plan_ratio=us("plan", 50) / us("echo", 50),
        tuned_ratio=us("select", 50) / us("tuned", 50),
        busy_ratio=us("select", 50) / us("busy", 50),
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Overhead of remote selections beside bare gRPC calls.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    measured = measure(options.device, options.calls)
    print(measured)
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(measured), indent=2) + "\n")


if __name__ == "__main__":
    main()
