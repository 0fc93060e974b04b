"""`answer`: tells whoever waits for a launch that it is over, unless it was given up.

Host side: the one variant and launching. The kernel, and why there is one, are in `answer_kernel`.
"""

from collections.abc import Callable

import torch

from ._cute_compile import arch_of, capability, device_index, load_or_compile
from ._cute_flags import SPARE_CELLS
from ._loaded import Loaded


class Answer:
    """Answers behind launches. Owns the variant that was compiled."""

    name = "answer"
    oldest = (8, 0)

    def __init__(self) -> None:
        self._launchers = Loaded(self._load)

    def precompile(self, arch: str) -> None:
        """Load or compile the variant for an architecture such as "sm_90a"; needs no GPU."""
        self._launchers(arch)

    def warm(self, device: torch.device) -> None:
        """Load or compile the variant and launch it once, so that the device has it."""
        memory = torch.zeros(SPARE_CELLS // 8 + 6, dtype=torch.int64, device=device)
        first = memory.data_ptr()
        words = tuple(range(first + SPARE_CELLS, first + SPARE_CELLS + 48, 8))
        self(first, words, device)

    def __call__(self, spare: int, words: tuple[int, ...], device: torch.device) -> None:
        """Enqueue an answer on the current stream of a device and return without waiting.

        Unless the spare memory is marked: counts in its second word, and stores 0, the ticket, the count and the ticket
        plus 1.

        Args:
            spare: address of the spare memory of the launches before it (`spare_bytes`), 16-byte aligned.
            words: six addresses of 64 bits, aligned, that the device can write: the request word, which becomes 0; the
                done word, which becomes the ticket plus 1 after all else that was written; two that become the count;
                the ticket, which is read; the echo, which becomes the same.
            device: a CUDA device.

        Raises:
            KernelUnavailableError: the variant can be neither loaded nor compiled.
        """
        index = device_index(device)
        stream = torch._C._cuda_getCurrentRawStream(index)
        self._launchers(arch_of(capability(index)))(spare, *words, stream)

    def _load(self, arch: str) -> Callable[..., None]:
        recent = int(arch.removeprefix("sm_").rstrip("a")) >= 90
        return load_or_compile("answer_kernel", "Answer", (recent,), arch).function
