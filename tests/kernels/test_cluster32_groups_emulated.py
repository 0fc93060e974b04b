"""Groups of f32 scores in the `cluster` family, run by the interpreter in `ptx`, against the oracle; no GPU is needed.

Clusters are run as in `test_cluster_emulated`, and the same errors are found.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.case import Case
from tests.cluster_sample import sampled_groups
from tests.conformance.backends import Backend
from tests.conformance.directed import directed, ints, rows_of
from tests.kernels import test_cluster32_emulated as emulated32
from tests.kernels import test_cluster_emulated as emulated
from topkd.kernels import validate_select
from topkd.kernels._cute_compile import compile_kernel, installed
from topkd.kernels.cluster import unmet_options

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]


class Emulated(emulated.Emulated):
    """`select_topk` by the interpreted kernel, on CPU tensors."""

    cta = emulated32.Cta

    def _kernel(self, largest: bool, _: Any, *rest: Any) -> tuple[Any, int]:
        kind = (largest, "float32", *rest)
        if kind not in self.kernels:
            from topkd.kernels.cluster32_kernel import ClusterSelect32Groups

            folder = self.folder / "-".join(map(str, kind))
            folder.mkdir(parents=True)
            options = f"--keep-ptx --dump-dir {folder}"
            compile_kernel("cluster32_kernel", "ClusterSelect32Groups", (self.cluster, *kind), "sm_90a", options)
            (file,) = folder.glob("*.ptx")
            shared = ClusterSelect32Groups(self.cluster, *kind).shared_bytes
            self.kernels[kind] = emulated.parse(file.read_text()), shared
        return self.kernels[kind]


@pytest.fixture(scope="session")
def backends(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Backend]:
    folder = tmp_path_factory.mktemp("ptx32groups")
    return {
        (cluster, path): Backend("emulated", Emulated(folder / f"{cluster}-{path}", cluster, path))
        for cluster in (1, 2, 4, 8, 16)
        for path in (0, 1)
    }


def as_floats(case: Case) -> Case:
    """The same case of bf16 scores as float32."""
    return replace(case, storage=case.storage.astype(np.uint32) << np.uint32(16), dtype="float32")


def served() -> dict[str, Case]:
    """The contract's cases of groups that the kernel serves, as float32, those that fit an interpreter."""
    found = {}
    for name, case in directed().items():
        if case.dtype == "bfloat16" and case.group >= 4 and case.rows * case.width <= 8000:
            try:
                scores = torch.zeros(case.rows, case.width)
                options = {"order": case.order, "ties": case.ties, "group": case.group, "pooled": case.pooled}
                unmet = unmet_options(validate_select(scores, case.k, **options))
            except ValueError:
                continue
            if unmet is None:
                found[name] = as_floats(case)
    return found


CASES = served()


@pytest.mark.parametrize("name", CASES)
def test_directed(backends: dict[tuple[int, int], Backend], name: str) -> None:
    backends[1 + (len(name) % 2), 0].run(CASES[name])


KINDS = ("near-one", "one-bin", "ascending", "plateau", "equal", "specials", "few-finite", "nan", "zeros")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cluster", "path"), [(1, 0), (2, 1)])
def test_kinds(backends: dict[tuple[int, int], Backend], kind: str, cluster: int, path: int) -> None:
    case = rows_of(kind, 1, 9001, 300, dtype="float32", group=8, values=True)
    backends[cluster, path].run(case)
    backends[cluster, path].run(replace(case, pin_newest=True, group=4, k=301, drop_neg_inf=False))


@pytest.mark.parametrize("group", [4, 8, 16, 32, 64, 128])
def test_sampled_rows_of_every_group(backends: dict[tuple[int, int], Backend], group: int) -> None:
    """More groups than are listed without a sample, and a row that begins and ends anywhere."""
    width = 4100 * group + 5
    backends[2, 0].run(rows_of("near-one", 1, width, 600, dtype="float32", group=group, row_starts=ints(3)))


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
def test_every_cluster(backends: dict[tuple[int, int], Backend], cluster: int) -> None:
    case = rows_of("near-one", 1, 40_000, 1500, dtype="float32", group=8, pin_newest=True)
    backends[cluster, 0].run(case)
    backends[cluster, 0].run(replace(case, order="index", ties="highest"))


@pytest.mark.parametrize("group", [4, 16])
def test_ends_of_groups_and_windows(backends: dict[tuple[int, int], Backend], group: int) -> None:
    """Lengths around the ends of groups and around k groups, at every alignment."""
    k = 9
    lengths = [n * group + d for n in (0, 1, k - 1, k, k + 1, 40) for d in (-1, 0, 1)]
    starts = [i % 5 for i in range(len(lengths))]
    options: dict[str, Any] = {"lengths": ints(*lengths), "row_starts": ints(*starts), "group": group, "values": True}
    for order in ("any", "index", "value"):
        case = rows_of("few-finite", len(lengths), 50 * group, k, dtype="float32", order=order, **options)
        backends[2, 0].run(replace(case, pin_newest=order != "index"))
        backends[1, 0].run(replace(case, pin_newest=order == "index"))


ORDERS = [("index", "lowest", 0), ("index", "highest", 1), ("value", "lowest", 1), ("value", "highest", 0)]


@pytest.mark.parametrize("kind", ["near-one", "levels", "equal", "few-finite", "specials"])
@pytest.mark.parametrize(("order", "ties", "path"), ORDERS)
def test_order(backends: dict[tuple[int, int], Backend], kind: str, order: str, ties: str, path: int) -> None:
    cluster = 1 if kind in ("levels", "specials") else 2
    options: dict[str, Any] = {"group": 8, "pin_newest": path == 0, "lengths": ints(7003, 2404)}
    backends[cluster, path].run(
        rows_of(kind, 2, 7003, 300, dtype="float32", order=order, ties=ties, values=True, **options)
    )


@pytest.mark.parametrize("large", [True, False])
def test_sample_that_misjudges(tmp_path_factory: pytest.TempPathFactory, large: bool) -> None:
    """All groups that are sampled are above the others, or below: too few pass, or the list is full; then again."""
    scores = np.random.default_rng(0).standard_normal(65_536).astype(np.float32)
    places = (sampled_groups(8192, pairs=True, attempt=0)[:, None] * 8 + np.arange(8)).ravel()
    scores[places] = (np.abs(scores[places]) + 10) * (1 if large else -1)
    kernel = Emulated(tmp_path_factory.mktemp("ptx"), 8, 0)
    Backend("emulated", kernel).run(
        Case(storage=scores.view(np.uint32), dtype="float32", rows=1, width=65_536, k=400, group=8)
    )
    assert not large or kernel.read > 2 * scores.nbytes
