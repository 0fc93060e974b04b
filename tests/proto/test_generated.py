"""The generated code, and the client's import, under whatever protobuf and grpcio are installed.

These tests need the package's base dependencies only: `make proto-oldest` runs them with the oldest ones supported, the
other tests' environment has the newest.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from types import ModuleType

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MODULES = ("control", "selection", "side", "tensor")


def generated(name: str) -> ModuleType:
    return import_module(f"topkd.v1.{name}_pb2")


MESSAGES = [
    getattr(generated(module), name)
    for module in MODULES
    for name in generated(module).DESCRIPTOR.message_types_by_name
]


def fill(message: Message, depth: int = 3) -> Message:
    """Set every field, of oneofs the last one; messages down to `depth`."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None:
            if depth:
                inner = getattr(message, field.name)
                fill(inner.add() if is_repeated(field) else inner, depth - 1)
                if not is_repeated(field):
                    inner.SetInParent()
            continue
        value = example(field)
        if is_repeated(field):
            getattr(message, field.name).extend([value, value])
        else:
            setattr(message, field.name, value)
    return message


def is_repeated(field: FieldDescriptor) -> bool:
    if hasattr(field, "is_repeated"):  # since protobuf 6.31, which deprecates the label
        return bool(field.is_repeated)
    return field.label == FieldDescriptor.LABEL_REPEATED


def example(field: FieldDescriptor) -> object:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.type == FieldDescriptor.TYPE_STRING:
        return "text"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"\x00\xff"
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    return 7


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was_sent(kind: type[Message]) -> None:
    sent = fill(kind())
    assert kind.FromString(sent.SerializeToString()) == sent


def test_absent_and_zero_differ_where_a_default_is_not_zero() -> None:
    selection = generated("selection").Selection
    for name in ("next_n", "max_length", "group", "drop_neg_inf", "largest", "page_size"):
        message = selection()
        assert not message.HasField(name)
        setattr(message, name, 0)
        assert selection.FromString(message.SerializeToString()).HasField(name)


def test_unknown_fields_survive() -> None:
    """A front that forwards a request of a newer client must not lose what it does not know."""
    item = generated("selection").BatchItem
    newer = item(plan=generated("selection").PlanCall(plan_id=5)).SerializeToString() + b"\xfa\x3f\x01x"
    assert item.FromString(newer).SerializeToString() == newer


@pytest.mark.parametrize(
    ("module", "service", "methods"),
    [
        ("control", "ControlService", ["GetServerInfo", "Attach"]),
        (
            "selection",
            "SelectionService",
            [
                "SelectTopK",
                "SelectTopKStream",
                "MergeTopK",
                "CreatePlan",
                "ReleasePlan",
                "OpenLane",
                "CloseLane",
                "RegisterRegion",
                "ReleaseRegion",
            ],
        ),
    ],
)
def test_services_have_stubs(module: str, service: str, methods: list[str]) -> None:
    import grpc

    stubs = import_module(f"topkd.v1.{module}_pb2_grpc")
    with grpc.insecure_channel("unix:/nonexistent") as channel:
        stub = getattr(stubs, f"{service}Stub")(channel)
        assert [name for name in vars(stub) if not name.startswith("_")] == methods


def test_the_client_imports_and_says_that_nobody_is_there() -> None:
    program = (
        "import topkd\n"
        "client = topkd.Client('/nonexistent', attach_timeout=0.1)\n"
        "try:\n    client.info()\n"
        "except topkd.UnavailableError as error:\n    print(type(error).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("UnavailableError\n", "")


def test_details_of_a_status_are_read() -> None:
    from google.protobuf.any_pb2 import Any
    from google.rpc import error_details_pb2, status_pb2

    detail = Any()
    detail.Pack(error_details_pb2.ErrorInfo(reason="QUEUE_FULL", domain="topkd.v1"))
    status = status_pb2.Status.FromString(status_pb2.Status(code=8, details=[detail]).SerializeToString())
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert info.reason == "QUEUE_FULL"
