"""`Plan.lane`: calls without a request, from the host; ends and losses."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

import topkd


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


def call_for_a_while(lane: topkd.Lane) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        lane.call_host()
