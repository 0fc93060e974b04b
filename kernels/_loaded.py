"""What a process has loaded of a kernel: each variant once, whoever asks first."""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Variant = TypeVar("_Variant", bound=Hashable)
_Code = TypeVar("_Code")


class Loaded(Generic[_Variant, _Code]):
    """The variants of a kernel that were asked for, and what `load` returned for each. Thread-safe.

    Args:
        load: loads or compiles a variant; called once for each, by one thread at a time. What it raises goes to whoever
            asked, and the next one makes it try again.
    """

    def __init__(self, load: Callable[[_Variant], _Code]) -> None:
        self._load = load
        self._codes: dict[_Variant, _Code] = {}
        self._lock = threading.Lock()

    def find(self, variant: _Variant) -> _Code | None:
        """Return what was loaded, None if the variant is cold; waits for nobody."""
        return self._codes.get(variant)

    def __call__(self, variant: _Variant) -> _Code:
        """Return what was loaded; a variant that is cold is loaded or compiled first. Waits only for the like."""
        code = self._codes.get(variant)
        if code is None:
            with self._lock:
                code = self._codes.get(variant)
                if code is None:
                    code = self._codes[variant] = self._load(variant)
        return code
