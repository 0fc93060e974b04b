"""The choice of a family: the table and what lies between its shapes, rules, the environment, memory, cost, reasons."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from topkd import kernels
from topkd.kernels import _chooser, _cute_compile, _dispatch, _env, _measured
from topkd.kernels._chooser import Chooser, decide, facts_of
from topkd.kernels._devices import KNOWN, DeviceKind, kind_name, kind_named
from topkd.kernels._explain import explain
from topkd.kernels._family import Family, Job
from topkd.kernels._measured import COLUMNS, Table

H200 = DeviceKind("h200", (9, 0))


class Fake:
    """A family that serves what it is told to."""

    capturable = True

    def __init__(self, name: str, refuses: str = "") -> None:
        self.name = name
        self.refuses = refuses
        self.asked = 0

    def unmet(self, request: kernels.SelectRequest) -> str | None:
        self.asked += 1
        if self.refuses and (self.refuses == "all" or request.order == self.refuses):
            return f"{self.name} does not serve {self.refuses}"
        return None

    def run(self, jobs: Sequence[Job]) -> None:
        raise NotImplementedError


def unmet(family: Family, request: kernels.SelectRequest) -> str | None:
    return family.unmet(request)


def request(
    rows: int, width: int, k: int, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> kernels.SelectRequest:
    return kernels.validate_select(torch.empty(width, dtype=dtype).expand(rows, width), k, **options)


def line(k: int, rows: int, bound: int, us: str, form: str = "any", device: str = "h200") -> dict[str, str]:
    return dict(zip(COLUMNS, (device, "9.0", form, "bf16", str(k), str(rows), str(bound), us), strict=True))


LINES = [
    line(512, 1, 4096, "small=3 radix_register=4 radix_wide=8"),
    line(512, 1, 16384, "radix_register=5 small=6 radix_wide=9"),
    line(512, 1, 65536, "cluster=6 radix_wide=12"),
    line(512, 64, 4096, "small=4 radix_register=4.5 radix_wide=9"),
    line(512, 64, 16384, "radix_register=7 small=9 radix_wide=10"),
    line(512, 64, 65536, "radix_wide=14 cluster=15"),
    line(512, 1, 65536, "radix_wide=13 split_merge=14", form="index"),
]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Table:
    table = Table(LINES)
    monkeypatch.setattr(_chooser, "table", lambda: table)
    return table


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is set, and what was read is read anew."""
    for name in ("TOPKD_KERNEL", "TOPKD_DISPATCH"):
        monkeypatch.delenv(name, raising=False)
    for read in (_env.forced_kernel, _env.dispatch):
        read.cache_clear()
    yield
    for read in (_env.forced_kernel, _env.dispatch):
        read.cache_clear()


FAMILIES = [
    Fake(name) for name in ("cluster", "small", "radix_register", "split_merge", "radix_wide", "newcomer", "torch")
]


def choice(
    one: kernels.SelectRequest, families: Sequence[Family] = FAMILIES, device: DeviceKind = H200
) -> tuple[str, str, str]:
    decision = decide(families, one, facts_of(one, device), unmet)
    return decision.family, decision.source, decision.reason


# ------------------------------------------------------------------------------------------------------------ the table


@pytest.mark.usefixtures("measured")
def test_a_measured_shape_takes_the_fastest_and_says_by_how_much() -> None:
    name, source, reason = choice(request(1, 65536, 512))
    assert (name, source) == ("cluster", "measured")
    assert reason == "measured on h200: 6.00 us, radix_wide 2.00 times that (1 x 65,536, k = 512, bf16)"
    assert choice(request(64, 65536, 512))[0] == "radix_wide"


@pytest.mark.usefixtures("measured")
def test_the_active_bound_counts_and_not_the_capacity() -> None:
    assert choice(request(1, 65536, 512, max_length=4096))[0] == "small"
    assert choice(request(1, 65536, 512, max_length=70000))[0] == "cluster"
    pooled = request(1, 65536, 512, group=4, pooled=True, max_length=16384)
    assert facts_of(pooled, H200)[-2:] == (4096, 4096), "a pooled row is read a score a group"
    groups = request(1, 65536, 512, group=4, max_length=16384)
    assert facts_of(groups, H200)[-2:] == (16384, 4096), "groups are read member by member"
    assert facts_of(groups, H200).form == "group8"
    assert choice(pooled)[0] == "small"


@pytest.mark.usefixtures("measured")
def test_a_family_that_cannot_is_never_taken() -> None:
    families = [Fake("cluster", "all"), Fake("radix_wide"), Fake("torch")]
    name, _, reason = choice(request(1, 65536, 512), families)
    assert name == "radix_wide"
    assert "not cluster: cluster does not serve all" in reason
    assert choice(request(1, 65536, 512), [Fake("cluster", "all"), Fake("torch")])[:2] == ("torch", "only")


@pytest.mark.usefixtures("measured")
def test_forms_have_shapes_of_their_own_and_else_those_of_plain_output() -> None:
    assert choice(request(1, 65536, 512, order="index"))[0] == "radix_wide"
    assert choice(request(1, 65536, 512, ties="lowest"))[0] == "radix_wide"
    assert choice(request(1, 65536, 512, order="value"))[0] == "cluster"


@pytest.mark.usefixtures("measured")
def test_between_measured_shapes_ratios_are_interpolated() -> None:
    near_small, _, reason = choice(request(1, 5000, 512))
    assert near_small == "small"
    assert "nearest 1 x 4,096, k = 512" in reason
    assert choice(request(1, 14000, 512))[:2] == ("radix_register", "between")
    assert choice(request(8, 65536, 512))[0] == "cluster"
    assert choice(request(60, 65536, 512))[0] == "radix_wide"


@pytest.mark.usefixtures("measured")
def test_beyond_the_measured_shapes_the_outermost_counts() -> None:
    assert choice(request(500, 1 << 20, 600))[0] == "radix_wide"
    assert choice(request(1, 3, 1))[0] == "small"
    assert choice(request(1, 65536, 512, max_length=0))[0] == "small"
    assert choice(request(0, 4096, 512))[0] == "small"


def test_an_estimate_is_that_of_its_neighbours(measured: Table) -> None:
    cells = measured.cells(H200, "any", "bf16")
    assert cells is not None
    middle = cells.estimate(512, 1, 8192)
    assert not middle.measured
    assert list(middle.us) == ["small", "radix_register", "radix_wide"]
    best = (3 * 5) ** 0.5
    assert middle.us["small"] == pytest.approx(best * (6 / 5) ** 0.5)
    assert middle.us["radix_register"] == pytest.approx(best * (4 / 3) ** 0.5)
    scarce = cells.estimate(512, 1, 17000)
    assert "cluster" not in scarce.us, "measured at one far corner only"


def test_a_shape_without_corners_takes_the_nearest() -> None:
    table = Table([line(512, 1, 4096, "small=3"), line(64, 64, 65536, "radix_wide=9")])
    cells = table.cells(H200, "any", "bf16")
    assert cells is not None
    assert list(cells.estimate(512, 2, 65536).us) == ["small"]
    assert cells.estimate(64, 100, 70000).us == {"radix_wide": pytest.approx(9)}


def test_a_device_of_the_same_capability_takes_the_table_and_others_do_not(measured: Table) -> None:
    h100 = choice(request(1, 65536, 512), device=DeviceKind("h100", (9, 0)))
    assert h100[:2] == ("cluster", "measured")
    assert "measured on h200" in h100[2]
    assert measured.cells(DeviceKind("a100", (8, 0)), "any", "bf16") is None
    name, source, reason = choice(request(1, 65536, 512), device=DeviceKind("a100", (8, 0)))
    assert (name, source) == ("cluster", "rule")
    assert reason.startswith("by rule, not measured on a100: ")
    assert choice(request(1, 65536, 512, torch.float32))[1] == "rule", "no shape of that dtype"
    assert choice(request(1, 65536, 512, torch.float16))[:2] == ("cluster", "measured"), "costs what bf16 does"


def test_the_table_that_ships_is_whole() -> None:
    path = Path(str(_measured.__file__)).with_name("measured.csv")
    with path.open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert path.read_text().splitlines()[0].split(",") == list(COLUMNS)
    known = set(kernels.kernels()) - {"torch"}
    for one in lines:
        assert one["device"] in KNOWN
        times = [pair.split("=") for pair in one["us"].split()]
        assert times
        assert {name for name, _ in times} <= known
        assert [float(us) for _, us in times] == sorted(float(us) for _, us in times)
    keys = [tuple(one[column] for column in COLUMNS[:-1]) for one in lines]
    assert len(keys) == len(set(keys))


# ---------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("rows", "width", "able", "name"),
    [
        (1, 4607, "cluster small radix_register radix_wide", "small"),
        (1, 4608, "radix_register radix_wide small", "radix_register"),
        (9, 33792, "radix_register radix_wide split_merge", "radix_register"),
        (9, 65535, "radix_register radix_wide split_merge", "radix_wide"),
        (9, 65536, "radix_register radix_wide split_merge", "split_merge"),
        (9, 33793, "cluster radix_wide split_merge", "cluster"),
        (33, 65536, "radix_register radix_wide split_merge", "radix_wide"),
        (200, 100, "newcomer", "newcomer"),
    ],
)
def test_rules_where_nothing_is_measured(rows: int, width: int, able: str, name: str) -> None:
    families = [Fake(one) for one in (*able.split(), "torch")]
    assert choice(request(rows, width, 5), families, DeviceKind("a100", (8, 0)))[:2] == (name, "rule")


@pytest.mark.usefixtures("measured")
def test_times_of_one_family_alone_do_not_choose() -> None:
    families = [Fake("cluster"), Fake("radix_wide"), Fake("torch")]
    assert choice(request(1, 4096, 512), families)[:2] == ("cluster", "rule")
    assert choice(request(1, 4096, 512), families[1:])[:2] == ("radix_wide", "measured")


def test_a_family_that_registers_itself_is_chosen_before_the_last_resort(measured: Table) -> None:
    families = [Fake("newcomer"), Fake("torch")]
    assert choice(request(1, 65536, 512), families)[:2] == ("newcomer", "rule")
    assert measured is not None


# ------------------------------------------------------------------------------------------------------ the environment


@pytest.mark.usefixtures("measured")
def test_the_environment_forces_a_family_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPKD_KERNEL", "split_merge")
    assert choice(request(1, 65536, 512)) == ("split_merge", "environment", "TOPKD_KERNEL asks for it")
    families = [Fake("split_merge", "value"), Fake("radix_wide"), Fake("torch")]
    assert choice(request(1, 65536, 512, order="value"), families)[0] == "radix_wide"
    assert choice(request(1, 65536, 512, kernel="torch")) == ("torch", "named", "asked for by name")


def test_an_unknown_family_in_the_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPKD_KERNEL", "fastest")
    with pytest.raises(ValueError, match=r"TOPKD_KERNEL is 'fastest'.*radix_wide"):
        kernels.select_topk(torch.zeros(1, 3), 1)
    assert kernels.select_topk(torch.zeros(1, 3), 1, kernel="torch").indices.tolist() == [[0]]


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("bound", "name"), [(4607, "small"), (4608, "radix_register"), (33792, "radix_register"), (33793, "radix_wide")]
)
def test_the_seeds_dispatch_by_the_active_bound(monkeypatch: pytest.MonkeyPatch, bound: int, name: str) -> None:
    monkeypatch.setenv("TOPKD_DISPATCH", "active")
    one = request(1, 65536, 512, max_length=bound)
    assert choice(one)[:2] == (name, "environment")
    assert "TOPKD_DISPATCH=active" in choice(one)[2]
    assert choice(one, [Fake("cluster"), Fake("torch")])[0] == "cluster", "none of the seed's is there"


@pytest.mark.usefixtures("measured")
def test_dispatch_by_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPKD_DISPATCH", "capacity")
    assert choice(request(1, 65536, 512, max_length=4096))[0] == "cluster"
    monkeypatch.setenv("TOPKD_DISPATCH", "fast")
    _env.dispatch.cache_clear()
    with pytest.raises(ValueError, match="measured, active and capacity"):
        choice(request(1, 65536, 512))


# --------------------------------------------------------------------------------------------------------------- memory


def test_choices_are_remembered_until_a_family_loses_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    families = [Fake("radix_wide"), Fake("torch")]
    chooser = Chooser(families, unmet)
    first = request(3, 100, 5)
    assert chooser.choose(first)[0] is families[0]
    for _ in range(3):
        chooser.choose(request(3, 100, 5))
    assert families[0].asked == 1
    for other in (
        {"order": "index"},
        {"max_length": 7},
        {"values": True},
        {"largest": False},
        {"index_dtype": torch.int64},
    ):
        chooser.choose(request(3, 100, 5, **other))
    chooser.choose(request(3, 101, 5))
    chooser.choose(request(3, 100, 6))
    chooser.choose(request(3, 100, 5, torch.float32))
    chooser.choose(kernels.validate_select(torch.zeros(3, 100), 5, lengths=torch.ones(3, dtype=torch.int32)))
    assert families[0].asked == 10
    monkeypatch.setattr(_cute_compile, "_FAILURES", {"radix_wide": "gone", "other": "gone"})
    chooser.choose(first)
    assert families[0].asked == 11


def test_what_is_remembered_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_chooser, "REMEMBERED", 3)
    chooser = Chooser([Fake("torch")], unmet)
    for width in range(10, 20):
        assert chooser.choose(request(1, width, 2))[0].name == "torch"
        assert len(chooser._remembered) <= 3


def test_a_remembered_choice_costs_next_to_nothing() -> None:
    one = request(3, 100, 5)
    kernels.choose(one)

    def nanoseconds(function: Any, argument: Any) -> float:
        best = float("inf")
        for _ in range(20):
            started = time.perf_counter_ns()
            for _ in range(500):
                function(argument)
            best = min(best, (time.perf_counter_ns() - started) / 500)
        return best

    # Against what the check of the same call costs, since no test knows a machine's speed.
    whole = nanoseconds(lambda one: kernels.validate_select(one.input, 5), one)
    assert nanoseconds(_dispatch._choose, one) < whole / 4


# -------------------------------------------------------------------------------------------------------------- explain


def test_explain_of_a_kind_of_device_that_is_not_here() -> None:
    facts, decision = explain(16, 131072, 2048, device="h200")
    assert facts.device == H200
    assert decision.family != "torch"
    assert [verdict.family for verdict in decision.verdicts] == list(kernels.kernels())
    index = {verdict.family: verdict for verdict in explain(16, 131072, 2048, device="a100").decision.verdicts}
    assert "compute capability" in str(index["cluster"].unmet)
    assert index["radix_wide"].unmet is None
    assert explain(1, 9, 2, device="cpu").decision.family == "torch"


@pytest.mark.parametrize("group", [4, 8, 128])
@pytest.mark.parametrize("form", [{}, {"order": "index", "ties": "lowest", "pin_newest": True}])
def test_long_rows_of_float32_groups_are_for_clusters(group: int, form: dict[str, Any]) -> None:
    """What the table that ships measured of others keeps nothing from them."""
    for rows, width in ((1, 131_072), (256, 131_072), (64, 1_048_576)):
        options: dict[str, Any] = {"dtype": torch.float32, "group": group, "device": "h200", **form}
        assert explain(rows, width, 512, **options).decision.family == "cluster"


def test_explain_checks_like_a_call() -> None:
    with pytest.raises(kernels.ArgumentValueError, match="group"):
        explain(1, 9, 2, device="h200", group=3)
    with pytest.raises(kernels.ArgumentValueError, match="cannot serve"):
        explain(1, 9, 2, device="a100", kernel="cluster")
    with pytest.raises(ValueError, match="h200"):
        explain(1, 9, 2, device="abacus")
    assert explain(1, 9, 2, device="h200", kernel="radix_wide").decision.source == "named"


def test_pretending_ends() -> None:
    before = _cute_compile.installed()
    with _cute_compile.pretending((7, 5)):
        assert _cute_compile.installed()
        assert _cute_compile.capability(3) == (7, 5)
    assert _cute_compile.installed() == before


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 3060", "rtx-3060"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA H2000", "h2000"),
        ("Tesla T4", "tesla-t4"),
    ],
)
def test_kinds_are_named_by_their_products(product: str, name: str) -> None:
    assert kind_name(product) == name


def test_kinds_have_capabilities() -> None:
    assert kind_named("b200") == DeviceKind("b200", (10, 0))
    assert kind_named("cpu").capability == (0, 0)
