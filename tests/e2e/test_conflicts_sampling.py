"""Where the served APIs disagree about sampling: defaults, windows, names, units and ranges."""

from typing import Any

import pytest

from tests.e2e.at_once import at_once, each_at_once
from tests.e2e.examples import COUNTING, LONG, OPEN, ids_of
from tests.e2e.seeds.calling import (
    LLAMACPP,
    Body,
    Caller,
    check_defaults,
    each_dialect,
    text_of,
    texts_by_seed,
)

pytestmark = pytest.mark.e2e

NEUTRAL: Body = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
OF_LLAMACPP: Body = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 40,
    "min_p": 0.05,
    "repeat_penalty": 1.1,
}
GREEDY: Body = {"temperature": 0, "max_tokens": 24, "repetition_penalty": 1.0}


@each_dialect("temperature", "repetition_penalty")
def test_conflict_05_sampler_defaults(caller: Caller, dialect: str) -> None:
    """Given explicitly, the defaults of the dialect change nothing, and those of another do."""
    body = {"prompt": OPEN, "max_tokens": 24}
    defaults, others = NEUTRAL, OF_LLAMACPP
    if dialect in LLAMACPP:
        defaults, others = OF_LLAMACPP, NEUTRAL
    if dialect == "llamacpp-2026":
        defaults = defaults | {"repeat_penalty": 1.0}
    check_defaults(caller, dialect, body, defaults=defaults, others=others)


@each_dialect("penalizes_prompt")
def test_conflict_06_tokens_that_penalties_count(caller: Caller, dialect: str) -> None:
    """llama.cpp counts the last 64 tokens, prompt included; others count the completion."""
    # The space, which comes next, occurs in it so often that the penalty outweighs any certainty.
    body = {"prompt": "".join(f"{number}, " for number in range(1, 16)) + "16,"}
    body |= GREEDY | {"max_tokens": 1}
    penalty = {"frequency_penalty": 2.0}
    plain, penalized, windowless = caller.texts(
        dialect, body, body | penalty, body | penalty | {"repeat_last_n": 0}
    )

    assert plain == " "
    assert (penalized != plain) is (dialect in LLAMACPP)
    assert windowless == plain


@each_dialect("penalty_last_n")
def test_conflict_06_window_of_the_repetition_penalty(caller: Caller, dialect: str) -> None:
    """Tokens more than 64 back count everywhere except in llama.cpp."""
    filler = ids_of("x") * 70
    body = {"prompt": ids_of(COUNTING) + filler, "max_tokens": 12, "temperature": 0}
    body |= {"repetition_penalty": 1.9}
    default, near, far = caller.texts(
        dialect, body, body | {"repeat_last_n": 64}, body | {"repeat_last_n": -1}
    )

    assert near != far
    assert default == (near if dialect in LLAMACPP else far)


@each_dialect("uses_sampler_chain")
def test_conflict_07_names_of_the_repetition_penalty(caller: Caller, dialect: str) -> None:
    body = {"prompt": COUNTING, "temperature": 0, "max_tokens": 12}
    both = {"repeat_penalty": 1.7, "repetition_penalty": 1.7}
    named = ({"repeat_penalty": 1.7}, {"repetition_penalty": 1.7}, both)
    texts = caller.texts(dialect, *(body | each for each in named))

    assert len({*texts}) == 1
    error = caller.refused(dialect, body | both | {"repeat_penalty": 1.8})
    assert "repeat_penalty" in error["message"]
    assert "repetition_penalty" in error["message"]


@each_dialect("mirostat_unit")
def test_conflict_08_names_and_units_of_mirostat(caller: Caller, dialect: str) -> None:
    body = {"prompt": OPEN, "max_tokens": 24, "seed": 13, "temperature": 1, "ignore_eos": True}
    bits = 1.5
    target = bits if dialect == "fireworks-2026" else 2**bits
    llamacpp = {"mirostat": 2, "mirostat_tau": bits, "mirostat_eta": 0.2}
    fireworks = {"mirostat_target": target, "mirostat_lr": 0.2}

    plain, one, other = caller.texts(dialect, body, body | llamacpp, body | fireworks)
    assert one == other != plain
    assert "mirostat" in caller.refused(dialect, body | llamacpp | fireworks)["message"]


@each_dialect("uses_sampler_chain")
def test_conflict_08_learning_rate_alone_is_off(caller: Caller, dialect: str) -> None:
    body = {"prompt": OPEN, "max_tokens": 24, "seed": 13}
    off = ({"mirostat_lr": 0.1}, {"mirostat": 0, "mirostat_tau": 5})
    plain, *others = caller.texts(dialect, body, *(body | each for each in off))

    assert others == [plain, plain]


@each_at_once("target", [0.99, 0, -1])
def test_conflict_08_perplexity_is_at_least_one(caller: Caller, target: float) -> None:
    body = {"prompt": OPEN, "max_tokens": 2, "mirostat_target": target}

    assert caller.refused("fireworks", body)["param"] == "mirostat_target"


@each_dialect("uses_sampler_chain")
def test_conflict_15_top_k_off(caller: Caller, dialect: str) -> None:
    body = {"prompt": OPEN, "max_tokens": 24, "seed": 21} | NEUTRAL
    values = (0, -1, 10**6, 1)
    off, *others, narrowest = caller.texts(dialect, *(body | {"top_k": k} for k in values))

    assert others == [off, off]
    assert narrowest != off


@each_dialect("uses_sampler_chain")
def test_conflict_15_top_p_of_zero_is_greedy(caller: Caller, dialect: str) -> None:
    # At every token of this text one is clearly the likeliest.
    body = {"prompt": LONG.prompt, "max_tokens": 20, "seed": 4} | NEUTRAL
    hot = body | {"temperature": 2}

    greedy, narrow, wide = caller.texts(dialect, body | {"temperature": 0}, hot | {"top_p": 0}, hot)
    assert narrow == greedy
    assert wide != greedy


@each_dialect("uses_sampler_chain")
@each_at_once(
    "name, edges, beyond",
    [
        ("n", (1, 128), (0, 129)),
        ("top_k", (1, 128), ()),
        ("top_p", (0, 1), (-0.1, 1.1)),
        ("temperature", (0, 2), (-0.1, 2.1)),
        ("presence_penalty", (-2, 2), (-2.1, 2.1)),
        ("frequency_penalty", (-2, 2), (-2.1, 2.1)),
        ("repetition_penalty", (0.01, 2), (0, 2.1)),
        ("logprobs", (0, 5), (-1, 21)),
    ],
)
def test_conflict_16_edges_belong_to_ranges(
    caller: Caller, dialect: str, name: str, edges: tuple[float, ...], beyond: tuple[float, ...]
) -> None:
    body = {"prompt": OPEN, "max_tokens": 1}

    for value in edges:
        caller.complete(dialect, body | {name: value})
    for value in beyond:
        assert name in caller.refused(dialect, body | {name: value})["message"]


@each_dialect("uses_sampler_chain")
def test_conflict_22_seeds(caller: Caller, dialect: str) -> None:
    body = {"prompt": OPEN, "max_tokens": 24} | NEUTRAL
    seeds = (0, 2**32 - 1, 2**63 - 1, -(2**63))

    texts, again, unseeded = at_once(
        lambda: texts_by_seed(caller, dialect, body, seeds),
        lambda: texts_by_seed(caller, dialect, body, seeds),
        lambda: texts_by_seed(caller, dialect, body, [-1] * 3),
    )
    # On a CPU, seeds that differ only in their upper half draw the same numbers.
    assert texts[0] != texts[1]
    assert again == texts
    assert len(set(unseeded)) > 1
    caller.refused(dialect, body | {"seed": 2**63})


@each_dialect("uses_sampler_chain")
def test_conflict_26_forms_of_logit_bias(caller: Caller, dialect: str) -> None:
    [z] = ids_of("z")
    body = {"prompt": OPEN} | GREEDY | {"max_tokens": 3}
    forms: list[Any] = [{str(z): 100}, [[z, 100]], {"z": 100}, [["z", 100]], {str(z): 1000}]

    texts = caller.texts(dialect, *(body | {"logit_bias": form} for form in forms))
    assert texts == ["zzz"] * len(forms)
    first = caller.complete(dialect, body | {"return_token_ids": True, "max_tokens": 1})
    [token] = first["choices"][0]["token_ids"]
    banned = caller.complete(dialect, body | {"logit_bias": [[token, False]]})
    assert text_of(banned) != text_of(first)
