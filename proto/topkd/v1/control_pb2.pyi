from topkd.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Backend(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BACKEND_UNSPECIFIED: _ClassVar[Backend]
    BACKEND_CPU: _ClassVar[Backend]
    BACKEND_CUDA: _ClassVar[Backend]
BACKEND_UNSPECIFIED: Backend
BACKEND_CPU: Backend
BACKEND_CUDA: Backend

class Device(_message.Message):
    __slots__ = ("backend", "uuid", "name", "memory_bytes", "compute_capability")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_CAPABILITY_FIELD_NUMBER: _ClassVar[int]
    backend: Backend
    uuid: str
    name: str
    memory_bytes: int
    compute_capability: str
    def __init__(self, backend: _Optional[_Union[Backend, str]] = ..., uuid: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., compute_capability: _Optional[str] = ...) -> None: ...

class KernelFamily(_message.Message):
    __slots__ = ("name", "dtypes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtypes: _containers.RepeatedScalarFieldContainer[_tensor_pb2.DType]
    def __init__(self, name: _Optional[str] = ..., dtypes: _Optional[_Iterable[_Union[_tensor_pb2.DType, str]]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_sessions", "max_regions", "max_region_bytes", "max_session_bytes", "max_plans", "max_batch", "max_rows", "max_message_bytes", "max_queue", "max_slots", "max_ready_timeout_ms", "max_streams", "max_lanes")
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_REGIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_REGION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PLANS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUE_FIELD_NUMBER: _ClassVar[int]
    MAX_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_READY_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_LANES_FIELD_NUMBER: _ClassVar[int]
    max_sessions: int
    max_regions: int
    max_region_bytes: int
    max_session_bytes: int
    max_plans: int
    max_batch: int
    max_rows: int
    max_message_bytes: int
    max_queue: int
    max_slots: int
    max_ready_timeout_ms: int
    max_streams: int
    max_lanes: int
    def __init__(self, max_sessions: _Optional[int] = ..., max_regions: _Optional[int] = ..., max_region_bytes: _Optional[int] = ..., max_session_bytes: _Optional[int] = ..., max_plans: _Optional[int] = ..., max_batch: _Optional[int] = ..., max_rows: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_queue: _Optional[int] = ..., max_slots: _Optional[int] = ..., max_ready_timeout_ms: _Optional[int] = ..., max_streams: _Optional[int] = ..., max_lanes: _Optional[int] = ...) -> None: ...

class ServerInfo(_message.Message):
    __slots__ = ("version", "protocol_revision", "epoch", "device", "kernels", "limits", "sessions")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_REVISION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol_revision: int
    epoch: str
    device: Device
    kernels: _containers.RepeatedCompositeFieldContainer[KernelFamily]
    limits: Limits
    sessions: int
    def __init__(self, version: _Optional[str] = ..., protocol_revision: _Optional[int] = ..., epoch: _Optional[str] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., kernels: _Optional[_Iterable[_Union[KernelFamily, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., sessions: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("info",)
    INFO_FIELD_NUMBER: _ClassVar[int]
    info: ServerInfo
    def __init__(self, info: _Optional[_Union[ServerInfo, _Mapping]] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("client_name", "client_version", "protocol_revision", "pid", "device_uuid", "reattach")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_REVISION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    REATTACH_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    client_version: str
    protocol_revision: int
    pid: int
    device_uuid: str
    reattach: bool
    def __init__(self, client_name: _Optional[str] = ..., client_version: _Optional[str] = ..., protocol_revision: _Optional[int] = ..., pid: _Optional[int] = ..., device_uuid: _Optional[str] = ..., reattach: bool = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("session_id", "token", "data_address", "info")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    token: str
    data_address: str
    info: ServerInfo
    def __init__(self, session_id: _Optional[str] = ..., token: _Optional[str] = ..., data_address: _Optional[str] = ..., info: _Optional[_Union[ServerInfo, _Mapping]] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("session", "draining")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    session: Session
    draining: Draining
    def __init__(self, session: _Optional[_Union[Session, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...
