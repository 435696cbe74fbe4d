"""Detection of the formats of chat templates."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from contract.messages import ContentFormat
from tests.support.cases import all_cases
from tests.worker.conftest import MODEL_FOLDER
from worker.chat_format import (
    MAX_TEMPLATE_CHARACTERS,
    ParserFormat,
    chat_format,
    content_format,
    folder_special_tokens,
    folder_templates,
    given_template,
    published,
)

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
PARTS = (
    "{% for message in messages %}{% for part in message.content %}{{ part.text }}{% endfor %}"
    "{% endfor %}"
)

LOOP = "{% for part in VALUE %}{{ part.text }}{% endfor %}"


def macro(parameters: str, given: str) -> str:
    """Return a template that iterates over the parameter `value` of a macro."""
    return (
        f"{{% macro text({parameters}) %}}{LOOP.replace('VALUE', 'value')}{{% endmacro %}}"
        f"{{% for message in messages %}}{{{{ text({given}) }}}}{{% endfor %}}"
    )


def folder_with(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_folder_may_have_no_template(tmp_path: Path) -> None:
    assert folder_templates(tmp_path) == {}
    assert folder_templates(folder_with(tmp_path, tokenizer_config__json={})) == {}
    assert chat_format({}, {}, ParserFormat()) is None


def test_the_template_file_comes_before_the_configuration(tmp_path: Path) -> None:
    folder_with(tmp_path, tokenizer_config__json={"chat_template": "from the configuration"})
    assert folder_templates(tmp_path) == {"default": "from the configuration"}
    folder_with(tmp_path, chat_template__jinja="from the file")
    assert folder_templates(tmp_path) == {"default": "from the file"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("for tools")
    assert folder_templates(tmp_path) == {"default": "from the file", "tool_use": "for tools"}


def test_a_configuration_may_name_several_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder_with(tmp_path, tokenizer_config__json={"chat_template": named})
    assert folder_templates(tmp_path) == {"default": "a", "tool_use": "b"}


def test_older_vision_models_have_a_separate_template_file(tmp_path: Path) -> None:
    folder_with(tmp_path, tokenizer_config__json={}, chat_template__json={"chat_template": "a"})
    assert folder_templates(tmp_path) == {"default": "a"}


def test_special_tokens_are_known_by_name(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "other": "x"}
    folder_with(tmp_path, tokenizer_config__json=config)
    assert folder_special_tokens(tmp_path) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert folder_special_tokens(MODEL_FOLDER) == {"bos_token": "<s>", "eos_token": "</s>"}


@all_cases(
    ("template", "expected"),
    [
        ("", ContentFormat.STRING),
        (PLAIN, ContentFormat.STRING),
        (PARTS, ContentFormat.PARTS),
        (PARTS.replace("message.content", "message['content']"), ContentFormat.PARTS),
        (PARTS.replace("in messages", "in messages[1:]"), ContentFormat.PARTS),
        (PARTS.replace("message.content", "message.content | list"), ContentFormat.PARTS),
        (
            "{% set rest = messages[1:] %}" + PARTS.replace("in messages", "in rest"),
            ContentFormat.PARTS,
        ),
        (LOOP.replace("VALUE", "content"), ContentFormat.PARTS),
        (LOOP.replace("VALUE", "message.tool_calls") + PLAIN, ContentFormat.STRING),
        (macro("value", "message.content"), ContentFormat.PARTS),
        (macro("a, value", "1, value=message.content"), ContentFormat.PARTS),
        (macro("value", "message.role"), ContentFormat.STRING),
        ("{% generation %}" + PARTS + "{% endgeneration %}", ContentFormat.PARTS),
        (PLAIN + "{% for x in [1] %}{% break %}{% endfor %}", ContentFormat.STRING),
    ],
)  # fmt: skip
def test_content_has_the_form_that_the_template_iterates_over(
    template: str, expected: ContentFormat
) -> None:
    assert content_format(template) is expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for message in messages %}", "Line 1: "),
        ("\n{{ messages", "Line 2: "),
        ("{{ 1" + " + 1" * 5_000 + " }}", "nested too deeply"),
        (" " * (MAX_TEMPLATE_CHARACTERS + 1), "at most 500000 characters. Given: 500001"),
    ],
)
def test_template_that_cannot_be_compiled_gives_the_reason(
    tmp_path: Path, template: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        content_format(template)
    file = tmp_path / "mine.jinja"
    file.write_text(template)
    with pytest.raises(
        ValueError, match=rf"chat_template: .*mine\.jinja cannot be used: .*{message}"
    ):
        given_template(file)
    assert chat_format({"default": template}, {}, ParserFormat()) is None


def test_template_file_must_exist_and_be_text(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"chat_template: .*none\.jinja cannot be used"):
        given_template(tmp_path / "none.jinja")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template: .*bytes\.jinja cannot be used"):
        given_template(tmp_path / "bytes.jinja")


def test_the_demo_model_is_described() -> None:
    templates = folder_templates(MODEL_FOLDER)
    parsers = ParserFormat(reasoning_start="<think>", reasoning_end="</think>")
    described = chat_format(templates, {"bos_token": "<s>"}, parsers)
    assert described is not None
    assert described.content_format is ContentFormat.PARTS
    assert described.template_digest == hashlib.sha256(published(templates)).hexdigest()
    assert json.loads(published(templates)) == templates
    assert (described.reasoning_start, described.reasoning_end) == ("<think>", "</think>")
    assert described.special_tokens == {"bos_token": "<s>"}


def test_templates_that_differ_in_form_are_given_strings() -> None:
    described = chat_format({"default": PARTS, "tool_use": PLAIN}, {}, ParserFormat())
    assert described is not None
    assert described.content_format is ContentFormat.STRING
