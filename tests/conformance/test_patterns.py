"""Every bit pattern of the 16-bit dtypes in one row, from both ends, with every order and tie rule."""

from __future__ import annotations

import pytest

from tests.case import Case
from tests.conformance.backends import Backend
from tests.conformance.directed import shuffled

# k ends inside the NaNs, just past the infinity, with one of the two zeros, past everything but a few, past everything
NAN = {"bfloat16": 254, "float16": 2046}
FINITE = {"bfloat16": 32639, "float16": 31743}  # of one sign, without zero


def counts(dtype: str, largest: bool) -> dict[str, int]:
    """Interesting k of a row that holds every pattern once."""
    before = NAN[dtype] if largest else 0
    return {
        "one": 1,
        "first-class": NAN[dtype] // 2,
        "past-infinity": before + 2,
        "one-of-two-zeros": before + 1 + FINITE[dtype] + 1,
        "all-but-some": 65536 - 100,
        "all": 65536,
        "more": 65600,
    }


SIDES = [(dtype, largest) for dtype in NAN for largest in (True, False)]
ENDS = [
    pytest.param(dtype, largest, k, id=f"{dtype}-{'largest' if largest else 'smallest'}-{name}")
    for dtype, largest in SIDES
    for name, k in counts(dtype, largest).items()
]


@pytest.mark.parametrize("ties", ["any", "lowest", "highest"])
@pytest.mark.parametrize("order", ["any", "index", "value"])
@pytest.mark.parametrize(("dtype", "largest", "k"), ENDS)
def test_every_pattern(backend: Backend, dtype: str, largest: bool, k: int, order: str, ties: str) -> None:
    case = Case(
        storage=shuffled(dtype),
        dtype=dtype,
        rows=1,
        width=65536,
        k=k,
        largest=largest,
        order=order,
        ties=ties,
        values=True,
    )
    backend.run(case)


@pytest.mark.parametrize("group", [2, 8, 128])
@pytest.mark.parametrize("dtype", sorted(NAN))
def test_every_pattern_in_groups(backend: Backend, dtype: str, group: int) -> None:
    for order in ("any", "index", "value"):
        case = Case(
            storage=shuffled(dtype), dtype=dtype, rows=1, width=65536, k=300, group=group, order=order, values=True
        )
        backend.run(case)
