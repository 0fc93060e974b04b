"""SelectionService of a worker: what it answers, and what it refuses."""

import threading
import time
from typing import Any

import grpc
import numpy as np
import pytest

from tests.server.harness import Memory, ServerProcess, Session, details, inline, read, refused, select
from topkd.v1 import selection_pb2, tensor_pb2

F32 = tensor_pb2.D_TYPE_FLOAT32
VALUE, LOWEST = selection_pb2.ORDER_VALUE, selection_pb2.TIES_LOWEST
RNG = np.random.default_rng(20261130)


def expected(scores: np.ndarray[Any, Any], k: int) -> np.ndarray[Any, Any]:
    return np.argsort(-scores, axis=1, kind="stable")[:, :k]


def test_inline_tensors(session: Session) -> None:
    scores = RNG.standard_normal((3, 100), dtype=np.float32)
    reply = session.select(select(input=inline(scores), k=7, order=VALUE, values=True))
    result = reply.results[0]
    assert np.array_equal(read(result.indices), expected(scores, 7))
    assert np.array_equal(read(result.values), -np.sort(-scores, axis=1)[:, :7])
    assert result.kernel
    assert result.device_time_ns > 0
    assert reply.queue_time_ns > 0


def test_regions_are_read_and_written_in_place(session: Session) -> None:
    memory = session.register(1 << 16)
    scores, out = memory.array("float32", (4, 1000)), memory.array("int32", (4, 16), 32768)
    lengths = memory.array("int32", (4,), 65000)
    fields: dict[str, Any] = {
        "input": memory.tensor("float32", (4, 1000)),
        "lengths": memory.tensor("int32", (4,), 65000),
        "out_indices": memory.tensor("int32", (4, 16), 32768),
    }
    for length in (1000, 500, 1000):  # the second and third call find the prepared batch
        scores[:] = RNG.standard_normal((4, 1000), dtype=np.float32)
        lengths[:], out[:] = length, 77
        reply = session.select(select(k=16, order=VALUE, **fields))
        assert np.array_equal(out, expected(scores[:, :length], 16))
        assert not reply.results[0].HasField("indices")
    session.stub.ReleaseRegion(
        selection_pb2.ReleaseRegionRequest(region_id=memory.region_id), metadata=session.metadata
    )
    with refused(grpc.StatusCode.NOT_FOUND) as found:
        session.select(select(k=16, order=VALUE, **fields))
    assert found[:2] == ["REGION_NOT_FOUND", "items[0].selection.input"]


def test_batch_of_two_plan_keys(session: Session) -> None:
    parts = [RNG.standard_normal((rows, width), dtype=np.float32) for rows, width in ((2, 50), (1, 60), (3, 50))]
    reply = session.select(*(select(input=inline(part), k=5, order=VALUE) for part in parts))
    for part, result in zip(parts, reply.results, strict=True):
        assert np.array_equal(read(result.indices), expected(part, 5))
    assert reply.results[0].device_time_ns == reply.results[2].device_time_ns


def test_merge(session: Session) -> None:
    values = np.array([[1, 5, 3, 4]], dtype=np.float32)
    indices = np.array([[10, 20, 30, -1]], dtype=np.int32)
    item = selection_pb2.Merge(values=inline(values), indices=inline(indices), k=2, order=VALUE)
    reply = session.stub.MergeTopK(selection_pb2.MergeTopKRequest(items=[item]), metadata=session.metadata)
    assert read(reply.results[0].indices).tolist() == [[20, 30]]
    assert read(reply.results[0].values).tolist() == [[5, 3]]
    item.k = 0
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as found:
        session.stub.MergeTopK(selection_pb2.MergeTopKRequest(items=[item]), metadata=session.metadata)
    assert found[:2] == ["ARGUMENT_VALUE", "items[0].k"]


def test_plans(session: Session) -> None:
    memory = session.register(8192)
    scores, out = memory.array("float32", (1, 1000)), memory.array("int32", (1, 8), 4096)
    request = selection_pb2.CreatePlanRequest(
        selection=selection_pb2.Selection(
            input=memory.tensor("float32", (1, 1000)),
            k=8,
            order=VALUE,
            out_indices=memory.tensor("int32", (1, 8), 4096),
        )
    )
    plan = session.stub.CreatePlan(request, metadata=session.metadata)
    assert plan.kernel
    assert plan.reason
    call = selection_pb2.BatchItem(plan=selection_pb2.PlanCall(plan_id=plan.plan_id))
    for _ in range(2):
        scores[:] = RNG.standard_normal((1, 1000), dtype=np.float32)
        session.select(call)
        assert np.array_equal(out, expected(scores, 8))
    for _ in range(2):
        session.stub.CreatePlan(request, metadata=session.metadata)
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED) as found:
        session.stub.CreatePlan(request, metadata=session.metadata)
    assert found[0] == "PLAN_LIMIT"
    session.stub.ReleasePlan(selection_pb2.ReleasePlanRequest(plan_id=plan.plan_id), metadata=session.metadata)
    with refused(grpc.StatusCode.NOT_FOUND) as found:
        session.select(call)
    assert found[:2] == ["PLAN_NOT_FOUND", "items[0].plan.plan_id"]


def test_foreign_ids_are_not_found(front: ServerProcess, session: Session) -> None:
    memory = session.register(4096)
    with Session(front) as other, refused(grpc.StatusCode.NOT_FOUND) as found:
        other.select(select(input=memory.tensor("float32", (1, 10)), k=1))
    assert found[3] == f"no region {memory.region_id:#018x}"


def bad_items(memory: Memory) -> list[tuple[str, selection_pb2.BatchItem]]:
    row = memory.tensor("float32", (1, 64))
    region = tensor_pb2.RegionSlice(region_id=memory.region_id)
    wide = np.zeros((1, 8), dtype=np.float32)
    return [
        ("k", select(input=row, k=0)),
        ("k", select(input=row, k=-(1 << 63))),
        ("input", select(k=1)),
        ("input", select(input=memory.tensor("float32", (1 << 62, 1 << 62)), k=1)),
        ("input", select(input=memory.tensor("float32", ((1 << 63) - 1, 1), strides=[0, 1]), k=1)),
        ("input", select(input=memory.tensor("float32", (2, 64), strides=[-64, 1]), k=1)),
        ("input", select(input=memory.tensor("float32", (1, 64), offset=(1 << 64) - 4), k=1)),
        ("input", select(input=memory.tensor("int32", (1, 64)), k=1)),
        ("input", select(input=tensor_pb2.Tensor(dtype=F32, shape=[1, 64]), k=1)),
        ("input", select(input=tensor_pb2.Tensor(dtype=99, shape=[1, 64], region=region), k=1)),  # type: ignore[arg-type]
        ("input", select(input=tensor_pb2.Tensor(dtype=F32, shape=[1, 9], inline_data=wide.tobytes()), k=1)),
        ("order", select(input=row, k=1, order=9)),
        ("ties", select(input=row, k=1, ties=-1)),
        ("index_dtype", select(input=row, k=1, index_dtype=tensor_pb2.D_TYPE_FLOAT16)),
        ("kernel", select(input=row, k=1, kernel="warp_drive")),
        ("lengths", select(input=row, k=1, lengths=memory.tensor("int32", (2,)))),
        ("group", select(input=row, k=1, group=3)),
        ("out_indices", select(input=row, k=1, out_indices=inline(np.zeros((1, 1), dtype=np.int32)))),
        ("out_indices", select(input=row, k=1, out_indices=memory.tensor("int32", (1, 1)))),
        ("out_indices", select(input=memory.tensor("float32", (4, 64)), k=1 << 20)),
        ("out_values", select(input=row, k=1, out_values=memory.tensor("float32", (1, 1), 2048))),
    ]


def test_bad_arguments_name_the_place_and_touch_nothing(session: Session) -> None:
    memory = session.register(4096)
    good = select(
        input=memory.tensor("float32", (1, 64)), k=2, out_indices=memory.tensor("int32", (1, 2), 3000 // 4 * 4)
    )
    out = memory.array("int32", (1, 2), 3000)
    out[:] = 77
    for argument, item in bad_items(memory):
        with refused(grpc.StatusCode.INVALID_ARGUMENT) as found:
            session.select(good, item)
        assert found[1].startswith(f"items[1].selection.{argument}"), (found, item)
        assert found[0] in ("ARGUMENT_VALUE", "ARGUMENT_TYPE")
        assert (out == 77).all()
    session.select(good)
    assert (out != 77).all()


def test_outputs_of_a_batch_must_not_overlap(session: Session) -> None:
    memory = session.register(4096)
    row, out = memory.tensor("float32", (1, 64)), memory.tensor("int32", (1, 4), 2048)
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as found:
        session.select(select(input=row, k=4, out_indices=out), select(input=row, k=4, out_indices=out))
    assert found[1] == "items[1].selection.out_indices"


def test_batches_are_bounded(session: Session) -> None:
    item = select(input=inline(np.zeros((1, 4), dtype=np.float32)), k=1)
    for count in (0, 9):
        with refused(grpc.StatusCode.INVALID_ARGUMENT) as found:
            session.select(*([item] * count))
        assert found[1] == "items"
    with refused(grpc.StatusCode.INVALID_ARGUMENT) as found:
        session.select(selection_pb2.BatchItem())
    assert found[1] == "items[0]"


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05\x00", b"\x0a\xff\xff\xff\xff\x0f"])
def test_messages_that_are_none(session: Session, message: bytes) -> None:
    call: Any = session.channel.unary_unary("/topkd.v1.SelectionService/SelectTopK")
    with refused(grpc.StatusCode.INVALID_ARGUMENT):
        call(message, metadata=session.metadata)


@pytest.mark.parametrize("token", [None, "", "wrong", "x" * 4000])
@pytest.mark.parametrize("method", ["SelectTopK", "ReleaseRegion", "NoSuchMethod"])
def test_tokens_are_checked_first(session: Session, token: str | None, method: str) -> None:
    call: Any = session.channel.unary_unary(f"/topkd.v1.SelectionService/{method}")
    metadata = () if token is None else (("topkd-token", token),)
    with refused(grpc.StatusCode.UNAUTHENTICATED) as found:
        call(b"\xff", metadata=metadata)
    assert found[0] == "TOKEN_INVALID"


def test_too_large_a_message_is_refused(session: Session) -> None:
    with refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
        session.select(select(input=inline(np.zeros((1, 1 << 19), dtype=np.float32)), k=1))


def test_cuda_memory_is_refused_here(session: Session) -> None:
    request = selection_pb2.RegisterRegionRequest(cuda_ipc=selection_pb2.CudaIpcMemory(handle=b"\0" * 64, size=1))
    with refused(grpc.StatusCode.FAILED_PRECONDITION) as found:
        session.stub.RegisterRegion(request, metadata=session.metadata)
    assert found[0] == "DEVICE_MISMATCH"


def slow_item(memory: Memory) -> selection_pb2.BatchItem:
    """Some tens of milliseconds of work: overlapping rows of one small region."""
    scores = memory.tensor("float32", (20_000, 2000), strides=[0, 1])
    return select(input=scores, k=64, order=VALUE, ties=LOWEST, out_indices=memory.tensor("int32", (20_000, 64), 8192))


def test_queue_is_bounded_and_deadlines_are_kept(session: Session) -> None:
    memory = session.register(8192 + 20_000 * 64 * 4)
    small = select(input=inline(np.zeros((1, 4), dtype=np.float32)), k=1)
    running = session.stub.SelectTopK.future(
        selection_pb2.SelectTopKRequest(items=[slow_item(memory)]), metadata=session.metadata
    )
    time.sleep(0.03)
    started = time.monotonic()
    with refused(grpc.StatusCode.DEADLINE_EXCEEDED):
        session.select(small, timeout=0.02)
    assert time.monotonic() - started < 0.5
    reasons: list[str] = []

    def ask() -> None:
        try:
            session.select(small)
            reasons.append("ok")
        except grpc.RpcError as error:
            reason, _, retry = details(error)
            reasons.append(reason if retry > 0 else f"{reason} without a delay")

    threads = [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reasons) == 12
    assert set(reasons) == {"ok", "QUEUE_FULL"}
    assert len(running.result().results) == 1


def test_a_cancelled_request_is_not_run(session: Session) -> None:
    memory = session.register(8192 + 20_000 * 64 * 4)
    out = memory.array("int32", (1, 4), 4096)
    out[:] = 77
    request = selection_pb2.SelectTopKRequest(items=[slow_item(memory)])
    running = session.stub.SelectTopK.future(request, metadata=session.metadata)
    time.sleep(0.03)
    item = select(input=memory.tensor("float32", (1, 64)), k=4, out_indices=memory.tensor("int32", (1, 4), 4096))
    waiting = session.stub.SelectTopK.future(selection_pb2.SelectTopKRequest(items=[item]), metadata=session.metadata)
    time.sleep(0.01)
    waiting.cancel()
    running.result()
    session.select(select(input=inline(np.zeros((1, 4), dtype=np.float32)), k=1))
    assert (out == 77).all()
