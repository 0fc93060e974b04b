import inspect

import pytest
from google.rpc import error_details_pb2, status_pb2

from topkd.kernels import ArgumentTypeError, ArgumentValueError
from topkd.server import errors


def unpack(status: status_pb2.Status) -> dict[str, object]:
    found: dict[str, object] = {}
    for detail in status.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            message = kind()
            if detail.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    return found


def test_every_error_is_in_the_table() -> None:
    classes = {
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, errors.ServerError) and kind is not errors.ServerError
    }
    assert classes == set(errors.TABLE)


def test_fields_and_retries() -> None:
    status = errors.to_status(errors.QueueFullError("full", retry_after_ms=1500), "req-1")
    found = unpack(status)
    assert (status.code, status.message) == (8, "full")
    assert found["ErrorInfo"] == error_details_pb2.ErrorInfo(
        reason="QUEUE_FULL", domain="topkd.v1", metadata={"request_id": "req-1"}
    )
    retry = found["RetryInfo"]
    assert isinstance(retry, error_details_pb2.RetryInfo)
    assert retry.retry_delay.ToMilliseconds() == 1500
    bad = unpack(errors.to_status(errors.FieldError("k: no", field="items[2].selection.k")))["BadRequest"]
    assert isinstance(bad, error_details_pb2.BadRequest)
    assert bad.field_violations[0].field == "items[2].selection.k"


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ArgumentTypeError("k", "k is x"), "ARGUMENT_TYPE"), (ArgumentValueError("k", "k"), "ARGUMENT_VALUE")],
)
def test_argument_errors_of_the_kernels(error: Exception, reason: str) -> None:
    assert errors.outcome_of(error) == errors.Outcome(3, reason)
    assert errors.to_side_error(error).field == "k"


def test_unknown_exceptions_say_nothing() -> None:
    status = errors.to_status(RuntimeError("secret /path"), "abc")
    assert status.code == 13
    assert "secret" not in str(status)
    assert "abc" in status.message


def test_messages_are_bounded_and_without_addresses() -> None:
    status = errors.to_status(errors.FieldError("out at 0x7f001234; " + "x" * 5000, field="f"))
    assert len(status.message) <= 1000
    assert "0x7f" not in status.message


def test_ids_are_all_that_not_found_tells() -> None:
    assert str(errors.RegionNotFoundError(255)) == "no region 0x00000000000000ff"
    assert str(errors.PlanNotFoundError(1)) == "no plan 0x0000000000000001"
