"""The one place of `topkd.kernels` that reads the environment."""

import functools
import os

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


@functools.cache
def check_data() -> bool:
    """Say whether `TOPKD_CHECK_DATA` asks for data checks; read once per process.

    With data checks, lengths, starts and tables that would have to be clamped or skipped raise `ValueError`.
    The checks synchronise with the device: they are for debugging.

    Raises:
        ValueError: the variable is set to something that is neither yes nor no.
    """
    text = os.environ.get("TOPKD_CHECK_DATA", "").strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"TOPKD_CHECK_DATA={text!r}: allowed are {sorted(_TRUE)} and {sorted(_FALSE)}")
