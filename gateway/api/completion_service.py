"""From a checked request to jobs in flight: rooms 3 to 5 in their order."""

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from redis.exceptions import RedisError

from contract import clock
from contract.messages import GenerationJob, WorkerCard
from gateway.api.context import ProcessContext
from gateway.auth.principal import Principal
from gateway.dialects.completions import (
    CompletionRequest,
    require_model,
    to_generation_request,
)
from gateway.dialects.request import GenerationRequest
from gateway.dialects.wire import validate
from gateway.dispatch.generation import Generation
from gateway.errors import InvalidParameterError, ModelNotFoundError, StoreUnavailableError
from gateway.prompt.tokenizers import EncodedPrompt, PromptEncoder
from gateway.prompt.window import fit_max_tokens
from gateway.stream.completion import Completion

ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Submission:
    """An accepted request."""

    completion: Completion
    generation: Generation
    applied_max_tokens: int
    """The lowest max_tokens that was applied to a prompt."""


async def submit(context: ProcessContext, principal: Principal, body: dict[str, Any]) -> Submission:
    """Check a request and put its jobs on the queue.

    Raises an ApiError, and then nothing is left behind.
    """
    name = require_model(body)
    if not principal.allows_model(name):
        raise ModelNotFoundError(name)
    wire = validate(CompletionRequest, body)
    request = to_generation_request(wire, max_prompts=context.settings.max_prompts)
    try:
        card = (await context.catalogue.find(name)).card
        tokenizer = await context.tokenizers.get(card.tokenizer_digest)
    except RedisError:
        raise StoreUnavailableError(
            "The queue cannot be reached.", retry_after_seconds=1.0
        ) from None
    _check_logit_bias(request, card)
    encoder = PromptEncoder(
        tokenizer, vocabulary_size=card.vocabulary_size, bos_token_id=card.bos_token_id
    )
    prompts = [
        await encoder.encode(prompt, param=_param(request, index))
        for index, prompt in enumerate(request.prompts)
    ]
    completion = Completion(
        id=f"cmpl-{_unguessable()}",
        model=request.model,
        created=clock.now_seconds(),
        fingerprint=_fingerprint(card.engine, card.model, card.tokenizer_digest),
        request=request,
        prompt_texts=[_echo_text(request, prompt, encoder) for prompt in prompts],
    )
    jobs = _jobs(context, principal, card, completion, prompts)
    generation = Generation(max_unread_bytes=context.settings.max_unread_bytes)
    await context.dispatcher.enqueue(
        card.model, jobs, weight=principal.tenant_weight, generation=generation
    )
    return Submission(completion, generation, min(job.max_tokens for job in jobs))


def _jobs(
    context: ProcessContext,
    principal: Principal,
    card: WorkerCard,
    completion: Completion,
    prompts: list[EncodedPrompt],
) -> list[GenerationJob]:
    request = completion.request
    deadline_ms = clock.now_ms() + int(context.settings.request_timeout.total_seconds() * 1000)
    secret = context.settings.cache_salt_secret.get_secret_value()
    salt = _cache_salt(secret, principal.tenant_id)
    return [
        GenerationJob(
            id=f"{completion.id}-{index}",
            handle=context.dispatcher.next_handle(),
            gateway=context.dispatcher.gateway,
            tenant=principal.tenant_id,
            cache_salt=salt,
            prompt_token_ids=prompt.token_ids,
            max_tokens=fit_max_tokens(
                len(prompt.token_ids),
                request.max_tokens,
                window=card.context_window,
                behavior=request.context_length_behavior,
            ),
            sampling=request.sampling,
            deadline_ms=deadline_ms,
            n=request.n,
            best_of=request.best_of,
            stop=request.stop,
            logprobs=request.logprobs,
            score_prompt=request.echo and request.logprobs is not None,
            stream=request.stream,
        )
        for index, prompt in enumerate(prompts)
    ]


def _check_logit_bias(request: GenerationRequest, card: WorkerCard) -> None:
    for token in request.sampling.logit_bias:
        if token >= card.vocabulary_size:
            raise InvalidParameterError(
                f"'logit_bias' must have token ids from 0 to {card.vocabulary_size - 1} as keys. "
                f"Given: {token}.",
                param="logit_bias",
            )


def _param(request: GenerationRequest, index: int) -> str:
    return "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"


def _echo_text(request: GenerationRequest, prompt: EncodedPrompt, encoder: PromptEncoder) -> str:
    if not request.echo:
        return ""
    return prompt.text if prompt.text is not None else encoder.decode(prompt.token_ids)


def _unguessable() -> str:
    return base64.b32encode(secrets.token_bytes(ID_BYTES)).decode().rstrip("=").lower()


@lru_cache(maxsize=1_000)
def _fingerprint(engine: str, model: str, tokenizer_digest: str) -> str:
    identity = f"{engine} {model} {tokenizer_digest}"
    return "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12]


@lru_cache(maxsize=10_000)
def _cache_salt(secret: str, tenant_id: str) -> str:
    digest = hmac.digest(secret.encode(), tenant_id.encode(), "sha256")
    return base64.urlsafe_b64encode(digest[:18]).decode()
