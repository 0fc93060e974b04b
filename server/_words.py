"""A session's words: one page of sealed shared memory that both sides map."""

import fcntl
import os

__all__ = ["REQUIRED_SEALS", "WORDS_BYTES", "create_words"]

WORDS_BYTES = 4096
REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def create_words() -> int:
    """Creates a memfd of WORDS_BYTES zeros whose size and seals are final; returns the descriptor (close-on-exec)."""
    fd = os.memfd_create("topkd-words", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, WORDS_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, REQUIRED_SEALS | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd
