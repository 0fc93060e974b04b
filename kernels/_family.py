"""What a kernel family is: the interface between the dispatcher and the code that selects."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ._cute_flags import SPARE_CELLS
from ._request import SelectRequest, TopKResult


class Job(NamedTuple):
    """A request together with the outputs that it is to write; `values` is None unless asked for."""

    request: SelectRequest
    indices: Tensor  # (rows, columns) index_dtype
    values: Tensor | None  # (rows, columns) the input's dtype
    spare: int = 0  # address of memory that is written instead, see `spare_bytes`; 0: none. Not for family `torch`

    @property
    def result(self) -> TopKResult:
        """The outputs as the caller gets them."""
        return TopKResult(self.indices, self.values)


def spare_bytes(columns: int) -> int:
    """Return the size of spare memory, for outputs of so many columns.

    It begins with a mark of 64 bits. Where that is not 0 when a kernel looks, what the kernel would write to outputs
    goes to the rest of the spare memory, from `SPARE_CELLS` bytes on; the 64 bits behind the mark are left alone.
    """
    return SPARE_CELLS + 8 * columns


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
