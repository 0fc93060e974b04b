from topkd.v1 import control_pb2 as _control_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RegisterMemfd(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class Detach(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SideRequest(_message.Message):
    __slots__ = ("attach", "register_memfd", "detach")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    REGISTER_MEMFD_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    attach: _control_pb2.AttachRequest
    register_memfd: RegisterMemfd
    detach: Detach
    def __init__(self, attach: _Optional[_Union[_control_pb2.AttachRequest, _Mapping]] = ..., register_memfd: _Optional[_Union[RegisterMemfd, _Mapping]] = ..., detach: _Optional[_Union[Detach, _Mapping]] = ...) -> None: ...

class RegisteredMemfd(_message.Message):
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
    __slots__ = ("error", "session", "registered_memfd")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    REGISTERED_MEMFD_FIELD_NUMBER: _ClassVar[int]
    error: SideError
    session: _control_pb2.Session
    registered_memfd: RegisteredMemfd
    def __init__(self, error: _Optional[_Union[SideError, _Mapping]] = ..., session: _Optional[_Union[_control_pb2.Session, _Mapping]] = ..., registered_memfd: _Optional[_Union[RegisteredMemfd, _Mapping]] = ...) -> None: ...
