"""Response of `POST /v1/completions:estimate`."""

from typing import Any

from gateway.dialects.effective import effective_parameters
from gateway.generation.call import Call
from gateway.generation.check import CheckedRequest
from gateway.generation.submit import draft_record


def estimate(call: Call, checked: CheckedRequest) -> dict[str, Any]:
    """Return the usage that a request would have, its possible cost and its parameters."""
    request, settings = checked.request, call.context.settings
    prompt_tokens = sum(len(prompt.token_ids) for prompt in checked.prepared.prompts)
    return {
        "object": "completion.estimate",
        "model": checked.model,
        "dialect": request.profile.name,
        "service_tier": checked.service_tier,
        "prompt_tokens": prompt_tokens,
        "prompt_truncated": checked.prepared.cut_tokens,
        "max_tokens": checked.prepared.applied_max_tokens,
        "completion_tokens_max": checked.most.completion_tokens,
        "total_tokens_max": prompt_tokens + checked.most.completion_tokens,
        "context_window": checked.card.context_window,
        "parameters": effective_parameters(request, checked.prepared.sampling),
        "ignored_parameters": list(request.ignored_parameters),
        "cost": _cost(call, checked),
        "limits": {
            "max_prompts": settings.max_prompts,
            "max_body_bytes": settings.max_body_bytes,
            "max_waiting_prompts": settings.max_waiting_jobs_of_tenant,
            **{limits.scope.value: limits.limits.body() for limits in call.principal.limits},
        },
    }


def _cost(call: Call, checked: CheckedRequest) -> dict[str, int]:
    """Return the cost of the prompt alone and the maximum total cost."""
    record, most = draft_record(call, checked, ""), checked.most
    return {
        "prompt_micros": record.cost_of(**most._replace(completion_tokens=0)._asdict()),
        "max_micros": record.cost_of(**most._asdict()),
    }
