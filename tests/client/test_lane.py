"""`Plan.lane`: calls without a request, from the host; ends and losses."""

from __future__ import annotations

import gc
import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import topkd
from tests.conftest import Server
from topkd._reaper import Reaper


@pytest.fixture
def scores(client: topkd.Client) -> Any:
    made = client.empty((2, 8), "float32")
    made[:] = np.arange(16).reshape(2, 8)
    return made


def test_a_lane_calls_its_plan(client: topkd.Client, scores: Any) -> None:
    with client.plan(scores, 2, order="value", values=True) as plan, plan.lane() as lane:
        assert (lane.mode, lane.broken, lane.closed) == ("polled", False, False)
        assert lane.reason
        for turn in range(50):
            scores[0] = np.roll(np.arange(8), turn)
            result = lane.call_host()
            best = (7 + turn) % 8
            assert result.indices[0].tolist() == [best, (best - 1) % 8]
            assert result.values[0].tolist() == [7.0, 6.0]
        assert result.kernel == plan.kernel
        lane.check()


def test_without_a_gpu_no_kernel_waits(client: topkd.Client, scores: Any) -> None:
    with client.plan(scores, 1) as plan:
        with plan.lane() as lane:
            assert lane.waits_by == "operations"
        with pytest.raises(topkd.RegionError, match=r"no kernel can wait for the lane's calls: .*GPU"):
            plan.lane(waits_by="kernel")
        wrong: Any = "magic"
        with pytest.raises(topkd.ArgumentValueError, match="waits_by is 'magic'"):
            client.lane(plan, waits_by=wrong)


def test_a_call_from_the_host_waits_for_all_that_the_last_answer_stores(client: topkd.Client, scores: Any) -> None:
    """After calls by kernels, which do not wait for the done word. Here their words are stored in their place."""
    with client.plan(scores, 1) as plan, plan.lane() as lane:
        lane.call_host()
        words, line = lane._words, lane.line
        assert lane._last_done() == 1
        words._cells[2 * line * 8 + 2] = 41  # the ticket of such a call
        assert lane._last_done() == 42
        assert lane._over(lane._last_done()), "an answer of a polled lane is no echo"
        words.set_slow(line, 0)
        for done, over in ((0, False), (1, False), (41, False), (42, True)):
            words.set_done(line, done)
            assert lane._over(lane._last_done()) is over
        words.set_slow(line, 1)


def test_a_lane_of_several_plans(client: topkd.Client, scores: Any) -> None:
    with (
        client.plan(scores, 1) as most,
        client.plan(scores, 1, largest=False) as least,
        client.lane(most, least) as lane,
    ):
        for _ in range(5):
            assert lane.call_host(least).indices.tolist() == [[0], [0]]
            assert lane.call_host(most).indices.tolist() == [[7], [7]]
            assert lane.call_host().indices.tolist() == [[7], [7]]
        with client.plan(scores, 1) as other, pytest.raises(topkd.ArgumentValueError, match="lane"):
            lane.call_host(other)


def test_a_call_on_a_stream_needs_cuda_tensors(client: topkd.Client, scores: Any) -> None:
    with client.plan(scores, 1) as plan, plan.lane() as lane, pytest.raises(topkd.RegionError, match="call_host"):
        lane()


def test_a_closed_lane_takes_no_calls_and_its_place_is_free_again(client: topkd.Client, scores: Any) -> None:
    most = client.info().limits.max_lanes
    with client.plan(scores, 1) as plan:
        for _ in range(most + 2):
            lane = plan.lane()
            lane.close()
            lane.close()
            with pytest.raises(topkd.ClientClosedError):
                lane.call_host()
        for _ in range(most + 2):
            plan.lane()  # dropped at once
            gc.collect()


def test_lanes_that_are_still_to_be_given_back_are_waited_for(client: topkd.Client, scores: Any) -> None:
    most = client.info().limits.max_lanes
    with client.plan(scores, 1) as plan:
        lanes = [plan.lane() for _ in range(most)]
        with pytest.raises(topkd.ResourceExhaustedError) as caught:
            plan.lane()
        assert caught.value.reason == "LANE_LIMIT"
        book = client._core.session.lanes  # type: ignore[union-attr]
        assert book is not None
        client._core.reaper.run(lambda: time.sleep(0.5))  # holds up what comes behind it
        lanes[3].close()
        started = time.monotonic()
        with plan.lane() as lane:
            assert time.monotonic() - started > 0.3
            assert lane.line == lanes[3].line
            assert lane.call_host().indices.tolist() == [[7], [7]]
        for one in lanes:
            one.close()


def test_a_plan_that_is_gone_is_told(client: topkd.Client, scores: Any) -> None:
    plan = client.plan(scores, 1)
    with plan.lane() as lane:
        lane.call_host()
        plan.close()
        with pytest.raises(topkd.NotFoundError):
            call_for_a_while(lane)
        with pytest.raises(topkd.ClientClosedError):
            plan.lane()


def test_threads_share_a_lane(client: topkd.Client, scores: Any) -> None:
    wrong: list[object] = []
    with (
        client.plan(scores, 1) as most,
        client.plan(scores, 1, largest=False) as least,
        client.lane(most, least) as lane,
    ):

        def work(plan: topkd.Plan, want: int) -> None:
            for _ in range(50):
                lane.call_host(plan)
                if plan._state.output.indices.tolist() != [[want], [want]]:
                    wrong.append(want)

        threads = [threading.Thread(target=work, args=pair) for pair in ((most, 7), (least, 0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert wrong == []


@pytest.mark.parametrize("wrong", [None, 5, "plan", [], topkd.Selection(np.zeros((1, 1), np.float32), 1)])
def test_a_lane_is_over_plans(client: topkd.Client, scores: Any, wrong: Any) -> None:
    with client.plan(scores, 1) as plan, pytest.raises(topkd.ArgumentTypeError, match=r"plans\[1\]") as caught:
        client.lane(plan, wrong)
    assert caught.value.argument == "plans"
    with pytest.raises(topkd.ArgumentValueError, match="a plan"):
        client.lane()


def test_a_plan_of_another_client_is_told_at_once(client: topkd.Client, server: Server, scores: Any) -> None:
    with topkd.Client(server.socket_dir) as other, client.plan(scores, 1) as plan:
        started = time.monotonic()
        with pytest.raises(topkd.ArgumentValueError, match=r"plans\[0\] is a plan of another client"):
            other.lane(plan)
        assert time.monotonic() - started < 1.0


def test_more_plans_than_there_can_be_are_refused(client: topkd.Client, scores: Any) -> None:
    most = client.info().limits.max_plans
    with client.plan(scores, 1) as plan:
        client.lane(*[plan] * most).close()
        with pytest.raises(topkd.ArgumentValueError, match="max_plans") as caught:
            client.lane(*[plan] * (most + 1))
    assert caught.value.argument == "plan_ids"


def test_a_lane_that_is_closed_during_a_call_answers_it(
    client: topkd.Client, scores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.plan(scores, 1) as plan:
        lane = plan.lane(timeout=5.0)
        store = lane._words.set_ready

        def close_first(line: int, value: int) -> None:
            lane.close()  # as another thread may
            time.sleep(0.3)
            store(line, value)

        monkeypatch.setattr(lane._words, "set_ready", close_first)
        assert lane.call_host().indices.tolist() == [[7], [7]]
        with pytest.raises(topkd.ClientClosedError):
            lane.call_host()


def test_a_call_after_one_that_was_interrupted_waits_for_its_own_end(
    client: topkd.Client, scores: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        client.plan(scores, 1) as plan,
        client.plan(long_scores(client), K) as long,
        client.lane(plan, long) as lane,
    ):

        def interrupt(*_: object) -> None:
            while lane._words.ready(lane.line):  # the worker takes it
                time.sleep(0)
            raise KeyboardInterrupt

        outputs = plan._state.output.indices
        for _ in range(3):
            outputs[:] = -1
            with monkeypatch.context() as patch:
                patch.setattr(lane._words, "wait", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    lane.call_host(long)
            assert lane.call_host(plan).indices.tolist() == [[7], [7]]


def test_a_lane_whose_last_call_does_not_end_keeps_its_outputs() -> None:
    held, seen = object(), threading.Event()

    class Session:
        lost, close_lane = False, None
        unreleased: ClassVar[list[object]] = []

        def call(self, method: object, request: object, timeout: float) -> None:
            assert timeout > 3600  # a halted worker that goes on later is still told
            raise topkd.DeadlineExceededError("the lane's last call is not over")

    class Book:
        guard = SimpleNamespace(forget=lambda line: None)
        end_close = staticmethod(seen.set)

    class Owner:
        pass

    session: Any = Session()
    owner: Any = Owner()
    reaper = Reaper(owner)
    reaper.start()
    busy = [True, True]
    reaper.close_lane(session, 16, Book(), busy=lambda: bool(busy and busy.pop()), events=(), held=held)  # type: ignore[arg-type]
    assert seen.wait(10)
    reaper.stop()
    assert busy == []
    assert session.unreleased == [held]


K = 8


def long_scores(client: topkd.Client) -> Any:
    """Rows whose selection takes longer than a thread looks for its answer."""
    made = client.empty((64, 100_000), "float32")
    made[:] = np.arange(100_000)
    return made


def call_for_a_while(lane: topkd.Lane) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lane.call_host()
