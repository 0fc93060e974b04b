"""Device memory that is shared: what can be, what cannot; nothing outside it is reached, and it comes back."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import pytest

import topkd
from tests.e2e import answers, gpu_engine, malformed, malformed_values, processes, raw, scrape
from tests.e2e.answers import UNIQUE, best
from tests.e2e.conftest import Launch
from tests.e2e.engines import Engine
from tests.e2e.malformed import OUTPUTS_AT, REGION_BYTES, Ids
from tests.e2e.raw import RawSession, refused
from tests.e2e.servers import Running
from topkd.v1 import selection_pb2

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
MIB = 1 << 20


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch("cuda")


@pytest.fixture(scope="module")
def client(own: Running) -> Iterator[topkd.Client]:
    with topkd.Client(own.socket_dir, timeout=60, attach_timeout=60) as attached:
        attached.connect()
        own.settle()
        yield attached


@pytest.fixture(scope="module")
def session(own: Running) -> Iterator[RawSession]:
    with raw.attached(own.socket_dir) as opened:
        own.settle()
        yield opened


class Exported:
    """Device memory of this process that nothing else lies in.

    Attributes:
        memory: keeps it.
        message: what shares it.
        bytes: it, as a tensor.
    """

    def __init__(self, size: int) -> None:
        """Allocates it."""
        from topkd._cuda import CudaMemory

        self.memory = CudaMemory(size, 0)
        self.message = self.memory.share_message
        interface = {"shape": (size,), "typestr": "|u1", "data": (self.memory.address, False), "version": 3}
        self.__cuda_array_interface__ = interface
        self.bytes = torch.as_tensor(self, device="cuda:0")

    def changed(self, **values: Any) -> selection_pb2.RegisterRegionRequest:
        """Returns a registration with something else in it."""
        message = selection_pb2.CudaIpcMemory()
        message.CopyFrom(self.message)
        for name, value in values.items():
            setattr(message, name, value)
        return selection_pb2.RegisterRegionRequest(cuda_ipc=message)

    def register(self, session: RawSession, **values: Any) -> int:
        """Registers it and returns the region."""
        reply = session.stub.RegisterRegion(self.changed(**values), metadata=session.metadata, timeout=raw.TIMEOUT)
        region: int = reply.region_id
        return region


def release(session: RawSession, region: int) -> None:
    request = selection_pb2.ReleaseRegionRequest(region_id=region)
    session.stub.ReleaseRegion(request, metadata=session.metadata, timeout=raw.TIMEOUT)


def used_bytes() -> int:
    """Returns the device memory in use, of all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


def region_bytes(own: Running) -> float:
    """Returns the bytes of all regions, once the workers have told the front."""
    time.sleep(0.6)
    return scrape.total(own.metrics(), "topkd_region_bytes", memory="cuda_ipc")


def selects(client: topkd.Client, scores: Any, k: int = 9) -> None:
    got = client.select_topk(scores, k, **UNIQUE).indices.cpu().numpy()
    assert (got == best(scores.float().cpu().numpy(), k)).all()


def test_a_registered_tensor_and_its_views(client: topkd.Client, own: Running) -> None:
    whole = torch.from_numpy(answers.rows(1, 64, 1 << 18)).cuda()  # 64 MiB: a segment of its own
    before = region_bytes(own)
    with client.register(whole) as region:
        assert region.shared.nbytes == whole.numel() * 4
        assert region.shared.size >= region.shared.nbytes
        assert region.shared.neighbours == region.shared.size - region.shared.nbytes
        assert region_bytes(own) == before + region.shared.size
        for view in (whole, whole[17:19], whole[5:60:7], whole[:, 1000:3001], whole[63:, -5000:], whole.view(16, -1)):
            selects(client, view)
        half = whole.view(torch.bfloat16)[:, 3:70_001]  # begins at an odd element
        got = client.select_topk(half, 5, largest=True, **UNIQUE).indices
        assert got.shape == (64, 5)
        during = region_bytes(own)
    assert region.wait_released(10)
    assert region_bytes(own) == during - region.shared.size
    selects(client, whole)  # staged now
    with client.register(whole):
        selects(client, whole)


def test_tensors_of_one_segment(client: topkd.Client) -> None:
    """torch's caching allocator packs small tensors together: they are shared together, and released one by one."""
    first, second = (torch.from_numpy(answers.rows(seed, 2, 1000)).cuda() for seed in (1, 2))
    one, two = client.register(first), client.register(second)
    assert one.shared.neighbours > 0
    assert "not of the tensor" in str(one.shared)
    one.close()
    one.wait_released(10)
    selects(client, second)
    selects(client, first)
    two.close()
    assert two.wait_released(10)


def test_memory_that_cannot_be_shared(client: topkd.Client) -> None:
    for unshared in (torch.ones(4, 4), torch.ones(4, 4).numpy()):
        with pytest.raises(topkd.RegionError, match=r"client\.empty"):
            client.register(unshared)
    with pytest.raises(TypeError):
        client.register([1.0, 2.0])


def test_expandable_segments_are_shared_by_descriptors(own: Running) -> None:
    before = scrape.total(own.metrics(), "topkd_region_bytes", memory="vmm")
    engine = Engine(own.socket_dir, "expandable", "gpu_engine.py")
    try:
        shared = engine.wait_for("shared", 120)["sizes"]
        assert shared[0] >= 32 * MIB
        assert 28 * MIB <= shared[1] < shared[2]
        assert shared[2] >= 64 * MIB
        assert shared[3] == 2 * MIB
        assert engine.wait_for("selected", 60)["wrong"] == 0
        told = engine.wait_for("released", 60)
        assert told["released"]
        assert told["wrong"] == 0
        assert told["overlapped"] == "out_indices"
        assert engine.wait_for("repeated", 60)["lost"] < 1 << 30  # of 4 GiB; a worker's start may lie in between
        scrape.wait_for(own.metrics_port, {"topkd_region_bytes": before}, memory="vmm")
    finally:
        engine.kill()


def test_a_pool_is_shared_if_its_allocations_were_made_for_it(own: Running) -> None:
    engine = Engine(own.socket_dir, "pool", "gpu_engine.py")
    try:
        told = engine.wait_for("told", 120)
        assert told["size"] == 8 * MIB
        assert told["wrong"] == 0
        assert "made without CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR" in told["text"]
        assert "client.empty" in told["text"]
    finally:
        engine.kill()


def test_a_client_that_dies_gives_its_segments_back(own: Running) -> None:
    engine = Engine(own.socket_dir, "expandable", "gpu_engine.py")
    try:
        engine.wait_for("shared", 120)
    finally:
        engine.kill()
    scrape.wait_for(own.metrics_port, {"topkd_region_bytes": 0}, 20, memory="vmm")


def test_a_tensor_of_another_gpu(client: topkd.Client) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    elsewhere = torch.ones(4 * MIB, device="cuda:1")
    with pytest.raises(topkd.RegionError, match="cuda:1"):
        client.register(elsewhere)
    with pytest.raises(ValueError, match="cuda:1"):
        client.select_topk(elsewhere.view(2, -1), 4)


def test_forged_regions_are_checked_against_the_real_allocation(session: RawSession) -> None:
    memory = Exported(4 * MIB)
    top = 1 << 64
    forged: list[tuple[dict[str, Any], str, str]] = [
        ({"size": 4 * MIB + 1}, "INVALID_ARGUMENT", "cuda_ipc.size"),
        ({"size": 1 << 39}, "INVALID_ARGUMENT", "cuda_ipc.size"),
        ({"size": top - 1}, "INVALID_ARGUMENT", "cuda_ipc"),
        ({"size": 0}, "INVALID_ARGUMENT", "cuda_ipc.size"),
        ({"offset": 1}, "INVALID_ARGUMENT", "cuda_ipc"),
        ({"offset": 4 * MIB, "size": 1}, "INVALID_ARGUMENT", "cuda_ipc"),
        ({"offset": top - 4096, "size": 8192}, "INVALID_ARGUMENT", "cuda_ipc"),
        ({"offset": 2 * MIB, "size": 2 * MIB + 256}, "INVALID_ARGUMENT", "cuda_ipc"),
        ({"handle": bytes(63)}, "INVALID_ARGUMENT", "cuda_ipc.handle"),
        ({"handle": b""}, "INVALID_ARGUMENT", "cuda_ipc.handle"),
        ({"handle": b"\xff" * 64}, "FAILED_PRECONDITION", "cuda_ipc.handle"),
        ({"device_uuid": "GPU-00000000-0000-0000-0000-000000000000"}, "FAILED_PRECONDITION", "cuda_ipc"),
    ]
    for values, code, field in forged:
        got = refused(session.stub.RegisterRegion, memory.changed(**values), metadata=session.metadata)
        assert got.code == code, (values, got)
        assert got.fields, (values, got)
        assert got.fields[0].startswith(field), (values, got)
    region = memory.register(session, offset=2 * MIB, size=MIB)
    inside = selection_pb2.Selection(input=raw.placed(region, MIB - 4096, (1, 1024)), k=4)
    assert session.select(inside).results[0].kernel
    inside.input.region.offset += 4
    got = refused(session.stub.SelectTopK, raw.batch(inside), metadata=session.metadata)
    assert (got.code, got.fields) == ("INVALID_ARGUMENT", ("items[0].selection.input",))
    release(session, region)


def test_a_handle_that_is_registered_twice(session: RawSession) -> None:
    memory = Exported(2 * MIB)
    memory.bytes.zero_()
    first, second = memory.register(session), memory.register(session, offset=MIB, size=MIB)
    assert first != second
    release(session, first)
    reply = session.select(selection_pb2.Selection(input=raw.placed(second, 0, (1, 64)), k=4))
    assert reply.results[0].indices.shape == [1, 4]
    got = refused(
        session.stub.SelectTopK,
        raw.batch(selection_pb2.Selection(input=raw.placed(first, 0, (1, 64)), k=4)),
        metadata=session.metadata,
    )
    assert (got.code, got.reason) == ("NOT_FOUND", "REGION_NOT_FOUND")
    release(session, second)


def test_addresses_that_come_back(client: topkd.Client) -> None:
    """Memory that is freed and made again often has the same address and handle; the server must see the new one."""
    for seed in range(20):
        scores = client.empty((8, 1 << 18), torch.float32)  # 8 MiB
        scores.copy_(torch.from_numpy(answers.rows(seed, 8, 1 << 18)))
        selects(client, scores, 3)
        del scores
        if seed % 3 == 0:
            gc.collect()
            time.sleep(0.05)


@pytest.mark.exclusive
def test_released_memory_is_the_devices_again(client: topkd.Client) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = used_bytes()
    big = client.empty((1 << 28,), torch.float32)  # 1 GiB
    assert used_bytes() - before > (1 << 30) - 64 * MIB  # what earlier tests gave up may go meanwhile
    big.fill_(1)
    del big
    processes.wait_until(lambda: used_bytes() - before < 64 * MIB, 10, "1 GiB is free again")


@pytest.mark.exclusive
def test_a_killed_client_gives_its_device_memory_back(own: Running, client: topkd.Client) -> None:
    steady = Engine(own.socket_dir, "steady", "gpu_engine.py")
    victim = None
    try:
        steady.wait_for("calling", 120)
        own.settle()
        torch.cuda.synchronize()
        workers, memory, page = own.workers(), used_bytes(), own.metrics()
        names = ("topkd_sessions", "topkd_regions", "topkd_region_bytes", "topkd_plans")
        before = {name: scrape.total(page, name) for name in names}
        victim = Engine(own.socket_dir, "long", "gpu_engine.py")
        victim.wait_for("calling", 120)
        own.settle()
        assert used_bytes() - memory > 2 * gpu_engine.MEMORY_BYTES
        time.sleep(0.5)  # the call runs for seconds
        killed_at = processes.kill(victim.pid)
        scrape.wait_for(own.metrics_port, before, 2.0)
        gone = lambda: len(own.workers()) == len(workers) and used_bytes() - memory < 128 * MIB  # noqa: E731
        processes.wait_until(gone, max(0.2, 2.0 - (time.monotonic() - killed_at)), "worker and memory are gone")
        steady.wait_for("many", 60)
        report = steady.finish()
        assert (report["wrong"], report["failed"]) == (0, 0), report
        selects(client, torch.from_numpy(answers.rows(1, 3, 3000)).cuda())
    finally:
        steady.kill()
        if victim is not None:
            victim.kill()


def test_wrong_requests_on_device_memory(own: Running, session: RawSession) -> None:
    """Every wrong request of the CPU suite, against regions of device memory."""
    memory, other = Exported(2 * MIB), Exported(2 * MIB)
    with raw.attached(own.socket_dir) as stranger:
        foreign = other.register(stranger, size=REGION_BYTES)
        ids = Ids(memory.register(session, size=REGION_BYTES), foreign, 1, 2, 3, 4)
        memory.bytes[:OUTPUTS_AT].zero_()
        memory.bytes[OUTPUTS_AT:] = 0xA5
        cases = [*malformed.tensor_cases(), *malformed_values.value_cases(), *malformed_values.garbage_cases()]
        wrong = []
        for case in cases:
            if case.name == "kernel-of-another-device":
                continue
            path = f"/topkd.v1.SelectionService/{case.method}"
            got = refused(raw.method(session.channel, path), case.build(ids), metadata=session.metadata)
            named = not case.field or (got.fields and got.fields[0].startswith(case.field))
            if got.code not in case.codes or not named:
                wrong.append((case.name, got))
        assert not wrong, wrong[:10]
        torch.cuda.synchronize()
        assert bool((memory.bytes[OUTPUTS_AT:] == 0xA5).all()), "outputs were touched by requests that were refused"
        session.select(malformed.first(ids))


def test_memory_given_up_during_a_capture(client: topkd.Client) -> None:
    """The library frees memory in the background; an engine that captures a graph at that time must not notice.

    The last of the module: a capture that breaks leaves this process unusable.
    """
    total = torch.zeros(4, device="cuda")
    given_up = [client.empty((8 * MIB,), torch.float32) for _ in range(4)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total.add_(1)
        given_up.clear()
        time.sleep(0.7)
        total.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert total.tolist() == [2, 2, 2, 2]
