"""What a compiled kernel takes of a GPU, read from its binary (an ELF file); no tool of the CUDA toolkit is needed.

Registers and stack stand in `.nv.info` as attributes: four bytes (format, attribute, 16-bit length), then the number of
a symbol and the value. An instruction of sm_70 and later is 16 bytes, its operation the low 12 bits of the first two.
"""

import struct
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = struct.Struct("<4s36xQ10xHHH")  # magic, offset of the section headers, their size, number, names' section
_SECTION = struct.Struct("<II16xQQ24x")  # name, type, offset, size
_NOBITS = 8
_REGISTERS, _FRAME = 0x2F, 0x11
_SIZED = 4  # format of an attribute with a payload of the given length
_LOCAL_LOAD, _LOCAL_STORE = 0x983, 0x387
_INSTRUCTION = 16


class Resources(NamedTuple):
    """What one kernel takes."""

    registers: int  # of a thread
    static_shared_bytes: int  # of a CTA; from sm_90 on with 1,024 of the system's own
    stack_bytes: int  # of a thread
    local_loads: int  # instructions that load from a thread's local memory: spills, or arrays that are no registers
    local_stores: int


def read_resources(binary: bytes) -> Resources:
    """Read what the kernel of a binary takes; of several functions, the most.

    Args:
        binary: a cubin.

    Raises:
        ValueError: it is none.
    """
    registers, stack, shared = 0, 0, 0
    operations: Counter[int] = Counter()
    try:
        for name, kind, offset, size in _sections(binary):
            if name.startswith(".nv.shared.") and not name.startswith(".nv.shared.reserved"):
                shared = max(shared, size)
            if kind == _NOBITS:
                continue
            body = binary[offset : offset + size]
            if len(body) != size:
                raise ValueError(f"section {name} is cut off")
            if name == ".nv.info":
                found = list(_attributes(body))
                registers = max([value for attribute, value in found if attribute == _REGISTERS], default=0)
                stack = max([value for attribute, value in found if attribute == _FRAME], default=0)
            elif name.startswith(".text."):
                operations.update(word & 0xFFF for (word,) in struct.iter_unpack("<H14x", body))
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"no binary of a kernel: {error}") from error
    if not registers:
        raise ValueError("no binary of a kernel: it names no registers")
    return Resources(registers, shared, stack, operations[_LOCAL_LOAD], operations[_LOCAL_STORE])


def kernel_name(binary: bytes) -> str:
    """Return the name of a binary's one kernel.

    Args:
        binary: a cubin.

    Raises:
        ValueError: it is none, or has another number of kernels.
    """
    try:
        names = [name.removeprefix(".text.") for name, *_ in _sections(binary) if name.startswith(".text.")]
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"no binary of a kernel: {error}") from error
    if len(names) != 1:
        raise ValueError(f"a binary of {len(names)} kernels; 1 is allowed")
    return names[0]


def _sections(binary: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, type, offset and size of each section."""
    magic, start, step, count, named = _HEADER.unpack_from(binary)
    if magic != b"\x7fELF":
        raise ValueError("no binary of a kernel: it is no ELF file")
    headers = [_SECTION.unpack_from(binary, start + step * index) for index in range(count)]
    names = headers[named][2]
    for name, kind, offset, size in headers:
        first = names + name
        yield binary[first : binary.index(b"\0", first)].decode("ascii"), kind, offset, size


def _attributes(body: bytes) -> Iterator[tuple[int, int]]:
    """Yield the attributes of `.nv.info` that have a value for a symbol."""
    at = 0
    while at < len(body):
        form, attribute, length = struct.unpack_from("<BBH", body, at)
        at += 4
        if form != _SIZED:  # the value stands in the length's place
            continue
        if length == 8:
            yield attribute, struct.unpack_from("<4xI", body, at)[0]
        at += length
