"""Armed lanes on a GPU: a call that no CPU has a part in, and everything that a blocked stream would hold up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

import topkd
from tests.e2e import processes, scrape
from tests.e2e.conftest import Launch, under_mps
from tests.e2e.engines import Engine
from tests.e2e.servers import Running
from topkd._lane import WaitsBy

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
UNIQUE: Any = {"order": "index", "ties": "lowest"}
SHAPES = {
    "cluster": (3, 65_536, 512),
    "radix_register": (8, 8192, 64),
    "small": (40, 2048, 32),
    "radix_wide": (4, 70_000, 600),
    "split_merge": (1, 200_000, 500),
}


@pytest.fixture(scope="module")
def own(launch: Launch) -> Running:
    return launch("cuda")


@pytest.fixture(scope="module")
def client(own: Running) -> Iterator[topkd.Client]:
    with topkd.Client(own.socket_dir, device="cuda:0", timeout=60, attach_timeout=60, ready_timeout=10) as attached:
        attached.connect()
        yield attached


class Selection:
    """Scores in session memory, a plan over them, and what is right."""

    def __init__(self, client: topkd.Client, kernel: str = "radix_register") -> None:
        rows, width, self.k = SHAPES[kernel]
        self.scores = client.empty((rows, width), torch.float32)
        self.renew()
        self.plan = client.plan(self.scores, self.k, kernel=kernel, **UNIQUE)
        self.best()  # loads what a first call loads
        torch.cuda.synchronize()

    def renew(self) -> None:
        self.scores.copy_(torch.randperm(self.scores.numel(), device="cuda").view(self.scores.shape))

    def best(self) -> Any:
        return torch.topk(self.scores, self.k).indices.sort(dim=1).values.to(torch.int32)


@pytest.mark.parametrize("kernel", list(SHAPES))
def test_every_kernel_that_only_enqueues_is_armed(client: topkd.Client, kernel: str, waits_by: WaitsBy) -> None:
    selection = Selection(client, kernel)
    with selection.plan.lane(waits_by=waits_by) as lane:
        assert (lane.mode, lane.waits_by) == ("armed", waits_by), lane.reason
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(100):
            selection.renew()
            wrong += (lane().indices != selection.best()).sum()
        torch.cuda.synchronize()
        lane.check()
        assert int(wrong) == 0
        for _ in range(20):
            selection.renew()
            torch.cuda.synchronize()
            assert torch.equal(lane.call_host().indices, selection.best())


def test_what_is_not_armed_says_why(client: topkd.Client) -> None:
    selection, other = Selection(client), Selection(client)
    with client.lane(selection.plan, other.plan) as lane:
        assert (lane.mode, lane.waits_by) == ("polled", "operations")
        assert "one plan" in lane.reason
    with client.plan(selection.scores, 8, kernel="torch", **UNIQUE) as plan, plan.lane() as lane:
        assert lane.mode == "polled"
        assert "torch" in lane.reason


def test_no_kernel_waits_without_mps(client: topkd.Client) -> None:
    if under_mps():
        pytest.skip("this is under MPS")
    selection = Selection(client)
    with pytest.raises(topkd.RegionError, match="MPS"):
        selection.plan.lane(waits_by="kernel")
    with selection.plan.lane() as lane:
        assert lane.waits_by == "operations"


def test_calls_on_a_stream_and_from_the_host_by_turns(client: topkd.Client, waits_by: WaitsBy) -> None:
    """No answer to a call on a stream passes for that of the call from the host behind it, nor the other way."""
    selection = Selection(client)
    with selection.plan.lane(waits_by=waits_by) as lane:
        copies = torch.empty((64, *selection.best().shape), dtype=torch.int32, device="cuda")
        graph = captured(lane, copies)
        for turn in range(200):
            selection.renew()
            want = selection.best()
            if turn % 3:
                got = lane().indices.clone()
                torch.cuda.current_stream().synchronize()
                assert torch.equal(got, want), turn
            if turn % 20 == 0:
                graph.replay()
                torch.cuda.synchronize()
                assert bool((copies == want).all()), turn
            selection.renew()
            want = selection.best()
            torch.cuda.synchronize()
            assert torch.equal(lane.call_host(timeout=5).indices, want), turn
        lane.check()


def captured(lane: Any, copies: Any) -> Any:
    lane()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # the client frees memory in the background
        for copy in copies:
            copy.copy_(lane().indices)
    return graph


def test_a_graph_holds_64_calls(client: topkd.Client, waits_by: WaitsBy) -> None:
    selection = Selection(client)
    with selection.plan.lane(waits_by=waits_by) as lane:
        copies = torch.empty((64, *selection.best().shape), dtype=torch.int32, device="cuda")
        graph = captured(lane, copies)
        for _ in range(5):
            selection.renew()
            copies.fill_(-7)
            graph.replay()
            assert bool((copies == selection.best()).all())
        lane.check()


def test_what_lanes_would_hold_up_goes_on_and_no_call_is_lost(
    own: Running, client: topkd.Client, waits_by: WaitsBy
) -> None:
    """Graphs of calls on two streams, while regions come and go, plans are made, and other calls are the first."""
    kept = [Selection(client), Selection(client, "cluster")]
    lanes = [selection.plan.lane(waits_by=waits_by) for selection in kept]
    assert [lane.mode for lane in lanes] == ["armed"] * 2
    wants = [selection.best() for selection in kept]
    copies = [torch.empty((64, *want.shape), dtype=torch.int32, device="cuda") for want in wants]
    streams = [torch.cuda.Stream() for _ in kept]
    graphs = []
    for stream, lane, copy in zip(streams, lanes, copies, strict=True):
        with torch.cuda.stream(stream):
            graphs.append(captured(lane, copy))
    torch.cuda.synchronize()
    for turn in range(6):
        for stream, graph, copy in zip(streams, graphs, copies, strict=True):
            with torch.cuda.stream(stream):
                copy.fill_(-7)
                graph.replay()
        scores = client.empty((2, 3000 + turn), torch.float32)
        scores.copy_(torch.arange(scores.numel(), device="cuda").view(scores.shape))
        kernel = ("torch", "radix_wide", "auto")[turn % 3]
        found = client.select_topk(scores, 5 + turn, kernel=kernel, wait="host", timeout=30).indices
        assert int(found.sum()) == 2 * sum(range(2995, 3000 + turn))
        with client.plan(scores, 9, order="value", values=True):
            pass
        region = client.register(torch.empty(2 << 20, device="cuda"))
        region.close()
        del scores, found
        torch.cuda.synchronize()
        for want, copy in zip(wants, copies, strict=True):
            assert bool((copy == want).all()), turn
    for lane in lanes:
        lane.check()
        lane.close()
    assert scrape.total(own.metrics(), "topkd_lane_disarmed_total") > 0


def test_a_released_plan_takes_its_lane_out_of_the_stream(client: topkd.Client, waits_by: WaitsBy) -> None:
    selection = Selection(client)
    with selection.plan.lane(waits_by=waits_by) as lane:
        lane.call_host()
        lane()
        torch.cuda.synchronize()
        selection.plan.close()
        time.sleep(0.5)
        with pytest.raises(topkd.NotFoundError):
            lane.call_host(timeout=5)
        for _ in range(3):
            lane()
        torch.cuda.synchronize()
        with pytest.raises(topkd.NotFoundError):
            lane.check()


def test_as_many_lanes_as_may_be_are_armed_and_the_rest_polled(launch: Launch) -> None:
    server = launch("cuda", limits={"lanes": 12})
    with topkd.Client(server.socket_dir, device="cuda:0", timeout=60, attach_timeout=60) as client:
        selections = [Selection(client) for _ in range(10)]
        lanes = [selection.plan.lane() for selection in selections]
        assert [lane.mode for lane in lanes] == ["armed"] * 8 + ["polled"] * 2
        for _ in range(5):
            for selection, lane in zip(selections, lanes, strict=True):
                selection.renew()
                torch.cuda.synchronize()
                assert torch.equal(lane.call_host(timeout=5).indices, selection.best())
        lanes[0].close()
        processes.wait_until(lambda: reopened(selections[0]) == "armed", 5, "a lane may be armed again")
    server.stop()


def reopened(selection: Selection) -> str:
    with selection.plan.lane() as lane:
        assert torch.equal(lane.call_host(timeout=5).indices, selection.best())
        return str(lane.mode)


def gone(pid: int) -> bool:
    return not processes.alive(pid)


def test_a_killed_client_leaves_no_worker(launch: Launch) -> None:
    server = launch("cuda")
    for pause in (0.0, 0.1):
        worker = server.spare()
        victim = Engine(server.socket_dir, "lane", "gpu_engine.py")
        assert victim.wait_for("calling")["mode"] == "armed"
        time.sleep(pause)
        processes.kill(victim.pid)
        processes.wait_until(partial(gone, worker), 10, "the worker is gone")
        victim.kill()
    server.stop()
