"""The `cluster` kernel's own PTX, run by the interpreter in `ptx`, against the oracle; no GPU is needed.

Clusters are run CTA by CTA in short turns. Beyond what `ptx` finds, an error is: data sent to a CTA before it is known
to have started or after it has ended, a wait that nobody ends, a CTA that ends while messages to it are under way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.case import Case
from tests.cluster_sample import sampled_elements
from tests.conformance.backends import Backend
from tests.conformance.directed import directed, ints, rows_of
from tests.kernels import ptx
from tests.kernels.emulated_memory import Placed
from topkd.kernels import TopKResult, validate_select
from topkd.kernels._cute_compile import compile_kernel, installed
from topkd.kernels._family import Job
from topkd.kernels.cluster import GROUPS32, KERNELS, kind_of, unmet_options

pytestmark = [
    pytest.mark.skipif(not installed(), reason="needs nvidia-cutlass-dsl"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

COMPARE: dict[str, Any] = {
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "leu": lambda x, y: ~(x > y),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}
"""Comparisons that hold where there is a NaN."""
FLOATS = {"min", "max", "mul", "add", "sub", "fma", "sqrt", "rcp", "neg"}
WAIT = re.compile(
    r"\{\s*\.reg \.pred\s+P1;\s*LAB_WAIT:\s*"
    r"mbarrier\.try_wait\.parity\.shared\.b64 P1, (\[[^\]]+\]), (\S+), \d+;.*?DONE:\s*\}",
    re.DOTALL,
)
TRY = re.compile(r"mbarrier\.try_wait\.parity\.acquire\.cta\.shared::cta\.b64\s+(\S+), (\[[^\]]+\]), (\S+);")
"""A try: here it does not give up, so that a wait that nobody ends is found; the clock stands."""


def parse(text: str) -> ptx.Kernel:
    """Parse a cluster's PTX: what waits for an mbarrier becomes one instruction."""
    text = WAIT.sub(r"mbarrierwait.b64 \1, \2;", text)
    return ptx.parse(TRY.sub(r"mbarrierwait.b64 \2, \3;\nsetp.eq.u32 \1, 0, 0;", text).replace("%globaltimer", "0"))


class Cta(ptx.Cta):
    """A CTA of a cluster."""

    peers: list[Cta]

    def begin(self, block: int) -> None:
        """Set up for a run as block (block, 0, 0)."""
        self._set_special(block)
        self.shared = ptx.SharedMemory(len(self.shared.bytes))
        self.counter = np.zeros(self.threads, np.int64)
        self.exited = np.zeros(self.threads, np.bool_)
        self.blocked = np.zeros(self.threads, np.bool_)
        self.waiting = np.zeros(self.threads, np.bool_)
        self.arrived = np.zeros(self.threads, np.bool_)
        self.met = False
        self.barriers: dict[int, list[int]] = {}  # address: [completed phases, pending arrivals, pending bytes]

    def turn(self, length: int) -> Iterator[int]:
        """Run, giving way after every `length` instructions; ends when all threads have returned."""
        issued = 0
        while not self.exited.all():
            ready = ~(self.exited | self.waiting)
            runnable = ready & ~self.blocked
            if not runnable.any():
                if ready.any() or not self.waiting.any():
                    raise ptx.PtxError("deadlock: lanes wait for others of their warp")
                self._release()
                continue
            at = int(self.counter[runnable].min())
            before = self.counter.copy()
            issued += self._run_block(at, ready & (self.counter == at))
            if issued > length or (before == self.counter).all():
                yield issued
                issued = 0
        for pending in self.barriers.values():
            if pending[2] < 0:
                raise ptx.PtxError("ends while messages to it are under way")

    def _release(self) -> None:
        """All threads are at the barrier of the CTA."""
        places = set(self.counter[self.waiting].tolist())
        if len(places) > 1 or (self.exited & ~self.waiting).any():
            raise ptx.PtxError("threads wait at different barriers")
        _, _, opcode, operands = self.kernel.lines[places.pop()]
        if "red" in opcode:
            votes = int(self._register(operands[2])[self.waiting].sum())
            self._store(operands[0])(np.full(self.threads, votes, np.uint32), self.waiting)
        self.counter[self.waiting] += 1
        self.waiting[:] = False
        self.shared.epoch += 1

    def _run_block(self, at: int, mask: ptx.Array) -> int:
        issued = 0
        while True:
            issued += 1
            if self.kernel.lines[at][2].split(".")[0] in (*ptx._JUMPS, "barrier", "mbarrierwait"):
                self.counter[mask] = at
                self.steps[at](mask)
                return issued
            self.steps[at](mask)
            at += 1
            if at in self.starts:
                self.counter[mask] = at
                return issued

    # --------------------------------------------------------------------------------------------------- operations

    def _arithmetic(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        if suffixes[-1] == "f32" and name in FLOATS:
            sources = [self._source(one, np.float32) for one in operands[1:]]
            store = self._store(operands[0])
            function: Any = {
                "mul": np.multiply,
                "add": np.add,
                "sub": np.subtract,
                "neg": np.negative,
                "fma": lambda a, b, c: a * b + c,
                "sqrt": np.sqrt,
                "min": np.minimum,
                "max": np.maximum,
                "rcp": lambda a: np.float32(1) / a,
            }[name]

            def step(mask: ptx.Array) -> None:
                with np.errstate(all="ignore"):
                    store(function(*(source() for source in sources)).astype(np.float32), mask)

            return step
        if name == "brev":
            word, store = self._source(operands[1], np.uint32), self._store(operands[0])
            return lambda mask: store(reversed_bits(word()), mask)
        if name == "mul" and suffixes == ["hi", "u32"]:
            a, b = (self._source(one, np.uint32) for one in operands[1:])
            store = self._store(operands[0])
            return lambda mask: store((a().astype(np.uint64) * b() >> np.uint64(32)).astype(np.uint32), mask)
        if suffixes in (["bf16x2"], ["f16x2"]) and name == "min":
            return self._least(operands, {"bf16x2": 0x7F80, "f16x2": 0x7C00}[suffixes[0]])
        if suffixes == ["relu", "s32"]:
            sources = [self._source(one, np.int32) for one in operands[1:]]
            store = self._store(operands[0])
            least_or_most: Any = {"min": np.minimum, "max": np.maximum}[name]
            return lambda mask: store(np.maximum(least_or_most(sources[0](), sources[1]()), 0), mask)
        return super()._arithmetic(name, suffixes, operands)

    def _least(self, operands: tuple[str, ...], infinity: int) -> ptx.Step:
        """The minimum of two 16-bit halves; of a number and NaN the number."""
        sources = [self._source(one, np.uint32) for one in operands[1:]]
        store = self._store(operands[0])

        def step(mask: ptx.Array) -> None:
            a, b = (np.ascontiguousarray(source()).view(np.uint16) for source in sources)
            nan_a, nan_b = (x & 0x7FFF > infinity for x in (a, b))
            order_a, order_b = (np.where(x & 0x8000, -(x & 0x7FFF).astype(int), x.astype(int)) for x in (a, b))
            least = np.where(nan_b | (~nan_a & (order_a <= order_b)), a, b)
            store(np.where(nan_a & nan_b, 0x7FFF, least).astype(np.uint16).view(np.uint32), mask)

        return step

    def _op_cvt(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        if suffixes == ["rzi", "s32", "f32"]:
            real = self._source(operands[1], np.float32)
            store = self._store(operands[0])

            def step(mask: ptx.Array) -> None:
                with np.errstate(all="ignore"):
                    store(np.clip(np.nan_to_num(real()), -(2.0**31), 2147483520).astype(np.int32), mask)

            return step
        return super()._op_cvt(name, suffixes, operands)

    def _op_setp(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        if suffixes[-1] in ("bf16x2", "f16x2"):
            lower, upper = (self._store(one) for one in operands[0].split("|"))
            both = self._halves(suffixes[0], suffixes[-1], operands[1:3])

            def step(mask: ptx.Array) -> None:
                result = both()
                lower(result[0], mask)
                upper(result[1], mask)

            return step
        if suffixes[-1] != "f32":
            return super()._op_setp(name, suffixes, operands)
        a, b = (self._source(one, np.float32) for one in operands[1:3])
        function = COMPARE.get(suffixes[0]) or ptx._COMPARE[suffixes[0]]
        store = self._store(operands[0])
        return lambda mask: store(function(a(), b()), mask)

    def _halves(
        self, comparison: str, kind: str, operands: tuple[str, ...]
    ) -> Callable[[], tuple[ptx.Array, ptx.Array]]:
        """Compares the lower and the upper halves of two words as numbers."""
        sources = [self._source(one, np.uint32) for one in operands]
        function = COMPARE.get(comparison) or ptx._COMPARE[comparison]

        def numbers(words: ptx.Array, upper: int) -> ptx.Array:
            half = (words >> np.uint32(16 * upper)) & np.uint32(0xFFFF)
            if kind == "f16x2":
                return half.astype(np.uint16).view(np.float16).astype(np.float32)
            return (half << np.uint32(16)).view(np.float32)

        def compare() -> tuple[ptx.Array, ptx.Array]:
            a, b = (np.ascontiguousarray(source()) for source in sources)
            with np.errstate(all="ignore"):
                return function(numbers(a, 0), numbers(b, 0)), function(numbers(a, 1), numbers(b, 1))

        return compare

    def _op_set(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        if suffixes[1] != "u32":
            raise ptx.PtxError(f"unknown comparison {suffixes}")
        store, both = self._store(operands[0]), self._halves(suffixes[0], suffixes[-1], operands[1:3])

        def step(mask: ptx.Array) -> None:
            lower, upper = (half.astype(np.uint32) * np.uint32(0xFFFF) for half in both())
            store(lower | upper << np.uint32(16), mask)

        return step

    def _op_cp(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        if suffixes == ["async", "wait_all"]:
            return lambda mask: None
        if suffixes != ["async", "cg", "shared", "global"] or operands[2] != "16":
            raise ptx.PtxError(f"unknown copy {suffixes}")
        target, _base = self._address(operands[0])
        source, _base = self._address(operands[1])

        def step(mask: ptx.Array) -> None:
            if mask.any():
                to, warps = self.shared.places(target()[mask], 16), self.warp[mask]
                self.shared.note(to, warps, "write")
                places = self.memory.places(source()[mask], 16, self.memory.readable, "copy")
                self.shared.bytes[to] = self.memory.bytes[places]

        return step

    def _op_red(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        if suffixes != ["shared", "or", "b32"]:
            return super()._op_red(name, suffixes, operands)
        address, _base = self._address(operands[0])
        value = self._source(operands[1], np.uint32)

        def step(mask: ptx.Array) -> None:
            if mask.any():
                places = self.shared.places(address()[mask], 4)
                self.shared.note(places, self.warp[mask], "atomic")
                np.bitwise_or.at(self.shared.bytes.view(np.uint32), places[:, 0] // 4, value()[mask])

        return step

    _op_fence = ptx.Cta._op_griddepcontrol

    def _op_barrier(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        def red(mask: ptx.Array) -> None:
            self.waiting[mask] = True

        def arrive(mask: ptx.Array) -> None:
            self.arrived[mask] = True
            self.counter[mask] += 1

        def wait(mask: ptx.Array) -> None:
            if all(peer.arrived.all() for peer in self.peers):
                self.met = True
                self.counter[mask] += 1

        if suffixes[:2] == ["cta", "red"]:
            return red
        return arrive if suffixes[1] == "arrive" else wait

    def _op_mapa(self, _: str, __: list[str], operands: tuple[str, ...]) -> ptx.Step:
        address, rank = self._source(operands[1], np.uint32), self._source(operands[2], np.uint32)
        store = self._store(operands[0])
        return lambda mask: store(address() | (rank() + np.uint32(1)) << np.uint32(24), mask)

    def _op_st(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        if suffixes[0] != "async":
            return super()._op_st(name, suffixes, operands)
        target, _base = self._address(operands[0])
        barrier, _base = self._address(operands[2])
        sources = [self._source(one.strip(), np.uint32) for one in operands[1].strip("{}").split(",")]

        def step(mask: ptx.Array) -> None:
            if mask.any() and not self.met:
                raise ptx.PtxError("sends before its peers are known to have started")
            for thread in np.flatnonzero(mask):
                at, to = int(target()[thread]), int(barrier()[thread])
                peer = self.peers[(at >> 24) - 1]
                if at >> 24 != to >> 24 or peer.exited.all():
                    raise ptx.PtxError("sends to a CTA that has ended, or counts at another's barrier")
                data = np.array([source()[thread] for source in sources], np.uint32).view(np.uint8)
                start = at & 0xFFFFFF
                if start % len(data):
                    raise ptx.PtxError("unaligned message")
                peer.shared.bytes[start : start + len(data)] = data
                peer._count(to & 0xFFFFFF, 0, -len(data))

        return step

    def _count(self, address: int, arrivals: int, size: int) -> None:
        """Changes what the phase of a barrier waits for, and ends it when that is nothing."""
        if address not in self.barriers:
            raise ptx.PtxError("a barrier that is not initialised")
        state = self.barriers[address]
        state[1] += arrivals
        state[2] += size
        if state[1] == 0 and state[2] == 0:
            state[0], state[1] = state[0] + 1, 1

    def _op_mbarrier(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> ptx.Step:
        address, _base = self._address(operands[0 if suffixes[0] == "init" else 1])
        value = self._source(operands[-1], np.uint32)

        def step(mask: ptx.Array) -> None:
            for thread in np.flatnonzero(mask):
                at = int(address()[thread])
                if suffixes[0] == "init":
                    self.barriers[at] = [0, 1, 0]
                else:
                    self.barriers[at][2] += int(value()[thread])
                    self._count(at, -1, 0)

        return step

    def _op_mbarrierwait(self, _: str, __: list[str], operands: tuple[str, ...]) -> ptx.Step:
        address, _base = self._address(operands[0])
        parity = self._source(operands[1], np.uint32)

        def step(mask: ptx.Array) -> None:
            first = int(np.flatnonzero(mask)[0])
            if self.barriers[int(address()[first])][0] % 2 != int(parity()[first]) % 2:
                self.counter[mask] += 1

        return step


class Counted(ptx.GlobalMemory):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.read = 0

    def places(self, addresses: ptx.Array, size: int, allowed: ptx.Array, what: str) -> ptx.Array:
        places = super().places(addresses, size, allowed, what)
        if what in ("read", "copy"):
            self.read += places.size
        return places


class Emulated:
    """`select_topk` by the interpreted kernel, on CPU tensors."""

    cta: type[Cta] = Cta

    def __init__(self, folder: Path, cluster: int, path: int, *facts: int) -> None:
        self.folder = folder
        self.cluster = cluster
        self.path = path
        self.facts = facts  # after those of a kind
        self.read = 0  # bytes of the last job's tensors
        self.kernels: dict[tuple[Any, ...], tuple[ptx.Kernel, int]] = {}

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def select_topk(self, input: torch.Tensor, k: int, **options: Any) -> TopKResult:
        request = validate_select(input, k, **options)
        indices, values = request.out_indices, request.out_values
        if indices is None:
            indices = torch.empty(request.output_shape, dtype=request.index_dtype)
        if values is None and request.values:
            values = torch.empty(request.output_shape, dtype=request.input.dtype)
        job = Job(request, indices, values)
        if request.rows:
            self._run(job)
        return job.result

    def _kernel(self, largest: bool, dtype: torch.dtype, *rest: Any) -> tuple[ptx.Kernel, int]:
        kind = (largest, KERNELS[dtype][-1], *rest)
        if kind not in self.kernels:
            from topkd.kernels.cluster_kernel import ClusterSelect

            folder = self.folder / "-".join(map(str, kind))
            folder.mkdir(parents=True)
            options = f"--keep-ptx --dump-dir {folder}"
            compile_kernel("cluster_kernel", "ClusterSelect", (self.cluster, *kind, *self.facts), "sm_90a", options)
            (file,) = folder.glob("*.ptx")
            self.kernels[kind] = parse(file.read_text()), ClusterSelect(self.cluster, *kind, *self.facts).shared_bytes
        return self.kernels[kind]

    def _run(self, job: Job) -> None:
        request = job.request
        kernel, shared = self._kernel(*kind_of(request))
        memory = Counted()
        placed = Placed(memory, job)
        *arguments, rows = placed.arguments
        ctas = [self.cta(kernel, memory, [*arguments, self.path], 512, shared) for _ in range(self.cluster)]
        for row in range(rows):
            run_cluster(ctas, row)
        self.read = memory.read
        placed.read_back()


def reversed_bits(x: ptx.Array) -> ptx.Array:
    """32-bit words with their bits in the opposite order."""
    bits = np.unpackbits(x.astype(">u4").view(np.uint8)).reshape(-1, 32)[:, ::-1]
    return np.packbits(bits, axis=1).view(">u4").ravel().astype(np.uint32)


def run_cluster(ctas: list[Cta], row: int, seed: int = 0) -> None:
    """Run one cluster, its CTAs in turns of random order."""
    random = np.random.default_rng(seed)
    for rank, cta in enumerate(ctas):
        cta.peers = ctas
        cta.begin(row * len(ctas) + rank)
    running = {rank: cta.turn(400) for rank, cta in enumerate(ctas)}
    turns = 0
    while running:
        rank = int(random.choice(list(running)))
        if next(running[rank], None) is None:
            del running[rank]
        turns += 1
        if turns > 60_000:
            raise ptx.PtxError("a wait that nobody ends")


@pytest.fixture(scope="session")
def backends(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Backend]:
    folder = tmp_path_factory.mktemp("ptx")
    return {
        (cluster, path): Backend("emulated", Emulated(folder / f"{cluster}-{path}", cluster, path))
        for cluster in (1, 2, 4, 8, 16)
        for path in (0, 1)
    }


def served(case: Case) -> bool:
    """Whether the family serves a case, by its options."""
    if case.dtype == "float32" or case.pooled or case.k > (2048 if case.order == "value" else 4096):
        return False
    ordered = case.order != "any" or case.ties != "any"
    if case.group == 1:
        return not case.pin_newest and not case.drop_neg_inf and (case.largest or not ordered)
    return case.group == 8 and not ordered


CASES = {
    name: case
    for name, case in directed().items()
    if served(case) and case.rows * case.width <= 3000 and (case.dtype == "bfloat16" or "specials" in name)
}
"""Of f16, in which only NaN begins elsewhere, one class of scores is enough."""


@pytest.mark.parametrize("name", CASES)
def test_directed(backends: dict[tuple[int, int], Backend], name: str) -> None:
    backends[1 + (len(name) % 2), 0].run(CASES[name])


KINDS = ("near-one", "one-bin", "ascending", "plateau", "equal", "specials", "any-bits", "nan", "zeros")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("cluster", "path"), [(1, 0), (2, 0), (2, 1)])
def test_kinds(backends: dict[tuple[int, int], Backend], kind: str, cluster: int, path: int) -> None:
    backends[cluster, path].run(rows_of(kind, 1, 9001, 300))


@pytest.mark.parametrize("kind", ["near-one", "specials", "nan"])
@pytest.mark.parametrize(("cluster", "start", "options"), [(1, 0, {}), (2, 8, {"pin_newest": True}), (2, 3, {})])
def test_groups(
    backends: dict[tuple[int, int], Backend], kind: str, cluster: int, start: int, options: dict[str, Any]
) -> None:
    windows = {"row_starts": ints(start), "lengths": ints(15_991), "values": True}
    backends[cluster, 0].run(rows_of(kind, 1, 16_008, 300, group=8, **windows, **options))


@pytest.mark.parametrize("ties", ["lowest", "highest"])
@pytest.mark.parametrize("kind", ["near-one", "plateau", "specials", "nan"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_ascending_indices(backends: dict[tuple[int, int], Backend], kind: str, cluster: int, ties: str) -> None:
    starts, lengths = ints(3), ints(8999)
    case = rows_of(kind, 1, 9007, 300, row_starts=starts, lengths=lengths, order="index", ties=ties, values=True)
    backends[cluster, 0].run(case)


@pytest.mark.parametrize("ties", ["lowest", "highest"])
@pytest.mark.parametrize("kind", ["near-one", "plateau", "any-bits", "equal"])
@pytest.mark.parametrize("cluster", [1, 2])
def test_by_value(backends: dict[tuple[int, int], Backend], kind: str, cluster: int, ties: str) -> None:
    starts, lengths = ints(3, 0), ints(8999, 299)
    case = rows_of(kind, 2, 9007, 700, row_starts=starts, lengths=lengths, order="value", ties=ties, values=True)
    backends[cluster, 0].run(case)


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
def test_wide_row(backends: dict[tuple[int, int], Backend], cluster: int) -> None:
    backends[cluster, 0].run(rows_of("near-one", 1, 16384 * cluster + 77 if cluster < 8 else 33333, 2048))


@pytest.mark.parametrize("k", [1, 700, 4096])
def test_smallest_and_windows(backends: dict[tuple[int, int], Backend], k: int) -> None:
    lengths = ints(12000, 11993, 5, -1)
    starts = ints(0, 3, 7, 12001)
    case = rows_of("any-bits", 4, 12000, k, lengths=lengths, row_starts=starts, values=True, largest=k == 1)
    backends[2, 0].run(case)


def test_sample_that_misjudges(backends: dict[tuple[int, int], Backend]) -> None:
    """All large scores, or all small ones, where the samples are taken: too few pass the cutoff; the list overflows."""
    sampled = sampled_elements(65536, 2)
    for large in (True, False):
        bits = np.random.default_rng(0).integers(0x3F00, 0x3FFF, 65536).astype(np.uint16)
        bits[sampled] = np.random.default_rng(1).integers(0x4100, 0x4200, len(sampled)) if large else 0x3E00
        case = Case(storage=bits, dtype="bfloat16", rows=1, width=65536, k=2048)
        backends[2, 0].run(case)


def read_once() -> Iterator[tuple[str, ptx.Array]]:
    """Rows of 32,768 scores that a sample taken at regular places would misjudge, or with many ties."""
    rng = np.random.default_rng(0)
    plain = rng.integers(0x3F00, 0x3FFF, 32_768).astype(np.uint16)
    for period in (8, 16, 32):
        bits = plain.copy()
        bits[3::period] = rng.integers(0x4100, 0x4200, len(bits[3::period]))
        yield f"period-{period}", bits
    elements = np.arange(32_768)
    folded = ((elements & 7) == elements * 8 // 32_768) & ((elements & 8) == 0)
    yield "folded", np.where(folded, rng.integers(0x4100, 0x4200, 32_768), plain).astype(np.uint16)
    yield "descending", (0x4080 - elements // 256).astype(np.uint16)
    yield "two-levels", np.where(rng.random(32_768) < 0.08, 0x4000, 0x3F80).astype(np.uint16)
    yield "plateau", np.where(rng.random(32_768) < 0.003, plain, 0).astype(np.uint16)


READ_ONCE = dict(read_once())


@pytest.fixture(scope="session")
def small_list(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """A CTA a row whose list holds 700 keys."""
    facts = {"threads": 512, "vectors": 2, "deep": 1, "residents": 2, "capacity": 700}
    return Emulated(tmp_path_factory.mktemp("ptx"), 1, 0, *facts.values())


@pytest.mark.parametrize("name", READ_ONCE)
def test_rows_that_are_read_once(small_list: Emulated, name: str) -> None:
    """The cutoff is not so low that the list overflows, and few ties are looked for no longer than it takes."""
    bits = READ_ONCE[name]
    Backend("emulated", small_list).run(Case(storage=bits, dtype="bfloat16", rows=1, width=len(bits), k=200))
    row, sample = bits.nbytes, 2 * 512 * 16
    assert row <= small_list.read < 1.3 * row + sample


@pytest.mark.parametrize("equal", [0, 2047, 2048, 30000])
def test_scores_equal_to_the_cutoff(backends: dict[tuple[int, int], Backend], equal: int) -> None:
    """They are in no list; what is wanted of them comes from the row, over several CTAs if the first has too few."""
    bits = np.where(np.random.default_rng(0).random(40_000) < 0.01, 0x4000, 0x3F80).astype(np.uint16)
    bits[:equal] = np.random.default_rng(1).integers(0, 0x3F00, equal)
    case = Case(storage=bits, dtype="bfloat16", rows=1, width=40_000, k=2048)
    backends[4, 0].run(case)
    backends[1, 0].run(case)


def test_what_is_not_served_is_named() -> None:
    x = torch.zeros((1, 8), dtype=torch.bfloat16)
    assert unmet_options(validate_select(x, 2)) is None
    for name, value in {"group": 2, "pin_newest": True, "drop_neg_inf": True}.items():
        assert name in str(unmet_options(validate_select(x, 2, **{name: value})))
    assert "16-bit" in str(unmet_options(validate_select(x, 2, group=16)))
    assert "4 to 128" in str(unmet_options(validate_select(x.float(), 2, group=2)))
    assert "order" in str(unmet_options(validate_select(x, 2, group=8, order="index")))
    for group in GROUPS32:
        options: dict[str, Any] = {"group": group, "pin_newest": True, "order": "value", "ties": "highest"}
        assert unmet_options(validate_select(x.float(), 2, **options)) is None
    assert unmet_options(validate_select(x.float(), 2, order="index", ties="lowest")) is None
    assert unmet_options(validate_select(x, 2048, order="value")) is None
    assert "value" in str(unmet_options(validate_select(x.float(), 2049, order="value")))
    assert "largest" in str(unmet_options(validate_select(x, 2, order="value", largest=False)))
    assert "k <= 4096" in str(unmet_options(validate_select(x, 4097)))
