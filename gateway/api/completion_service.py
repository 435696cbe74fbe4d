"""From a plan to jobs in flight: room 5."""

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass
from functools import lru_cache

from contract import clock
from contract.messages import GenerationJob
from gateway.api.context import ProcessContext
from gateway.api.plan import Plan
from gateway.auth.principal import Principal
from gateway.dialects.request import ContextLengthBehavior
from gateway.dispatch.generation import Generation
from gateway.stream.completion import Completion

ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Submission:
    """An accepted request."""

    plan: Plan
    completion: Completion
    generation: Generation


async def submit(context: ProcessContext, principal: Principal, plan: Plan) -> Submission:
    """Put the jobs of a request on the queue. Raises an ApiError, and then nothing is left behind."""
    card, prompts = plan.card, plan.prepared.prompts
    completion = Completion(
        id=f"cmpl-{_unguessable()}",
        model=plan.model,
        created=clock.now_seconds(),
        fingerprint=_fingerprint(card.engine, card.model, card.tokenizer_digest),
        request=plan.request,
        prompt_token_ids=[prompt.token_ids for prompt in prompts],
        prompt_texts=[prompt.echo for prompt in prompts],
    )
    generation = Generation(max_unread_bytes=context.settings.max_unread_bytes)
    await context.dispatcher.enqueue(
        card.model,
        _jobs(context, principal, plan, completion_id=completion.id),
        weight=principal.tenant_weight,
        generation=generation,
    )
    return Submission(plan, completion, generation)


def _jobs(
    context: ProcessContext, principal: Principal, plan: Plan, *, completion_id: str
) -> list[GenerationJob]:
    request = plan.request
    deadline_ms = clock.now_ms() + int(context.settings.request_timeout.total_seconds() * 1000)
    salt = _cache_salt(
        context.settings.cache_salt_secret.get_secret_value(),
        principal.tenant_id,
        request.cache_isolation_key,
    )
    return [
        GenerationJob(
            id=f"{completion_id}-{index}",
            handle=context.dispatcher.next_handle(),
            gateway=context.dispatcher.gateway,
            tenant=principal.tenant_id,
            cache_salt=salt,
            prompt_token_ids=prompt.token_ids,
            max_tokens=prompt.max_tokens,
            sampling=plan.prepared.sampling,
            deadline_ms=deadline_ms,
            n=request.n,
            best_of=request.best_of,
            ranking=request.ranking,
            stop=request.stop,
            includes_stop=request.includes_stop,
            logprobs=request.logprobs,
            score_prompt=request.echo and request.logprobs is not None,
            stream=request.stream,
            grammar=plan.grammar,
            reads_prefix_cache=request.reads_prefix_cache,
            # A tool call is often marked by special tokens.
            shows_special_tokens=request.shows_special_tokens or request.tool_use is not None,
            max_predict_ms=request.max_predict_ms,
            images=request.images[index],
            may_shorten=request.context_length_behavior is ContextLengthBehavior.TRUNCATE,
        )
        for index, prompt in enumerate(plan.prepared.prompts)
    ]


def _unguessable() -> str:
    return base64.b32encode(secrets.token_bytes(ID_BYTES)).decode().rstrip("=").lower()


@lru_cache(maxsize=1_000)
def _fingerprint(engine: str, model: str, tokenizer_digest: str) -> str:
    identity = f"{engine} {model} {tokenizer_digest}"
    return "fp_" + hashlib.sha256(identity.encode()).hexdigest()[:12]


@lru_cache(maxsize=10_000)
def _cache_salt(secret: str, tenant_id: str, isolation_key: str) -> str:
    # The length stands in front, so that no tenant's id and key together are another tenant's id.
    identity = f"{len(tenant_id)} {tenant_id}{isolation_key}" if isolation_key else tenant_id
    digest = hmac.digest(secret.encode(), identity.encode(), "sha256")
    return base64.urlsafe_b64encode(digest[:18]).decode()
