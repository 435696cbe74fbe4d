"""Selection of vLLM's parsers for a model's chat responses, and the marks that they look for.

Names and tokenizer are checked before the model is loaded. A mismatch aborts startup with a message
that names the setting.
"""

import logging
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Any

from contract.grammar import HERMES_PARSERS
from worker.chat_format import ParserFormat
from worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

_TESTED_TOOL_PARSERS = HERMES_PARSERS | {
    *("deepseek_v3", "deepseek_v31", "glm45", "glm47", "granite", "kimi_k2"),
    *("llama3_json", "llama4_json", "mistral", "pythonic", "qwen3_coder", "qwen3_xml"),
}
_TESTED_REASONING_PARSERS = {
    *("deepseek_r1", "deepseek_v3", "glm45", "glm47"),
    *("kimi_k2", "mimo", "nemotron_v3", "qwen3", "step3p5"),
}
_UNREADABLE = {"openai", "openai_gptoss"}
"""Parsers that read gpt-oss by token ids of their own encoding, not by text."""

_THINKING = {"thinking": True, "enable_thinking": True}
"""Template arguments with which parsers of models with optional reasoning look for it."""

_PROBE_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def parser_format(settings: WorkerSettings, load_tokenizer: Callable[[], Any]) -> ParserFormat:
    """Describe the configured parsers. Raise ValueError, naming the setting, if one is invalid.

    Args:
        settings: The settings of the worker.
        load_tokenizer: Returns the model's tokenizer; called only if a parser is configured.
    """
    tool, reasoning = settings.tool_parser, settings.reasoning_parser
    if not tool and not reasoning:
        return ParserFormat()
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    known_tools = ToolParserManager.list_registered()
    _check_name("tool_parser", tool, known_tools, _TESTED_TOOL_PARSERS)
    known = ReasoningParserManager.list_registered()
    _check_name("reasoning_parser", reasoning, known, _TESTED_REASONING_PARSERS)
    tokenizer = load_tokenizer()
    start, end = _reasoning_marks(reasoning, tokenizer) if reasoning else ("", "")
    if tool:
        _parser(tokenizer, tool_parser=tool)
    return ParserFormat(
        tool_parser=tool,
        reasoning_parser=reasoning,
        reasoning_start=start,
        reasoning_end=end,
        shows_special_tokens=_shows_special_tokens(tokenizer, tool, reasoning),
    )


def _check_name(setting: str, name: str, known: Iterable[str], tested: AbstractSet[str]) -> None:
    offered = sorted(set(known) - _UNREADABLE)
    if not name or name in tested:
        return
    if name not in offered:
        raise ValueError(f"{setting}: must be one of {', '.join(offered)}. Given: {name!r}")
    _log.warning("%s: %s is not tested with this worker", setting, name)


def _reasoning_marks(name: str, tokenizer: Any) -> tuple[str, str]:
    """Return the marks around reasoning, if each is one token."""
    _parser(tokenizer, reasoning_parser=name)
    parser_class = _parser_class(reasoning_parser=name).reasoning_parser_cls
    parser = parser_class(tokenizer, chat_template_kwargs=_THINKING)
    marks = parser.reasoning_start_str or "", parser.reasoning_end_str or ""
    lengths = [len(tokenizer.encode(mark, add_special_tokens=False)) for mark in marks]
    if lengths == [1, 1]:
        return marks
    _log.warning(
        "reasoning_parser: %s has no single tokens around reasoning in this model (%s), so "
        "reasoning has no budget and cannot precede structured output",
        name,
        " and ".join(repr(mark) for mark in marks if mark) or "no marks",
    )
    return "", ""


def _shows_special_tokens(tokenizer: Any, tool_parser: str, reasoning_parser: str) -> bool:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": ""}], tools=[_PROBE_TOOL], tool_choice="auto"
    )
    parser = _parser(
        tokenizer, request.tools, tool_parser=tool_parser, reasoning_parser=reasoning_parser
    )
    return not parser.adjust_request(request).skip_special_tokens


def _parser(tokenizer: Any, tools: Any = None, **names: str) -> Any:
    """Return a parser. Raise ValueError, naming the settings, if the tokenizer does not fit."""
    try:
        return _parser_class(**names, tokenizer=tokenizer)(
            tokenizer, tools, chat_template_kwargs=_THINKING
        )
    except Exception as error:
        given = {name: value for name, value in names.items() if value}
        reason = error.__cause__ or error
        raise ValueError(
            f"{' and '.join(given)}: {' and '.join(given.values())} cannot be used with this "
            f"model: {str(reason).strip() or type(reason).__name__}"
        ) from error


def _parser_class(
    *, tool_parser: str = "", reasoning_parser: str = "", tokenizer: Any = None
) -> Any:
    from vllm.parser.parser_manager import ParserManager

    return ParserManager.get_parser(
        tool_parser_name=tool_parser or None,
        reasoning_parser_name=reasoning_parser or None,
        enable_auto_tools=True,
        tokenizer=tokenizer,
    )
