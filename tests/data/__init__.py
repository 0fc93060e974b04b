"""Recorded score rows; README.md beside this file says where they come from and under which licences."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

INDEXER_ROWS = Path(__file__).with_name("indexer_rows.npz")


def indexer_rows() -> tuple[list[str], npt.NDArray[Any], npt.NDArray[Any]]:
    """The ten recorded rows: names, bits of bfloat16 (10, 131072) uint16, and lengths (10,) int32."""
    with np.load(INDEXER_ROWS) as file:
        kinds = ("relu_sum", "dot", "plateau")
        names = [f"{kind}-{row}" for kind in kinds for row in range(len(file[kind]))]
        return names, np.concatenate([file[kind] for kind in kinds]), file["lengths"]
