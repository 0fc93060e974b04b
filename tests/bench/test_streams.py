from __future__ import annotations

import pytest

from tests.bench import streams

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]


def test_a_selection_on_a_stream_costs_little_more_than_a_bare_message() -> None:
    measured = streams.measure("cpu")
    print(f"\n{measured}")
    assert measured.plan_ratio <= streams.GOAL


@pytest.mark.gpu
def test_a_selection_on_a_stream_costs_little_more_than_a_bare_message_on_cuda() -> None:
    measured = streams.measure("cuda")
    print(f"\n{measured}")
    assert measured.plan_ratio <= streams.GOAL
