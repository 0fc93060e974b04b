"""A small interpreter of PTX, so that kernels can be run, and their memory accesses judged, without a GPU.

One CTA at a time, all of its threads at once in numpy. Threads at the lowest program counter run first, so that
diverged ones meet again as early as they can; what synchronises a warp waits for all of its lanes, `bar.sync` waits
for all threads that have not returned. What it knows is what our kernels use: integers, predicates, canonical
NaNs of the float operations that make keys, shared and global memory, shuffles, votes, reductions.

Beyond the results it finds: global accesses outside the buffers, unaligned accesses, shared memory that two warps touch
between barriers where one of them writes (atomics among themselves are fine), barriers that not all can reach.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Step = Callable[[Array], "int | None"]

_LINE = re.compile(r"(?:@(!?)(\S+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_SIGNED = {"s16": np.int16, "s32": np.int32, "s64": np.int64}
_UNSIGNED = {"b16": np.uint16, "u16": np.uint16, "b32": np.uint32, "u32": np.uint32, "f32": np.uint32}
_UNSIGNED |= {"b64": np.uint64, "u64": np.uint64, "bf16x2": np.uint32, "f16x2": np.uint32, "b8": np.uint8}
_UNSIGNED |= {"u16x2": np.uint32}
_TYPES = _SIGNED | _UNSIGNED
_COMPARE: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
}
_COMPARE |= {"ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
_COMPARE |= {"gtu": lambda a, b: ~(a <= b), "geu": lambda a, b: ~(a < b)}  # of floats: or either is NaN
_COMPARE |= {"ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b)}
_JUMPS = ("bra", "ret", "bar", "shfl", "vote", "redux")
_NONE = -1


class PtxError(AssertionError):
    """The kernel did what no kernel may do."""


class GlobalMemory:
    """Buffers at addresses of their own; an access outside them is an error."""

    BASE = 1 << 20

    def __init__(self) -> None:
        self.bytes: Array = np.zeros(0, np.uint8)
        self.readable: Array = np.zeros(0, np.bool_)
        self.writable: Array = np.zeros(0, np.bool_)

    def add(self, array: Array, *, skew: int = 0, writable: bool = False) -> int:
        """Copy an array in, `skew` bytes past a multiple of 256, and return its address."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start = -(-len(self.bytes) // 256) * 256 + 256 + skew
        size = start + len(data) + 64
        grown = [np.zeros(size, one.dtype) for one in (self.bytes, self.readable, self.writable)]
        for new, old in zip(grown, (self.bytes, self.readable, self.writable), strict=True):
            new[: len(old)] = old
        self.bytes, self.readable, self.writable = grown
        self.bytes[start : start + len(data)] = data
        self.readable[start : start + len(data)] = True
        self.writable[start : start + len(data)] = writable
        return self.BASE + start

    def get(self, address: int, dtype: npt.DTypeLike, count: int) -> Array:
        """A copy of what stands at an address."""
        size = np.dtype(dtype).itemsize * count
        start = address - self.BASE
        return self.bytes[start : start + size].copy().view(dtype)

    def places(self, addresses: Array, size: int, allowed: Array, what: str) -> Array:
        """Byte places of accesses of `size` bytes, (n, size)."""
        if (addresses % size).any():
            raise PtxError(f"unaligned {what} of {size} bytes at {int(addresses[addresses % size != 0][0]):#x}")
        places: Array = (addresses.astype(np.int64) - self.BASE)[:, None] + np.arange(size)
        bad = (places < 0) | (places >= len(self.bytes))
        bad |= ~allowed[np.where(bad, 0, places)]
        if bad.any():
            raise PtxError(f"{what} of {size} bytes outside every buffer, at {int(addresses[bad.any(axis=1)][0]):#x}")
        return places


class SharedMemory:
    """The CTA's shared memory, with who touched which word since the last barrier."""

    def __init__(self, size: int) -> None:
        self.bytes = np.full(size, 0xCD, np.uint8)
        words = size // 4
        self.epoch = 1
        self.seen = {
            kind: (np.zeros(words, np.int64), np.zeros(words, np.int64)) for kind in ("read", "write", "atomic")
        }

    def places(self, addresses: Array, size: int) -> Array:
        """Byte places of accesses of `size` bytes, (n, size)."""
        if (addresses % size).any():
            raise PtxError(f"unaligned access of {size} bytes of shared memory")
        places: Array = addresses.astype(np.int64)[:, None] + np.arange(size)
        if (places < 0).any() or (places >= len(self.bytes)).any():
            raise PtxError(f"access outside shared memory, at {int(places.max()):#x}")
        return places

    def note(self, places: Array, warps: Array, kind: str) -> None:
        """Remember an access and refuse one that races with another warp's."""
        words = places[:, ::4] // 4
        who = np.broadcast_to(warps[:, None], words.shape)
        for other, (epochs, owners) in self.seen.items():
            if kind == other == "read" or kind == other == "atomic":
                continue
            race = (epochs[words] == self.epoch) & (owners[words] != who)
            if race.any():
                raise PtxError(
                    f"race: {kind} of word {int(words[race][0])} by warp {int(who[race][0])} after a {other}"
                )
        epochs, owners = self.seen[kind]
        mixed = (epochs[words] == self.epoch) & (owners[words] != who)
        owners[words] = np.where(mixed, _NONE, who)  # several warps: a race with any other kind of access
        epochs[words] = self.epoch


@dataclass(frozen=True)
class Kernel:
    """A parsed kernel: one entry per instruction, labels as places in it."""

    lines: tuple[tuple[str, str, str, tuple[str, ...]], ...]  # (predicate or "", "!" or "", opcode, operands)
    labels: dict[str, int]
    parameters: tuple[str, ...]
    shared_symbols: frozenset[str]


def parse(text: str) -> Kernel:
    """Parse the first entry of a PTX module; registers of nested blocks get names of their own."""
    text = re.sub(r"//[^\n]*", "", text)
    symbols = frozenset(re.findall(r"\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)", text))
    head, body = text[text.index(".entry") :].split("{", 1)
    parameters = tuple(re.findall(r"\.param\s+\.\w+\s+(?:\.ptr[^,)]*\s)?(\w+)", head))
    lines: list[tuple[str, str, str, tuple[str, ...]]] = []
    labels: dict[str, int] = {}
    scopes: list[dict[str, str]] = []
    for piece in _pieces(body):
        if piece == "{":
            scopes.append({})
        elif piece == "}":
            if not scopes:
                break
            scopes.pop()
        elif piece.endswith(":"):
            labels[piece[:-1]] = len(lines)
        elif piece.startswith(".reg"):
            if scopes:
                for name in piece.split(None, 2)[2].split(","):
                    kind = {".pred": "p", ".b64": "rd", ".u64": "rd"}.get(piece.split()[1], "r")
                    scopes[-1][name.strip()] = f"%{kind}_{len(lines)}_{name.strip()}"
        elif not piece.startswith("."):
            lines.append(_instruction(piece, scopes))
    return Kernel(tuple(lines), labels, parameters, symbols)


def _pieces(body: str) -> list[str]:
    """Instructions, labels and braces of blocks; braces of vector operands stay where they are."""
    pieces, current, depth = [], "", 0
    for char in body:
        if char in "{}" and (depth or current.strip()):
            depth += 1 if char == "{" else -1
            current += char
        elif char in "{}":
            pieces.append(char)
        elif char == ";" or (char == ":" and re.fullmatch(r"\s*\$?\w+", current)):
            pieces.append((current + (":" if char == ":" else "")).strip())
            current = ""
        else:
            current += char
    return pieces


def _instruction(piece: str, scopes: list[dict[str, str]]) -> tuple[str, str, str, tuple[str, ...]]:
    match = _LINE.fullmatch(piece)
    if match is None:
        raise PtxError(f"cannot parse {piece!r}")
    negated, predicate, opcode, rest = match.groups()
    names = {name: new for scope in scopes for name, new in scope.items()}
    rest = re.sub(r"(?<![\w%$.])[a-z]\w*", lambda m: names.get(m.group(), m.group()), rest)
    operands = tuple(one.strip() for one in re.split(r",(?![^{]*\})", rest)) if rest.strip() else ()
    return names.get(predicate or "", predicate or ""), negated or "", opcode, operands


class Cta:
    """One CTA: its registers, its memory, and its instructions bound to them."""

    def __init__(self, kernel: Kernel, memory: GlobalMemory, arguments: list[int], threads: int, shared: int) -> None:
        self.kernel = kernel
        self.memory = memory
        self.threads = threads
        self.warp = np.arange(threads) // 32
        self.shared = SharedMemory(shared)
        self.registers: dict[str, Array] = {}
        self.special = {name: np.zeros(threads, np.uint32) for name in ("%tid.x", "%ctaid.x", "%lanemask_lt")}
        self.values = dict(zip(kernel.parameters, arguments, strict=True))
        self.steps: list[Step] = [self._bind(*line) for line in kernel.lines]
        self.starts = frozenset(kernel.labels.values())

    def run(self, block: int, limit: int = 2_000_000) -> int:
        """Run as block (block, 0, 0); returns how many instructions were issued, all warps together counting once."""
        self._set_special(block)
        self.shared = SharedMemory(len(self.shared.bytes))
        self.counter = np.zeros(self.threads, np.int64)
        self.exited = np.zeros(self.threads, np.bool_)
        self.blocked = np.zeros(self.threads, np.bool_)  # waits for its warp
        self.waiting = np.zeros(self.threads, np.bool_)  # at the barrier
        issued = 0
        while not self.exited.all():
            ready = ~(self.exited | self.waiting)
            runnable = ready & ~self.blocked
            if not runnable.any():
                if ready.any() or not self.waiting.any():
                    raise PtxError("deadlock: lanes wait for others of their warp")
                if len(set(self.counter[self.waiting].tolist())) > 1:
                    raise PtxError("threads wait at different barriers")
                self.counter[self.waiting] += 1
                self.waiting[:] = False
                self.shared.epoch += 1
                continue
            at = int(self.counter[runnable].min())
            mask = ready & (self.counter == at)
            issued += self._run_block(at, mask)
            if issued > limit:
                raise PtxError(f"more than {limit} instructions: endless loop?")
        return issued

    def _run_block(self, at: int, mask: Array) -> int:
        """Run from one instruction to the next jump or label."""
        issued = 0
        while True:
            issued += 1
            if self.kernel.lines[at][2].split(".")[0] in _JUMPS:
                self.counter[mask] = at
                self.steps[at](mask)
                return issued
            self.steps[at](mask)
            at += 1
            if at in self.starts:
                self.counter[mask] = at
                return issued

    # -------------------------------------------------------------------------------------------------- operands

    def _set_special(self, block: int) -> None:
        lane = np.arange(self.threads, dtype=np.uint32) % 32
        self.special["%tid.x"][:] = np.arange(self.threads)
        self.special["%ctaid.x"][:] = block
        self.special["%lanemask_lt"][:] = (np.uint32(1) << lane) - np.uint32(1)

    def _register(self, name: str) -> Array:
        if name not in self.registers:
            dtype: Any = np.bool_ if name.startswith("%p") else np.uint64 if name.startswith("%rd") else np.uint32
            self.registers[name] = np.zeros(self.threads, dtype)
        return self.registers[name]

    def _source(self, name: str, dtype: Any) -> Callable[[], Array]:
        """A function that gives an operand as `dtype`."""
        if name in self.special:
            array = self.special[name]
            return lambda: array.astype(dtype)
        if name.startswith("%"):
            register = self._register(name)
            if register.dtype.itemsize == np.dtype(dtype).itemsize and dtype is not np.bool_:
                view = register.view(dtype)
                return lambda: view
            return lambda: register.astype(dtype)
        if name in self.kernel.shared_symbols:
            return lambda: np.zeros(self.threads, dtype)
        text = name.removesuffix("U")
        number = int("0x" + text[2:] if text.startswith("0f") else text, 0)
        width = 8 * np.dtype(dtype).itemsize
        bits = np.array(number & ((1 << width) - 1), np.dtype(f"u{width // 8}")).view(dtype)
        constant = np.full(self.threads, bits)
        return lambda: constant

    def _store(self, name: str) -> Callable[[Array, Array], None]:
        """A function that sets a register where a mask is set."""
        register = self._register(name)

        def store(value: Array, mask: Array) -> None:
            if value.dtype != register.dtype and value.dtype.itemsize == register.dtype.itemsize:
                value = value.view(register.dtype)
            np.copyto(register, value, where=mask, casting="unsafe")

        return store

    def _address(self, operand: str) -> tuple[Callable[[], Array], str]:
        base, _, offset = operand.strip("[]").partition("+")
        number = int(offset or "0", 0)
        dtype = np.uint64 if base.startswith("%rd") else np.uint32
        source = self._source(base, dtype)
        return lambda: source().astype(np.int64) + number, base

    # ----------------------------------------------------------------------------------------------- instructions

    def _bind(self, predicate: str, negated: str, opcode: str, operands: tuple[str, ...]) -> Step:
        """Bind an instruction to this CTA's registers."""
        name, *suffixes = opcode.split(".")
        method = getattr(self, f"_op_{name}", None)
        if method is None:
            method = self._arithmetic
        step: Step = method(name, suffixes, operands)
        if not predicate:
            return step
        register = self._register(predicate)
        jump = name in ("bra", "ret")

        def guarded(mask: Array) -> int | None:
            wanted = mask & (~register if negated else register)
            if jump:
                self.counter[mask] += 1
                self.counter[wanted] -= 1
            return step(wanted)

        return guarded

    def _arithmetic(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        """Instructions without side effects: destination, then sources of one type."""
        kind = suffixes[-1]
        if kind == "pred":
            sources = [self._predicate(one) for one in operands[1:]]
            logical: dict[str, Callable[..., Array]] = {"and": np.logical_and, "or": np.logical_or}
            logical |= {"xor": np.logical_xor, "not": np.logical_not, "mov": lambda a: a}
            function = logical[name]
        else:
            sources = [self._source(one, _TYPES[kind]) for one in operands[1:]]
            function = self._function(name, suffixes, operands)
        store = self._store(operands[0])

        def step(mask: Array) -> None:
            with np.errstate(all="ignore"):
                store(function(*(source() for source in sources)), mask)

        return step

    def _predicate(self, name: str) -> Callable[[], Array]:
        if name.lstrip("-").isdigit():
            return lambda: np.full(self.threads, int(name) != 0)
        register = self._register(name)
        return lambda: register

    def _function(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> Callable[..., Array]:
        """The function of an arithmetic instruction."""
        kind = suffixes[-1]
        dtype = _TYPES[kind]
        bits = 8 * np.dtype(dtype).itemsize
        if kind == "u16x2":
            better = {"min": np.minimum, "max": np.maximum}[name]
            return lambda a, b: better(*(np.ascontiguousarray(one).view(np.uint16) for one in (a, b))).view(dtype)
        if kind in ("f32", "bf16x2", "f16x2") and name != "mov":
            return _float_function(name, suffixes)
        if name == "mul" and "hi" in suffixes:
            return lambda a, b: (a.astype(np.uint64) * b >> np.uint64(32)).astype(np.uint32)
        if name in ("mul", "mad") and "wide" in suffixes:
            wide: Any = np.int64 if kind[0] == "s" else np.uint64
            return lambda a, b: a.astype(wide) * b.astype(wide)
        simple: dict[str, Callable[..., Array]] = {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "mad": lambda a, b, c: a * b + c,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
            "not": np.invert,
            "neg": np.negative,
            "min": np.minimum,
            "max": np.maximum,
            "mov": lambda a: a,
            "div": lambda a, b: np.trunc(a / np.where(b == 0, 1, b)).astype(dtype),
            "rem": lambda a, b: np.fmod(a, np.where(b == 0, 1, b)).astype(dtype),
            "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
            "brev": _reversed,
            "clz": lambda a: (bits - np.frexp(a.astype(np.float64))[1]).astype(np.uint32),
        }
        if name in simple:
            return simple[name]
        if name == "lop3":
            return lambda a, b, c, table: _lop3(a, b, c, int(table[0]))
        raise PtxError(f"unknown instruction {name}.{'.'.join(suffixes)} {operands}")

    def _op_shl(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        return self._shift(name, suffixes, operands)

    def _op_shr(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        return self._shift(name, suffixes, operands)

    def _shift(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        """Shifts: the amount is 32 bits wide whatever is shifted."""
        value = self._source(operands[1], _TYPES[suffixes[-1]])
        amount = self._source(operands[2], np.uint32)
        bits = 8 * np.dtype(_TYPES[suffixes[-1]]).itemsize
        store = self._store(operands[0])

        def step(mask: Array) -> None:
            a, by = value(), amount()
            inside = np.minimum(by, bits - 1).astype(a.dtype)
            result = a << inside if name == "shl" else a >> inside
            if name == "shl" or a.dtype.kind == "u":
                result = np.where(by >= bits, np.zeros(1, a.dtype), result)
            store(result, mask)

        return step

    def _op_shf(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        low, high, amount = (self._source(one, np.uint32) for one in operands[1:])
        store = self._store(operands[0])
        left = suffixes[0] == "l"

        def step(mask: Array) -> None:
            both = (high().astype(np.uint64) << np.uint64(32)) | low()
            by = (amount() & np.uint32(31)).astype(np.uint64)
            result = (both << by) >> np.uint64(32) if left else both >> by
            store(result.astype(np.uint32), mask)

        return step

    def _op_mov(self, name: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        """Moves, and packing and unpacking of two halves."""
        target, source = operands
        if target.startswith("{"):
            halves = [None if one == "_" else self._store(one) for one in re.findall(r"[\w%$]+", target)]
            whole = self._source(source, np.uint64)

            def unpack(mask: Array) -> None:
                for half, shift in zip(halves, (0, 32), strict=True):
                    if half is not None:
                        half((whole() >> np.uint64(shift)).astype(np.uint32), mask)

            return unpack
        if source.startswith("{"):
            low, high = (self._source(one, np.uint32) for one in re.findall(r"[\w%$-]+", source))
            store = self._store(target)
            return lambda mask: store((high().astype(np.uint64) << np.uint64(32)) | low(), mask)
        return self._arithmetic(name, suffixes, operands)

    def _op_prmt(self, _: str, __: list[str], operands: tuple[str, ...]) -> Step:
        a, b, selector = (self._source(one, np.uint32) for one in operands[1:])
        store = self._store(operands[0])

        def step(mask: Array) -> None:
            both = (b().astype(np.uint64) << np.uint64(32)) | a()
            pick = selector()
            result = np.zeros(self.threads, np.uint32)
            for i in range(4):
                place = ((pick >> np.uint32(4 * i)) & np.uint32(7)).astype(np.uint64) * np.uint64(8)
                byte = ((both >> place) & np.uint64(255)).astype(np.uint32)
                signs = (pick >> np.uint32(4 * i)) & np.uint32(8) != 0  # the byte's sign bit, eight times
                byte = np.where(signs, (byte >> np.uint32(7)) * np.uint32(255), byte)
                result |= byte << np.uint32(8 * i)
            store(result, mask)

        return step

    def _op_cvt(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        to, origin = (np.float32 if one == "f32" else _TYPES[one] for one in suffixes[-2:])
        register = self._register(operands[1])
        store = self._store(operands[0])

        def step(mask: Array) -> None:
            with np.errstate(all="ignore"):
                value = register.astype(f"u{np.dtype(origin).itemsize}").view(origin).astype(to)
            store(value if to is np.float32 else value.astype(self._register(operands[0]).dtype), mask)

        return step

    def _op_setp(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        kind = np.float32 if suffixes[-1] == "f32" else _TYPES[suffixes[-1]]
        a, b = (self._source(one, kind) for one in operands[1:3])
        compare = _COMPARE[suffixes[0]]
        store = self._store(operands[0])
        return lambda mask: store(compare(a(), b()), mask)

    def _op_selp(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        a, b = (self._source(one, _TYPES[suffixes[-1]]) for one in operands[1:3])
        choice = self._register(operands[3])
        store = self._store(operands[0])
        return lambda mask: store(np.where(choice, a(), b()), mask)

    def _op_ld(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        space, dtype = suffixes[0], _TYPES[suffixes[-1]]
        if space == "param":
            value = self.values[operands[1].strip("[]")]
            store = self._store(operands[0])
            width = self._register(operands[0]).dtype
            bits = np.full(self.threads, value & ((1 << 8 * width.itemsize) - 1), width)
            return lambda mask: store(bits, mask)
        names = [one.strip() for one in operands[0].strip("{}").split(",")]
        stores = [self._store(one) for one in names]
        address, _base = self._address(operands[1])
        size = np.dtype(dtype).itemsize

        def step(mask: Array) -> None:
            if not mask.any():
                return
            whole = size * len(stores)
            at = address()[mask]
            if space == "shared":
                places = self.shared.places(at, whole)
                self.shared.note(places, self.warp[mask], "read")
                data = self.shared.bytes[places]
            else:
                places = self.memory.places(at, whole, self.memory.readable, "read")
                data = self.memory.bytes[places]
            columns = np.ascontiguousarray(data).view(dtype)
            for i, store in enumerate(stores):
                value = np.zeros(self.threads, dtype)
                value[mask] = columns[:, i]
                store(value.astype(self._register(names[i]).dtype), mask)

        return step

    def _op_st(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        space, dtype = suffixes[0], _TYPES[suffixes[-1]]
        sources = [self._source(one.strip(), dtype) for one in operands[1].strip("{}").split(",")]
        address, _base = self._address(operands[0])
        size = np.dtype(dtype).itemsize

        def step(mask: Array) -> None:
            if not mask.any():
                return
            at = address()[mask]
            data = np.stack([source()[mask] for source in sources], axis=1)
            data = np.ascontiguousarray(data.astype(dtype)).view(np.uint8)
            whole = size * len(sources)
            if space == "shared":
                places = self.shared.places(at, whole)
                if len(np.unique(at)) < len(at):
                    raise PtxError("two threads store to one word of shared memory at once")
                self.shared.note(places, self.warp[mask], "write")
                self.shared.bytes[places] = data
            else:
                places = self.memory.places(at, whole, self.memory.writable, "write")
                self.memory.bytes[places] = data

        return step

    def _op_red(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        address, _base = self._address(operands[0])
        value = self._source(operands[1], np.uint32)
        if suffixes[0] != "shared" or suffixes[1] != "add":
            raise PtxError(f"unknown reduction {suffixes}")

        def step(mask: Array) -> None:
            if not mask.any():
                return
            at = address()[mask]
            places = self.shared.places(at, 4)
            self.shared.note(places, self.warp[mask], "atomic")
            np.add.at(self.shared.bytes.view(np.uint32), places[:, 0] // 4, value()[mask])

        return step

    def _op_atom(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        if suffixes != ["shared", "add", "u32"]:
            raise PtxError(f"unknown atomic {suffixes}")
        store = self._store(operands[0]) if operands[0] != "_" else None
        address, _base = self._address(operands[1])
        value = self._source(operands[2], np.uint32)

        def step(mask: Array) -> None:
            before = np.zeros(self.threads, np.uint32)
            if mask.any():
                places = self.shared.places(address()[mask], 4)
                self.shared.note(places, self.warp[mask], "atomic")
                words, added = self.shared.bytes.view(np.uint32), value()
                for thread, word in zip(np.flatnonzero(mask), places[:, 0] // 4, strict=True):
                    before[thread] = words[word]
                    words[word] += added[thread]
            if store is not None:
                store(before, mask)

        return step

    def _op_griddepcontrol(self, _: str, __: list[str], ___: tuple[str, ...]) -> Step:
        return lambda mask: None

    # -------------------------------------------------------------------------------------------- between threads

    def _whole_warps(self, mask: Array) -> Array:
        """The part of `mask` whose warps are complete; the rest waits."""
        whole: Array = np.repeat(mask.reshape(-1, 32).all(axis=1), 32)
        self.blocked[mask & ~whole] = True
        self.blocked[whole] = False
        self.counter[whole] += 1
        return whole

    def _op_shfl(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        kind = suffixes[1]
        target = operands[0].split("|")[0].strip()
        value, by, clamp = (self._source(one, np.uint32) for one in operands[1:4])
        store = self._store(target)
        lane = np.arange(self.threads, dtype=np.int64) % 32
        first = np.arange(self.threads, dtype=np.int64) - lane

        def step(mask: Array) -> None:
            whole = self._whole_warps(mask)
            offset = by().astype(np.int64) & 31
            bound = clamp().astype(np.int64) & 31
            source = {"up": lane - offset, "down": lane + offset, "bfly": lane ^ offset, "idx": offset}[kind]
            inside = source >= bound if kind == "up" else source <= bound
            store(value()[first + np.where(inside, source, lane)], whole)

        return step

    def _op_vote(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        negated = operands[1].startswith("!")
        choice = self._predicate(operands[1].lstrip("!"))
        store = self._store(operands[0])
        weights = np.uint32(1) << np.arange(32, dtype=np.uint32)

        def step(mask: Array) -> None:
            whole = self._whole_warps(mask)
            votes = (choice() ^ negated).reshape(-1, 32)
            if suffixes[1] == "ballot":
                result = (votes * weights).sum(axis=1, dtype=np.uint32)
            else:
                result = votes.any(axis=1) if suffixes[1] == "any" else votes.all(axis=1)
            store(np.repeat(result, 32), whole)

        return step

    def _op_redux(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        value = self._source(operands[1], _TYPES[suffixes[-1]])
        function = {"add": np.add, "or": np.bitwise_or, "and": np.bitwise_and, "max": np.maximum, "min": np.minimum}
        store = self._store(operands[0])

        def step(mask: Array) -> None:
            whole = self._whole_warps(mask)
            rows = value().reshape(-1, 32)
            store(np.repeat(function[suffixes[1]].reduce(rows, axis=1, dtype=rows.dtype), 32), whole)

        return step

    def _op_bar(self, _: str, suffixes: list[str], operands: tuple[str, ...]) -> Step:
        if suffixes[0] == "warp":
            return lambda mask: self._whole_warps(mask) is None or None

        def step(mask: Array) -> None:
            self.waiting[mask] = True

        return step

    def _op_bra(self, _: str, __: list[str], operands: tuple[str, ...]) -> Step:
        target = self.kernel.labels[operands[-1]]

        def step(mask: Array) -> None:
            self.counter[mask] = target

        return step

    def _op_ret(self, _: str, __: list[str], ___: tuple[str, ...]) -> Step:
        def step(mask: Array) -> None:
            self.exited[mask] = True

        return step


def _reversed(bits: Array) -> Array:
    """32-bit words with their bits in reverse."""
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        kept, by = np.uint32(mask), np.uint32(shift)
        bits = ((bits >> by) & kept) | ((bits & kept) << by)
    return bits


def _lop3(a: Array, b: Array, c: Array, table: int) -> Array:
    """The bitwise function of three operands that a truth table gives."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


_FORMATS = {"f32": (32, 23, 0x7FFFFFFF), "bf16x2": (16, 7, 0x7FFF), "f16x2": (16, 10, 0x7FFF)}


def _float_function(name: str, suffixes: list[str]) -> Callable[..., Array]:
    """The float operations that make keys: x + 0.0, x * 1.0 + 0.0, the maximum that propagates NaN; with one NaN."""
    bits, fraction, nan = _FORMATS[suffixes[-1]]
    kind = np.uint32 if bits == 32 else np.uint16
    infinity = ((1 << (bits - 1 - fraction)) - 1) << fraction
    sign = 1 << (bits - 1)

    def canonical(x: Array) -> Array:
        x = np.where(x == sign, 0, x).astype(kind)
        return np.where(x & (sign - 1) > infinity, nan, x).astype(kind)

    def ordered(x: Array) -> Array:
        return np.where(x & sign, -(x & (sign - 1)).astype(np.int64), x.astype(np.int64))

    def maximum(a: Array, b: Array) -> Array:
        best = np.where(ordered(a) >= ordered(b), a, b)
        either = (a & (sign - 1) > infinity) | (b & (sign - 1) > infinity)
        return np.where(either, nan, best).astype(kind)

    def by_parts(function: Callable[..., Array], *arrays: Array) -> Array:
        result: Array = function(*(np.ascontiguousarray(one).view(kind) for one in arrays)).view(np.uint32)
        return result

    if name == "max" and "NaN" in suffixes:
        return lambda a, b: by_parts(maximum, a, b)
    numbers: dict[str, Callable[..., Array]] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    numbers |= {"min": np.fmin, "max": np.fmax, "rcp": np.reciprocal, "fma": lambda a, b, c: a * b + c}
    if name in numbers and bits == 32:
        function = numbers[name]

        def of_numbers(*arrays: Array) -> Array:
            result: Array = function(*(np.ascontiguousarray(one).view(np.float32) for one in arrays)).astype(np.float32)
            return np.where(np.isnan(result), np.uint32(nan), result.view(np.uint32))

        return of_numbers
    if name == "fma" and bits == 16:
        return lambda a, one, zero: by_parts(canonical, a)
    raise PtxError(f"unknown float instruction {name}.{'.'.join(suffixes)}")
