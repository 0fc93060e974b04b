"""The f32 kernel of the `cluster` family, run by the interpreter in `ptx`, against the oracle; no GPU is needed.

Clusters are run as in `test_cluster_emulated`, and the same errors are found.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.case import Case
from tests.conformance.backends import Backend
from tests.conformance.directed import directed, ints, rows_of
from tests.kernels import ptx
from tests.kernels import test_cluster_emulated as emulated
from tests.patterns import crowded
from topkd.kernels._cute_compile import compile_kernel, installed

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]


class Cta(emulated.Cta):
    """A CTA of a cluster; f32 operations that make keys have the hardware's one NaN."""

    def _arithmetic(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        if [name, *suffixes] in (["add", "rn", "f32"], ["min", "f32"]):
            sources = [self._source(one, np.float32) for one in operands[1:]]
            store = self._store(operands[0])
            function: Any = np.add if name == "add" else np.fmin

            def step(mask: ptx.Array) -> None:
                with np.errstate(all="ignore"):
                    result = function(*(source() for source in sources)).astype(np.float32)
                store(np.where(np.isnan(result), np.uint32(0x7FFFFFFF), result.view(np.uint32)), mask)

            return step
        if suffixes[-1] == "f32" and name == "max":
            return ptx.Cta._arithmetic(self, name, suffixes, operands)
        return super()._arithmetic(name, suffixes, operands)


class Emulated(emulated.Emulated):
    """`select_topk` by the interpreted kernel, on CPU tensors."""

    cta = Cta

    def _kernel(self, largest: bool, _: Any, *rest: Any) -> tuple[ptx.Kernel, int]:
        kind = (largest, "float32", *rest)
        if kind not in self.kernels:
            from topkd.kernels.cluster32_kernel import ClusterSelect32

            folder = self.folder / "-".join(map(str, kind))
            folder.mkdir(parents=True)
            options = f"--keep-ptx --dump-dir {folder}"
            compile_kernel("cluster32_kernel", "ClusterSelect32", (self.cluster, *kind), "sm_90a", options)
            (file,) = folder.glob("*.ptx")
            self.kernels[kind] = emulated.parse(file.read_text()), ClusterSelect32(self.cluster, *kind).shared_bytes
        return self.kernels[kind]


@pytest.fixture(scope="session")
def backends(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Backend]:
    folder = tmp_path_factory.mktemp("ptx32")
    return {
        (cluster, path): Backend("emulated", Emulated(folder / f"{cluster}-{path}", cluster, path))
        for cluster in (1, 2, 4, 8, 16)
        for path in (0, 1)
    }


def served(case: Case) -> bool:
    """Whether the family serves a case, by its options."""
    plain = case.group == 1 and not case.pin_newest and not case.drop_neg_inf
    return plain and case.dtype == "float32" and case.k <= (2048 if case.order == "value" else 4096)


CASES = {name: case for name, case in directed().items() if served(case) and case.rows * case.width <= 3000}


@pytest.mark.parametrize("name", CASES)
def test_directed(backends: dict[tuple[int, int], Backend], name: str) -> None:
    backends[1 + (len(name) % 2), 0].run(CASES[name])


KINDS = ("near-one", "one-bin", "high-bits", "ascending", "plateau", "equal", "specials", "any-bits", "nan", "zeros")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cluster", "path"), [(1, 0), (2, 0), (2, 1)])
def test_kinds(backends: dict[tuple[int, int], Backend], kind: str, cluster: int, path: int) -> None:
    backends[cluster, path].run(rows_of(kind, 1, 9001, 300, dtype="float32"))


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
def test_wide_row(backends: dict[tuple[int, int], Backend], cluster: int) -> None:
    width = 8192 * cluster + 77 if cluster < 8 else 33333
    backends[cluster, 0].run(rows_of("near-one", 1, width, 2048, dtype="float32"))


@pytest.mark.parametrize("k", [1, 700, 4096])
def test_smallest_and_windows(backends: dict[tuple[int, int], Backend], k: int) -> None:
    lengths = ints(12000, 11993, 5, -1)
    starts = ints(0, 3, 7, 12001)
    options: dict[str, Any] = {"lengths": lengths, "row_starts": starts, "values": True, "largest": k == 1}
    backends[2, 0].run(rows_of("any-bits", 4, 12000, k, dtype="float32", **options))


@pytest.mark.parametrize("crowd", [2, 31, 32, 33, 64, 100, 127, 128, 129, 300])
@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("order", ["any", "index"])
def test_crowds_at_the_kth_place(backends: dict[tuple[int, int], Backend], crowd: int, equal: bool, order: str) -> None:
    """Of up to 128 keys the k-th best is found one by one, more are counted again."""
    cluster, k = 1 + crowd % 2, 400 if crowd < 200 else 900
    storage = crowded("float32", crowd, 9001, k, crowd, equal=equal)
    ties = "any" if order == "any" else "lowest"
    case = Case(storage=storage, dtype="float32", rows=1, width=9001, k=k, order=order, ties=ties, values=True)
    backends[cluster, 0].run(case)


ORDERS = [("lowest", 0), ("highest", 0), ("any", 0), ("lowest", 1), ("highest", 1)]


@pytest.mark.parametrize("kind", ["near-one", "levels", "plateau", "equal", "ascending", "specials"])
@pytest.mark.parametrize(("ties", "path"), ORDERS)
def test_order(backends: dict[tuple[int, int], Backend], kind: str, ties: str, path: int) -> None:
    cluster = 1 if kind in ("levels", "ascending") else 2
    backends[cluster, path].run(rows_of(kind, 2, 7003, 300, dtype="float32", order="index", ties=ties, values=True))


@pytest.mark.parametrize("kind", ["near-one", "levels", "any-bits", "equal"])
@pytest.mark.parametrize(("ties", "path"), ORDERS)
def test_by_value(backends: dict[tuple[int, int], Backend], kind: str, ties: str, path: int) -> None:
    cluster = 1 if kind in ("levels", "any-bits") else 2
    lengths = ints(7003, 300)
    case = rows_of(kind, 2, 7003, 600, dtype="float32", lengths=lengths, order="value", ties=ties, values=True)
    backends[cluster, path].run(case)
