"""The engine description (`EngineInfo`) of a started vLLM, read from its configuration."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from contract.messages import ChatFormat, Feature
from worker.chat_format import DEFAULT, TOOL_USE, ParserFormat, chat_format, given_template
from worker.engine.adapters import adapter_limits
from worker.engine.base import EngineInfo
from worker.engine.vllm.arguments import offers_sampler_chain
from worker.engine.vllm.prompts import Prompts
from worker.settings import WorkerSettings


def describe(
    llm: Any,
    prompts: Prompts,
    settings: WorkerSettings,
    *,
    version: str,
    has_grammars: bool,
    parsers: ParserFormat,
    publishes_cache: bool,
    resolve_template: Callable[..., str | None],
) -> EngineInfo:
    """Describe an `AsyncLLM`.

    Args:
        llm: The engine.
        prompts: The prompt inputs that its model accepts.
        settings: The settings of the worker.
        version: vLLM's version.
        has_grammars: Whether grammars can be compiled for the model's tokenizer.
        parsers: The parsers of the model's chat responses.
        publishes_cache: Whether the engine reports what is in its prefix cache.
        resolve_template: Returns the model's chat template for conversations with these `tools`,
            or None.

    Raises ValueError if parsers are set for a model without a chat template.
    """
    config = llm.vllm_config
    cache = config.cache_config
    templates = _templates(settings, resolve_template)
    chat = chat_format(templates, dict(llm.tokenizer.special_tokens_map), parsers)
    _check_chat(chat, parsers)
    generates = settings.runner != "pooling"
    offered = {
        Feature.SAMPLER_CHAIN: offers_sampler_chain(settings),
        Feature.STRUCTURE: has_grammars and generates,
        Feature.IMAGES: prompts.max_images > 0 and generates,
        Feature.CHAT: chat is not None,
        Feature.TOOLS: bool(parsers.tool_parser),
        Feature.STRICT_TOOLS: has_grammars and parsers.has_enforced_calls,
        Feature.REASONING: bool(parsers.reasoning_parser),
        Feature.THINKING_BUDGET: config.reasoning_config is not None,
    }
    return EngineInfo(
        name=f"vllm {version}",
        context_window=config.model_config.max_model_len,
        vocabulary_size=config.model_config.get_vocab_size(),
        max_sequences=config.scheduler_config.max_num_seqs,
        kv_cache_tokens=_kv_cache_tokens(config),
        tokenizer_json=_tokenizer_json(settings.model_path, llm.tokenizer),
        bos_token_id=llm.tokenizer.bos_token_id,
        eos_token_ids=_eos_token_ids(llm.input_processor, llm.tokenizer),
        features=[feature for feature, is_offered in offered.items() if is_offered],
        image_token=prompts.image_token,
        max_images=prompts.max_images,
        image_tokens=prompts.image_tokens(),
        chat=chat,
        chat_templates=templates,
        cache_block_tokens=cache.block_size if publishes_cache else 0,
        adapters=adapter_limits(settings),
        can_sleep=config.model_config.enable_sleep_mode,
    )


def _kv_cache_tokens(config: Any) -> int:
    cache = config.cache_config
    tokens = int(cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size)
    # An encoder has no KV cache, and its sequences are limited by their number only.
    return tokens or config.scheduler_config.max_num_seqs * config.model_config.max_model_len


def _templates(
    settings: WorkerSettings, resolve_template: Callable[..., str | None]
) -> dict[str, str]:
    if settings.chat_template is not None:
        return given_template(settings.chat_template)
    found = {DEFAULT: resolve_template(None), TOOL_USE: resolve_template([{}])}
    if found[TOOL_USE] == found[DEFAULT]:
        del found[TOOL_USE]
    return {name: source for name, source in found.items() if source}


def _check_chat(chat: ChatFormat | None, parsers: ParserFormat) -> None:
    given = {"tool_parser": parsers.tool_parser, "reasoning_parser": parsers.reasoning_parser}
    names = [name for name, value in given.items() if value]
    if names and chat is None:
        raise ValueError(
            f"{', '.join(names)}: the model has no chat template that could be used; "
            "chat_template gives it one"
        )


def _eos_token_ids(input_processor: Any, tokenizer: Any) -> list[int]:
    """Return the tokenizer's end-of-text token, then the other ones that the model configures."""
    named = input_processor.generation_config_fields.get("eos_token_id") or []
    ids = [tokenizer.eos_token_id, *([named] if isinstance(named, int) else named)]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _tokenizer_json(model_path: str, tokenizer: Any) -> bytes:
    path = Path(model_path) / "tokenizer.json"
    if path.is_file():
        return path.read_bytes()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{model_path}: the model has no tokenizer in the `tokenizers` format")
    content: str = backend.to_str()
    return content.encode()
