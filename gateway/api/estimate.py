"""The answer of `POST /v1/completions:estimate`."""

from typing import Any

from gateway.api.plan import Plan
from gateway.dialects.effective import effective_parameters
from gateway.settings import Settings


def estimate(plan: Plan, settings: Settings) -> dict[str, Any]:
    """Return what a request would take and with which parameters it would run."""
    request, prompts = plan.request, plan.prepared.prompts
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    completion_tokens = sum(prompt.max_tokens for prompt in prompts) * request.best_of
    return {
        "object": "completion.estimate",
        "model": plan.model,
        "dialect": request.profile.name,
        "prompt_tokens": prompt_tokens,
        "prompt_truncated": plan.prepared.cut_tokens,
        "max_tokens": plan.prepared.applied_max_tokens,
        "completion_tokens_max": completion_tokens,
        "total_tokens_max": prompt_tokens + completion_tokens,
        "context_window": plan.card.context_window,
        "parameters": effective_parameters(request, plan.prepared.sampling),
        "ignored_parameters": list(request.ignored_parameters),
        "cost": None,
        "limits": {
            "max_prompts": settings.max_prompts,
            "max_body_bytes": settings.max_body_bytes,
            "max_waiting_prompts": settings.max_waiting_jobs_of_tenant,
        },
    }
