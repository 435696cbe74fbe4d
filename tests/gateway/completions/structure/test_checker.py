"""The sandboxes: verdicts, and bounds of hostile structures."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.completions.structure.checker import GrammarChecker
from gateway.completions.structure.limits import MAX_SOURCE_BYTES
from gateway.completions.structure.sandbox.messages import Verdict
from gateway.completions.structure.sandbox.pool import SandboxSettings, TokenizerSource
from gateway.dialects.request import Reasoning, Structure, StructureKind, Tool, ToolMode, ToolUse
from gateway.records.errors import InvalidGrammarError, OverloadedError, TenantQueueFullError
from tests.gateway.completions.structure.conftest import EOS_ID
from tests.support.patience import PATIENCE_SECONDS

BOMB = Structure(StructureKind.JSON_SCHEMA, {"type": "number", "multipleOf": 123456789}, "x")
THINKING = Reasoning("<think>", "</think>", is_open=True)
PATIENT = SandboxSettings(
    wait_seconds=PATIENCE_SECONDS,
    task_seconds=PATIENCE_SECONDS,
    cpu_seconds=0.5,
    compile_seconds=0.2,
)
"""Limits of processor time only, and more of it to compile: no load changes a verdict."""


@pytest.fixture
def source(tokenizer_json: bytes) -> TokenizerSource:
    async def fetch() -> bytes:
        return tokenizer_json

    return TokenizerSource("demo", fetch, [EOS_ID], 2048)


@pytest.fixture
async def checker() -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(PATIENT)
    yield checker
    await checker.aclose()


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def children() -> list[int]:
    """Return the ids of this process's sandboxes."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            command = (status.parent / "cmdline").read_bytes()
            if (
                int(fields[1]) == os.getpid()
                and b"gateway.completions.structure.sandbox.program" in command
            ):
                found.append(int(status.parent.name))
    return found


async def test_a_structure_becomes_a_grammar_and_a_wrong_one_an_error(
    checker: GrammarChecker, source: TokenizerSource, accepts: Callable[[str, str], bool]
) -> None:
    good = Structure(StructureKind.GBNF, 'root ::= "a" | "b"', "grammar")
    verdict = await checker.compile(good, tenant_id="acme", tokenizer=source)
    assert accepts(verdict.grammar, "b")
    with pytest.raises(InvalidGrammarError) as raised:
        await checker.compile(
            Structure(StructureKind.GBNF, 'root ::= "a" x', "response_format"),
            tenant_id="acme",
            tokenizer=source,
        )
    assert raised.value.status == 400
    assert raised.value.code == "invalid_grammar"
    assert raised.value.param == "response_format"
    assert raised.value.message == (
        "'response_format' was rejected: line 1, column 14: rule 'x' is not defined."
    )


async def test_tools_become_a_grammar_only_if_they_constrain(
    checker: GrammarChecker, source: TokenizerSource
) -> None:
    tools = [Tool("now", True, is_strict=False)]
    free = await checker.compile(
        None, ToolUse(tools, ToolMode.AUTO), tenant_id="acme", tokenizer=source
    )
    assert free.grammar == ""
    forced = await checker.compile(
        None, ToolUse(tools, ToolMode.REQUIRED), tenant_id="acme", tokenizer=source
    )
    assert "<[11]>" in forced.grammar


@pytest.mark.parametrize("mode", [ToolMode.AUTO, ToolMode.REQUIRED])
async def test_error_in_a_tool_names_its_schema(
    checker: GrammarChecker, source: TokenizerSource, mode: ToolMode
) -> None:
    good = Structure(StructureKind.CHOICE, ["a"], "response_format")
    tools_place = "functions[1].parameters"
    for schema, reason, path in (
        ({"type": "foo"}, "'type' must be one or several of", ".type"),
        ({"properties": {"a": {"minItems": 10**9}}}, "minItems", ".properties.a.minItems"),
        ({"properties": {"a": {"pattern": "("}}}, "unclosed group", ".properties.a.pattern"),
    ):
        place = tools_place + path
        wrong = Tool("f", schema, is_strict=True, place=tools_place)
        tools = [Tool("now", True, is_strict=True), wrong]
        for reasoning in (None, THINKING):
            with pytest.raises(InvalidGrammarError, match=reason) as raised:
                await checker.compile(
                    good if mode is ToolMode.AUTO else None,
                    ToolUse(tools, mode),
                    tenant_id="acme",
                    tokenizer=source,
                    reasoning=reasoning,
                )
            assert raised.value.message.startswith(f"'{place}' was rejected: ")
            assert raised.value.param == place


async def test_error_of_tools_beside_a_structure_names_what_is_too_large(
    checker: GrammarChecker, source: TokenizerSource
) -> None:
    long = {"enum": ["a" * MAX_SOURCE_BYTES]}
    for answer, parameters, param in (({}, long, "tools"), (long, {}, "response_format")):
        structure = Structure(StructureKind.JSON_SCHEMA, answer, "response_format")
        use = ToolUse([Tool("f", parameters, is_strict=True)], ToolMode.AUTO)
        with pytest.raises(InvalidGrammarError) as caught:
            await checker.compile(structure, use, tenant_id="acme", tokenizer=source)
        bound = f"'{param}' was rejected: it must have at most {MAX_SOURCE_BYTES} bytes. Given: "
        assert caught.value.message.startswith(bound)
        assert caught.value.param == param


async def test_error_in_the_grammar_of_a_tool_names_its_place(
    checker: GrammarChecker, source: TokenizerSource
) -> None:
    for text, reason in (
        ("start: nope", 'line 1, column 8: unknown name: "nope"'),
        ("begin: /a/", "a Lark grammar must have a rule 'start'"),
    ):
        lark = Structure(StructureKind.LARK, text, "tools", "[1].format.definition")
        tool_use = ToolUse([Tool("a", {}, is_strict=False, grammar=lark)], ToolMode.AUTO)
        with pytest.raises(InvalidGrammarError) as caught:
            await checker.compile(None, tool_use, tenant_id="acme", tokenizer=source)
        assert caught.value.param == "tools[1].format.definition"
        assert reason in caught.value.message


async def test_error_names_the_grammar_that_does_not_compile(
    checker: GrammarChecker, source: TokenizerSource
) -> None:
    grammars = [
        {"lark_grammar": 'start: "a" @b'},
        {"name": "b", "lark_grammar": "start: @c"},
        {"name": "c", "json_schema": {"not": {}}},
    ]
    structure = Structure(StructureKind.LLGUIDANCE, {"grammars": grammars}, "grammar", ".value")
    for reasoning in (None, THINKING):
        message = await refusal_by(checker, structure, source, reasoning=reasoning)
        assert message.startswith("'grammar.value.grammars[2].json_schema.not' was rejected: ")


async def test_positions_refer_to_the_clients_text(
    checker: GrammarChecker, source: TokenizerSource
) -> None:
    lark = Structure(StructureKind.LARK, 'start: "a" x\nx: "b" foo', "grammar")
    with pytest.raises(InvalidGrammarError, match=r'line 2, column 4: unknown name: "foo"'):
        await checker.compile(lark, tenant_id="acme", tokenizer=source)
    with pytest.raises(InvalidGrammarError, match=r'line 2, column 4: unknown name: "foo"'):
        await checker.compile(lark, tenant_id="acme", tokenizer=source, reasoning=THINKING)
    schema = Structure(StructureKind.JSON_SCHEMA, {"not": {}}, "json_schema")
    with pytest.raises(InvalidGrammarError, match=r"rejected: 'not' cannot be enforced"):
        await checker.compile(schema, tenant_id="acme", tokenizer=source)


def gbnf_of(rules: str) -> tuple[StructureKind, str]:
    return StructureKind.GBNF, f"root ::= {rules}"


def nested(levels: int) -> Any:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"anyOf": [schema]}
    return schema


MANY = range(3000)
HOSTILE: dict[str, tuple[StructureKind, Any]] = {
    "multipleOf": (StructureKind.JSON_SCHEMA, {"type": "integer", "multipleOf": 99999989}),
    "minItems": (StructureKind.JSON_SCHEMA, {"type": "array", "minItems": 10**9}),
    "huge number": (StructureKind.JSON_SCHEMA, {"maximum": 10**40}),
    "uniqueItems": (StructureKind.JSON_SCHEMA, {"uniqueItems": True}),
    "ref to itself": (
        StructureKind.JSON_SCHEMA,
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    ),
    "ref elsewhere": (StructureKind.JSON_SCHEMA, {"$ref": "http://127.0.0.1:1/x"}),
    "ref to a file": (StructureKind.JSON_SCHEMA, {"$ref": "file:///etc/passwd"}),
    "nested anyOf": (StructureKind.JSON_SCHEMA, nested(400)),
    "nested items": (StructureKind.JSON_SCHEMA, {"items": nested(70)}),
    "huge enum": (StructureKind.JSON_SCHEMA, {"enum": [f"v{i}" * 9 for i in range(30_000)]}),
    "wide anyOf": (
        StructureKind.JSON_SCHEMA,
        {"anyOf": [{"properties": {f"b{i}": {"maxLength": i}}} for i in range(1500)]},
    ),
    "many optional properties": (
        StructureKind.JSON_SCHEMA,
        {"type": "object", "properties": {f"k{i}": {"pattern": f".*{i}.{{9}}"} for i in MANY}},
    ),
    "patternProperties": (
        StructureKind.JSON_SCHEMA,
        {"patternProperties": {"a.{99}": {"type": "null"}, "b.{99}": {}}},
    ),
    "allOf of patterns": (
        StructureKind.JSON_SCHEMA,
        {"type": "string", "allOf": [{"pattern": f".*{x}.{{40}}"} for x in "abcdef"]},
    ),
    "look behind": (StructureKind.REGEX, "(?<=a)b"),
    "regex of nested groups": (StructureKind.REGEX, "(" * 60_000 + "a" + ")" * 60_000),
    "intersection": (
        StructureKind.LARK,
        "start: X\nX: /(.*a.{14}.*)/ & /(.*b.{13}.*)/ & /(.*c.{12}.*)/ & ~/.*d.{12}.*/",
    ),
    "ambiguous": (StructureKind.LARK, 'start: e\ne: e e e | e e | "a" | "b" | ""'),
    "optional in a row": (
        StructureKind.LARK,
        "start: a\na: " + " ".join(f"/{chr(97 + i % 26)}*/?" for i in range(600)),
    ),
    "loop": (StructureKind.LARK, "start: x\nx: y\ny: x"),
    "no text": (StructureKind.LARK, "start: start"),
    "gbnf loop": gbnf_of("root"),
    "gbnf ambiguous": gbnf_of('root root root | root root | "a" | "b" | ""'),
    "gbnf undefined": gbnf_of("foo"),
    "gbnf deep": gbnf_of("(" * 5000 + "'a'" + ")" * 5000),
    "gbnf chain": (
        StructureKind.GBNF,
        "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in MANY) + "r3000 ::= 'a'",
    ),
    "regex not closed": (StructureKind.REGEX, "a{1000000000000}"),
    "large literal": gbnf_of("'" + "a" * 1_000_000 + "'"),
    "lark is not": (StructureKind.LARK, "start: \x00\x01"),
    "llguidance": (StructureKind.LLGUIDANCE, '{"grammars": [' + "[" * 10_000),
}
BOUNDED: dict[str, tuple[StructureKind, Any]] = {
    "regex of a million letters": (StructureKind.REGEX, "(a{1000}){1000}"),
    "regex of stars": (StructureKind.REGEX, "((a*)*)*"),
    "regex of alternatives": (StructureKind.REGEX, "(" * 40 + "a" + "|b)*" * 40),
    "regex of many states": (StructureKind.REGEX, "(a|b)*a(a|b){20}"),
    "maxLength": (StructureKind.JSON_SCHEMA, {"type": "string", "maxLength": 2**31 - 1}),
    "minItems at its bound": (StructureKind.JSON_SCHEMA, {"type": "array", "minItems": 10_000}),
    "ref cycle": (
        StructureKind.JSON_SCHEMA,
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
    ),
    "left recursion": gbnf_of('root "a" | "b"'),
    "empty loops": (StructureKind.LARK, 'start: (x*)* "b"\nx: (y*)*\ny: "a"*'),
    "long literal": gbnf_of("'" + "ab" * 10_000 + "'"),
    "choices": (StructureKind.CHOICE, [f"{i}-{'x' * 90}" for i in range(1024)]),
    "gbnf many rules": (
        StructureKind.GBNF,
        "root ::= r0\n"
        + "".join(
            f"r{i} ::= 'a{i}' r{(i * 7) % 300} | [a-{chr(98 + i % 9)}]* root\n" for i in range(300)
        ),
    ),
    "enum": (StructureKind.JSON_SCHEMA, {"enum": [f"v{i}" * 9 for i in range(2000)]}),
    "gbnf repetitions": gbnf_of("((('a'{2000}){2000}){2000} root)?"),
}


async def refusal_by(
    checker: GrammarChecker,
    structure: Structure,
    source: TokenizerSource,
    *,
    reasoning: Reasoning | None = None,
) -> str:
    """Return the refusal, empty if there is none."""
    try:
        await checker.compile(structure, tenant_id="acme", tokenizer=source, reasoning=reasoning)
    except InvalidGrammarError as error:
        return error.message
    return ""


@pytest.mark.slow
async def test_hostile_structure_is_refused_or_bounded(
    checker: GrammarChecker, source: TokenizerSource
) -> None:
    harmless = Structure(StructureKind.CHOICE, ["a"], "structured_outputs.choice")
    await checker.compile(harmless, tenant_id="acme", tokenizer=source)
    accepted, refused = [], {}
    for name, (kind, value) in (HOSTILE | BOUNDED).items():
        message = await refusal_by(checker, Structure(kind, value, "grammar"), source)
        if message:
            refused[name] = message
            assert message.startswith(
                ("'grammar' was rejected: ", "'grammar.", "'grammar' must have ")
            )
            assert len(message) < 500
        else:
            accepted.append(name)
    assert set(accepted) == set(BOUNDED), refused
    assert await checker.compile(harmless, tenant_id="acme", tokenizer=source)


@pytest.mark.parametrize(
    "names",
    [
        # One of each kind: the prefix of a structure depends on its kind.
        ("nested anyOf", "look behind", "loop", "gbnf loop", "llguidance", "ref cycle", "choices"),
        pytest.param(tuple(HOSTILE | BOUNDED), marks=pytest.mark.long),
    ],
    ids=["few", "all"],
)
async def test_hostile_structure_after_reasoning_is_refused_too(
    checker: GrammarChecker, source: TokenizerSource, names: Sequence[str]
) -> None:
    accepted = []
    for name in names:
        kind, value = (HOSTILE | BOUNDED)[name]
        structure = Structure(kind, value, "grammar")
        if not await refusal_by(checker, structure, source, reasoning=THINKING):
            accepted.append(name)
    assert set(accepted) == BOUNDED.keys() & names


async def test_stopped_sandbox_times_out(source: TokenizerSource) -> None:
    settings = dataclasses.replace(PATIENT, processes=1)
    checker = GrammarChecker(settings)
    try:
        await checker.compile(
            Structure(StructureKind.CHOICE, ["a"], "x"), tenant_id="acme", tokenizer=source
        )
        (pid,) = children()
        os.kill(pid, signal.SIGSTOP)
        checker._pool._settings = dataclasses.replace(settings, task_seconds=0.1)
        another = Structure(StructureKind.CHOICE, ["b"], "x")
        with pytest.raises(OverloadedError, match="could not be compiled in time"):
            await checker.compile(another, tenant_id="acme", tokenizer=source)
        checker._pool._settings = settings
        assert await checker.compile(another, tenant_id="acme", tokenizer=source)
        assert pid not in children()
    finally:
        await checker.aclose()


async def test_verdict_is_cached(
    checker: GrammarChecker, source: TokenizerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = await refusal_by(checker, BOMB, source)

    async def asked_again(*_: object) -> None:
        pytest.fail("a sandbox was asked again")

    monkeypatch.setattr(checker._pool, "run", asked_again)
    again = await refusal_by(checker, BOMB, source)
    assert (
        again == message == "'x' was rejected: too complex: it takes too long or too much memory."
    )


async def test_concurrent_structures_are_served_or_get_an_overload_error(
    source: TokenizerSource,
) -> None:
    checker = GrammarChecker(dataclasses.replace(PATIENT, processes=1, most_waiting=4))
    try:
        jobs = [
            checker.compile(
                Structure(StructureKind.CHOICE, [f"a{i}"], "x"), tenant_id="acme", tokenizer=source
            )
            for i in range(12)
        ]
        results = await asyncio.gather(*jobs, return_exceptions=True)
    finally:
        await checker.aclose()
    served = [result for result in results if isinstance(result, Verdict)]
    shed = [result for result in results if isinstance(result, TenantQueueFullError)]
    assert (len(served), len(shed)) == (5, 7)


async def test_event_loop_runs_during_a_compilation(
    checker: GrammarChecker, source: TokenizerSource
) -> None:
    await refusal_by(checker, Structure(StructureKind.CHOICE, ["a"], "x"), source)
    longest, last = 0.0, time.thread_time()
    large = Structure(StructureKind.GBNF, "root ::= " + " | ".join(["'ab'"] * 15_000), "x")
    pending = {asyncio.create_task(refusal_by(checker, each, source)) for each in (BOMB, large)}
    while pending:
        await asyncio.sleep(0.001)
        pending = {task for task in pending if not task.done()}
        # Processor time of this thread: the load of the machine does not count.
        now = time.thread_time()
        longest, last = max(longest, now - last), now
    # Compilation in this thread would take a second; garbage collection some hundredths.
    assert longest < 0.3


async def test_cancelled_structure_does_not_affect_the_next_one(
    checker: GrammarChecker, source: TokenizerSource, accepts: Callable[[str, str], bool]
) -> None:
    await checker.compile(
        Structure(StructureKind.CHOICE, ["a"], "x"), tenant_id="acme", tokenizer=source
    )
    for number in range(4):
        bomb = Structure(BOMB.kind, {**BOMB.source, "title": str(number)}, "x")
        task = asyncio.create_task(checker.compile(bomb, tenant_id="acme", tokenizer=source))
        while len(checker._pool._free) == PATIENT.processes:
            await asyncio.sleep(0)
        for _ in range(number):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    grammar = await checker.compile(
        Structure(StructureKind.CHOICE, ["b"], "x"), tenant_id="acme", tokenizer=source
    )
    assert accepts(grammar.grammar, "b")


async def test_a_killed_sandbox_is_replaced(
    checker: GrammarChecker, source: TokenizerSource
) -> None:
    await checker.compile(
        Structure(StructureKind.CHOICE, ["a"], "x"), tenant_id="acme", tokenizer=source
    )
    (pid,) = children()
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.nice(0) + SandboxSettings().niceness)
    os.kill(pid, signal.SIGKILL)
    grammars = [
        await refusal_by(checker, Structure(StructureKind.CHOICE, [text], "x"), source)
        for text in "bcde"
    ]
    assert grammars.count("") >= 3
    assert pid not in children()


@pytest.mark.slow
async def test_sandboxes_end_with_the_process_that_started_them(
    tokenizer_json: bytes, tmp_path: Path
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, pathlib, sys, time\n"
        "from gateway.dialects.request import Structure, StructureKind\n"
        "from gateway.completions.structure.checker import GrammarChecker\n"
        "from gateway.completions.structure.sandbox import pool\n"
        "from gateway.completions.structure.sandbox.pool import SandboxSettings, TokenizerSource\n"
        f"vars(pool).update(_START_SECONDS={PATIENCE_SECONDS}, _LOAD_SECONDS={PATIENCE_SECONDS})\n"
        "async def fetch():\n"
        "    return pathlib.Path(sys.argv[1]).read_bytes()\n"
        "async def main():\n"
        f"    checker = GrammarChecker({PATIENT})\n"
        "    source = TokenizerSource('d', fetch, [1], 2048)\n"
        "    structure = Structure(StructureKind.CHOICE, ['a'], 'x')\n"
        "    await checker.compile(structure, tenant_id='acme', tokenizer=source)\n"
        "    print(checker._pool._all[-1]._process or checker._pool._all[0]._process, flush=True)\n"
        "    time.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer_json)
    parent = await asyncio.create_subprocess_exec(
        sys.executable, str(script), str(file), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    sandbox = int((await parent.stdout.readline()).split()[-1].rstrip(b">"))
    assert is_there(sandbox)
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while is_there(sandbox):
            await asyncio.sleep(0.05)
