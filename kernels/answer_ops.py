"""Loads of `answer` in an order that matters."""

# mypy: ignore-errors

import cutlass.cute as cute
from cutlass import Int64
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def load_int64_first(address: Int64, *, loc=None, ip=None) -> Int64:
    """One int64 as it is in memory now, before anything that is read or written behind it."""
    return cute.arch.inline_ptx(
        "ld.acquire.sys.global.b64 {$w0}, [{$r0}];",
        write_only_types=[Int64],
        read_only_args=[address],
        loc=loc,
        ip=ip,
    )
