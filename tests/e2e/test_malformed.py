"""Wrong requests are refused by name, nothing of them runs, and the server serves on as if they had not been."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from tests.e2e import malformed, malformed_values, processes, raw, scrape
from tests.e2e.malformed import INVALID, OUTPUTS_AT, REGION_BYTES, BadCase, Ids
from tests.e2e.raw import RawSession, refusal, refused
from tests.e2e.servers import Running
from topkd.v1 import selection_pb2

CASES = [
    *malformed.tensor_cases(),
    *malformed_values.value_cases(),
    *malformed_values.id_cases(),
    *malformed_values.garbage_cases(),
]
SENTINEL = 0xA5
GROWTH_BYTES = 48 << 20
pytestmark = pytest.mark.timeout(60)


@dataclass
class Target:
    """A session to send wrong requests to.

    Attributes:
        session: it.
        ids: what they name.
        memory: the region's bytes.
        worker: its process.
        before: memory, descriptors and metrics before the first wrong request.
    """

    session: RawSession
    ids: Ids
    memory: np.ndarray[Any, Any]
    worker: int
    before: tuple[int, int, scrape.Samples]

    def call(self, case: BadCase) -> raw.Refusal:
        """Sends a wrong request."""
        path = f"/topkd.v1.SelectionService/{case.method}"
        return refused(raw.method(self.session.channel, path), case.build(self.ids), metadata=self.session.metadata)

    def serves(self) -> None:
        """A right request is still answered rightly, into the region."""
        self.session.select(malformed.first(self.ids))
        got = self.memory[OUTPUTS_AT : OUTPUTS_AT + 4 * malformed.ROWS * malformed.K].view(np.int32)
        scores = self.memory[: 4 * malformed.ROWS * malformed.WIDTH].view(np.float32).reshape(malformed.ROWS, -1)
        want = np.argsort(-scores, axis=1, kind="stable")[:, : malformed.K]
        assert np.array_equal(np.sort(got.reshape(want.shape)), np.sort(want))
        self.memory[OUTPUTS_AT:] = SENTINEL


def _scores(memory: np.ndarray[Any, Any]) -> None:
    rng = np.random.default_rng(7)
    count = malformed.ROWS * malformed.WIDTH
    memory[: 4 * count].view(np.float32)[:] = rng.permutation(count).astype(np.float32)
    memory[32768 : 32768 + 16].view(np.int32)[:] = malformed.WIDTH
    memory[OUTPUTS_AT:] = SENTINEL


def _plan(session: RawSession, ids: Ids) -> int:
    request = selection_pb2.CreatePlanRequest(selection=malformed.plain(ids))
    plan: int = session.stub.CreatePlan(request, metadata=session.metadata, timeout=raw.TIMEOUT).plan_id
    return plan


@pytest.fixture(scope="module")
def target(cpu: Running) -> Iterator[Target]:
    other = raw.attach(cpu.socket_dir, "other")
    session = raw.attach(cpu.socket_dir)
    region, memory = session.register(REGION_BYTES)
    released, _ = session.register(4096)
    foreign, _ = other.register(REGION_BYTES)
    call: dict[str, Any] = {"metadata": session.metadata, "timeout": raw.TIMEOUT}
    session.stub.ReleaseRegion(selection_pb2.ReleaseRegionRequest(region_id=released), **call)
    ids = Ids(region, foreign, 0, 0, 0, released)
    gone = _plan(session, ids)
    session.stub.ReleasePlan(selection_pb2.ReleasePlanRequest(plan_id=gone), **call)
    foreign_plan = _plan(other, Ids(foreign, 0, 0, 0, 0, 0))
    ids = Ids(region, foreign, _plan(session, ids), foreign_plan, gone, released)
    _scores(memory)
    worker = processes.listener(session.worker_socket)
    found = Target(session, ids, memory, worker, (0, 0, {}))
    for _ in range(50):
        found.call(CASES[0])
        found.serves()
    figures = scrape.wait_for(cpu.metrics_port, {"topkd_regions": 2, "topkd_plans": 2})
    found.before = (processes.memory_bytes(worker), processes.descriptors(worker), figures)
    yield found
    session.close()
    other.close()


def test_there_are_enough_cases_and_no_two_are_one() -> None:
    assert len(CASES) >= 200
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_request_is_refused_by_name(target: Target, case: BadCase) -> None:
    got = target.call(case)
    assert got.code in case.codes, got
    assert got.reason, got
    assert len(got.message) <= 1100, "a message is bounded"
    if case.field:
        assert got.fields, f"no field is named: {got}"
        assert got.fields[0].startswith(case.field), got
    for foreign in (target.ids.foreign_region, target.ids.foreign_plan):
        if got.code != "NOT_FOUND":
            assert f"{foreign:x}" not in got.message, "a text tells of another session's things"


def test_foreign_ids_look_like_unknown_ones(target: Target) -> None:
    def answer(region: int) -> tuple[str, str, str, tuple[str, ...]]:
        selection = malformed.plain(target.ids)
        selection.input.region.region_id = region
        case = BadCase("", "SelectTopK", lambda _: raw.batch(selection))
        got = target.call(case)
        return got.code, got.message.replace(f"{region:#018x}", "ID"), got.reason, got.fields

    assert answer(target.ids.foreign_region) == answer(0x0123456789ABCDEF)


def test_nothing_of_a_wrong_batch_was_written(target: Target) -> None:
    assert bool((target.memory[OUTPUTS_AT:] == SENTINEL).all()), "outputs were touched by requests that were refused"
    target.serves()


@pytest.mark.parametrize(
    "metadata",
    [
        (("topkd-filler", "x" * (1 << 20)),),
        tuple((f"topkd-filler-{number}", "x" * 64) for number in range(2000)),
    ],
    ids=["one-long", "many"],
)
def test_huge_metadata(target: Target, cpu: Running, metadata: tuple[tuple[str, str], ...]) -> None:
    with grpc.insecure_channel(target.session.session.data_address, raw.OPTIONS) as channel:
        call = raw.method(channel, "/topkd.v1.SelectionService/SelectTopK")
        got = refused(call, malformed_values.Bytes(b""), metadata=(*target.session.metadata, *metadata))
    assert got.code in ("RESOURCE_EXHAUSTED", INVALID, "UNAUTHENTICATED"), got
    target.serves()


@pytest.mark.parametrize("value", ["", " ", "x" * 5000, "../../etc/passwd", '{"a": 1}'])
def test_a_strange_request_id_does_no_harm(target: Target, value: str) -> None:
    metadata = (*target.session.metadata, ("topkd-request-id", value))
    target.session.stub.SelectTopK(raw.batch(malformed.first(target.ids)), metadata=metadata, timeout=raw.TIMEOUT)
    target.memory[OUTPUTS_AT:] = SENTINEL


def test_a_message_beyond_the_limit(target: Target) -> None:
    case = BadCase("", "SelectTopK", lambda _: malformed_values.Bytes(bytes((64 << 20) + 4096)))
    assert target.call(case).code == "RESOURCE_EXHAUSTED"
    target.serves()


def test_an_unknown_method(target: Target) -> None:
    case = BadCase("", "SelectEverything", lambda _: malformed_values.Bytes(b""))
    assert target.call(case).code == "UNIMPLEMENTED"


def test_random_bytes_never_fail_the_server(target: Target) -> None:
    """What parses by chance is judged as a request; in no case the server is at fault."""
    rng = np.random.default_rng(11)
    base = raw.batch(malformed.first(target.ids), malformed.paged(target.ids)).SerializeToString()
    method = raw.method(target.session.channel, "/topkd.v1.SelectionService/SelectTopK")
    for round_ in range(200):
        data = bytearray(base)
        for place in rng.integers(0, len(data), 1 + round_ % 4):
            data[place] = int(rng.integers(0, 256))
        try:
            method(malformed_values.Bytes(bytes(data)), metadata=target.session.metadata, timeout=raw.TIMEOUT)
        except grpc.RpcError as error:
            got = refusal(error)
            assert got.code in (INVALID, "NOT_FOUND", "RESOURCE_EXHAUSTED"), (got, bytes(data).hex())
    target.memory[OUTPUTS_AT:] = SENTINEL


def test_the_server_has_not_grown(target: Target, cpu: Running) -> None:
    """The last of the module: memory, descriptors, regions, plans, sessions and workers are as before."""
    memory, descriptors, figures = target.before
    for case in CASES[::4]:
        target.call(case)
    target.serves()
    assert processes.memory_bytes(target.worker) - memory < GROWTH_BYTES
    processes.wait_until(lambda: processes.descriptors(target.worker) <= descriptors, 5, "no descriptor is left over")
    names = ("topkd_regions", "topkd_region_bytes", "topkd_plans", "topkd_sessions", "topkd_workers")
    scrape.wait_for(cpu.metrics_port, {name: scrape.total(figures, name) for name in names})
    for code in ("INTERNAL", "UNKNOWN"):
        assert scrape.total(scrape.scrape(cpu.metrics_port), "topkd_requests_total", code=code) == 0
