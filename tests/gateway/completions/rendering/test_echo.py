"""Echoed prompts, and the offsets of tokens in the returned text."""

import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from contract.messages import TokenLogprob
from contract.pieces import PieceReader
from gateway.completions.prompt.preparation import echoed_text
from gateway.completions.rendering import prompt_logprobs as prompt_logprobs_module
from gateway.completions.rendering.assembler import ChoicesAssembler
from gateway.completions.rendering.form_registry import collect
from gateway.completions.rendering.logprobs import (
    LOGPROB_FLOOR,
    LogprobLists,
    ScoredToken,
    placed,
)
from gateway.completions.rendering.sse import ChunkRenderer
from gateway.dialects.request import ChatRequest
from gateway.records.errors import InvalidParameterError
from tests.gateway.replies import STOP, completion, ended, inbox, said, scored
from tests.support.cases import all_cases
from tests.support.events import parse_chunks
from worker.execution.logprobs import TokenTexts, prompt_logprobs

CHECKPOINT = Path(__file__).parents[4] / "worker" / "demo_model" / "checkpoint"
TOKENIZER = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
TEXTS = TokenTexts(TOKENIZER)
PIECES = PieceReader(TOKENIZER)


def decode(token_ids: list[int]) -> str:
    """Return the text of token ids, special tokens shown."""
    return str(TOKENIZER.decode(token_ids, skip_special_tokens=False))


def encode(text: str) -> list[int]:
    """Return the token ids of a text, without begin-of-text tokens."""
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def echo(token_ids: list[int], last: int | None, *, text: str | None = None) -> str:
    """Return what is echoed of a prompt."""
    request = completion(prompt_texts=[""], echo_last=last).request
    return echoed_text(request, text=text, token_ids=token_ids, decode=decode)


def score(token_ids: list[int]) -> list[TokenLogprob]:
    """Return what the worker sends about a prompt."""
    scores = [[(token, -1.0)] for token in token_ids[1:]]
    return prompt_logprobs(TOKENIZER, TEXTS, token_ids, scores, alternatives=0)


def test_whole_prompt_is_echoed_verbatim() -> None:
    assert echo([5, 6], None, text="any text") == "any text"
    assert echo(encode("Once upon"), None) == "Once upon"


@all_cases("last", [0, 1, 2, 3, 30, 100])
def test_last_tokens_are_echoed(last: int) -> None:
    ids = encode("Once upon a time there was a little girl who liked the sea.")
    expected = decode(ids)[len(decode(ids[: len(ids) - last])) :] if last else ""
    assert (
        echo(ids, last, text="Once upon a time there was a little girl who liked the sea.")
        == expected
    )


def test_nothing_is_echoed_unless_requested() -> None:
    request = completion(echo_last=3).request
    assert echoed_text(request, text="a", token_ids=[5], decode=decode) == ""


def test_character_that_the_echo_cuts_is_echoed_as_a_whole() -> None:
    ids = encode("a😀b")
    shown = [echo(ids, last) for last in range(len(ids) + 1)]
    assert set(shown) == {"", "b", "😀b", "a😀b"}


@given(st.text(min_size=1, max_size=40), st.integers(1, 12))
def test_echo_of_the_last_tokens_is_an_end_of_the_text(text: str, last: int) -> None:
    ids = encode(text)
    whole = decode(ids)
    shown = echo(ids, last, text=whole)
    assert whole.endswith(shown)
    rest = whole[: len(whole) - len(shown)]
    assert decode(ids[: max(len(ids) - last, 0)]).startswith(rest)


def assert_tokens_join(token_ids: list[int], shown: str, *, last: int | None = None) -> None:
    """Check that the echoed tokens join to the echo, each at its offset."""
    entries = score(token_ids)
    start = 0 if last is None else max(len(entries) - last, 0)
    tokens = placed(entries[start:], shown)
    assert len(tokens) == len(entries) - start
    assert "".join(each.token for each in tokens) == shown
    ends = accumulate(len(each.token) for each in tokens)
    assert [each.offset for each in tokens] == [0, *ends][:-1]


@given(st.text(alphabet=st.sampled_from("ab c\né漢😀"), min_size=1, max_size=30), st.integers(1, 9))
def test_tokens_of_an_echo_join_to_it(text: str, last: int) -> None:
    ids = encode(text)
    assert_tokens_join(ids, text)
    # The token that completes a cut character has all of it.
    assert_tokens_join(ids, echo(ids, last, text=text), last=last)


@given(st.lists(st.integers(0, 255), min_size=1, max_size=12), st.integers(1, 12))
def test_tokens_of_any_bytes_join_to_their_echo(values: list[int], last: int) -> None:
    letters = {PIECES.bytes_of(token): token for token in range(TOKENIZER.get_vocab_size())}
    ids = [letters[bytes([value])] for value in values]
    assert_tokens_join(ids, echo(ids, None))
    assert_tokens_join(ids, echo(ids, last), last=last)


@all_cases(
    ("tokens", "text", "expected"),
    [
        # The client did not send the begin-of-text token, or did.
        (["<s>", "Once", " up"], "Once up", ["", "Once", " up"]),
        (["<s>", "Once"], "<s>Once", ["<s>", "Once"]),
        (["<s>", "a", ""], "a\ufffd", ["", "a", "\ufffd"]),
        # Infill: the suffix is not echoed.
        (["<P>", "ab", "c", "<S>", "d", "<M>"], "abc", ["", "ab", "c", "", "", ""]),
        (["<P>", "<S>", "d", "<M>"], "", ["", "", "", ""]),
        # The tokenizer composes characters, or puts a space before the text.
        (["a", "é", " b"], "ae\u0301 b", ["a", "e\u0301", " b"]),
        ([" a", "b"], "ab", ["a", "b"]),
        (["é", "é!", "x"], "e\u0301e\u0301!x", ["e", "\u0301e\u0301!", "x"]),
    ],
)
def test_each_token_has_its_part_of_the_echo(
    tokens: list[str], text: str, expected: list[str]
) -> None:
    entries = [TokenLogprob(token, -1.0, 0) for token in tokens]
    assert [each.token for each in placed(entries, text)] == expected


def test_completion_starts_after_the_echo_with_a_cut_character() -> None:
    answer = completion(prompt_texts=["a\ufffd"], logprobs=0)
    renderer = ChunkRenderer(answer)
    (chunk,) = parse_chunks(
        renderer.render(
            [
                scored([TokenLogprob("a", None, 0), TokenLogprob("", -1.0, 1)]),
                said(
                    "é!",
                    finish=STOP,
                    token_ids=[8, 9],
                    logprobs=[TokenLogprob("é", -1.0, 0), TokenLogprob("!", -1.0, 1)],
                ),
                ended(),
            ]
        )
    )
    reported = chunk["choices"][0]
    assert reported["text"] == "a\ufffdé!"
    assert reported["logprobs"]["text_offset"] == [0, 1, 2, 3]


def echoing(last: int, shown: str, **fields: Any) -> dict[str, Any]:
    """Stream the prompt "abc" with its last tokens echoed; return the only chunk."""
    answer = completion(prompt_texts=[shown], echo_last=last, logprobs=0, **fields)
    entries = [TokenLogprob(letter, -1.0, place) for place, letter in enumerate("abc")]
    renderer = ChunkRenderer(answer)
    (chunk,) = parse_chunks(
        renderer.render(
            [
                scored(entries),
                said("d", finish=STOP, logprobs=[TokenLogprob("d", -1.0, 0)]),
                ended(),
            ]
        )
    )
    reported: dict[str, Any] = chunk["choices"][0]
    return reported


def test_echo_last_returns_log_probabilities_of_the_last_tokens() -> None:
    reported = echoing(2, "bc")
    assert reported["text"] == "bcd"
    assert reported["logprobs"]["tokens"] == ["b", "c", "d"]
    assert reported["logprobs"]["token_logprobs"] == [-1.0, -1.0, -1.0]
    assert reported["logprobs"]["text_offset"] == [0, 1, 2]


def test_log_probabilities_may_be_objects_with_places() -> None:
    reported = echoing(2, "bc", has_scored_objects=True)
    assert [*reported["logprobs"]] == ["content"]
    seen = [
        (each["token"], each["token_id"], each["text_offset"])
        for each in reported["logprobs"]["content"]
    ]
    assert seen == [("b", 6, 0), ("c", 7, 1), ("d", 9, 2)]
    others = {"bytes": [*b"b"], "logprob": -1.0, "top_logprobs": []}
    assert reported["logprobs"]["content"][0].items() >= others.items()


def test_echo_last_of_more_tokens_than_there_are_is_the_whole_echo() -> None:
    assert echoing(9, "abc")["logprobs"]["tokens"] == ["a", "b", "c", "d"]


def test_echo_last_of_no_token_is_no_echo() -> None:
    reported = echoing(0, "")
    assert reported["text"] == "d"
    assert reported["logprobs"]["tokens"] == ["d"]
    assert reported["logprobs"]["text_offset"] == [0]


def test_echo_last_cuts_the_token_ids_of_log_probabilities_as_well() -> None:
    reported = echoing(2, "bc", return_token_ids=True)
    assert reported["logprobs"]["token_ids"] == [6, 7, 9]
    assert reported["prompt_token_ids"] == [5, 6, 7]
    assert reported["token_ids"] == [9]


@pytest.mark.parametrize("bytes_allowed", [100, 20_000])
async def test_log_probabilities_of_echoed_prompts_are_bounded_over_all_choices(
    monkeypatch: pytest.MonkeyPatch, bytes_allowed: int
) -> None:
    monkeypatch.setattr(prompt_logprobs_module, "MAX_BYTES", bytes_allowed)
    answer = completion(n=3, prompt_texts=["abc"], logprobs=0)
    replies = [
        scored([TokenLogprob(letter, -1.0, place) for place, letter in enumerate("abc")]),
        *(said("d", choice=choice, finish=STOP) for choice in range(3)),
        ended(),
    ]
    renderer = ChunkRenderer(answer)
    events = renderer.render(replies)
    if bytes_allowed == 20_000:
        assert len(parse_chunks(events)) == 3
        assert json.loads((await collect(answer, inbox(*replies))).content)["choices"]
        return
    assert events == b""
    assert isinstance(renderer.failure, InvalidParameterError)
    assert renderer.failure.param == "logprobs"
    with pytest.raises(
        InvalidParameterError, match=r"must take at most 100 bytes .* Given: at least \d+"
    ):
        await collect(answer, inbox(*replies))


@all_cases("chat", [None, ChatRequest(messages=[])], ids=["completion", "chat"])
async def test_prompt_logprobs_have_ranks_without_gaps_in_whole_responses_and_first_chunks(
    chat: ChatRequest | None,
) -> None:
    top = [("x", -1.0), ("b", -1.0), ("y", -2.0)]
    entries = [
        TokenLogprob("a", None, 0),
        # The prompt's token and the first alternative have equal scores.
        TokenLogprob("b", -1.0, 1, top, [8, 6, 9], 2),
        # The prompt's token is far less likely than the alternatives.
        TokenLogprob("c", float("-inf"), 2, [*top[:2], ("c", -99.0)], [8, 6, 7], 400),
    ]
    answer = completion(chat=chat, prompt_logprobs=2, prompt_token_ids=[[5, 6, 7]])
    replies = [scored(entries), said("d"), said("e", finish=STOP), ended()]
    expected = [
        None,
        {"6": (-1.0, 2, "b"), "8": (-1.0, 1, "x")},
        {"7": (LOGPROB_FLOOR, 400, "c"), "8": (-1.0, 1, "x"), "6": (-1.0, 2, "b")},
    ]
    whole = json.loads((await collect(answer, inbox(*replies))).content)
    first, *others = parse_chunks(ChunkRenderer(answer).render(replies))
    for body in (whole, first):
        holder = body["choices"][0] if chat is None else body
        shown = [
            each and {token: tuple(values.values()) for token, values in each.items()}
            for each in holder["prompt_logprobs"]
        ]
        assert shown == expected
        assert [list(each) for each in shown[1:]] == [["6", "8"], ["7", "8", "6"]]
    assert "prompt_logprobs" not in json.dumps(others)


@all_cases("chat", [None, ChatRequest(messages=[])], ids=["completion", "chat"])
async def test_log_probabilities_are_encoded_as_they_arrive(chat: ChatRequest | None) -> None:
    score = TokenLogprob("a", -1.0, 0, [("a", -1.0), ("b", -2.0)], [6, 7])
    assembler = ChoicesAssembler(completion(chat=chat, logprobs=2))
    for _ in range(50):
        assembler.add(said("a", logprobs=[score]))
    # Their objects take a hundred times the memory, and to encode all at once holds the event loop.
    kept = [each for each in gc.get_objects() if isinstance(each, ScoredToken | LogprobLists)]
    assert len(kept) < 5


async def test_each_large_choice_is_encoded_in_its_own_turn() -> None:
    entries = [TokenLogprob("token", -1.0, 5 * place) for place in range(3000)]
    ids = [list(range(3000))]
    answer = completion(n=4, prompt_texts=["token" * 3000], prompt_token_ids=ids, logprobs=0)
    replies = [
        scored(entries),
        *(said("d", choice=choice, finish=STOP) for choice in range(4)),
        ended(),
    ]
    turns = 0

    @asynccontextmanager
    async def turn() -> AsyncIterator[None]:
        nonlocal turns
        turns += 1
        yield

    generation = inbox(*replies)
    generation.turn = turn
    body = json.loads((await collect(answer, generation)).content)
    # One for the long prompt, one for each choice, and one for the whole.
    assert turns == 6
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [3000] * 4
