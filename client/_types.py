"""The plain data of the public API: arguments, results and what a server says of itself. Imports no heavy package."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "Array",
    "Backend",
    "Device",
    "KernelFamily",
    "Limits",
    "MergeOptions",
    "SelectOptions",
    "SelectResult",
    "Selection",
    "ServerInfo",
    "Shared",
    "TlsOptions",
]

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
"""A numpy array or a torch tensor."""

Order: TypeAlias = Literal["any", "index", "value"]
Ties: TypeAlias = Literal["any", "lowest", "highest"]

Wait: TypeAlias = Literal["stream", "host"]
WaitsBy: TypeAlias = Literal["operations", "kernel"]
"""What a call with CUDA tensors waits for: to be accepted in its stream's order, or to be complete."""


class SelectOptions(TypedDict, total=False):
    """The keyword arguments of a selection: those of `topkd.kernels.select_topk`, by the same names and defaults."""

    lengths: Array | None
    next_n: int
    max_length: int | None
    row_starts: Array | None
    group: int
    pooled: bool
    pin_newest: bool
    drop_neg_inf: bool | None
    expand: bool
    largest: bool
    order: Order
    ties: Ties
    values: bool
    index_dtype: Any
    row_offsets: Array | None
    page_table: Array | None
    page_size: int
    row_to_table: Array | None
    table_starts: Array | None
    out_indices: Array | None
    out_values: Array | None
    kernel: str


class MergeOptions(TypedDict, total=False):
    """The keyword arguments of a merge: those of `topkd.kernels.merge_topk`, by the same names and defaults."""

    largest: bool
    order: Order
    ties: Ties
    out_indices: Array | None
    out_values: Array | None


@dataclass(slots=True)
class Selection:
    """One selection of a batch: the arguments of `Client.select_topk`.

    Attributes:
        input: Scores (rows, width): bfloat16, float16 or float32.
        k: Elements selected a row.
        lengths: Valid members of each row, (rows,) or (rows // next_n,) int32.
        next_n: Draft tokens: rows that share an entry of `lengths`.
        max_length: Bound of all lengths, known on the host.
        row_starts: First member of each row's window, (rows,) int32.
        group: Members of an element.
        pooled: Whether `input` holds one score a group already.
        pin_newest: Whether a row's last element is always selected.
        drop_neg_inf: Whether selected elements that score -inf are written as -1.
        expand: Whether members are written instead of elements.
        largest: Whether the largest are selected.
        order: Order inside a row's output.
        ties: Which of the elements equal to the k-th value are taken.
        values: Whether the scores are returned too.
        index_dtype: int32 or int64, of numpy or torch, or its name.
        row_offsets: Added to each index, (rows,) int32 or int64.
        page_table: Maps indices by pages, (tables, entries) int32.
        page_size: Indices of a page, a power of two.
        row_to_table: The table of each row, (rows,) int32.
        table_starts: First page of each row, (rows,) int32.
        out_indices: Written in place instead of a new array.
        out_values: Written in place instead of a new array.
        kernel: A kernel family's name, or "auto".
    """

    input: Array
    k: int
    lengths: Array | None = None
    next_n: int = 1
    max_length: int | None = None
    row_starts: Array | None = None
    group: int = 1
    pooled: bool = False
    pin_newest: bool = False
    drop_neg_inf: bool | None = None
    expand: bool = False
    largest: bool = True
    order: Order = "any"
    ties: Ties = "any"
    values: bool = False
    index_dtype: Any = "int32"
    row_offsets: Array | None = None
    page_table: Array | None = None
    page_size: int = 1
    row_to_table: Array | None = None
    table_starts: Array | None = None
    out_indices: Array | None = None
    out_values: Array | None = None
    kernel: str = "auto"


@dataclass(slots=True)
class Merge:
    """One merge: the arguments of `Client.merge_topk`."""

    values: Array
    indices: Array
    k: int
    largest: bool = True
    order: Order = "any"
    ties: Ties = "any"
    out_indices: Array | None = None
    out_values: Array | None = None


@dataclass(slots=True, frozen=True)
class SelectResult:
    """What a selection gave. Arrays are numpy's where the input was, else torch's, on the input's device.

    Attributes:
        indices: (rows, k), or (rows, k * group) of expanded groups.
        values: Scores beside the indices; None unless asked for.
        kernel: The kernel family that ran.
        device_time: Seconds of the kernel call that served this selection; 0 where it was ordered on a stream.
        queue_time: Seconds from the request's arrival to its start.
        local: Whether it ran in this process because no server was there.
    """

    indices: Any
    values: Any = None
    kernel: str = ""
    device_time: float = 0.0
    queue_time: float = 0.0
    local: bool = False


class Backend(enum.Enum):
    """Where a server computes."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(slots=True, frozen=True)
class Device:
    """A server's device.

    Attributes:
        backend: Where it computes.
        uuid: "GPU-..." or "CPU".
        name: For people.
        memory_bytes: Total memory, 0 if unknown.
        compute_capability: "9.0" and the like, "" on the CPU.
    """

    backend: Backend
    uuid: str
    name: str
    memory_bytes: int
    compute_capability: str


@dataclass(slots=True, frozen=True)
class KernelFamily:
    """A kernel family and the element types that it serves."""

    name: str
    dtypes: tuple[str, ...]


@dataclass(slots=True, frozen=True)
class Limits:
    """Bounds that the server enforces; 0 if it named none."""

    max_sessions: int = 0
    max_regions: int = 0
    max_region_bytes: int = 0
    max_session_bytes: int = 0
    max_plans: int = 0
    max_batch: int = 0
    max_rows: int = 0
    max_message_bytes: int = 0
    max_queue: int = 0
    max_slots: int = 0
    max_ready_timeout_ms: int = 0
    max_streams: int = 0
    max_lanes: int = 0


@dataclass(slots=True, frozen=True)
class ServerInfo:
    """What a server says of itself.

    Attributes:
        version: Of the server's package.
        protocol_revision: Counts revisions within `topkd.v1`.
        epoch: Random, new at each start of the server.
        device: What it computes on.
        kernels: The kernel families that it has.
        limits: Bounds that it enforces.
        sessions: Sessions open now.
    """

    version: str
    protocol_revision: int
    epoch: str
    device: Device
    kernels: tuple[KernelFamily, ...]
    limits: Limits
    sessions: int


@dataclass(slots=True, frozen=True)
class Shared:
    """What a registration makes visible to the server.

    Attributes:
        address: First byte of the allocation behind the tensor.
        size: Bytes of the whole allocation: all of it can be read and written by the server.
        offset: Bytes from the allocation's first byte to the tensor's.
        nbytes: Bytes of the tensor.
        neighbours: Bytes of the allocation that are not the tensor's: other tensors of torch's caching allocator.
    """

    address: int
    size: int
    offset: int
    nbytes: int
    neighbours: int

    def __str__(self) -> str:
        others = f", {self.neighbours:,} of them not of the tensor" if self.neighbours else ""
        return f"an allocation of {self.size:,} bytes{others}"


@dataclass(slots=True, frozen=True)
class TlsOptions:
    """TLS of a TCP target, PEM each.

    Attributes:
        ca: Certificates that sign the server's; None: the system's.
        certificate: The client's certificate chain, where the server asks for one.
        key: The client's private key.
        server_name: Name expected in the server's certificate where it is not the target's host.
    """

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None
