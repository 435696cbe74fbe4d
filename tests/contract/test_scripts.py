"""Lua scripts name their keys and arguments, and so do their callers."""

import re
from importlib import resources
from pathlib import Path

import pytest
from redis.asyncio import Redis

from contract.scripts import LuaScript
from tests.support.cases import all_cases

ROOT = Path(__file__).parents[2]
FILES = [
    file for package in ("contract", "gateway") for file in sorted((ROOT / package).rglob("*.lua"))
]
MOST_LINES = 155


@all_cases("file", FILES)
def test_file_is_short_and_names_its_keys_and_arguments(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert not re.search(r"\b(KEYS|ARGV)\[\d", text)
    assert text.startswith("-- ")


async def test_callers_must_name_what_the_script_names(redis: "Redis") -> None:
    script = LuaScript("job_reclaim")
    with pytest.raises(TypeError, match=r"takes .*again_ms.*, not .*agian_ms"):
        await script.run(redis, leases="l", job_prefix="j", most=1, agian_ms=1)


def test_script_unpacks_as_many_values_as_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.lua").write_text("local a, b = unpack(KEYS, 1, 3)\n")
    monkeypatch.setattr(resources, "files", lambda _package: tmp_path)
    with pytest.raises(ValueError, match="bad unpacks 3"):
        LuaScript("bad")
