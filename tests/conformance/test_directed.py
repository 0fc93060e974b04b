"""Every hand-made case on every backend, and on every kernel family that says that it serves it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.case import Case
from tests.conformance.backends import Backend, InProcess
from tests.conformance.directed import directed

CASES = directed()
NAMED = [pytest.param(case, id=name) for name, case in CASES.items()]


@pytest.mark.parametrize("case", NAMED)
def test_directed(backend: Backend, case: Case) -> None:
    backend.run(case)


@pytest.mark.parametrize("case", NAMED)
def test_every_family(backend: Backend, case: Case) -> None:
    """A family either serves a case like any other, or names the condition that it does not meet."""
    if not isinstance(backend.api, InProcess):
        backend.run(replace(case, kernel="torch"))  # the family that serves everything
        return
    from topkd import kernels

    families = list(kernels.kernels())
    assert "torch" in families
    assert "auto" not in families
    served = []
    for family in families:
        forced = replace(case, kernel=family)
        unmet = backend.unmet(forced)
        if unmet is None:
            backend.run(forced)
            served.append(family)
        else:
            assert unmet.strip(), f"{family} gives no reason"
            with pytest.raises(ValueError, match=family):
                backend.run(forced)
    assert "torch" in served
