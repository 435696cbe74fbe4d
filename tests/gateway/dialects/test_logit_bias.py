"""`logit_bias` in its forms, and the tokens that must remain allowed."""

import math
from typing import Any

from tests.gateway.dialects.reading import LLAMACPP, OPENAI, read, refusal
from tests.support.cases import all_cases


def test_map_is_read_by_token_id() -> None:
    request = read(logit_bias={"5": 1, "007": -100, "2047": 0.5})
    assert request.sampling.logit_bias == {5: 1.0, 7: -100.0, 2047: 0.5}
    assert request.bias_texts == {}


@all_cases("text", ["x", "-", "+1", "1.0", " 7", "1_0", "٣", "t" * 128])
def test_key_that_is_no_integer_is_a_text(text: str) -> None:
    request = read(logit_bias={text: 1})
    assert (request.sampling.logit_bias, request.bias_texts) == ({}, {text: 1.0})


def test_string_of_a_pair_is_a_text_even_if_it_looks_like_an_id() -> None:
    request = read(logit_bias=[["5", 1], [5.0, 2]])
    assert (request.sampling.logit_bias, request.bias_texts) == ({5: 2.0}, {"5": 1.0})


@all_cases(
    ("given", "expected"),
    [
        (100.5, 100.0),
        (-100.5, -100.0),
        (1e300, 100.0),
        (0, 0.0),
        (False, -math.inf),
        (10**30, 100.0),
    ],
)
def test_bias_is_clamped_and_false_forbids(given: Any, expected: float) -> None:
    assert read(logit_bias={"5": given}).sampling.logit_bias == {5: expected}
    assert read(logit_bias=[["a", given]]).bias_texts == {"a": expected}


def test_last_bias_of_a_token_counts() -> None:
    assert read(logit_bias=[[5, 1], [5, False], [5, 2]]).sampling.logit_bias == {5: 2.0}
    assert read(logit_bias={"5": 1, "05": 2}).sampling.logit_bias == {5: 2.0}


@all_cases("value", [True, "1", None, [1], 10**400])
def test_bias_of_a_wrong_type_is_refused_naming_the_token(value: Any) -> None:
    error = refusal(logit_bias={"5": value})
    assert error.message.startswith("'logit_bias' must have numbers or false as biases. Given: ")
    assert error.message.endswith(" for 5.")
    assert error.param == "logit_bias"


@all_cases("text", ["", "t" * 129])
def test_text_beyond_its_length_is_refused(text: str) -> None:
    error = refusal(logit_bias={text: 1})
    assert error.message == (
        f"'logit_bias' must have strings of 1 to 128 characters. Given: {len(text)} characters."
    )


@all_cases("entry", [5, "a", [5], [5, 1, 1], [], {}])
def test_entry_that_is_no_pair_is_refused(entry: Any) -> None:
    error = refusal(logit_bias=[[5, 1], entry])
    assert error.message.startswith(
        "'logit_bias' must have pairs of a token id or text and a bias."
    )


@all_cases("token", [-1, 2**31, 1.5, True, None, [5]])
def test_token_that_is_no_id_is_refused(token: Any) -> None:
    error = refusal(logit_bias=[[token, 1]])
    assert error.message.startswith(
        "'logit_bias' must have token ids, which are non-negative integers."
    )


@all_cases("key", ["-1", "99999999999", "9" * 128])
def test_integer_that_is_no_id_is_refused(key: str) -> None:
    for bias in ({"5": 1, key: 1}, [[5, 1], [int(key), 1]]):
        for profile in (OPENAI, LLAMACPP):
            error = refusal(profile, logit_bias=bias)
            assert error.param == "logit_bias"
            assert f"token ids, which are non-negative integers. Given: {key[:20]}" in error.message


@all_cases("make", [dict, lambda pairs: [list(pair) for pair in pairs]])
def test_too_many_biases_are_refused_with_the_limit(make: Any) -> None:
    def pairs(count: int) -> Any:
        return make((str(token), 1) for token in range(count))

    assert read(logit_bias=pairs(1024))
    error = refusal(logit_bias=pairs(1025))
    assert error.message == "'logit_bias' must have at most 1024 entries. Given: 1025."


def test_logit_bias_that_forbids_every_allowed_token_is_refused() -> None:
    assert read(allowed_token_ids=[5, 6], logit_bias={"5": False}).sampling.allowed_token_ids
    assert read(allowed_token_ids=[5], logit_bias={"5": -100}).sampling.allowed_token_ids
    error = refusal(allowed_token_ids=[5, 6], logit_bias={"5": False, "6": False, "7": 1})
    assert error.message == (
        "'allowed_token_ids' must have at least one token that 'logit_bias' allows. Given: [5,6]."
    )
    assert error.param == "allowed_token_ids"
