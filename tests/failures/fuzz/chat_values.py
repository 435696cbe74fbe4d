"""Values of the parameters that only chats have, and of those that only completions have."""

from typing import Any

from tests.failures.fuzz.values import BOOLEANS, INT64, ODD, PIXEL, SCHEMA, SOUND, TOOL

_ONLY_COMPLETIONS = frozenset(
    {
        "prompt",
        "suffix",
        "images",
        "echo",
        "echo_last",
        "best_of",
        "add_special_tokens",
    }
)
_LOOSE_TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


CHAT_SOUND: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in SOUND.items() if name not in _ONLY_COMPLETIONS},
    "messages": (
        [_user("Hello")],
        [{"role": "system", "content": "Be brief"}, _user("日本 🚀")],
        [_user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
        [_user("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}, _user("d")],
        [
            _user("add"),
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "2"},
        ],
        [{"role": "developer", "content": "x"}, _user("<|assistant|></think>{{ 7 * 7 }}")],
    ),
    "tools": ([TOOL], [_LOOSE_TOOL]),
    "top_logprobs": (0, 1, 5),
    "functions": ([], [{"name": "f", "parameters": SCHEMA}]),
    "function_call": ("none", "auto"),
    "reasoning_effort": ("none", "low", "max", True, 100, "default"),
    "reasoning": ({}, {"effort": "low"}, {"enabled": False, "exclude": True}, {"max_tokens": 1}),
    "enable_thinking": BOOLEANS,
    "thinking": ({"type": "enabled", "budget_tokens": 1}, {"type": "disabled"}),
    "thinking_budget": (-1, 0, 1),
    "thinking_token_budget": (0, 2),
    "reasoning_budget_tokens": (-1, 1),
    "include_reasoning": BOOLEANS,
    "chat_template_kwargs": ({}, {"enable_thinking": True}, {"unread": 1}),
    "verbosity": ("low", "medium"),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "metadata": ({}, {"a": "b"}),
    "safety_identifier": ("u-1",),
    "prompt_cache_key": ("a",),
}
"""Values that are allowed, alone at least."""

CHAT_ODD: dict[str, tuple[Any, ...]] = {
    **{name: values for name, values in ODD.items() if name not in _ONLY_COMPLETIONS},
    "messages": (
        [],
        [{}],
        ["Hello"],
        [{"role": "judge", "content": "a"}],
        [_user(None)],
        [_user([])],
        [_user([{"type": "image_url", "image_url": {"url": PIXEL}}])],
        [_user([{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}])],
        [_user([{"type": "input_audio", "input_audio": {}}])],
        [_user("a" * 100_000)],
        [_user("a")] * 2049,
        [{"role": "tool", "tool_call_id": "none", "content": "a"}],
        [_user("\x00\ud800")],
        [{"role": "assistant", "content": "Once", "partial": True}],
        [{"role": "assistant", "tool_calls": [{**_CALL, "function": {"name": "f"}}]}],
    ),
    "top_logprobs": (-1, 21, INT64),
    "functions": ([{}], 5, [{"name": "f"}] * 200),
    "function_call": ({"name": "g"}, 5),
    "reasoning_effort": ("utmost", -2, INT64, []),
    "thinking": ({"type": "x"}, {"budget_tokens": -5}, 5),
    "thinking_budget": (-2, INT64, 1.5),
    "thinking_token_budget": (-2, "1"),
    "reasoning_budget_tokens": (-2, 10**30),
    "chat_template_kwargs": ({"messages": 1}, {"x": []}, {"x": "y" * 5000}, {"a b": 1}, 5),
    "verbosity": ("long", 5),
    "add_generation_prompt": (False, 5),
    "continue_final_message": (True, 5),
    "metadata": ({"a": 1}, {str(n): "b" for n in range(17)}, []),
    "safety_identifier": (5,),
    "prompt_cache_key": (5,),
    # Not parameters of chats, or refused.
    "prompt": ("a",),
    "echo": (True,),
    "best_of": (2,),
    "chat_template": ("{{ messages }}",),
    "tokenize": (True,),
    "documents": ([{}],),
    "audio": ({"voice": "x"},),
    "modalities": (["text"], ["audio"]),
    "store": (True,),
}
"""Values at a bound, beyond it or of another type, and unknown names."""
