"""The kernel bench without a GPU: cells, exactness, the budget, the record, what is said of it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.bench import kernel_host as host
from tests.bench import kernel_readme, kernel_table
from tests.bench import kernel_records as records
from tests.bench import kernel_seed as seed
from tests.bench import kernels as bench
from tests.bench.kernel_cells import FORMS, GRIDS, KINDS, LARGEST_BYTES, NAMED, Cell, Grid, cells
from tests.bench.kernel_peers import Contender, Prepared, contenders
from tests.bench.kernel_records import Row
from tests.bench.kernel_timing import CALLS, COLD_BYTES, Call, copies

CELL = Cell("bf16", "normal", 4, 4096, 512)


class FakeTimer:
    """Makes every call once and says what it was told."""

    def __init__(self, us: float = 5.0) -> None:
        self.us = us
        self.seen: list[tuple[int, int, float]] = []

    def cold(self, calls: Sequence[Call], touched: int, seconds: float) -> float:
        for call in calls:
            call()
        self.seen.append((len(calls), touched, seconds))
        return self.us

    def warm(self, call: Call, seconds: float, expected: float) -> float:
        call()
        assert expected == self.us
        return self.us - 1


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few inputs of little memory."""
    monkeypatch.setattr("tests.bench.kernel_timing.COLD_BYTES", 100_000)
    monkeypatch.setattr(bench, "COLD_BYTES", 100_000)


def run(cell: Cell, many: Sequence[Contender], timer: FakeTimer, seconds: float = 60.0) -> tuple[list[Row], list[str]]:
    said: list[str] = []
    made = bench.Bench(bench.Inputs([cell], "cpu"), (timer, timer), time.monotonic() + seconds, said.append)
    return list(made.run([(cell, many)])), said


def test_the_grid_is_that_of_the_issue() -> None:
    bf16 = list(cells("issue", ["bf16"]))
    assert len(bf16) == 5 * 7 * 2
    assert len(list(cells("issue", ["bf16", "f32"]))) == 140
    assert all(cell.input_bytes <= LARGEST_BYTES for cell in cells("table", ["bf16", "f16", "f32"]))
    assert {(c.dtype, c.rows, c.width, c.k) for c in cells("named", ["bf16", "f32"])} == set(NAMED)
    assert set(NAMED) <= {(c.dtype, c.rows, c.width, c.k) for c in cells("issue", ["bf16", "f32"])}


def test_cells_of_more_than_the_bound_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(GRIDS, "issue", Grid((1, 600), (1 << 20,), (512,)))
    assert [cell.rows for cell in cells("issue", ["bf16", "f32"])] == [1, 1]


def test_a_cell_knows_its_floor() -> None:
    cell = Cell("bf16", "normal", 256, 131072, 2048)
    assert cell.input_bytes == 64 << 20
    assert cell.bytes == (64 << 20) + 256 * 2048 * 4
    assert cell.floor_us == pytest.approx(16.1, abs=0.1)


def test_cold_inputs_reach_past_the_cache() -> None:
    assert copies(1) == CALLS
    assert copies(25_000) == 4
    assert copies(25_001) == 4
    assert copies(900_000) == 1
    assert COLD_BYTES > 120_000_000


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_every_kind_of_rows_is_selected_from_exactly(kind: str, dtype: str) -> None:
    cell = CELL._replace(data=kind, dtype=dtype)
    rows, said = run(cell, list(contenders(["torch"], ["none"], ("", "index", "value", "group8"))), FakeTimer())
    assert [(row.impl, row.exact) for row in rows] == [
        (f"torch_family{form}", True) for form in ("", "+index", "+value", "+group8")
    ]
    assert said == []


def test_real_rows_reach_any_width() -> None:
    scores = torch.empty(3, 140_000, dtype=torch.bfloat16)
    KINDS["real"](scores)
    assert len(scores[0].unique()) > 1000
    assert not torch.equal(scores[0], scores[2])


def test_each_call_of_a_cold_measurement_reads_other_memory() -> None:
    timer = FakeTimer()
    seen: list[int] = []

    def prepare(inputs: Sequence[torch.Tensor], k: int, indices: torch.Tensor) -> Prepared:
        def call(scores: torch.Tensor) -> None:
            seen.append(scores.data_ptr())
            indices.copy_(scores.float().topk(k).indices)

        return Prepared([lambda scores=scores: call(scores) for scores in inputs])  # type: ignore[misc]

    rows, _ = run(CELL, [Contender("mine", prepare)], timer)
    assert rows == [Row("mine", CELL, 4.0, 5.0, True)]
    [(calls, touched, _)] = timer.seen
    assert touched >= 100_000
    assert len(set(seen)) == touched // CELL.input_bytes
    assert calls % len(set(seen)) == 0
    assert seen[calls] == seen[0], "the input whose answer is known comes last"


def wrong(inputs: Sequence[torch.Tensor], k: int, indices: torch.Tensor) -> Prepared:
    return Prepared([lambda: indices.copy_(torch.arange(k).expand_as(indices)) for _ in inputs])


def lazy(inputs: Sequence[torch.Tensor], k: int, indices: torch.Tensor) -> Prepared:
    return Prepared([lambda: None for _ in inputs])


def twice(inputs: Sequence[torch.Tensor], k: int, indices: torch.Tensor) -> Prepared:
    def call() -> None:
        indices.copy_(inputs[0].float().topk(k).indices)
        indices[:, -1] = indices[:, 0]

    return Prepared([call for _ in inputs])


@pytest.mark.parametrize("prepare", [wrong, lazy, twice])
@pytest.mark.parametrize("form", ["", "+index", "+value", "+group8"])
def test_a_wrong_answer_is_seen(prepare: object, form: str) -> None:
    rows, _ = run(CELL._replace(k=200), [Contender(f"mine{form}", prepare)], FakeTimer())  # type: ignore[arg-type]
    assert [row.exact for row in rows] == [False]


def test_an_answer_in_the_wrong_order_is_seen() -> None:
    def prepare(inputs: Sequence[torch.Tensor], k: int, indices: torch.Tensor) -> Prepared:
        return Prepared([lambda: indices.copy_(inputs[0].float().topk(k).indices.flip(1)) for _ in inputs])

    for form, exact in (("", True), ("+value", False), ("+index", False)):
        rows, _ = run(CELL, [Contender(f"mine{form}", prepare)], FakeTimer())
        assert [row.exact for row in rows] == [exact]


def test_what_cannot_be_measured_is_said_once_and_failures_do_not_end_the_rest() -> None:
    def unable(*_: object) -> str:
        return "it serves nothing"

    def broken(*_: object) -> Prepared:
        raise RuntimeError("out of luck")

    said: list[str] = []
    made = bench.Bench(bench.Inputs([CELL], "cpu"), (FakeTimer(), FakeTimer()), time.monotonic() + 60, said.append)
    many = [Contender("unable", unable), Contender("broken", broken), *contenders(["torch"], ["none"])]
    rows = list(made.run([(CELL, many), (CELL, many)]))
    assert [row.impl for row in rows] == ["torch_family", "torch_family"]
    assert [line.split()[0:2] for line in said].count(["not", "measured:"]) == 1
    assert made.failures == 2
    assert any("out of luck" in line for line in said)
    assert len(list(made.run([(CELL, many)]))) == 1
    assert (made.failures, made.left_out) == (2, 1), "what failed twice is left out"


def test_after_a_cuda_error_nothing_else_is_tried() -> None:
    def fault(*_: object) -> Prepared:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    made = bench.Bench(bench.Inputs([CELL], "cpu"), (FakeTimer(), FakeTimer()), time.monotonic() + 60, print)
    many = [Contender("fault", fault), *contenders(["torch"], ["none"])]
    assert list(made.run([(CELL, many)] * 2)) == []
    assert made.lost
    assert made.left_out == 3


def test_the_budget_is_kept() -> None:
    timer = FakeTimer()
    made = bench.Bench(bench.Inputs([CELL], "cpu"), (timer, timer), time.monotonic() - 1, print)
    assert list(made.run([(CELL, list(contenders(["torch"], ["none"])))] * 5)) == []
    assert made.left_out == 5
    run(CELL, list(contenders(["torch"], ["none"])), timer, seconds=0.1)
    assert timer.seen[-1][2] <= 0.1 / 2


def test_large_cells_get_more_of_the_budget_and_warm_times_can_be_left_out() -> None:
    timer = FakeTimer()
    large = CELL._replace(rows=64, width=1 << 20)
    made = bench.Bench(bench.Inputs([CELL, large], "cpu"), (timer, timer), time.monotonic() + 20, print, warm=False)
    many = list(contenders(["torch"], ["none"]))
    small_row, large_row = made.run([(CELL, many), (large, [Contender("idle", lazy)])])
    assert math.isnan(small_row.warm)
    assert large_row.cold == timer.us
    assert timer.seen[0][2] <= timer.seen[1][2]


def test_a_family_that_registers_itself_is_measured() -> None:
    names = [one.name for one in contenders(["all"], ["all"])]
    assert names[0] == "auto"
    assert {"cluster", "radix_wide"} <= set(names)
    assert "torch" in names, "torch.topk"
    assert [one.name for one in contenders(["cluster", "radix_wide"], ["none"], ("pdl",))] == ["cluster+pdl"]
    assert [one.name for one in contenders(["none"], ["torch"])][:1] == ["torch"]
    assert [one.form for one in contenders(["torch"], ["none"], tuple(FORMS))] == ["", "index", "value", "group8"]
    with pytest.raises(SystemExit, match="cudnn"):
        list(contenders([], ["tensorflow"]))
    with pytest.raises(SystemExit, match="radix_wide"):
        list(contenders(["fastest"], ["none"]))


def test_the_command_line_plans_the_work() -> None:
    options = bench.parser().parse_args(["--kinds", "--forms", "--families", "all", "--dtypes", "bf16"])
    work = bench.plan(options)
    assert len([cell for cell, _ in work if cell.data == "normal"]) == 70 + 9
    assert {cell.data for cell, _ in work} == set(KINDS)
    assert {one.name for cell, many in work if cell.data != "normal" for one in many} == {"auto"}
    assert {"cluster+pdl", "auto+index", "radix_wide+group8"} <= {one.name for _, many in work[-9:] for one in many}
    quick = bench.plan(bench.parser().parse_args(["--grid", "crossing", "--forms", "--families", "cluster"]))
    assert {cell.width for cell, many in quick if many[0].name == "cluster+index"} == {4096, 8192, 16384, 18432, 32768}
    assert {cell.width for cell, many in quick if many[0].name == "cluster+value"} == {4096, 8192, 9216}
    with pytest.raises(SystemExit, match="bf16"):
        bench.plan(bench.parser().parse_args(["--dtypes", "f64"]))


# --------------------------------------------------------------------------------------------------------- the record


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [Row("auto", CELL, 4.125, 5.0, True), Row("cluster+index", CELL._replace(dtype="f32"), 1.5, 2.25, False)]
    with records.Writer(tmp_path / "h200" / "kernels.csv") as writer:
        for row in rows:
            writer.write(row)
    text = (tmp_path / "h200" / "kernels.csv").read_text()
    assert text.splitlines()[0] == "impl,dtype,data,rows,width,k,us_l2_warm,us_l2_cold,exact"
    assert text.splitlines()[1] == "auto,bf16,normal,4,4096,512,4.125,5.000,1"
    assert records.read(tmp_path / "h200" / "kernels.csv") == rows


def test_a_record_can_be_added_to() -> None:
    before = [Row("auto", CELL, 1, 2, True), Row("cluster", CELL, 1, 2, True)]
    rows = [Row("auto", CELL, 3, 4, False), Row("auto", CELL._replace(rows=9), 5, 6, True)]
    assert records.together(before, rows) == [rows[0], before[1], rows[1]]
    assert records.together([], rows) == rows


def test_what_calls_and_choices_cost_the_host_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "ROUNDS", 2)
    monkeypatch.setattr(host, "CALLS", 2)
    calls, choices = host.costs("cpu")
    assert re.fullmatch(
        r"host, us a call of .* by torch: select_topk [\d.]+, a checked request [\d.]+, a plan [\d.]+", calls
    )
    assert choices.startswith("host: a choice ")


def test_the_committed_envelope_is_the_best_of_each_cell() -> None:
    rows = records.read(bench.RESULTS / "h200" / "public_envelope.csv")
    best = records.envelope(rows)
    assert all(row.exact for row in rows if row.impl != "torch")
    assert {cell for dtype in ("bf16", "f32") for cell in cells("issue", [dtype])} <= best.keys()
    assert best[Cell("bf16", "normal", 1, 131072, 2048)].cold == pytest.approx(11.8, abs=0.05)
    assert len(records.of(rows, "torch")) == 140
    assert [row for row in rows if row.impl != "torch"] == [row for row in best.values() if row.impl != "torch"]


def test_an_inexact_or_unmeasured_row_is_no_envelope() -> None:
    rows = [Row("a", CELL, 1, 1, False), Row("b", CELL, 9, math.nan, True), Row("c", CELL, 3, 3, True)]
    assert records.envelope(rows)[CELL].impl == "c"


def record() -> list[Row]:
    fast, wide = CELL, CELL._replace(rows=256, width=1048576, k=2048)
    rows = [Row("auto", fast, 3, 4, True), Row("auto", wide, 170, 190, True)]
    rows += [Row("cluster", fast, 3, 4.1, True), Row("cluster", wide, 170, 190, True)]
    rows += [Row("radix_wide", fast, 3, 3.8, True), Row("radix_wide", wide, 170, 480, True)]
    rows += [Row("torch", fast, 20, 22, True), Row("torch", wide, 1000, 1100, True)]
    rows += [Row("auto", wide._replace(data="equal"), 200, 285, True), Row("auto+index", fast, 4, 6, True)]
    return [*rows, Row("auto", fast._replace(dtype="f32"), 3, 2, True)]


def test_the_summary_says_what_the_issue_asks_for() -> None:
    rows = record()
    fast, wide = rows[0].cell, rows[1].cell
    reference = [Row("ds", fast, 5, 5, True), Row("ds", wide, 100, 100, True), Row("fi", fast, 1, 1, False)]
    reference += [Row("torch", fast, 20, 20, True), Row("torch", wide, 1000, 1000, True)]
    text = "\n".join(records.summary(rows, reference))
    mean = math.sqrt(0.8 * 1.9)
    assert "11 measurements, 0 of them inexact" in text
    assert "torch.topk now / recorded: 1.100 (2 cells)" in text
    assert (
        f"bf16: auto / envelope {mean:.3f}, goal 0.8, {mean / 1.1:.3f} if the envelope is scaled; 2 cells, 1 above"
        in text
    )
    assert "1.90  bf16 normal 256 x 1,048,576 k=2048: 190.00 us, ds 100.00, floor 125" in text
    assert "190.00 (170.00)  goal 165: MISSED" in text
    assert "auto / best family: 1.026, worst 1.05 (bf16 normal 4 x 4,096 k=512)" in text
    assert "equal / normal: 1.50, worst 1.50 (bf16 equal 256 x 1,048,576 k=2048), bound 1.25: MISSED" in text
    assert "auto+index / auto: 1.50" in text
    assert "16 bits / f32: worst 2.00 (bf16 normal 4 x 4,096 k=512), 1 of 1 slower" in text


def test_the_summary_needs_no_reference_and_names_what_is_inexact() -> None:
    rows = [Row("auto", CELL, 3, 4, False)]
    text = "\n".join(records.summary(rows, []))
    assert "INEXACT auto bf16 normal 4 x 4,096 k=512" in text
    assert "envelope" not in text


def test_the_readmes_table_is_made_from_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [cell for cell in cells("issue", ["bf16", "f32"]) if cell.rows in kernel_readme.ROWS]
    rows = [Row("auto", cell, 3, 4.04, True) for cell in shapes] + [Row("cluster", cell, 1, 1, True) for cell in shapes]
    reference = [Row("best", cell, 5, 5.05, True) for cell in shapes] + [
        Row("bad", cell, 1, 1, False) for cell in shapes
    ]
    for name, made in (("kernels", rows), ("envelope", reference)):
        with records.Writer(tmp_path / f"{name}.csv") as writer:
            writer.write_all(made)
    kernel_readme.main([str(tmp_path / "kernels.csv"), "--reference", str(tmp_path / "envelope.csv")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| bf16, 512 | 1 |" + " **4.0** 5.0 |" * 5
    assert lines[17].startswith("| f32, 2,048 | 256 | **4.0**")
    assert lines[-2:] == [f"{d}: 0.800 of the best public kernel over 56 cells, 0 above 1.25" for d in ("bf16", "f32")]


# ----------------------------------------------------------------------------------------------------- the seed's table


def test_the_seeds_calls() -> None:
    calls = seed.calls()
    assert [call.context for call in calls if call.kind == "prompt"] == list(seed.PROMPTS)
    assert {call.capacity for call in calls} == {262144, 524288}
    options = seed.Call("prompt", 256, 262144, 4096).options("cpu")
    assert options["lengths"].tolist() == list(range(3841, 4097))
    assert options["max_length"] == 4096
    assert "max_length" not in seed.Call("decode", 4, 262144, 2100).options("cpu")


def test_the_seeds_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.bench.kernel_timing.COLD_BYTES", 1)
    timer = FakeTimer()
    small = [seed.Call("prompt", 8, 8192, 3000), seed.Call("decode", 2, 8192, 2050)]
    lines = [line for call in small for line in seed.measure(call, ["auto", "torch"], (timer, timer), 0.1, "cpu")]
    assert [(line.impl, line.exact) for line in lines] == [("auto", True), ("torch", True)] * 2
    seed.write(tmp_path / "seed_table.csv", lines)
    assert (tmp_path / "seed_table.csv").read_text().splitlines()[1] == "auto,prompt,8,8192,3000,5.000,1"
    assert "within 1.05" in seed.table(lines, ["auto", "torch"])[-1]
    slow = [lines[0]._replace(us=8.0), lines[1]]
    assert "auto is 1.60 of the best family: prompt 3,000 cells" in seed.table(slow, ["auto", "torch"])[-1]
    assert "WRONG" in seed.table([lines[0]._replace(exact=False)], ["auto"])[1]


def test_without_a_gpu_the_command_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="GPU"):
        bench.main([])


# -------------------------------------------------------------------------------------------------- the chooser's table


def test_the_choosers_table_is_made_from_records(tmp_path: Path) -> None:
    rows = [row for row in record() if row.cell.data == "normal"]
    rows += [Row("radix_wide+index", CELL, 4, 4.5, True), Row("cluster+index", CELL, 4, 4.0, False)]
    rows += [Row("radix_wide+pdl", CELL, 1, 1, True), Row("gone", CELL, 1, 1, True)]
    with records.Writer(tmp_path / "kernels.csv") as writer:
        for row in rows:
            writer.write(row)
    with records.Writer(tmp_path / "later.csv") as writer:
        writer.write(Row("radix_wide", CELL, 3, 5.5, True))
    table = tmp_path / "measured.csv"
    table.write_text(
        "device,capability,form,dtype,k,rows,bound,us\na100,8.0,any,f32,1,2,3,radix_wide=9\nh200,9.0,any,f32,1,2,3,cluster=1\n"
    )
    files = [str(tmp_path / name) for name in ("kernels.csv", "later.csv")]
    kernel_table.main([*files, "--table", str(table)])
    assert table.read_text().splitlines() == [
        "device,capability,form,dtype,k,rows,bound,us",
        "a100,8.0,any,f32,1,2,3,radix_wide=9",
        "h200,9.0,any,bf16,512,4,4096,cluster=4.1 radix_wide=5.5",
        "h200,9.0,any,bf16,2048,256,1048576,cluster=190 radix_wide=480",
        "h200,9.0,index,bf16,512,4,4096,radix_wide=4.5",
    ]
