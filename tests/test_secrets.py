"""The secret scan finds planted secrets in every encoding, and nothing else."""

import base64
import os
import random
import string
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import jwt
import pytest

from gateway.auth.api_key import ApiKey
from tests.support import secrets as scanner
from tests.support.cases import all_cases
from tests.support.secrets import Finding, scan_for_secrets

KEY = ApiKey.generate().reveal()
TOKEN = jwt.encode({"sub": "ann", "tenant": "acme"}, "a secret of thirty-two bytes or more")
WEBHOOK_SECRET = "whsec_" + base64.b64encode(bytes(range(200, 232))).decode()
PASSWORD = "correct horse battery+staple/\"'"
LINE = b'{"level":"info","request":"cmpl-0123456789abcdef0123456789abcdef","message":"ended"}\n'


def percent(text: str) -> str:
    return "".join(f"%{byte:02x}" for byte in text.encode())


DISGUISES: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "base64": lambda text: base64.b64encode(text.encode()).decode(),
    "base64 shifted by one": lambda text: base64.b64encode(b"u" + text.encode()).decode(),
    "base64 shifted by two": lambda text: base64.b64encode(b"u:" + text.encode()).decode(),
    "base64 for URLs, no padding": lambda text: (
        base64.urlsafe_b64encode(b"\xff\xfe\xfb" + text.encode()).decode().rstrip("=")
    ),
    "hexadecimal": lambda text: text.encode().hex(),
    "hexadecimal in capitals": lambda text: text.encode().hex().upper(),
    "percent-encoded": lambda text: quote(text, safe=""),
    "percent-encoded throughout": percent,
    "percent-encoded base64": lambda text: quote(base64.b64encode(text.encode()).decode(), safe=""),
    "base64 of base64": lambda text: base64.b64encode(base64.b64encode(text.encode())).decode(),
    "hexadecimal base64": lambda text: base64.b64encode(text.encode()).hex(),
}


@all_cases("disguise", DISGUISES.values(), ids=DISGUISES)
@all_cases(
    "secret",
    [KEY, TOKEN, WEBHOOK_SECRET, PASSWORD],
    ids=["key", "token", "webhook secret", "password"],
)
@all_cases("before", [b" ", b"x", b"xy", b"xyz", b"\x00\xff", b'": "'])
def test_known_secret_is_found(disguise: Callable[[str], str], secret: str, before: bytes) -> None:
    data = LINE * 3 + before + disguise(secret).encode() + b"\n" + LINE * 3
    found = scan_for_secrets({"log": data}, [secret])
    assert found
    # The secret begins at `before` or within it, if both are one run of characters.
    first = len(LINE * 3)
    assert all(first <= each.offset < first + len(before) + len(disguise(secret)) for each in found)
    assert any("known secret" in each.what for each in found)


@all_cases("disguise", DISGUISES.values(), ids=DISGUISES)
@all_cases(
    ("secret", "what"), [(KEY, f"API key {KEY[3:15]}"), (TOKEN, "JWT")], ids=["key", "token"]
)
def test_every_key_or_token_is_found(
    disguise: Callable[[str], str], secret: str, what: str
) -> None:
    [found] = {
        each.what.split(",")[0]
        for each in scan_for_secrets({"dump": LINE + b"=" + disguise(secret).encode() + LINE})
    }
    assert found == what


def test_public_parts_of_secrets_are_not_reported() -> None:
    header, claims, _ = TOKEN.split(".")
    shown = [KEY[:15], f"sk-{KEY[3:15]}-***", f"{header}.{claims}", header]
    assert scan_for_secrets({"log": " ".join(shown)}, [KEY, TOKEN]) == []


def test_secret_part_of_a_key_is_found_without_its_prefix() -> None:
    [found] = scan_for_secrets({"log": f"ends in {KEY[16:]}"}, [KEY])
    assert found == Finding("log", 8, "known secret of 40 characters")


def test_lookalikes_of_keys_and_tokens_are_not_reported() -> None:
    wrong_end = KEY[:-1] + ("0" if KEY[-1] != "0" else "1")
    no_header = f"eyJ{'a' * 20}.{'b' * 30}.{'c' * 43}"
    no_algorithm = base64.urlsafe_b64encode(b'{"a":1}').decode().rstrip("=")
    texts = [
        wrong_end,
        base64.b64encode(wrong_end.encode()).decode(),
        no_header,
        f"{no_algorithm}.{'b' * 30}.{'c' * 43}",
        os.urandom(4096).hex(),
        base64.b64encode(os.urandom(4096)).decode(),
        LINE.decode() * 100,
    ]
    for text in texts:
        assert scan_for_secrets({"text": text}, [KEY]) == []


def test_findings_name_source_and_place_without_the_secret() -> None:
    sources: dict[str, bytes | str | Path] = {
        "gateway.log": LINE * 2 + KEY.encode(),
        "worker.log": LINE,
        "errors": TOKEN,
    }
    found = scan_for_secrets(sources, [KEY, TOKEN])
    assert {(each.source, each.offset) for each in found} >= {
        ("gateway.log", len(LINE) * 2),
        ("errors", 0),
    }
    assert not {"worker.log"} & {each.source for each in found}
    text = repr(found)
    assert KEY[16:] not in text
    assert TOKEN.rpartition(".")[2] not in text


def test_secrets_at_the_borders_of_chunks_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanner, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(scanner, "OVERLAP_BYTES", 200)
    file = tmp_path / "log"
    for offset in range(900, 1010, 7):
        file.write_bytes(b"." * offset + KEY.encode() + b"." * 3000)
        offsets = {each.offset for each in scan_for_secrets({"log": file})}
        assert offsets == {offset}
        data = file.read_bytes()
        assert {each.offset for each in scan_for_secrets({"log": data})} == {offset}


def test_empty_text_has_no_findings(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    assert scan_for_secrets({"file": empty, "text": ""}, [KEY]) == []


def test_secret_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="8 letters"):
        scan_for_secrets({}, ["short"])


def test_many_megabytes_take_seconds(tmp_path: Path) -> None:
    generator = random.Random(3)
    letters = string.ascii_letters + string.digits

    def line(number: int) -> str:
        request = f"cmpl-{generator.getrandbits(128):032x}"
        # Every tenth line contains something that could be an encoded secret.
        text = "".join(generator.choices(letters, k=20 if number % 10 else 60))
        return (
            f'2026-11-21T10:00:00Z INFO request={request} n={number} path="/v1/completions" {text}'
        )

    lines = [line(number) for number in range(20_000)]
    block = "\n".join(lines).encode()
    size = 8 << 20
    file = tmp_path / "log"
    with file.open("wb") as out:
        while out.tell() < size:
            out.write(block)
        out.write(KEY.encode())
    secrets = [ApiKey.generate().reveal() for _ in range(500)]
    began = time.process_time()
    found = scan_for_secrets({"log": file}, secrets)
    seconds = time.process_time() - began
    assert len(found) == 1
    # A quadratic search, or one for each secret, would take minutes.
    assert seconds < 10
