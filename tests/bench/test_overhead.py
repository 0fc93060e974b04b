from __future__ import annotations

import pytest

from tests.bench import overhead

pytestmark = [pytest.mark.bench, pytest.mark.timeout(300)]


def test_a_selection_costs_little_more_than_a_bare_call() -> None:
    measured = overhead.measure("cpu")
    print(f"\n{measured}")
    assert measured.ratio <= overhead.GOAL


@pytest.mark.gpu
def test_a_selection_costs_little_more_than_a_bare_call_on_cuda() -> None:
    measured = overhead.measure("cuda")
    print(f"\n{measured}")
    assert measured.ratio <= overhead.GOAL
