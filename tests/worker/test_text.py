"""Detokenising and stop strings: streamed text equals the text of a whole decode."""

from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from typing_extensions import override

from tests.support.cases import all_cases
from tests.worker.conftest import MODEL_FOLDER
from worker.execution.text import Detokenizer, StopMatcher, StopStrings

TOKENIZER = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
MIXED = "naïve 日本語 😀 fin é and\nplain words"
BASE = TOKENIZER.encode("Return the").ids


def decoded(prompt: list[int], completion: list[int]) -> str:
    detokenizer = Detokenizer(TOKENIZER, prompt)
    return "".join(detokenizer.step(token_id) for token_id in completion)


def vllm_text(prompt: list[int], completion: list[int]) -> str:
    """The text of vLLM's detokenizer, primed with the whole prompt."""
    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    return "".join(stream.step(TOKENIZER, token_id) or "" for token_id in completion)


def test_text_of_every_cut_continues_the_prompt() -> None:
    ids = TOKENIZER.encode(MIXED).ids
    for cut in range(len(ids) + 1):
        before = decoded(BASE, ids[:cut])
        after = decoded(BASE + ids[:cut], ids[cut:])
        assert before + after == MIXED, f"cut after {cut} of {len(ids)} tokens"


def test_prompt_inside_a_character_does_not_leak() -> None:
    first, *rest = TOKENIZER.encode("日").ids
    assert rest, "the tokenizer of the test model must split this character"
    words = TOKENIZER.encode(" of the").ids
    assert decoded([*BASE, first], [*rest, *words]) == "日 of the"
    assert decoded([*BASE, first], words) == " of the"


def test_prompt_that_ends_in_a_literal_replacement_character_does_not_leak() -> None:
    prompt = TOKENIZER.encode("odd \ufffd\ufffd\ufffd").ids
    assert decoded(prompt, TOKENIZER.encode(" of the").ids) == " of the"


def test_prompt_of_special_tokens_only() -> None:
    (bos,) = TOKENIZER.encode("<s>").ids
    assert decoded([bos], TOKENIZER.encode("The end").ids) == "The end"


def test_special_tokens_have_no_text() -> None:
    (eos,) = TOKENIZER.encode("</s>").ids
    ids = TOKENIZER.encode("one two").ids
    assert decoded(BASE, [*ids, eos]) == "one two"


def test_incomplete_character_at_the_end_is_left_out_as_vllm_does() -> None:
    ids = [*TOKENIZER.encode("one").ids, TOKENIZER.encode("日").ids[0]]
    assert decoded(BASE, ids) == vllm_text(BASE, ids) == "one"


@given(st.text(max_size=60), st.text(min_size=1, max_size=20))
def test_text_equals_vllms_for_prompts_of_whole_characters(completion: str, prompt: str) -> None:
    prompt_ids = TOKENIZER.encode(prompt + ".").ids
    ids = TOKENIZER.encode(completion).ids
    assert decoded(prompt_ids, ids) == vllm_text(prompt_ids, ids)


@given(st.text(max_size=60), st.integers(2, 9))
def test_text_of_several_tokens_is_that_of_each(completion: str, size: int) -> None:
    ids = TOKENIZER.encode(completion).ids
    single, several = Detokenizer(TOKENIZER, BASE), Detokenizer(TOKENIZER, BASE)
    for start in range(0, len(ids), size):
        part = ids[start : start + size]
        assert several.decode(part) == "".join(map(single.step, part))


def matched(pieces: list[str], stop: list[str]) -> tuple[str, str | None, list[str]]:
    """Return the text shown, the stop string found, and the shown pieces."""
    matcher = StopMatcher(StopStrings(stop))
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched is not None:
            return "".join(shown), matcher.matched, shown
    shown.append(matcher.flush())
    return "".join(shown), None, shown


def reference(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The earliest completed match, found one character at a time."""
    for end in range(1, len(text) + 1):
        for each in stop:
            if text[:end].endswith(each):
                return text[: end - len(each)], each
    return text, None


@all_cases("cut", range(15))
def test_stop_string_is_found_across_every_cut(cut: int) -> None:
    text = "abc STOP tail"
    assert matched([text[:cut], text[cut:]], ["STOP"])[:2] == ("abc ", "STOP")


def test_earliest_completed_match_ends_the_text() -> None:
    assert matched(["one two three"], ["three", "two", "wo"])[:2] == ("one ", "two")
    assert matched(["xabcd"], ["abcd", "bc"])[:2] == ("xa", "bc")


def test_only_the_longest_possible_prefix_of_a_stop_is_held_back() -> None:
    assert matched(["ab", "ST", "x", "S"], ["STOP"])[2] == ["ab", "", "STx", "", "S"]
    assert matched(["aab", "aac"], ["aabaad"])[2] == ["", "aabaac", ""]


pieces = st.lists(st.text(alphabet="ab€", max_size=4), max_size=12)
stops = st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), min_size=1, max_size=3)


@given(pieces, stops)
def test_streamed_stops_equal_a_search_of_the_whole_text(parts: list[str], stop: list[str]) -> None:
    text, found, shown = matched(parts, stop)
    assert (text, found) == reference("".join(parts), stop)
    if found is None:
        for index in range(len(shown) - 1):
            held = "".join(parts[: index + 1])[len("".join(shown[: index + 1])) :]
            assert not held or any(each.startswith(held) for each in stop)


def test_special_tokens_are_shown_on_request() -> None:
    ids = TOKENIZER.encode("one<s> two").ids
    detokenizer = Detokenizer(TOKENIZER, BASE, shows_special_tokens=True)
    assert "".join(detokenizer.step(token_id) for token_id in ids) == "one<s> two"
    assert decoded(BASE, ids) == "one two"


def included(pieces: list[str], stop: list[str]) -> str:
    """Return the text shown where the stop string belongs to it."""
    matcher = StopMatcher(StopStrings(stop), includes_stop=True)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown
    return shown + matcher.flush()


@given(pieces, stops)
def test_text_that_includes_its_stop_is_longer_by_just_that(
    parts: list[str], stop: list[str]
) -> None:
    text, found = reference("".join(parts), stop)
    assert included(parts, stop) == text + (found or "")


def test_first_listed_of_stops_that_end_together_is_reported() -> None:
    assert matched(["x and"], ["nd", "and"])[:2] == ("x a", "nd")
    assert matched(["x and"], ["and", "nd"])[:2] == ("x ", "and")


many = st.lists(st.text(alphabet="ab", min_size=1, max_size=9), min_size=30, max_size=64)


@given(st.lists(st.text(alphabet="abc", max_size=9), max_size=9), many)
def test_64_stops_are_found_at_every_boundary(parts: list[str], stop: list[str]) -> None:
    stop = [each + "c" for each in stop]
    text, found, shown = matched(parts, stop)
    assert (text, found) == reference("".join(parts), stop)
    assert included(parts, stop) == text + (found or "")
    assert "".join(shown) == text


def min_tokens_reference(tokens: list[str], stop: list[str], least: int) -> str:
    """The shown text if no match may end within the first tokens."""
    text, free = "".join(tokens), len("".join(tokens[:least]))
    for end in range(free + 1, len(text) + 1):
        for each in stop:
            if text[:end].endswith(each):
                return text[: end - len(each)]
    return text


@given(pieces, stops, st.integers(0, 6))
@example(["ab", "€b"], ["b€€", "abb", "b"], 1)
@example(["ab", "€"], ["b", "abb"], 1)
def test_matches_that_end_too_early_count_neither_then_nor_later(
    tokens: list[str], stop: list[str], least: int
) -> None:
    matcher = StopMatcher(StopStrings(stop))
    shown = ""
    for position, token in enumerate(tokens):
        shown += matcher.push(token, may_match=position >= least)
        if matcher.matched is not None:
            break
    assert shown + matcher.flush() == min_tokens_reference(tokens, stop, least)


def test_64_long_stops_cost_little_even_if_the_text_nearly_matches_them_all() -> None:
    stop = ["a" * 511 + "b", *("a" * (9 + index) + "c" * 500 for index in range(63))]
    matcher = StopMatcher(StopStrings([Compared(each) for each in stop]))
    Compared.times = 0
    shown = sum(len(matcher.push("aaaa")) for _ in range(1_000))
    assert shown == 4_000 - 511
    # About nine for each character. A search at every end for every stop string takes millions.
    assert 0 < Compared.times < 20 * 4_000


class Compared(str):
    """A stop string that counts how often any of them is compared with a text."""

    __slots__ = ()
    times = 0

    @override
    def __gt__(self, other: str) -> bool:
        Compared.times += 1
        return super().__gt__(other)

    @override
    def startswith(self, *args: Any) -> bool:
        Compared.times += 1
        return super().startswith(*args)
