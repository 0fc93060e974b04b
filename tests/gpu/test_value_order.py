"""Order "value" on a GPU: every family that sorts, rows that its sorts treat differently, every count of interest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conformance.backends import Backend, InProcess
from tests.gpu.agree import skip_unless_served
from tests.value_rows import VALUE_KINDS, cases_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

WIDTHS = {
    "small": (2100, 4096),
    "radix_register": (2049, 4096, 16_384),
    "radix_wide": (9000,),
    "split_merge": (70_000,),
    "cluster": (6000, 20_000, 40_000),
}
MOST_DIFFERENT = 32_000
"""Scores of 16 bits that can all be different: about so many are in a row of that kind."""


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend("cuda", InProcess("cuda"))


@pytest.mark.parametrize("kind", VALUE_KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kernel", WIDTHS)
def test_kinds_and_counts(backend: Backend, kernel: str, dtype: str, kind: str) -> None:
    skip_unless_served(kernel)
    done = 0
    for width in WIDTHS[kernel]:
        if kind == "different" and dtype == "bfloat16":
            width = min(width, MOST_DIFFERENT)
        for case in cases_of(kind, dtype, width):
            try:
                backend.run(replace(case, kernel=kernel))
            except ValueError as error:
                assert "cannot serve" in str(error)  # noqa: PT017
            else:
                done += 1
    assert done >= 7 * len(WIDTHS[kernel])
