"""Which tests run in one process where several share them (`make test`).

All that start servers, and wait for them, are one group: they measure time, and would keep each other waiting. A file
of kernel tests, which compute and start nothing, is a group, and so is the conformance suite.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling


def group(nodeid: str) -> str:
    """Return the group of a test."""
    folder, _, rest = nodeid.removeprefix("tests/").partition("/")
    if folder == "kernels":
        return rest.partition("::")[0]
    return folder if folder == "conformance" else "servers"


class Groups(LoadScopeScheduling):
    """Hands whole groups to processes.

    The mark `xdist_group` would say the same, but pytest-xdist 3.8 notes it in a way that pytest 9.2 does not see.
    """

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)
