from topkd.v1 import control_pb2 as _control_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterMemfd(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class RegisterVmm(_message.Message):
    __slots__ = ("device_uuid", "address", "range_address", "range_size", "sizes")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANGE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    address: int
    range_address: int
    range_size: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, device_uuid: _Optional[str] = ..., address: _Optional[int] = ..., range_address: _Optional[int] = ..., range_size: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SideRequest(_message.Message):
    __slots__ = ("attach", "register_memfd", "detach", "register_vmm")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    REGISTER_MEMFD_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    REGISTER_VMM_FIELD_NUMBER: _ClassVar[int]
    attach: _control_pb2.AttachRequest
    register_memfd: RegisterMemfd
    detach: Detach
    register_vmm: RegisterVmm
    def __init__(self, attach: _Optional[_Union[_control_pb2.AttachRequest, _Mapping]] = ..., register_memfd: _Optional[_Union[RegisterMemfd, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ..., register_vmm: _Optional[_Union[RegisterVmm, _Mapping]] = ...) -> None: ...

class RegisteredMemfd(_message.Message):
    __slots__ = ("region_id",)
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    def __init__(self, region_id: _Optional[int] = ...) -> None: ...

class RegisteredVmm(_message.Message):
    __slots__ = ("region_id",)
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    region_id: int
    def __init__(self, region_id: _Optional[int] = ...) -> None: ...

class SideError(_message.Message):
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

class SideReply(_message.Message):
    __slots__ = ("error", "session", "registered_memfd", "registered_vmm")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_MEMFD_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_VMM_FIELD_NUMBER: _ClassVar[int]
    error: SideError
    session: _control_pb2.Session
    registered_memfd: RegisteredMemfd
    registered_vmm: RegisteredVmm
    def __init__(self, error: _Optional[_Union[SideError, _Mapping]] = ..., session: _Optional[_Union[_control_pb2.Session, _Mapping]] = ..., registered_memfd: _Optional[_Union[RegisteredMemfd, _Mapping]] = ..., registered_vmm: _Optional[_Union[RegisteredVmm, _Mapping]] = ...) -> None: ...
