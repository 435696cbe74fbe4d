"""The form of API keys."""

import hashlib
import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.auth.api_key import ALPHABET, ApiKey, MalformedKeyError, checksum
from tests.support.cases import all_cases

FORM = re.compile(r"sk-[A-Za-z0-9]{12}-[A-Za-z0-9]{40}")


def test_generated_key_has_the_documented_form() -> None:
    key = ApiKey.generate()
    text = key.reveal()
    assert FORM.fullmatch(text)
    assert key.prefix == text[3:15]
    assert key.digest() == hashlib.sha256(text.encode()).digest()


def test_generated_keys_differ_in_prefix_and_secret() -> None:
    keys = [ApiKey.generate().reveal() for _ in range(100)]
    assert len({key[3:15] for key in keys}) == 100
    assert len({key[16:] for key in keys}) == 100


def test_generated_key_is_parsed_again() -> None:
    for _ in range(100):
        key = ApiKey.generate()
        assert ApiKey.parse(key.reveal()).prefix == key.prefix


@given(st.binary())
def test_checksum_is_the_crc_in_six_digits_of_base_62(data: bytes) -> None:
    text = data.hex()
    digits = checksum(text)
    assert len(digits) == 6
    value = 0
    for digit in digits:
        value = value * 62 + ALPHABET.index(digit)
    assert value == zlib.crc32(text.encode())


@given(st.data())
def test_any_single_changed_character_is_detected(data: st.DataObject) -> None:
    text = ApiKey.generate().reveal()
    place = data.draw(st.integers(0, len(text) - 1))
    character = data.draw(st.characters())
    changed = text[:place] + character + text[place + 1 :]
    if changed == text:
        assert ApiKey.parse(changed).reveal() == text
        return
    with pytest.raises(MalformedKeyError):
        ApiKey.parse(changed)


@given(st.text())
def test_other_text_is_malformed(text: str) -> None:
    with pytest.raises(MalformedKeyError):
        ApiKey.parse(text)


@all_cases("ending", ["\n", " ", "a", "\0"])
def test_nothing_may_follow_a_key(ending: str) -> None:
    with pytest.raises(MalformedKeyError):
        ApiKey.parse(ApiKey.generate().reveal() + ending)


def test_key_redacts_itself() -> None:
    key = ApiKey.generate()
    secret = key.reveal()[16:]
    for shown in (repr(key), str(key), f"{key}", f"{[key]}", f"{key!s}"):
        assert secret not in shown
        assert secret[-6:] not in shown
        assert key.prefix in shown
