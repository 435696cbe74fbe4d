"""Validation of a job by the worker before it is submitted to an engine.

The gateway has already run these checks and returned clearer messages to the client. A worker
repeats them because an invalid request may crash the engine and end all of its jobs.
"""

import math
import re
import sys
from array import array
from collections.abc import Sequence

from contract import sampling as ranges
from contract.grammar import MAX_GRAMMAR_CHARACTERS
from contract.messages import AUDIO_RATE, SAMPLE_BYTES, Feature, GenerationJob
from contract.prompts import TokenIds
from contract.sampling import Range, SamplerChain, SamplingSpec
from worker.engine.base import EngineInfo, InvalidRequestError, nothing_allowed

_PATTERN_TOKENS = Range(0, 4096)
"""Tokens of a repeated pattern, and its repetitions: vLLM compares that many after each token."""

_MAX_TOOLS = 128
_GIVEN_AS = {"mirostat_version": "mirostat", "dry_last_n": "dry_penalty_last_n"}
"""Parameters of clients that have other names in a chain."""
_MAX_STEPS = 32
"""Steps of a sampler chain, which may contain the same step more than once."""
_MAX_PREDICT_MS = Range(0, 2**31 - 1)


def check_job(job: GenerationJob, info: EngineInfo) -> None:
    """Raise InvalidRequestError, with a message for the client, if no engine could run the job."""
    _check_pooling(job, info)
    _check_audio(job, info)
    _check_length(job, info)
    _check_choices(job)
    _check_resumption(job, info)
    _check_stop(job)
    _check_features(job, info)
    _check_parsing(job)
    _check_sampling(job.sampling, info)
    _check_something_is_left(job.sampling, info)


def _check_pooling(job: GenerationJob, info: EngineInfo) -> None:
    pooling, support = job.pooling, info.pooling
    if pooling is None or support is None:
        if pooling is not None or support is not None:
            raise InvalidRequestError(f"This model generates {'no ' if support else ''}text.")
        return
    if pooling.task is not support.task:
        raise InvalidRequestError(f"This model cannot {pooling.task.value} texts.")
    if not (
        sum(pooling.lengths) == len(job.prompt_token_ids)
        and min(pooling.lengths, default=0) > 0
        and len(pooling.lengths) == job.n == job.best_of
        and len(pooling.second_texts) in (0, job.n)
        and job.max_tokens == 0
    ):
        raise InvalidRequestError("The inputs of the job contradict each other.")
    if pooling.dimensions is not None:
        _check_range("dimensions", pooling.dimensions, Range(1, support.size))


def _check_audio(job: GenerationJob, info: EngineInfo) -> None:
    size, most = len(job.audio), info.clip_seconds * AUDIO_RATE * SAMPLE_BYTES
    if (size > 0) != (most > 0):
        raise InvalidRequestError(f"This model transcribes {'only' if most else 'no'} audio.")
    if size > most or size % SAMPLE_BYTES:
        raise InvalidRequestError(
            f"audio must have an even number of at most {most} bytes. Given: {size}"
        )


def _check_length(job: GenerationJob, info: EngineInfo) -> None:
    _check_token_ids("prompt", job.prompt_token_ids, info)
    tokens = len(job.prompt_token_ids) if job.pooling is None else max(job.pooling.lengths)
    if not job.prompt_token_ids:
        raise InvalidRequestError("'prompt' must not be empty.", param="prompt")
    if job.max_tokens < 0 or tokens + job.max_tokens > info.context_window:
        raise InvalidRequestError(
            f"prompt and max_tokens together must be at most {info.context_window} tokens. "
            f"Given: {tokens} + {job.max_tokens}"
        )
    _check_range("t_max_predict_ms", job.max_predict_ms, _MAX_PREDICT_MS)


def _check_choices(job: GenerationJob) -> None:
    _check_range("n", job.n, ranges.N)
    if job.best_of < job.n:
        message = f"'best_of' must be at least n ({job.n}). Given: {job.best_of}."
        raise InvalidRequestError(message, param="best_of")
    _check_range("best_of", job.best_of, ranges.N)
    if job.logprobs is not None:
        _check_range("logprobs", job.logprobs, ranges.LOGPROBS)
    if job.prompt_logprobs is not None:
        _check_range("prompt_logprobs", job.prompt_logprobs, ranges.LOGPROBS)


def _check_resumption(job: GenerationJob, info: EngineInfo) -> None:
    if job.resumption is None:
        return
    given = len(job.resumption.sequences)
    if given != job.sequences:
        raise InvalidRequestError(
            f"resumption must have {job.sequences} sequences, as many as are sampled. "
            f"Given: {given}"
        )
    for progress in job.resumption.sequences:
        _check_number("resumption", progress.token_ids, job.max_tokens)
        _check_token_ids("resumption", progress.token_ids, info)


def _check_stop(job: GenerationJob) -> None:
    if "" in job.stop:
        raise InvalidRequestError("'stop' must not be an empty string.", param="stop")
    _check_number("stop", job.stop, ranges.MAX_STOP_STRINGS)
    _check_characters("stop", job.stop, ranges.MAX_STOP_CHARACTERS)


def _check_features(job: GenerationJob, info: EngineInfo) -> None:
    wanted = {
        Feature.STRUCTURE: bool(job.grammar),
        Feature.SAMPLER_CHAIN: job.sampling.chain is not None,
        Feature.IMAGES: bool(job.images),
        Feature.CHAT: job.parsing is not None,
        Feature.TOOLS: job.parsing is not None and bool(job.parsing.tools),
        Feature.REASONING: job.parsing is not None and job.parsing.finds_reasoning,
        Feature.THINKING_BUDGET: job.sampling.thinking_budget is not None,
    }
    for feature, is_wanted in wanted.items():
        if is_wanted and feature not in info.features:
            raise InvalidRequestError(f"This model or its engine does not support {feature.value}.")
    if job.adapter is not None and info.adapters is None:
        raise InvalidRequestError("This worker serves no adapters.")
    _check_characters("grammar", [job.grammar], MAX_GRAMMAR_CHARACTERS)
    if job.images:
        _check_number("images", job.images, info.max_images)
        if job.score_prompt:
            raise InvalidRequestError("logprobs of the prompt are not supported with images.")


def _check_parsing(job: GenerationJob) -> None:
    if job.parsing is None:
        return
    _check_number("tools", job.parsing.tools, _MAX_TOOLS)
    most = len(job.prompt_token_ids)
    _check_range("opening_tokens", job.parsing.opening_tokens, Range(0, most))


def _check_sampling(spec: SamplingSpec, info: EngineInfo) -> None:
    _check_range("min_tokens", spec.min_tokens, ranges.MIN_TOKENS)
    if spec.thinking_budget is not None:
        _check_range("thinking_budget", spec.thinking_budget, ranges.THINKING_BUDGET)
    for name, bounds in ranges.SAMPLING_RANGES.items():
        _check_range(name, getattr(spec, name), bounds)
    _check_number("logit_bias", spec.logit_bias, ranges.MAX_LOGIT_BIAS_ENTRIES)
    _check_token_ids("logit_bias", list(spec.logit_bias), info)
    for bias in spec.logit_bias.values():
        if bias != -math.inf:
            _check_range("logit_bias", bias, ranges.LOGIT_BIAS)
    _check_number("stop_token_ids", spec.stop_token_ids, ranges.MAX_STOP_TOKEN_IDS)
    _check_token_ids("stop_token_ids", spec.stop_token_ids, info)
    _check_number("allowed_token_ids", spec.allowed_token_ids, ranges.MAX_ALLOWED_TOKEN_IDS)
    _check_token_ids("allowed_token_ids", spec.allowed_token_ids, info)
    _check_bad_words(spec.bad_words)
    if spec.repetition_detection is not None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            _check_range(
                f"repetition_detection.{name}",
                getattr(spec.repetition_detection, name),
                _PATTERN_TOKENS,
            )
    if spec.chain is not None:
        _check_chain(spec.chain)


def _check_bad_words(words: list[str]) -> None:
    _check_number("bad_words", words, ranges.MAX_BAD_WORDS)
    _check_characters("bad_words", words, ranges.MAX_BAD_WORD_CHARACTERS)
    if not all(word.strip() for word in words):
        raise InvalidRequestError("'bad_words' must not be empty or blank.", param="bad_words")


def _check_chain(chain: SamplerChain) -> None:
    values = chain.values()
    for name, bounds in ranges.CHAIN_RANGES.items():
        if name in values:
            _check_range(_GIVEN_AS.get(name, name), values[name], bounds)
    _check_number("samplers", chain.order, _MAX_STEPS)
    if chain.dry is not None:
        name, breakers = "dry_sequence_breakers", chain.dry.breakers
        _check_number(name, breakers, ranges.MAX_DRY_BREAKERS)
        _check_characters(name, breakers, ranges.MAX_DRY_BREAKER_CHARACTERS)


def _check_something_is_left(spec: SamplingSpec, info: EngineInfo) -> None:
    """Reject a job that forbids every token: an engine would still sample one of them."""
    forbidden = {token_id for token_id, bias in spec.logit_bias.items() if bias == -math.inf}
    ends = {*spec.stop_token_ids, *info.eos_token_ids}
    if spec.min_tokens:
        forbidden |= ends
        if len(ends) > ranges.MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids and the model's end-of-text tokens together must be at most "
                f"{ranges.MAX_STOP_TOKEN_IDS} if min_tokens is given. Given: {len(ends)}.",
                param="stop_token_ids",
            )
    if spec.allowed_token_ids:
        is_left = not forbidden.issuperset(spec.allowed_token_ids)
    else:
        is_left = len(forbidden) < info.vocabulary_size
    if not is_left:
        raise nothing_allowed(spec)


def _check_number(name: str, values: "Sequence[object] | dict[int, float]", most: int) -> None:
    if len(values) > most:
        message = f"'{name}' must have at most {most} entries. Given: {len(values)}."
        raise InvalidRequestError(message, param=name)


def _check_characters(name: str, texts: Sequence[str], most: int) -> None:
    longest = max(map(len, texts), default=0)
    if longest > most:
        message = f"'{name}' must have at most {most} characters. Given: {longest}."
        raise InvalidRequestError(message, param=name)


def _check_range(name: str, value: float, bounds: Range) -> None:
    # Written so that NaN, which is neither above nor below, is rejected.
    if not bounds.minimum <= value <= bounds.maximum:
        raise InvalidRequestError(
            f"'{name}' must be between {bounds.minimum} and {bounds.maximum}. Given: {value}.",
            param=name,
        )


def _check_token_ids(name: str, token_ids: Sequence[int], info: EngineInfo) -> None:
    highest = info.vocabulary_size - 1
    if isinstance(token_ids, array):
        is_valid = _is_within(token_ids, highest)
    else:
        is_valid = min(token_ids, default=0) >= 0 and max(token_ids, default=0) <= highest
    if not is_valid:
        bad = next(each for each in token_ids if not 0 <= each <= highest)
        raise InvalidRequestError(
            f"'{name}' must have token ids between 0 and {highest}. Given: {bad}.", param=name
        )


def _is_within(token_ids: TokenIds, highest: int) -> bool:
    """Whether no packed id is higher: as characters, they are compared without an integer each."""
    try:
        characters = token_ids.tobytes().decode("utf-32-le", "surrogatepass")
    except UnicodeDecodeError:  # Some are higher than any character.
        return max(token_ids) <= highest
    last = min(highest, sys.maxunicode)
    return re.fullmatch(rf"[\0-\U{last:08x}]*", characters) is not None
