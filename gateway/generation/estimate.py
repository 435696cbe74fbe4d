"""Response of `POST /v1/completions:estimate`."""

from typing import Any

from gateway.dialects.effective import effective_parameters
from gateway.generation.call import Call
from gateway.generation.plan import Plan
from gateway.generation.submit import draft_record


def estimate(call: Call, plan: Plan) -> dict[str, Any]:
    """Return the usage that a request would have, its possible cost and its parameters."""
    request, settings = plan.request, call.context.settings
    prompt_tokens = sum(len(prompt.token_ids) for prompt in plan.prepared.prompts)
    return {
        "object": "completion.estimate",
        "model": plan.model,
        "dialect": request.profile.name,
        "service_tier": plan.service_tier,
        "prompt_tokens": prompt_tokens,
        "prompt_truncated": plan.prepared.cut_tokens,
        "max_tokens": plan.prepared.applied_max_tokens,
        "completion_tokens_max": plan.most.completion_tokens,
        "total_tokens_max": prompt_tokens + plan.most.completion_tokens,
        "context_window": plan.card.context_window,
        "parameters": effective_parameters(request, plan.prepared.sampling),
        "ignored_parameters": list(request.ignored_parameters),
        "cost": _cost(call, plan),
        "limits": {
            "max_prompts": settings.max_prompts,
            "max_body_bytes": settings.max_body_bytes,
            "max_waiting_prompts": settings.max_waiting_jobs_of_tenant,
            **{limits.scope.value: limits.limits.body() for limits in call.principal.limits},
        },
    }


def _cost(call: Call, plan: Plan) -> dict[str, int]:
    """Return the cost of the prompt alone and the maximum total cost."""
    record, most = draft_record(call, plan, ""), plan.most
    return {
        "prompt_micros": record.cost_of(**most._replace(completion_tokens=0)._asdict()),
        "max_micros": record.cost_of(**most._asdict()),
    }
