"""What loading compiled kernels takes where the compiler is not installed: its runtime library and its version.

`write_kit` puts both beside kernels that were compiled ahead of time; a process with `TOPKD_PRECOMPILED_DIR` finds them
there. The launcher (apache-tvm-ffi) has to be installed all the same.
"""

import functools
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

from . import _env

_FOLDER = "runtime"
_LIBRARY = "libcute_dsl_runtime.so"
_RECORD = "compiler.json"


class Kit(NamedTuple):
    """A compiler that is not here."""

    versions: dict[str, str]  # of its packages
    library: Path  # its runtime library
    flavour: str  # the CUDA that the library is for, such as "cu13"


def write_kit(directory: Path, versions: dict[str, str], library: Path) -> None:
    """Put an installed compiler's runtime library and versions into a directory of compiled kernels.

    Raises:
        OSError: it cannot be written.
    """
    folder = directory / _FOLDER
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    shutil.copyfile(library, folder / _LIBRARY)
    record = {"versions": versions, "flavour": library.parent.parent.name}
    (folder / _RECORD).write_text(json.dumps(record, indent=1) + "\n")


@functools.cache
def read_kit() -> Kit | None:
    """Return the kit of `TOPKD_PRECOMPILED_DIR`; None without one, or if others could write it."""
    directory = _env.precompiled_directory()
    if directory is None:
        return None
    folder = directory.absolute() / _FOLDER
    try:
        if not all(is_trusted(path.stat()) for path in (directory, folder, folder / _LIBRARY, folder / _RECORD)):
            return None
        record = json.loads((folder / _RECORD).read_text())
        versions = {str(name): str(version) for name, version in record["versions"].items()}
        return Kit(versions, folder / _LIBRARY, str(record["flavour"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def is_trusted(status: os.stat_result) -> bool:
    """Say whether only this user and root could have written something."""
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022
