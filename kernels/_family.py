"""What a kernel family is: the interface between the dispatcher and the code that selects."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ._request import SelectRequest, TopKResult


class Job(NamedTuple):
    """A request together with the outputs that it is to write; `values` is None unless asked for."""

    request: SelectRequest
    indices: Tensor  # (rows, columns) index_dtype
    values: Tensor | None  # (rows, columns) the input's dtype

    @property
    def result(self) -> TopKResult:
        """The outputs as the caller gets them."""
        return TopKResult(self.indices, self.values)


class Family(Protocol):
    """One way to run selections; every family keeps the whole contract for the requests that it serves."""

    @property
    def name(self) -> str:
        """Name that `kernel=` takes."""

    @property
    def capturable(self) -> bool:
        """Whether a call can be captured in a CUDA graph."""

    def unmet(self, request: SelectRequest) -> str | None:
        """Return the first condition that keeps this family from serving `request`, or None."""

    def run(self, jobs: Sequence[Job]) -> None:
        """Enqueue jobs that share a plan key on the current stream of their device and return without waiting.

        All were checked; none has 0 rows. The family may run them as one launch or one by one.
        """


class Compiled(Protocol):
    """Something whose code is compiled, or loaded from the cache of what was; made without arguments."""

    @property
    def oldest(self) -> tuple[int, int]:
        """The lowest compute capability that it runs on."""

    def precompile(self, arch: str) -> None:
        """Make all variants for an architecture such as "sm_90a" ready; needs no GPU.

        Raises:
            KernelUnavailableError: a variant can be neither loaded nor compiled.
        """


@runtime_checkable
class CompiledFamily(Family, Compiled, Protocol):
    """A family whose code is compiled."""

    def warm(self, request: SelectRequest) -> None:
        """Make ready what `run` needs for requests like this one, which `unmet` has nothing against.

        Loads or compiles the variant and puts its code on the device; touches no tensor of the request. May wait for
        the compiler, and for the device; costs next to nothing the second time.

        Raises:
            KernelUnavailableError: the code can be neither loaded nor compiled.
            RuntimeError: the current stream is being captured and the variant is cold; the stream was not touched.
        """
