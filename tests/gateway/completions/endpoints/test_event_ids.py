"""Whether a client requests event ids, and the event id after which it resumes."""

import pytest
from fastapi import Request

from gateway.completions.endpoints.event_ids import (
    Position,
    read_event_ids,
    read_last_event_id,
    read_position,
    read_stream,
)
from gateway.records.errors import InvalidParameterError
from tests.support.cases import all_cases

ID = "cmpl-" + "a2" * 13
CHAT_ID = f"chat{ID}"


def request(query: str = "", **headers: str) -> Request:
    """Make the parts of a request that are read."""
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": raw, "query_string": query.encode()})


@all_cases("default", [False, True])
def test_header_overrides_whether_events_have_ids(*, default: bool) -> None:
    assert read_event_ids(request(), default=default) is default
    assert read_event_ids(request(x_event_ids="true"), default=default)
    assert not read_event_ids(request(x_event_ids="false"), default=default)


@all_cases("value", ["", "1", "True", "true, true", "x" * 5000])
def test_other_value_of_the_header_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidParameterError, match="'X-Event-Ids' must be true or false") as error:
        read_event_ids(request(x_event_ids=value), default=True)
    assert error.value.param == "X-Event-Ids"
    assert value[:20] in error.value.message
    assert len(error.value.message) < 300


@all_cases("request_id", [ID, CHAT_ID])
@all_cases("number", [0, 1, 999_999_999_999_999])
def test_event_id_is_read(request_id: str, number: int) -> None:
    given = request(last_event_id=f"{request_id}:{number}")
    assert read_last_event_id(given) == Position(request_id, number)


@all_cases("headers", [{}, {"last_event_id": ""}], ids=["absent", "empty"])
def test_missing_event_id_means_the_beginning(headers: dict[str, str]) -> None:
    assert read_last_event_id(request(**headers)) is None
    assert read_position(request(**headers), ID) == 0


@all_cases(
    "value",
    [
        "12",
        ID,
        f"{ID}:",
        f"{ID}:-1",
        f"{ID}:1.5",
        f"{ID}:1 ",
        f"{ID}:1234567890123456",
        f"{ID[:-1]}:1",
        f"{ID.upper()}:1",
        "cmpl-1:1",
        f"chat{CHAT_ID}:1",
        f"chat-{ID}:1",
        "x" * 5000,
    ],
)
def test_malformed_event_id_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidParameterError, match="Last-Event-ID") as caught:
        read_last_event_id(request(last_event_id=value))
    assert caught.value.param == "Last-Event-ID"
    assert len(caught.value.message) < 300


def test_header_wins_over_the_query_that_a_browser_repeats() -> None:
    query = "stream=true&starting_after=3"
    assert read_position(request(query), ID) == 3
    assert read_position(request(query, last_event_id=f"{ID}:7"), ID) == 7


def test_event_of_another_completion_is_refused() -> None:
    other = "cmpl-" + "b" * 26
    with pytest.raises(InvalidParameterError, match="must name an event of"):
        read_position(request(last_event_id=f"{other}:7"), ID)


@all_cases("value", ["-1", "1.5", "one", "", "1" * 16])
def test_wrong_number_in_the_query_is_refused_by_name(value: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        read_position(request(f"starting_after={value}"), ID)
    assert caught.value.param == "starting_after"


def test_only_true_requests_a_stream() -> None:
    assert read_stream(request("stream=true"))
    assert not read_stream(request("stream=false"))
    assert not read_stream(request())
    with pytest.raises(InvalidParameterError, match="'stream' must be true or false"):
        read_stream(request("stream=1"))
