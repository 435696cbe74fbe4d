"""Templates are fetched once, tried before use, and bounded."""

import asyncio
import contextlib
import hashlib
import json
import zlib
from datetime import UTC, datetime
from typing import Any

import pytest
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contract.messages import ContentFormat
from gateway.completions.prompt.chat_templates import (
    MAX_TEMPLATE_CHARACTERS,
    MAX_TEMPLATES,
    ChatTemplates,
)
from gateway.completions.prompt.conversation import for_template
from gateway.completions.prompt.templates import template as module
from gateway.completions.prompt.templates.environment import ENVIRONMENT
from gateway.completions.prompt.templates.template import (
    ChatTemplate,
    RefusedMessagesError,
    TooLongError,
    WrongTemplateError,
)
from gateway.records.errors import ModelMisconfiguredError, OverloadedError, ServiceUnavailableError
from tests.gateway.completions.prompt.chatting import CHATS, SOURCES, SPECIAL_TOKENS, TOOL
from tests.support.cases import all_cases

NOW = datetime(2026, 11, 21, tzinfo=UTC)


class Published:
    """The source of templates, and the sandbox that tries them."""

    def __init__(self, sources: Any) -> None:
        self.file: bytes | None = zlib.compress(json.dumps(sources).encode())
        self.fetched: list[str] = []
        self.tried: list[str] = []
        self.reason: str | Exception = ""
        self.store = ChatTemplates(self.fetch, self.try_out)

    async def fetch(self, digest: str) -> bytes | None:
        self.fetched.append(digest)
        await asyncio.sleep(0)
        return self.file

    async def try_out(self, source: str) -> str:
        self.tried.append(source)
        if isinstance(self.reason, Exception):
            raise self.reason
        return self.reason


async def test_templates_are_fetched_and_tried_out_once() -> None:
    source = Published({"default": "a", "tool_use": "b"})
    found = await asyncio.gather(*(source.store.get("d1") for _ in range(5)))
    assert len({id(templates) for templates in found}) == 1
    assert (source.fetched, source.tried) == (["d1"], ["a", "b"])
    assert found[0].choose(has_tools=False).source == "a"
    assert found[0].choose(has_tools=True).source == "b"


async def test_the_default_serves_tools_where_nothing_else_does() -> None:
    templates = await Published({"default": "a", "rag": "b"}).store.get("d1")
    assert templates.choose(has_tools=True).source == "a"


async def test_missing_template_is_fetched_again() -> None:
    source = Published({"default": "a"})
    file, source.file = source.file, None
    with pytest.raises(ServiceUnavailableError, match="not published yet") as caught:
        await source.store.get("d1")
    assert caught.value.retry_after_seconds == 1.0
    source.file = file
    assert await source.store.get("d1")


async def test_a_template_that_fails_its_trial_is_not_tried_again() -> None:
    source = Published({"default": "a"})
    source.reason = "too complex"
    for _ in range(2):
        with pytest.raises(ModelMisconfiguredError, match="is unusable: too complex") as caught:
            await source.store.get("d1")
    assert caught.value.status == 503
    assert caught.value.headers()["x-should-retry"] == "false"
    assert len(source.tried) == 1


async def test_trial_that_timed_out_is_repeated() -> None:
    source = Published({"default": "a"})
    source.reason = OverloadedError("busy")
    with pytest.raises(OverloadedError):
        await source.store.get("d1")
    source.reason = ""
    assert await source.store.get("d1")


@all_cases(
    ("sources", "reason"),
    [
        ([], "file cannot be read"),
        ({"default": 1}, "file cannot be read"),
        ({"tool_use": "a"}, "no template named 'default'"),
        ({"default": "a", **{str(n): "a" for n in range(MAX_TEMPLATES)}}, "at most 16 templates"),
        ({"default": "a" * (MAX_TEMPLATE_CHARACTERS + 1)}, "at most 524288 characters"),
        ({"default": "a" * (MAX_TEMPLATE_CHARACTERS * MAX_TEMPLATES)}, "cannot be read"),
        ({"default": "{% if %}"}, "line 1"),
    ],
    ids=["list", "number", "no default", "many", "long", "bomb", "syntax"],
)
async def test_malformed_templates_are_not_used(sources: Any, reason: str) -> None:
    with pytest.raises(ModelMisconfiguredError, match=reason):
        await Published(sources).store.get("d1")


async def test_templates_in_an_unknown_format_are_not_used() -> None:
    source = Published({})
    source.file = hashlib.sha256().digest()
    with pytest.raises(ModelMisconfiguredError, match="cannot be read"):
        await source.store.get("d1")


def rendered(source: str, *, most_characters: int = 1000, **variables: Any) -> str:
    return ChatTemplate(source).render(variables, now=NOW, most_characters=most_characters)


def test_rendered_text_is_bounded() -> None:
    source = "{% for i in range(10) %}aa{% endfor %}"
    assert rendered(source, most_characters=20) == "a" * 20
    with pytest.raises(TooLongError):
        rendered(source, most_characters=19)


def test_rendering_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = (
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' }}{% endfor %}{% endfor %}"
    )
    monkeypatch.setattr(module, "MAX_RENDER_SECONDS", 0.05)
    with pytest.raises(RefusedMessagesError, match="takes too long"):
        rendered(endless)


@all_cases(
    ("source", "reason"),
    [
        ("{{ raise_exception('Roles must alternate!') }}", "^Roles must alternate!$"),
        ("{{ raise_exception('a' * 9999) }}", "^a{500}$"),
        ("{{ raise_exception(none) }}", "None"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ messages + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set _ = messages.append(1) %}", "unsafe|not safely"),
        ("{{ messages.__init__.__globals__ }}", "unsafe"),
        ("{{ strftime_now.__self__.year }}", "unsafe"),
    ],
)
def test_any_error_in_a_template_is_a_refusal(source: str, reason: str) -> None:
    with pytest.raises(RefusedMessagesError, match=reason):
        rendered(source, messages=[{"role": "user"}])


@all_cases(
    ("source", "reason"),
    [
        ("a\n{% if %}", "^line 2: "),
        ("{% include 'x' %}{% nothing %}", "unknown tag 'nothing'"),
        ("{{ a | nothing }}", "No filter named 'nothing'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "Error"),
        ("{% generation %}", "line 1"),
    ],
)
def test_a_template_in_another_language_is_not_compiled(source: str, reason: str) -> None:
    with pytest.raises(WrongTemplateError, match=reason):
        ChatTemplate(source)


OPENS = "{% if add_generation_prompt %}"


@pytest.mark.slow
@all_cases(
    ("source", "is_known"),
    [
        *((source, True) for source in SOURCES.values()),
        ("{{ messages[0].role }}", True),
        (f"a{OPENS}b{{% if messages %}}c{{% endif %}}{{% endif %}}", True),
        ("{% if add_generation_prompt is defined and add_generation_prompt %}b{% endif %}", True),
        ("a{% if add_generation_prompt and not messages %}b{% endif %}", True),
        (f"a{OPENS}b{{% endif %}}c", False),
        (f"{OPENS}b{{% else %}}c{{% endif %}}", False),
        (f"{OPENS}b{{% elif messages %}}c{{% endif %}}", False),
        ("a{% if add_generation_prompt or messages %}b{% endif %}", False),
        ("a{% if not add_generation_prompt %}b{% endif %}", False),
        ("a{% if add_generation_prompt is defined %}b{% endif %}", False),
        (f"{{{{ 'x' if add_generation_prompt }}}}{OPENS}b{{% endif %}}", False),
        (f"a{OPENS}{{{{ add_generation_prompt }}}}{{% endif %}}", False),
        (f"{{% set add_generation_prompt = 1 %}}a{OPENS}b{{% endif %}}", False),
    ],
)
def test_opening_is_what_is_missing_without_a_generation_prompt(
    source: str, *, is_known: bool
) -> None:
    for chat in CHATS.values():
        messages: Any = for_template(
            [*chat],
            ContentFormat.STRING,
            image_token="",
            tool_parser="",
            has_developer_role=True,
        )
        variables = {**SPECIAL_TOKENS, "messages": messages, "tools": [TOOL]}
        with contextlib.suppress(RefusedMessagesError):
            before = rendered(source, **variables, add_generation_prompt=False)
            known = ChatTemplate(source).render_opening(
                {**variables, "add_generation_prompt": True}, now=NOW, most_characters=1000
            )
            assert (known.opening is not None) == is_known
            if known.opening is not None:
                assert known.text == before + known.opening


@all_cases("value", [{"role": "a", "items": 1}, LoopContext([1, 2], Undefined), "role", [1], None])
def test_templates_read_attributes_as_in_the_sandbox(value: Any) -> None:
    if isinstance(value, LoopContext):
        next(value)
    for name in ("role", "items", "first", "last", "index0", "length", "missing", "__class__"):
        shown = [
            (type(read), str(read) if not isinstance(read, Undefined) else read._undefined_message)
            for read in (
                ENVIRONMENT.getattr(value, name),
                ImmutableSandboxedEnvironment().getattr(value, name),
            )
        ]
        assert shown[0] == shown[1]


def test_template_lists_the_variables_that_it_reads() -> None:
    template = ChatTemplate(
        "{% set x = namespace(y=1) %}{% for m in messages %}{{ m }}{% endfor %}"
        "{{ strftime_now('%d') }}"
        "{% if enable_thinking is defined %}{{ x.y ~ range(2) }}{% endif %}{{ 'developer' }}"
    )
    assert template.variables == {"messages", "enable_thinking"}
    assert template.has_developer_role
    assert not ChatTemplate("developer").has_developer_role


def test_a_template_reads_nothing_from_elsewhere() -> None:
    for source in ("{% include 'pyproject.toml' %}", "{% import '/etc/passwd' as x %}{{ x }}"):
        with pytest.raises(RefusedMessagesError):
            rendered(source)


def test_messages_are_data_and_no_template() -> None:
    hostile = "{{ 1 / 0 }}{% for i in range(99999) %}x{% endfor %}"
    assert rendered("{{ messages[0].content }}", messages=[{"content": hostile}]) == hostile
