"""Conflicts of the served APIs about stop text, lengths, choices and suffixes."""

from functools import partial

import pytest

from tests.e2e.at_once import at_once
from tests.e2e.examples import COUNTING, OPEN, ids_of
from tests.e2e.seeds.calling import LLAMACPP, Body, Caller, each_dialect, joined, text_of, texts_of

pytestmark = pytest.mark.e2e

WINDOW = 2048
GREEDY: Body = {"temperature": 0, "max_tokens": 24, "repetition_penalty": 1.0}

TRUNCATING = ("fireworks", "fireworks-2026", "llamacpp", "llamacpp-2026", "omlx", "vllm")
REFUSING = ("openai", "mistralrs")


@each_dialect("includes_stop")
def test_conflict_01_stop_text(caller: Caller, dialect: str) -> None:
    body = {"prompt": COUNTING, "stop": " 8"} | GREEDY
    without, included = " 5, 6, 7,", " 5, 6, 7, 8"
    expected = included if dialect == "fireworks" else without

    explicit = (body | {"include_stop_str_in_output": value} for value in (True, False))
    texts, chunks = at_once(
        lambda: caller.texts(dialect, body, *explicit), lambda: caller.stream(dialect, body)
    )

    assert texts == [expected, included, without]
    assert joined(chunks) == expected


@each_dialect("context_length_behavior")
def test_conflict_02_completion_beyond_the_window(caller: Caller, dialect: str) -> None:
    body = {"prompt": [5] * (WINDOW - 7), "max_tokens": 8, "ignore_eos": True}
    name = "context_length_exceeded_behavior"

    if dialect in TRUNCATING:
        assert caller.complete(dialect, body)["usage"]["completion_tokens"] == 7
    else:
        caller.refused(dialect, body)
    assert caller.complete(dialect, body | {name: "truncate"})["usage"]["completion_tokens"] == 7
    caller.refused(dialect, body | {name: "error"})
    caller.complete(dialect, body | {name: "error", "max_tokens": 7})


@each_dialect("error_style")
def test_conflict_03_prompt_beyond_the_window(caller: Caller, dialect: str) -> None:
    prompt = [5] * 50 + [6] * WINDOW
    body = {"prompt": prompt, "max_tokens": 10, "ignore_eos": True}

    error = caller.refused(dialect, body)
    if dialect in LLAMACPP:
        assert error["type"] == "exceed_context_size_error"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (len(prompt), WINDOW)
    response = caller.post(dialect, body | {"truncate_sequence": True})
    assert response.json()["usage"]["prompt_tokens"] == WINDOW - 10
    assert response.headers["x-prompt-truncated"] == str(len(prompt) - (WINDOW - 10))


@each_dialect()
def test_conflict_03_both_rules_compose(caller: Caller, dialect: str) -> None:
    """The prompt is cut first, then max_tokens."""
    kept = WINDOW - 4
    body = {"prompt": [5] * (WINDOW + 9), "max_tokens": 10, "truncate_prompt_tokens": kept}
    name = "context_length_exceeded_behavior"

    response = caller.post(dialect, body | {name: "truncate", "ignore_eos": True})
    assert response.json()["usage"]["prompt_tokens"] == kept
    assert response.headers["x-max-tokens-applied"] == "4"
    caller.refused(dialect, body | {name: "error"})


@each_dialect("max_tokens")
def test_conflict_04_default_of_max_tokens(caller: Caller, dialect: str) -> None:
    body = {"prompt": [5] * (WINDOW - 40), "ignore_eos": True}
    expected = 16 if dialect in ("openai", "fireworks", "fireworks-2026", "vllm") else 40

    limits: list[Body] = [{}, {"max_tokens": None}, {"max_tokens": -1}]
    answers = at_once(*(partial(caller.complete, dialect, body | limit) for limit in limits))
    tokens = [answer["usage"]["completion_tokens"] for answer in answers]
    assert tokens == [expected, expected, 40]


@each_dialect("allows_empty_completion")
def test_conflict_04_max_tokens_of_zero(caller: Caller, dialect: str) -> None:
    body = {"prompt": COUNTING, "max_tokens": 0}

    if dialect in LLAMACPP:
        answer = caller.complete(dialect, body)
        assert (text_of(answer), answer["usage"]["completion_tokens"]) == ("", 0)
    else:
        caller.refused(dialect, body)
    echoed = caller.complete(dialect, body | {"echo": True})
    assert (text_of(echoed), echoed["usage"]["completion_tokens"]) == (COUNTING, 0)


@each_dialect("is_suffix_literal")
def test_conflict_09_suffix(caller: Caller, dialect: str) -> None:
    prompt, suffix = "def add(a, b):\n    ", "\n    return result"
    body = {"prompt": prompt, "suffix": suffix} | GREEDY
    answer, chunks, plain = at_once(
        lambda: caller.complete(dialect, body),
        lambda: caller.stream(dialect, body),
        lambda: caller.complete(dialect, body | {"suffix": None}),
    )
    tokens = answer["usage"]["prompt_tokens"]

    assert joined(chunks) == text_of(answer)
    if dialect == "mistralrs":
        assert text_of(answer) == text_of(plain) + suffix
        assert tokens == len(ids_of(prompt))
    else:
        # The model reads both, between its three fill-in-the-middle tokens.
        assert tokens == len(ids_of(prompt)) + len(ids_of(suffix)) + 3


@each_dialect("best_of_keeps")
def test_conflict_10_best_of(caller: Caller, dialect: str) -> None:
    body = {"prompt": OPEN, "max_tokens": 6, "ignore_eos": True, "seed": 8, "logprobs": 0}
    lesser, greater = body | {"n": 4, "best_of": 2}, body | {"n": 2, "best_of": 4}
    accepted, refused = (lesser, greater) if dialect == "mistralrs" else (greater, lesser)

    answer = caller.complete(dialect, accepted)
    assert len(texts_of(answer)) == 2
    assert answer["usage"]["completion_tokens"] == 4 * 6
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in answer["choices"]]
    # All have one length here, so that the mean and the sum agree on the order.
    assert sums == sorted(sums, reverse=True)
    assert "best_of" in caller.refused(dialect, refused)["message"]


@each_dialect("uses_sampler_chain")
def test_conflict_21_choices_at_temperature_zero(caller: Caller, dialect: str) -> None:
    answer = caller.complete(dialect, {"prompt": COUNTING, "n": 3} | GREEDY)

    first, *others = texts_of(answer)
    assert others == [first, first]
    assert first.startswith(" 5, 6,")
