"""vLLM's parsers with the demo model's tokenizer: which fit, and their marks."""

import logging
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.worker.conftest import MODEL_FOLDER
from worker.chat_format import ParserFormat
from worker.engine.vllm.parser_format import parser_format
from worker.settings import WorkerSettings

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore")]


def load_tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    file = str(MODEL_FOLDER / "tokenizer.json")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(file))


def described(tool_parser: str = "", reasoning_parser: str = "") -> ParserFormat:
    settings = WorkerSettings(
        model_path=str(MODEL_FOLDER), tool_parser=tool_parser, reasoning_parser=reasoning_parser
    )
    return parser_format(settings, load_tokenizer)


def test_no_parser_needs_no_tokenizer() -> None:
    def never() -> Any:
        raise AssertionError

    assert parser_format(WorkerSettings(model_path=str(MODEL_FOLDER)), never) == ParserFormat()


@pytest.mark.parametrize("name", ["hermes", "qwen3_json"])
def test_calls_of_hermes_are_in_the_form_of_grammars(name: str) -> None:
    found = described(tool_parser=name)
    assert (found.tool_parser, found.has_enforced_calls) == (name, True)
    assert (found.reasoning_parser, found.reasoning_start, found.reasoning_end) == ("", "", "")
    assert found.shows_special_tokens


@pytest.mark.parametrize("name", ["qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2"])
def test_reasoning_has_its_marks(name: str) -> None:
    found = described(reasoning_parser=name)
    assert (found.reasoning_parser, found.tool_parser) == (name, "")
    assert not found.has_enforced_calls
    assert (found.reasoning_start, found.reasoning_end) == ("<think>", "</think>")


def test_special_tokens_reach_parsers_that_need_them() -> None:
    assert not described(
        tool_parser="pythonic", reasoning_parser="deepseek_r1"
    ).shows_special_tokens
    assert described(tool_parser="hermes", reasoning_parser="deepseek_r1").shows_special_tokens


def test_reasoning_without_marks_of_one_token_has_no_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        found = described(reasoning_parser="seed_oss")
    assert (found.reasoning_parser, found.reasoning_start, found.reasoning_end) == (
        "seed_oss",
        "",
        "",
    )
    assert "'<seed:think>' and '</seed:think>'" in caplog.text
    assert "seed_oss is not tested" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tool_parser": "nope"},
            r"^tool_parser: must be one of .*hermes.* Given: 'nope'",
        ),
        ({"tool_parser": "openai"}, r"^tool_parser: must be one of .* Given: 'openai'"),
        (
            {"reasoning_parser": "nope"},
            r"^reasoning_parser: must be one of .*qwen3.* Given: 'nope'",
        ),
        (
            {"tool_parser": "mistral"},
            "^tool_parser: mistral cannot be used with this model: Mistral",
        ),
        (
            {"reasoning_parser": "olmo3"},
            "^reasoning_parser: olmo3 cannot be used with this model: ",
        ),
        ({"tool_parser": "hf"}, "^tool_parser: hf cannot be used with this model: "),
        (
            {"tool_parser": "hermes", "reasoning_parser": "poolside_v1"},
            "^reasoning_parser: poolside_v1 cannot be used with this model: ",
        ),
    ],
)  # fmt: skip
def test_unsuitable_parser_is_named_at_the_start(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        described(**settings)
