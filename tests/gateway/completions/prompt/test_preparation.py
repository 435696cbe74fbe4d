"""Prompts of a request: cut, fitted into the window, with image tokens, echoed."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from typing_extensions import override

from contract.sampling import SamplingSpec
from gateway.completions.prompt.preparation import PreparedPrompt, PreparedRequest, prepare
from gateway.completions.prompt.tokenizers import SLICE_CHARACTERS, PromptEncoder
from gateway.dialects.profile import ContextLengthBehavior
from gateway.dialects.request import (
    FIT,
    ChatRequest,
    Structure,
    StructureKind,
    Tool,
    ToolMode,
    ToolUse,
)
from gateway.records.errors import (
    ContextLengthExceededError,
    InvalidParameterError,
    UnsupportedParameterError,
)
from tests.gateway.completions.prompt.building import (
    BOS,
    at_once,
    card_of,
    letter_tokenizer,
    request_of,
    tiny_tokenizer,
)
from tests.support.cases import all_cases

T = TypeVar("T")

TRUNCATE = ContextLengthBehavior.TRUNCATE
TOKENIZER = letter_tokenizer("<image>", "<|pad|>", adds_bos=True)
CARD = card_of(TOKENIZER)
PICTURES = card_of(TOKENIZER, image_token="<|pad|>")


async def prepared(*prompts: Any, card: Any = CARD, **fields: Any) -> PreparedRequest:
    """Prepare prompts of a request whose window has 20 tokens."""
    return await prepare(request_of(*prompts, **fields), TOKENIZER, card, at_once)


async def only(prompt: Any, **fields: Any) -> PreparedPrompt:
    """Prepare one prompt."""
    [result] = (await prepared(prompt, **fields)).prompts
    return result


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


async def test_special_tokens_are_added_unless_disabled() -> None:
    assert list((await only("ab")).token_ids) == [BOS, *ids("ab")]
    assert list((await only("ab", adds_special_tokens=False)).token_ids) == ids("ab")
    assert list((await only(["a", 5], adds_special_tokens=False)).token_ids) == [*ids("a"), 5]


async def test_empty_prompt_without_special_tokens_is_refused() -> None:
    assert list((await only("")).token_ids) == [BOS]
    with pytest.raises(InvalidParameterError, match="'add_special_tokens' is false"):
        await only("", adds_special_tokens=False)


@all_cases(
    ("length", "kept", "max_tokens", "expected"),
    [
        (10, None, 4, 10),
        (10, 3, 4, 3),
        (3, 10, 4, 3),
        (19, FIT, 1, 19),
        (20, FIT, 4, 16),
        (30, FIT, 4, 16),
        (30, FIT, 0, 19),
        (30, FIT, -1, 19),
        (30, FIT, 19, 1),
    ],
    ids=str,
)
async def test_last_tokens_are_kept(
    length: int, kept: int | None, max_tokens: int, expected: int
) -> None:
    prompt = [2 + n for n in range(length)]
    result = await only(prompt, prompt_tokens_kept=kept, max_tokens=max_tokens)
    assert list(result.token_ids) == prompt[length - expected :]
    assert result.cut_tokens == length - expected
    if max_tokens > 0:
        assert result.max_tokens == max_tokens


async def test_conflict_03_prompt_is_cut_first_and_max_tokens_are_lowered_then() -> None:
    long = [3] * 30
    kept = await only(long, prompt_tokens_kept=15, max_tokens=50, context_length_behavior=TRUNCATE)
    assert (len(kept.token_ids), kept.max_tokens, kept.cut_tokens) == (15, 5, 15)
    fitted = await only(
        long, prompt_tokens_kept=FIT, max_tokens=50, context_length_behavior=TRUNCATE
    )
    assert (len(fitted.token_ids), fitted.max_tokens) == (1, 19)
    with pytest.raises(ContextLengthExceededError) as caught:
        await only(long, prompt_tokens_kept=15, max_tokens=50)
    assert caught.value.param == "max_tokens"


@given(
    length=st.integers(1, 60),
    max_tokens=st.integers(-1, 60),
    kept=st.one_of(st.none(), st.just(FIT), st.integers(1, 60)),
    behavior=st.sampled_from(ContextLengthBehavior),
)
def test_prepared_prompt_always_fits(
    length: int, max_tokens: int, kept: int | None, behavior: ContextLengthBehavior
) -> None:
    prompt = [2 + n % 7 for n in range(length)]
    fields = {"prompt_tokens_kept": kept, "context_length_behavior": behavior}
    try:
        result = asyncio.run(only(prompt, max_tokens=max_tokens, **fields))
    except ContextLengthExceededError:
        assert kept != FIT or behavior is ContextLengthBehavior.ERROR
        return
    assert len(result.token_ids) + max(result.max_tokens, 1) <= 20
    assert list(result.token_ids) == prompt[result.cut_tokens :]
    assert result.token_ids


async def test_errors_name_the_prompt_and_carry_the_counts() -> None:
    with pytest.raises(ContextLengthExceededError, match=r"'prompt\[1\]' must .* 20\.") as caught:
        await prepared([2], [3] * 20)
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (20, 20)
    with pytest.raises(ContextLengthExceededError, match="21 in the prompt"):
        await only("a" * 20)
    with pytest.raises(InvalidParameterError, match=r"'prompt\[1\]\[0\]' must be a token id"):
        await prepared([2], [10**9])


async def test_counts_of_a_request_are_the_lowest_and_the_sum() -> None:
    result = await prepared(
        [2] * 18,
        [2] * 25,
        [2],
        prompt_tokens_kept=FIT,
        max_tokens=10,
        context_length_behavior=TRUNCATE,
    )
    assert [prompt.max_tokens for prompt in result.prompts] == [2, 10, 10]
    assert result.applied_max_tokens == 2
    assert result.cut_tokens == 15


@all_cases(
    ("prompt", "fields", "expected"),
    [
        ("a  b", {}, "a  b"),
        (["a", 5], {}, "<s>ab"),
        ("abc", {"echo_last": 2}, "bc"),
        ("abc", {"echo_last": 4}, "abc"),
        ("abc", {"echo_last": 99}, "abc"),
        ("abcdef", {"prompt_tokens_kept": 3}, "def"),
        ("abcdef", {"prompt_tokens_kept": 3, "echo_last": 1}, "f"),
    ],
    ids=str,
)
async def test_echo_is_the_prompt_that_the_model_got(
    prompt: Any, fields: dict[str, Any], expected: str
) -> None:
    assert TOKENIZER.id_to_token(5) == "b"
    assert (await only(prompt, echo=True, **fields)).shown == expected
    assert (await only(prompt, **fields)).shown == ""


async def test_marks_become_the_models_image_tokens() -> None:
    pad = TOKENIZER.token_to_id("<|pad|>")
    result = await only("a<image>b<image>", images=[[b"1", b"2"]], card=PICTURES)
    assert list(result.token_ids) == [BOS, *ids("a"), pad, *ids("b"), pad]
    # The digests of the text before an image find its worker.
    assert result.plain_tokens == 1 + len(ids("a"))
    assert (await only("ab")).plain_tokens == 1 + len(ids("ab"))
    mixed = await only(["<image>", 5], images=[[b"1"]], card=PICTURES)
    assert list(mixed.token_ids) == [BOS, pad, 5]


async def test_mark_without_images_is_a_text_like_any_other() -> None:
    mark = TOKENIZER.token_to_id("<image>")
    assert list((await only("a<image>", card=PICTURES)).token_ids) == [BOS, *ids("a"), mark]


@all_cases("prompt", ["<image><|pad|>", ["<image>", 2], [2, 2]], ids=str)
async def test_image_tokens_without_an_image_are_refused(prompt: Any) -> None:
    assert TOKENIZER.token_to_id("<|pad|>") == 2
    with pytest.raises(InvalidParameterError, match="Given: 2 image tokens, 1 images"):
        await only(prompt, images=[[b"1"]], card=PICTURES)


async def test_images_are_refused_by_a_model_without_vision() -> None:
    with pytest.raises(UnsupportedParameterError, match="'images'"):
        await only("<image>", images=[[b"1"]])


async def test_cutting_never_loses_an_image() -> None:
    fields: dict[str, Any] = {"images": [[b"1"]], "card": PICTURES}
    kept = await only("abcdef<image>", prompt_tokens_kept=3, **fields)
    assert kept.token_ids[-1] == TOKENIZER.token_to_id("<|pad|>")
    with pytest.raises(ContextLengthExceededError, match="would remove an image"):
        await only("<image>abcdef", prompt_tokens_kept=3, **fields)


async def test_biases_for_texts_reach_all_of_their_tokens() -> None:
    a, b, c = ids("abc")
    sampling = SamplingSpec(seed=1, logit_bias={b: 5.0})
    texts = {"ab": -1.0, "c": float("-inf")}
    result = await prepared("a", sampling=sampling, bias_texts=texts)
    assert result.sampling.logit_bias == {a: -1.0, b: 5.0, c: float("-inf")}
    assert result.sampling.seed == 1
    assert sampling.logit_bias == {b: 5.0}
    assert (await prepared("a", sampling=sampling)).sampling is sampling


async def test_biases_for_too_many_tokens_are_refused() -> None:
    tokenizer = tiny_tokenizer()
    texts = {tokenizer.decode([token]): 1.0 for token in range(20, 2048)}
    with pytest.raises(InvalidParameterError, match="at most 1024 tokens") as caught:
        await prepare(request_of("a", bias_texts=texts), tokenizer, card_of(tokenizer), at_once)
    assert caught.value.param == "logit_bias"


TOOLS = [Tool("f", {}, is_strict=False)]
CONSTRAINED: dict[str, dict[str, Any]] = {
    "grammar": {"structure": Structure(StructureKind.GBNF, 'root ::= "a"', "grammar")},
    "tools": {"tool_use": ToolUse(TOOLS, ToolMode.REQUIRED)},
}


@all_cases("constraint", CONSTRAINED)
async def test_end_of_a_structured_text_must_not_be_forbidden(constraint: str) -> None:
    first, end = ids("ab")
    card = card_of(TOKENIZER, eos_token_ids=[first, end])
    fields = CONSTRAINED[constraint]
    forbidding = SamplingSpec(seed=1, logit_bias={end: float("-inf")})
    await prepared("a", card=card, sampling=forbidding)
    await prepared("a", card=card, sampling=forbidding, tool_use=ToolUse(TOOLS, ToolMode.AUTO))
    lowered = SamplingSpec(seed=1, logit_bias={end: -100.0})
    await prepared("a", card=card, sampling=lowered, **fields)
    ways: list[dict[str, Any]] = [{"sampling": forbidding}, {"bias_texts": {"b": float("-inf")}}]
    for way in ways:
        with pytest.raises(InvalidParameterError, match=f"if '{constraint}' is given") as caught:
            await prepared("a", card=card, **way, **fields)
        assert caught.value.param == "logit_bias"


@all_cases("param", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
async def test_ids_outside_the_vocabulary_are_refused(param: str) -> None:
    size = TOKENIZER.get_vocab_size()
    fits: Any = {size - 1: 1.0} if param == "logit_bias" else [size - 1]
    wrong: Any = {size: 1.0} if param == "logit_bias" else [size]
    await prepared("a", sampling=SamplingSpec(seed=1, **{param: fits}))
    with pytest.raises(InvalidParameterError, match=f"from 0 to {size - 1}. Given: {size}") as e:
        await prepared("a", sampling=SamplingSpec(seed=1, **{param: wrong}))
    assert e.value.param == param


async def test_cost_of_a_chat_is_the_length_of_its_text() -> None:
    sizes: list[int] = []

    async def watch(work: Callable[[], T], *, size: int = 0) -> T:
        sizes.append(size)
        return work()

    for chat in (None, ChatRequest(messages=[])):
        await prepare(request_of("abc", chat=chat), TOKENIZER, CARD, watch)
    assert sizes == [0, 3]


WINDOW = 20
LONG = "ab\n" * 40_000
"""Far longer than any text of as many tokens as the window has."""


@all_cases("prompt", [LONG, ["a", LONG, 5], ["ab\n"] * 40_000], ids=["text", "mixed", "pieces"])
@all_cases(
    ("kept", "tokens"), [(None, 0), (FIT, WINDOW - 4), (7, 7)], ids=["refused", "fitted", "kept"]
)
@all_cases("keeps_start", [False, True])
async def test_only_the_kept_end_of_a_far_too_long_prompt_is_encoded(
    prompt: Any,
    kept: int | None,
    tokens: int,
    keeps_start: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded = 0

    class Watched(PromptEncoder):
        @override
        def _encode_batch(self, texts: list[str], **options: Any) -> Any:
            nonlocal encoded
            encoded += sum(map(len, texts))
            return super()._encode_batch(texts, **options)

    monkeypatch.setattr("gateway.completions.prompt.preparation.PromptEncoder", Watched)
    if kept is None:
        with pytest.raises(ContextLengthExceededError, match="at least 21 in the prompt"):
            await only(prompt, keeps_prompt_start=keeps_start)
    else:
        whole = PromptEncoder(TOKENIZER, vocabulary_size=CARD.vocabulary_size, bos_token_id=BOS)
        ids = whole.encode(prompt, param="prompt")
        prepared = await only(prompt, prompt_tokens_kept=kept, keeps_prompt_start=keeps_start)
        assert list(prepared.token_ids) == (ids[:tokens] if keeps_start else ids[-tokens:])
    assert encoded <= 3 * SLICE_CHARACTERS


async def test_a_long_text_of_few_tokens_is_not_too_long() -> None:
    # Spaces are nothing to this tokenizer.
    tokenizer = Tokenizer(models.WordLevel({"<s>": BOS, "a": 1}, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text = "a" + " " * 3 * SLICE_CHARACTERS + "a"
    prepared = await prepare(request_of(text), tokenizer, card_of(tokenizer), at_once)
    assert list(prepared.prompts[0].token_ids) == [1, 1]


async def test_a_suffix_that_is_far_too_long_is_refused() -> None:
    tokenizer = letter_tokenizer("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    request = request_of("a", suffix=LONG, prompt_tokens_kept=FIT)
    with pytest.raises(ContextLengthExceededError, match="at least 21 in the suffix"):
        await prepare(request, tokenizer, card_of(tokenizer), at_once)


async def test_image_in_the_unencoded_part_is_kept() -> None:
    fields = {"images": [[b"image"]], "image_params": [[""]], "prompt_tokens_kept": FIT}
    with pytest.raises(ContextLengthExceededError, match="would remove an image"):
        await prepared("<image>" + LONG, card=PICTURES, **fields)
