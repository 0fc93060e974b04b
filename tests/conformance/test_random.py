"""Random requests, every option with every other; `--hypothesis-profile=thorough` draws many more."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.case import Case, MergeCase
from tests.conformance.backends import Backend
from tests.strategies import cases, merge_cases

pytestmark = pytest.mark.timeout(3600)  # the thorough profile takes minutes


@given(case=cases())
def test_random(backend: Backend, case: Case) -> None:
    backend.run(case)


@given(case=merge_cases())
def test_random_merge(backend: Backend, case: MergeCase) -> None:
    backend.merge(case)
