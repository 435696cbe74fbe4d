"""What a started vLLM can take, read from its configuration."""

from pathlib import Path
from typing import Any

from contract.messages import Feature
from worker.engine.arguments import offers_sampler_chain
from worker.engine.base import EngineInfo
from worker.engine.prompts import Prompts
from worker.settings import Settings


def describe(
    llm: Any, prompts: Prompts, settings: Settings, *, version: str, has_grammars: bool
) -> EngineInfo:
    """Describe an `AsyncLLM`.

    Args:
        llm: The engine.
        prompts: What its model sees.
        settings: What it was started with.
        version: vLLM's own.
        has_grammars: Whether grammars can be compiled for the model's tokenizer.
    """
    config = llm.vllm_config
    cache = config.cache_config
    offered = {
        Feature.SAMPLER_CHAIN: offers_sampler_chain(settings),
        Feature.STRUCTURE: has_grammars,
        Feature.IMAGES: prompts.max_images > 0,
    }
    return EngineInfo(
        name=f"vllm {version}",
        context_window=config.model_config.max_model_len,
        vocabulary_size=config.model_config.get_vocab_size(),
        max_sequences=config.scheduler_config.max_num_seqs,
        kv_cache_tokens=cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size,
        tokenizer_json=_tokenizer_json(settings.model_path, llm.tokenizer),
        bos_token_id=llm.tokenizer.bos_token_id,
        eos_token_ids=_eos_token_ids(llm.input_processor, llm.tokenizer),
        features=[feature for feature, is_offered in offered.items() if is_offered],
        image_token=prompts.image_token,
        max_images=prompts.max_images,
    )


def _eos_token_ids(input_processor: Any, tokenizer: Any) -> list[int]:
    """Return the tokenizer's end of text, then those that the model names besides."""
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
