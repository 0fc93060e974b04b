import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from topkd.server._memory_host import HostBackend, HostRegion, check_memfd
from topkd.server._views import View
from topkd.server._words import WORDS_BYTES, create_words
from topkd.server.errors import FieldError, MemfdNotSealedError
from topkd.v1 import tensor_pb2

GOOD = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@contextmanager
def memfd(size: int, seals: int) -> Iterator[int]:
    fd = os.memfd_create("test-host", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd
    finally:
        os.close(fd)


def test_words_are_final() -> None:
    fd = create_words()
    try:
        assert os.fstat(fd).st_size == WORDS_BYTES
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == GOOD | fcntl.F_SEAL_SEAL
        for size in (0, 8192):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
        with mmap.mmap(fd, 0) as words:
            words[:8] = b"12345678"
    finally:
        os.close(fd)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, GOOD | fcntl.F_SEAL_WRITE, GOOD | 0x10])
def test_wrong_seals_are_refused(seals: int) -> None:
    with memfd(4096, seals) as fd, pytest.raises(MemfdNotSealedError):
        check_memfd(fd, 4096)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb+") as file:
        file.truncate(4096)
        with pytest.raises(MemfdNotSealedError):
            check_memfd(file.fileno(), 4096)


def test_read_only_descriptor_is_refused() -> None:
    with memfd(4096, GOOD) as fd:
        other = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        try:
            with pytest.raises(MemfdNotSealedError, match="open for reading and writing"):
                check_memfd(other, 4096)
        finally:
            os.close(other)


@pytest.mark.parametrize("size", [0, 4097, 1 << 63])
def test_wrong_size_is_refused(size: int) -> None:
    with memfd(4096, GOOD) as fd, pytest.raises(FieldError, match="size"):
        check_memfd(fd, size)


def test_views_share_memory_and_are_dropped() -> None:
    with memfd(4096, GOOD) as fd:
        region = HostRegion(fd, 4096)
        other = mmap.mmap(fd, 4096)
        other[16:24] = b"\x01\x00\x00\x00\x02\x00\x00\x00"
        view = region.tensor(View(tensor_pb2.D_TYPE_INT32, (1, 2), (2, 1), 4))
        assert view.tolist() == [[1, 2]]
        view[0, 0] = 7
        assert other[16] == 7
        empty = region.tensor(View(tensor_pb2.D_TYPE_FLOAT32, (0, 9), (9, 1), 0))
        assert empty.shape == (0, 9)
        maps = Path("/proc/self/maps")
        assert maps.read_text().count("memfd:test-host") == 2
        del view
        region.close()
        assert maps.read_text().count("memfd:test-host") == 1


def test_overlapping_rows() -> None:
    with memfd(4096, GOOD) as fd:
        region = HostRegion(fd, 4096)
        view = region.tensor(View(tensor_pb2.D_TYPE_FLOAT32, (3, 4), (0, 1), 0))
        assert view.stride() == (0, 1)


def test_inline_bytes() -> None:
    backend = HostBackend(1)
    view = View(tensor_pb2.D_TYPE_FLOAT32, (1, 2), (2, 1), 0)
    assert torch.equal(backend.from_bytes(b"\0\0\x80\x3f\0\0\0\x40", view), torch.tensor([[1.0, 2.0]]))
    assert backend.from_bytes(b"", View(tensor_pb2.D_TYPE_FLOAT32, (0, 2), (2, 1), 0)).shape == (0, 2)
    assert backend.info.uuid == "CPU"
