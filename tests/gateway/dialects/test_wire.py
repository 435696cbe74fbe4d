"""Reading the body: anything except plain, shallow JSON is refused in one sentence."""

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from gateway.dialects import wire
from gateway.dialects.chat.request import ChatCompletionRequest
from gateway.dialects.completions import CompletionRequest
from gateway.dialects.responses.request import ResponseRequest
from gateway.dialects.wire import (
    MAX_DEPTH,
    MAX_MEMBERS,
    SLICE_BYTES,
    StructureMeter,
    parse_object,
    validate,
)
from gateway.records.errors import InvalidJsonError, InvalidParameterError, PayloadTooLargeError
from tests.support.cases import all_cases


class Anything(BaseModel):
    """A body without parameters."""

    model_config = ConfigDict(extra="allow")


def nested(levels: int) -> bytes:
    """Return an object with `levels` levels of nesting, the object itself included."""
    return b'{"a":' + b"[" * (levels - 1) + b"]" * (levels - 1) + b"}" if levels > 1 else b"{}"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"a":1,}',
        b"{'a':1}",
        b'{"a":01}',
        b"{} {}",
        b'{"a":"\n"}',
        b"\xef\xbb\xbf{}",
        b'{"a":"\xff"}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 5000 + b"}",
    ],
    ids=[
        "empty",
        "truncated",
        "trailing-comma",
        "single-quotes",
        "leading-zero",
        "two-values",
        "raw-newline",
        "byte-order-mark",
        "not-utf-8",
        "nan",
        "infinity",
        "minus-infinity",
        "beyond-float",
        "beyond-integer",
    ],
)
def test_malformed_json_is_refused_with_the_place(body: bytes) -> None:
    with pytest.raises(InvalidJsonError, match=r"^The body is not valid JSON: .+\.$"):
        parse_object(body)


@all_cases("body", [b"[]", b'"text"', b"1", b"null", b"true"])
def test_json_that_is_no_object_is_refused_and_shown(body: bytes) -> None:
    with pytest.raises(InvalidJsonError) as caught:
        parse_object(body)
    assert caught.value.message == f"The body must be a JSON object. Given: {body.decode()}."


def test_last_of_duplicate_keys_counts() -> None:
    assert parse_object(b'{"n":1,"n":2}') == {"n": 2}


def test_deepest_allowed_nesting_is_read() -> None:
    assert "a" in parse_object(nested(MAX_DEPTH))


@all_cases("levels", [MAX_DEPTH + 1, 500, 200_000])
def test_deeper_nesting_is_refused_with_the_limit(levels: int) -> None:
    with pytest.raises(InvalidJsonError, match=f"at most {MAX_DEPTH} levels"):
        parse_object(nested(levels))


def test_deep_objects_are_refused_like_deep_arrays() -> None:
    body = b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1)
    with pytest.raises(InvalidJsonError, match="nested at most"):
        parse_object(body)


def test_many_brackets_side_by_side_are_read() -> None:
    assert len(parse_object(b'{"a":[' + b"[]," * 999 + b"[]]}")["a"]) == 1000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_any_object_is_read_as_the_standard_library_reads_it(value: dict[str, Any]) -> None:
    body = json.dumps(value).encode()
    assert parse_object(body) == json.loads(body)


TORN = st.text(alphabet='a"\\\n\u00e9\u65e5\U0001f600ud8', max_size=200) | st.text(
    alphabet="a\u00e9\u65e5\U0001f600", max_size=200
)
"""Texts whose escapes and characters take up to twelve bytes."""


@given(st.dictionaries(st.text(), TORN | st.lists(TORN | st.integers()), max_size=3), st.booleans())
def test_large_object_is_read_in_slices_that_cut_no_character(
    value: dict[str, Any], escapes: bool
) -> None:
    body = json.dumps(value, ensure_ascii=escapes).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "SLICE_BYTES", 30)
        assert parse_object(body) == value
        # A slice that is no valid text would cause another decoding of the whole body.
        assert wire._sliced(memoryview(body), 0) == value


@all_cases("fault", [b"\xff", b"\\q", b'"x', b"\n"])
def test_fault_in_a_large_object_is_refused_with_its_place(fault: bytes) -> None:
    body = b'{"a":"' + b"x" * 8 * SLICE_BYTES + fault + b"y" * 2 * SLICE_BYTES + b'"}'
    with pytest.raises(InvalidJsonError) as caught:
        parse_object(body)
    with pytest.raises((msgspec.DecodeError, UnicodeDecodeError)) as expected:
        msgspec.json.decode(body)
    assert caught.value.message == f"The body is not valid JSON: {expected.value}."


@all_cases(
    ("written", "text"),
    [
        (rb"\ud83d", "\ufffd"),
        (rb"a\uDE00b", "a\ufffdb"),
        (rb"\ud83d\ud83d\ude00", "\ufffd\N{GRINNING FACE}"),
        (rb"\ud83d\ude00\ude00", "\N{GRINNING FACE}\ufffd"),
        (rb"\ude00\ud83d", "\ufffd\ufffd"),
        (rb"\ude00\ude00", "\ufffd\ufffd"),
        (rb"\ud83d\n", "\ufffd\n"),
        # After a backslash, it is the text of an escape.
        (rb"\\ud83d\\\ud83d", "\\ud83d\\\ufffd"),
        (rb"\\ud83d\ude00", "\\ud83d\ufffd"),
        (b"\xed\xa0\xbd", "\ufffd"),
        (rb"\ud83d" + b"y" * 3 * SLICE_BYTES, "\ufffd" + "y" * 3 * SLICE_BYTES),
    ],
)
def test_half_of_a_character_is_a_replacement(written: bytes, text: str) -> None:
    body = b'{"%b":["%b"]}' % (written, written)
    assert parse_object(body) == {text: [text]}
    assert parse_object(bytearray(body)) == {text: [text]}


@given(st.binary(max_size=64))
def test_any_bytes_give_an_object_or_an_api_error(body: bytes) -> None:
    with contextlib.suppress(InvalidJsonError):
        assert parse_object(body) == json.loads(body)


def test_body_of_too_many_parameters_is_refused() -> None:
    def body(count: int) -> dict[str, Any]:
        return {f"p{number}": 1 for number in range(count)}

    assert validate(Anything, body(256)).model_extra == body(256)
    with pytest.raises(InvalidParameterError) as caught:
        validate(Anything, body(257))
    assert caught.value.message == "The body must have at most 256 parameters. Given: 257."


@all_cases("body", [ChatCompletionRequest, CompletionRequest, ResponseRequest])
def test_names_and_repeated_labels_have_bounds(body: type[BaseModel]) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        validate(body, {"x" * 257: 1})
    assert caught.value.message.startswith("Names of parameters must have at most 256 characters.")
    assert caught.value.message.endswith("(257 characters).")
    labels = {"user", "safety_identifier", "prompt_cache_key"} & body.model_fields.keys()
    assert labels
    for name in labels:
        assert getattr(validate(body, {name: "x" * 1024}), name) == "x" * 1024
        with pytest.raises(InvalidParameterError) as caught:
            validate(body, {name: "x" * 1025})
        assert caught.value.param == name
        assert "must be a string of at most 1024 characters. Given: " in caught.value.message


MOST_ITEMS = 100_000


@all_cases(
    ("unit", "most"),
    [
        (b"5,", MOST_ITEMS - 1),
        (b"[],", MAX_MEMBERS - 3),
        (b'{"a":5},', MAX_MEMBERS // 2 - 2),
        (b'"\\\\\\"[],",', MOST_ITEMS - 1),
    ],
    ids=["numbers", "arrays", "members", "escapes"],
)
@all_cases("part", [1, 7, 10_000, 10**9])
def test_items_of_a_body_are_counted_while_it_arrives(unit: bytes, most: int, part: int) -> None:
    def feed(units: int) -> None:
        body = b'{"a":[' + unit * units + b"5]}"
        # Parts arrive in small pieces where an error may be, and otherwise in few, to save time.
        tail = len(body) - 60 * part if part < 10 else 0
        meter = StructureMeter(most_items=MOST_ITEMS)
        if tail > 0:
            arrive(meter, body[:tail])
        for start in range(max(tail, 0), len(body), part):
            arrive(meter, body[start : start + part])

    feed(most)
    with pytest.raises(PayloadTooLargeError, match=r"must have at most \d+ .*Given: at least"):
        feed(most + 1)


@given(
    st.recursive(
        st.none() | st.integers() | st.text(alphabet='a"\\,[{:'),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\,[{:'), inner),
    ),
    st.integers(1, 9),
)
def test_commas_in_strings_do_not_count(value: Any, size: int) -> None:
    body = json.dumps({"a": value}).encode()
    meter = StructureMeter(most_items=1)
    # A second item exceeds the bound of one.
    items = _items({"a": value})
    with pytest.raises(PayloadTooLargeError) if items else contextlib.nullcontext():
        for start in range(0, len(body), size):
            arrive(meter, body[start : start + size])


def arrive(meter: StructureMeter, part: bytes) -> None:
    """Feed a part, and count as long as the result is open."""
    meter.feed(part)
    while meter.is_in_doubt:
        meter.count()


def _items(value: Any) -> int:
    """Count the commas between the items of all arrays and objects."""
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(len(value) - 1, 0) + sum(map(_items, inner))
