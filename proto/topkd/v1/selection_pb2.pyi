from topkd.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_UNSPECIFIED: _ClassVar[Order]
    ORDER_ANY: _ClassVar[Order]
    ORDER_INDEX: _ClassVar[Order]
    ORDER_VALUE: _ClassVar[Order]

class Ties(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIES_UNSPECIFIED: _ClassVar[Ties]
    TIES_ANY: _ClassVar[Ties]
    TIES_LOWEST: _ClassVar[Ties]
    TIES_HIGHEST: _ClassVar[Ties]

class OrderedFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDERED_FAILURE_UNSPECIFIED: _ClassVar[OrderedFailure]
    ORDERED_FAILURE_READY_TIMEOUT: _ClassVar[OrderedFailure]
    ORDERED_FAILURE_KERNEL_FAILED: _ClassVar[OrderedFailure]
    ORDERED_FAILURE_SESSION_ENDED: _ClassVar[OrderedFailure]

class LaneMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_MODE_UNSPECIFIED: _ClassVar[LaneMode]
    LANE_MODE_POLLED: _ClassVar[LaneMode]
    LANE_MODE_ARMED: _ClassVar[LaneMode]

class LaneFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LANE_FAILURE_UNSPECIFIED: _ClassVar[LaneFailure]
    LANE_FAILURE_NO_PLAN: _ClassVar[LaneFailure]
    LANE_FAILURE_KERNEL_FAILED: _ClassVar[LaneFailure]
    LANE_FAILURE_SESSION_ENDED: _ClassVar[LaneFailure]
ORDER_UNSPECIFIED: Order
ORDER_ANY: Order
ORDER_INDEX: Order
ORDER_VALUE: Order
TIES_UNSPECIFIED: Ties
TIES_ANY: Ties
TIES_LOWEST: Ties
TIES_HIGHEST: Ties
ORDERED_FAILURE_UNSPECIFIED: OrderedFailure
ORDERED_FAILURE_READY_TIMEOUT: OrderedFailure
ORDERED_FAILURE_KERNEL_FAILED: OrderedFailure
ORDERED_FAILURE_SESSION_ENDED: OrderedFailure
LANE_MODE_UNSPECIFIED: LaneMode
LANE_MODE_POLLED: LaneMode
LANE_MODE_ARMED: LaneMode
LANE_FAILURE_UNSPECIFIED: LaneFailure
LANE_FAILURE_NO_PLAN: LaneFailure
LANE_FAILURE_KERNEL_FAILED: LaneFailure
LANE_FAILURE_SESSION_ENDED: LaneFailure

class Selection(_message.Message):
    __slots__ = ("input", "k", "lengths", "next_n", "max_length", "row_starts", "group", "pooled", "pin_newest", "drop_neg_inf", "expand", "largest", "order", "ties", "values", "index_dtype", "row_offsets", "page_table", "page_size", "row_to_table", "table_starts", "out_indices", "out_values", "kernel")
    INPUT_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    NEXT_N_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROW_STARTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    PIN_NEWEST_FIELD_NUMBER: _ClassVar[int]
    DROP_NEG_INF_FIELD_NUMBER: _ClassVar[int]
    EXPAND_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    INDEX_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PAGE_TABLE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    ROW_TO_TABLE_FIELD_NUMBER: _ClassVar[int]
    TABLE_STARTS_FIELD_NUMBER: _ClassVar[int]
    OUT_INDICES_FIELD_NUMBER: _ClassVar[int]
    OUT_VALUES_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    input: _tensor_pb2.Tensor
    k: int
    lengths: _tensor_pb2.Tensor
    next_n: int
    max_length: int
    row_starts: _tensor_pb2.Tensor
    group: int
    pooled: bool
    pin_newest: bool
    drop_neg_inf: bool
    expand: bool
    largest: bool
    order: Order
    ties: Ties
    values: bool
    index_dtype: _tensor_pb2.DType
    row_offsets: _tensor_pb2.Tensor
    page_table: _tensor_pb2.Tensor
    page_size: int
    row_to_table: _tensor_pb2.Tensor
    table_starts: _tensor_pb2.Tensor
    out_indices: _tensor_pb2.Tensor
    out_values: _tensor_pb2.Tensor
    kernel: str
    def __init__(self, input: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., k: _Optional[int] = ..., lengths: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., next_n: _Optional[int] = ..., max_length: _Optional[int] = ..., row_starts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., group: _Optional[int] = ..., pooled: bool = ..., pin_newest: bool = ..., drop_neg_inf: bool = ..., expand: bool = ..., largest: bool = ..., order: _Optional[_Union[Order, str]] = ..., ties: _Optional[_Union[Ties, str]] = ..., values: bool = ..., index_dtype: _Optional[_Union[_tensor_pb2.DType, str]] = ..., row_offsets: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., page_table: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., page_size: _Optional[int] = ..., row_to_table: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., table_starts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., out_indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., out_values: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., kernel: _Optional[str] = ...) -> None: ...

class PlanCall(_message.Message):
    __slots__ = ("plan_id",)
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    def __init__(self, plan_id: _Optional[int] = ...) -> None: ...

class BatchItem(_message.Message):
    __slots__ = ("selection", "plan")
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    selection: Selection
    plan: PlanCall
    def __init__(self, selection: _Optional[_Union[Selection, _Mapping]] = ..., plan: _Optional[_Union[PlanCall, _Mapping]] = ...) -> None: ...

class Ordering(_message.Message):
    __slots__ = ("slot", "ready", "done", "ready_timeout_ms")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    READY_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    ready: int
    done: int
    ready_timeout_ms: int
    def __init__(self, slot: _Optional[int] = ..., ready: _Optional[int] = ..., done: _Optional[int] = ..., ready_timeout_ms: _Optional[int] = ...) -> None: ...

class SelectTopKRequest(_message.Message):
    __slots__ = ("items", "ordering")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ORDERING_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchItem]
    ordering: Ordering
    def __init__(self, items: _Optional[_Iterable[_Union[BatchItem, _Mapping]]] = ..., ordering: _Optional[_Union[Ordering, _Mapping]] = ...) -> None: ...

class SelectionResult(_message.Message):
    __slots__ = ("indices", "values", "kernel", "device_time_ns")
    INDICES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    indices: _tensor_pb2.Tensor
    values: _tensor_pb2.Tensor
    kernel: str
    device_time_ns: int
    def __init__(self, indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., values: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., kernel: _Optional[str] = ..., device_time_ns: _Optional[int] = ...) -> None: ...

class SelectTopKResponse(_message.Message):
    __slots__ = ("results", "queue_time_ns")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SelectionResult]
    queue_time_ns: int
    def __init__(self, results: _Optional[_Iterable[_Union[SelectionResult, _Mapping]]] = ..., queue_time_ns: _Optional[int] = ...) -> None: ...

class SelectTopKStreamRequest(_message.Message):
    __slots__ = ("call_id", "request", "timeout_ms")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    request: SelectTopKRequest
    timeout_ms: int
    def __init__(self, call_id: _Optional[int] = ..., request: _Optional[_Union[SelectTopKRequest, _Mapping]] = ..., timeout_ms: _Optional[int] = ...) -> None: ...

class CallError(_message.Message):
    __slots__ = ("code", "reason", "message", "field", "retry_after_ms")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    field: str
    retry_after_ms: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_ms: _Optional[int] = ...) -> None: ...

class SelectTopKStreamResponse(_message.Message):
    __slots__ = ("call_id", "response", "error")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    response: SelectTopKResponse
    error: CallError
    def __init__(self, call_id: _Optional[int] = ..., response: _Optional[_Union[SelectTopKResponse, _Mapping]] = ..., error: _Optional[_Union[CallError, _Mapping]] = ...) -> None: ...

class Merge(_message.Message):
    __slots__ = ("values", "indices", "k", "largest", "order", "ties", "out_indices", "out_values")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    TIES_FIELD_NUMBER: _ClassVar[int]
    OUT_INDICES_FIELD_NUMBER: _ClassVar[int]
    OUT_VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _tensor_pb2.Tensor
    indices: _tensor_pb2.Tensor
    k: int
    largest: bool
    order: Order
    ties: Ties
    out_indices: _tensor_pb2.Tensor
    out_values: _tensor_pb2.Tensor
    def __init__(self, values: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., k: _Optional[int] = ..., largest: bool = ..., order: _Optional[_Union[Order, str]] = ..., ties: _Optional[_Union[Ties, str]] = ..., out_indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., out_values: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class MergeTopKRequest(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[Merge]
    def __init__(self, items: _Optional[_Iterable[_Union[Merge, _Mapping]]] = ...) -> None: ...

class MergeTopKResponse(_message.Message):
    __slots__ = ("results", "queue_time_ns")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_NS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[SelectionResult]
    queue_time_ns: int
    def __init__(self, results: _Optional[_Iterable[_Union[SelectionResult, _Mapping]]] = ..., queue_time_ns: _Optional[int] = ...) -> None: ...

class CudaIpcMemory(_message.Message):
    __slots__ = ("handle", "offset", "size", "device_uuid")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset: int
    size: int
    device_uuid: str
    def __init__(self, handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ("cuda_ipc",)
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    cuda_ipc: CudaIpcMemory
    def __init__(self, cuda_ipc: _Optional[_Union[CudaIpcMemory, _Mapping]] = ...) -> None: ...

class RegisterRegionResponse(_message.Message):
    __slots__ = ("region_id", "size")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    size: int
    def __init__(self, region_id: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class ReleaseRegionRequest(_message.Message):
    __slots__ = ("region_id",)
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    def __init__(self, region_id: _Optional[int] = ...) -> None: ...

class ReleaseRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CreatePlanRequest(_message.Message):
    __slots__ = ("selection",)
    SELECTION_FIELD_NUMBER: _ClassVar[int]
    selection: Selection
    def __init__(self, selection: _Optional[_Union[Selection, _Mapping]] = ...) -> None: ...

class CreatePlanResponse(_message.Message):
    __slots__ = ("plan_id", "kernel", "reason")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    kernel: str
    reason: str
    def __init__(self, plan_id: _Optional[int] = ..., kernel: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ReleasePlanRequest(_message.Message):
    __slots__ = ("plan_id",)
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    def __init__(self, plan_id: _Optional[int] = ...) -> None: ...

class ReleasePlanResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenLaneRequest(_message.Message):
    __slots__ = ("plan_ids", "signals")
    PLAN_IDS_FIELD_NUMBER: _ClassVar[int]
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    plan_ids: _containers.RepeatedScalarFieldContainer[int]
    signals: CudaIpcMemory
    def __init__(self, plan_ids: _Optional[_Iterable[int]] = ..., signals: _Optional[_Union[CudaIpcMemory, _Mapping]] = ...) -> None: ...

class OpenLaneResponse(_message.Message):
    __slots__ = ("lane", "mode", "reason", "call_code", "call_kernel", "call_reason")
    LANE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CALL_CODE_FIELD_NUMBER: _ClassVar[int]
    CALL_KERNEL_FIELD_NUMBER: _ClassVar[int]
    CALL_REASON_FIELD_NUMBER: _ClassVar[int]
    lane: int
    mode: LaneMode
    reason: str
    call_code: bytes
    call_kernel: str
    call_reason: str
    def __init__(self, lane: _Optional[int] = ..., mode: _Optional[_Union[LaneMode, str]] = ..., reason: _Optional[str] = ..., call_code: _Optional[bytes] = ..., call_kernel: _Optional[str] = ..., call_reason: _Optional[str] = ...) -> None: ...

class CloseLaneRequest(_message.Message):
    __slots__ = ("lane",)
    LANE_FIELD_NUMBER: _ClassVar[int]
    lane: int
    def __init__(self, lane: _Optional[int] = ...) -> None: ...

class CloseLaneResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
