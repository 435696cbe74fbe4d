"""The effective parameters of a chat, as an estimate reports them."""

from gateway.dialects.estimate_parameters import effective_parameters
from tests.gateway.dialects.chat_reading import read_chat


def test_effective_parameters_of_a_chat_have_the_names_of_chats() -> None:
    request = read_chat(
        n=2,
        logprobs=True,
        top_logprobs=3,
        reasoning_effort="low",
        reasoning_budget_tokens=50,
        include_reasoning=False,
        tools=[{"type": "function", "function": {"name": "f"}}],
        parallel_tool_calls=False,
    )
    reported = effective_parameters(request, request.sampling)
    expected = {
        "n": 2,
        "logprobs": True,
        "top_logprobs": 3,
        "chat_template_kwargs": {
            "reasoning_effort": "low",
            "enable_thinking": True,
            "thinking": True,
        },
        "continue_final_message": False,
        "thinking_budget": 50,
        "include_reasoning": False,
        "tools": ["f"],
        "parallel_tool_calls": False,
    }
    assert {name: reported[name] for name in expected} == expected
    assert reported.keys().isdisjoint({"echo", "best_of", "suffix"})


def test_chat_without_logprobs_shows_logprobs_false() -> None:
    request = read_chat()
    reported = effective_parameters(request, request.sampling)
    assert (reported["logprobs"], reported["top_logprobs"], reported["thinking_budget"]) == (
        False,
        0,
        None,
    )
