"""A client process with CUDA tensors that a test may kill: `python gpu_engine.py SOCKET_DIR MODE`.

It speaks like `engine.py`.

Modes:
    long        attaches, holds device memory in regions, and makes calls of some seconds each
    blocked     has a call accepted that its stream comes to after ten seconds only
    steady      makes short calls as fast as it can, checks every bit, says when they are many, and reports when its
                standard input ends
    lane        replays graphs of 64 calls of a lane as fast as it can
    expandable  registers tensors of expandable segments, selects from them, and counts what is wrong
    pool        registers tensors of pools of its own, with and without a descriptor type
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

if sys.argv[2:] == ["expandable"]:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        os.environ[name] = "expandable_segments:True"

import torch

import topkd

WIDTH = 131072
LONG_SECONDS = 4.0
MEMORY_BYTES = 256 << 20
MANY = 50
ATTACH_SECONDS = 110


def say(**what: object) -> None:
    """Writes one line."""
    print(json.dumps(what), flush=True)


def many_rows(client: topkd.Client, count: int) -> Any:
    """Returns a matrix of `count` rows that are all one row in session memory."""
    row = client.empty((1, WIDTH), torch.float32)
    row.copy_(torch.randperm(WIDTH, generator=torch.Generator().manual_seed(3)).float()[None])
    return row.as_strided((count, WIDTH), (0, 1))


def long_call(client: topkd.Client, seconds: float = LONG_SECONDS) -> tuple[Any, int]:
    """Returns a matrix, and a k, whose selection by the family `torch` takes about `seconds` on the server."""
    rows = 2048
    for _ in range(2):
        probe = client.select_topk(many_rows(client, rows), 8, kernel="torch", timeout=60, wait="host").device_time
    return many_rows(client, min(1 << 23, int(rows * seconds / probe))), 8


def run_long(client: topkd.Client) -> None:
    """Calls of some seconds each."""
    held = client.empty((MEMORY_BYTES // 4,), torch.float32)
    held.fill_(1)
    other = torch.ones(MEMORY_BYTES // 4, device=held.device)
    region = client.register(other)
    scores, k = long_call(client)
    say(state="calling", held=held.numel(), shared=region.shared.size)
    while True:
        client.select_topk(scores, k, kernel="torch", timeout=60, wait="host")
        say(state="called")


def run_blocked(client: topkd.Client) -> None:
    """A call behind a stream that is busy for long."""
    scores = client.empty((4, 8192), torch.float32)
    client.select_topk(scores, 64, kernel="radix_wide")
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000_000)
    for _ in range(2):
        client.select_topk(scores, 64, kernel="radix_wide")
    say(state="blocked")
    time.sleep(60)


def wait_for_end(ended: threading.Event) -> None:
    """Notes the end of standard input."""
    sys.stdin.read()
    ended.set()


def run_steady(client: topkd.Client) -> None:
    """Short calls, each checked."""
    scores = client.empty((4, 8192), torch.float32)
    ended = threading.Event()
    threading.Thread(target=wait_for_end, args=(ended,), daemon=True).start()
    calls = wrong = failed = 0
    first_error = ""
    longest = 0.0
    say(state="calling")
    while not ended.is_set():
        scores.copy_(torch.randperm(scores.numel(), device=scores.device).view(scores.shape))
        started = time.monotonic()
        try:
            got = client.select_topk(scores, 64, order="index", ties="lowest").indices
            want = torch.topk(scores, 64).indices.sort(dim=1).values.to(torch.int32)
            wrong += not torch.equal(got, want)
        except topkd.TopkdError as error:
            failed += 1
            first_error = first_error or repr(error)
        longest = max(longest, time.monotonic() - started)
        calls += 1
        if calls == MANY:
            say(state="many")
    say(state="ended", calls=calls, wrong=wrong, failed=failed, error=first_error, longest=longest)


def differs(client: topkd.Client, scores: Any, **options: Any) -> int:
    """Selects from scores that all differ; returns the number of indices that are wrong."""
    scores.copy_(torch.randperm(scores.numel(), device="cuda").view(scores.shape))
    got = client.select_topk(scores, 64, order="index", ties="lowest", **options).indices
    want = torch.topk(scores, 64).indices.sort(dim=1).values.to(torch.int32)
    return int((got != want).sum())


def run_lane(client: topkd.Client) -> None:
    """Graphs of calls without a request, one behind the other."""
    scores = client.empty((4, 8192), torch.float32)
    scores.copy_(torch.randperm(scores.numel(), device=scores.device).view(scores.shape))
    lane = client.plan(scores, 64, order="index", ties="lowest").lane()
    lane()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(64):
            lane()
    graph.replay()
    say(state="calling", mode=lane.mode)
    while True:
        graph.replay()
        torch.cuda.synchronize()


def run_expandable(client: topkd.Client) -> None:
    """Memory in several allocations of a segment, which regions share."""
    first = torch.empty(8, 1 << 20, device="cuda")  # 32 MiB: two allocations of 20 MiB, the second shared
    second = torch.empty(16, 1 << 20, device="cuda")
    small = torch.empty(4, 4096, device="cuda")
    flat = second.view(-1)
    regions = [client.register(tensor) for tensor in (first, flat[9 << 20 :], second, small)]
    say(state="shared", sizes=[region.shared.size for region in regions])
    wrong = sum(
        differs(client, view) for view in (first, second, small, second[3:15:2], second[9:], second[:, 70_001:900_000])
    )
    out = first.view(torch.int32)[:, :64]
    wrong += differs(client, second[:8], out_indices=out)
    with client.plan(second, 64, order="index", ties="lowest") as plan:
        second.copy_(torch.randperm(second.numel(), device="cuda").view(second.shape))
        want = torch.topk(second, 64).indices.sort(dim=1).values.to(torch.int32)
        wrong += sum(int((plan.run().indices != want).sum()) for _ in range(20))
        torch.cuda.synchronize()
    say(state="selected", wrong=wrong)
    overlapped = ""
    try:
        client.select_topk(second[8:], 64, out_indices=flat[12 << 20 :][: 8 * 64].view(torch.int32).view(8, 64))
    except topkd.ArgumentValueError as error:  # though the two were found in different regions
        overlapped = error.argument
    for region in regions:
        region.close()
    released = all(region.wait_released(10) for region in regions)
    wrong = differs(client, second)  # staged now
    del first, second, small, out, flat, want, regions, region, plan
    torch.cuda.empty_cache()
    say(state="released", released=released, wrong=wrong, overlapped=overlapped)
    free = torch.cuda.mem_get_info()[0]
    for _ in range(16):
        segment = torch.empty(256 << 18, device="cuda")  # 256 MiB
        region = client.register(segment)
        region.close()
        region.wait_released(10)
        del segment, region
        torch.cuda.empty_cache()
    say(state="repeated", lost=free - torch.cuda.mem_get_info()[0])
    sys.stdin.read()


class _Bytes:
    """Device memory for torch."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


def mapped(size: int, types: int) -> Any:
    """Returns memory that was mapped as an engine's pool maps it: one allocation, some way behind its range's start."""
    from cuda.bindings import driver

    from topkd._cuda import checked

    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 0
    wanted.requestedHandleTypes = driver.CUmemAllocationHandleType(types)
    handle = checked("create", driver.cuMemCreate(size, wanted, 0))
    base = int(checked("reserve", driver.cuMemAddressReserve(4 * size, 0, 0, 0))) + size
    checked("map", driver.cuMemMap(base, size, 0, handle, 0))
    access = driver.CUmemAccessDesc()
    access.location = wanted.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    checked("access", driver.cuMemSetAccess(base, size, [access], 1))
    return torch.as_tensor(_Bytes(base, size), device="cuda").view(torch.float32)


def run_pool(client: topkd.Client) -> None:
    """Memory of pools that no allocator of torch's made."""
    shareable = mapped(8 << 20, 1).view(4, -1)
    region = client.register(shareable[:, 1000:2000])
    wrong = sum(differs(client, view) for view in (shareable, shareable[1:3, 5:9000]))
    text = ""
    try:
        client.register(mapped(2 << 20, 0))
    except topkd.RegionError as error:
        text = str(error)
    say(state="told", size=region.shared.size, wrong=wrong, text=text)
    sys.stdin.read()


def main(target: str, mode: str) -> None:
    """Runs a mode."""
    name = f"gpu engine {mode}"
    with topkd.Client(Path(target), name=name, attach_timeout=ATTACH_SECONDS, ready_timeout=10) as client:
        client.connect(timeout=ATTACH_SECONDS)  # its worker may have to be started, on a busy machine
        say(state="attached")
        modes = {"long": run_long, "steady": run_steady, "blocked": run_blocked, "lane": run_lane}
        {**modes, "expandable": run_expandable, "pool": run_pool}[mode](client)


if __name__ == "__main__":
    main(*sys.argv[1:])
