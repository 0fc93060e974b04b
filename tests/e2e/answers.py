"""What calls must answer, in plain numpy: for rows without NaN, ties to the lowest index, ascending indices."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

UNIQUE: Final[dict[str, Any]] = {"order": "index", "ties": "lowest"}
"""Options that leave one answer only, bit for bit."""


def best(scores: npt.NDArray[Any], k: int) -> npt.NDArray[np.int32]:
    """Returns the indices of each row's k largest, ascending; of equal scores the lowest indices."""
    ranked = np.argsort(-scores.astype(np.float64), axis=1, kind="stable")[:, :k]
    return np.sort(ranked, axis=1).astype(np.int32)


def rows(seed: int, count: int, width: int) -> npt.NDArray[np.float32]:
    """Returns scores with many equal ones among them."""
    return np.random.default_rng(seed).integers(-width, width, (count, width)).astype(np.float32)
