"""The last check of a job before an engine sees it.

The gateway has checked all this and told the client so in better words. A worker checks again, because
what an engine cannot take may end it for everybody.
"""

from contract import sampling as ranges
from contract.messages import GenerationJob
from contract.sampling import Range, SamplingSpec
from worker.engine.base import EngineInfo, InvalidRequestError

_RANGES: dict[str, Range] = {
    "temperature": ranges.TEMPERATURE,
    "top_p": ranges.TOP_P,
    "top_k": ranges.TOP_K,
    "min_p": ranges.MIN_P,
    "presence_penalty": ranges.PRESENCE_PENALTY,
    "frequency_penalty": ranges.FREQUENCY_PENALTY,
    "repetition_penalty": ranges.REPETITION_PENALTY,
    "seed": ranges.SEED,
}


def check_job(job: GenerationJob, info: EngineInfo) -> None:
    """Raise InvalidRequestError, with words fit for a client, if no engine could take the job."""
    _check_token_ids("prompt", job.prompt_token_ids, info)
    tokens = len(job.prompt_token_ids)
    if not job.prompt_token_ids:
        raise InvalidRequestError("prompt must not be empty.")
    if job.max_tokens < 0 or tokens + job.max_tokens > info.context_window:
        raise InvalidRequestError(
            f"prompt and max_tokens together must be at most {info.context_window} tokens. "
            f"Given: {tokens} + {job.max_tokens}"
        )
    _check_range("n", job.n, ranges.N)
    if job.best_of < job.n:
        raise InvalidRequestError(f"best_of must be at least n ({job.n}). Given: {job.best_of}")
    if "" in job.stop:
        raise InvalidRequestError("stop must not be an empty string.")
    if job.logprobs is not None:
        _check_range("logprobs", job.logprobs, ranges.LOGPROBS)
    _check_sampling(job.sampling, info)


def _check_sampling(spec: SamplingSpec, info: EngineInfo) -> None:
    for name, bounds in _RANGES.items():
        _check_range(name, getattr(spec, name), bounds)
    _check_token_ids("logit_bias", list(spec.logit_bias), info)
    for bias in spec.logit_bias.values():
        _check_range("logit_bias", bias, ranges.LOGIT_BIAS)


def _check_range(name: str, value: float, bounds: Range) -> None:
    # Written so that NaN, which is neither above nor below, is refused.
    if not bounds.minimum <= value <= bounds.maximum:
        raise InvalidRequestError(
            f"{name} must be between {bounds.minimum} and {bounds.maximum}. Given: {value}"
        )


def _check_token_ids(name: str, token_ids: list[int], info: EngineInfo) -> None:
    highest = info.vocabulary_size - 1
    if token_ids and (min(token_ids) < 0 or max(token_ids) > highest):
        bad = next(each for each in token_ids if not 0 <= each <= highest)
        raise InvalidRequestError(
            f"{name}: token ids must be between 0 and {highest}. Given: {bad}"
        )
