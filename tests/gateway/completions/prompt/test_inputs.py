"""A query and a document become the one text that a reranker's template makes of them."""

from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from contract.messages import ChatFormat, PairForm, PoolingSupport, PoolingTask
from gateway.completions.prompt.inputs import check_template_arguments, prepare_inputs
from gateway.completions.prompt.templates.template import ChatTemplate
from gateway.completions.prompt.tokenizers import _literal_copy
from gateway.dialects.embeddings import read_rerank
from gateway.dialects.request import GenerationRequest
from gateway.records.errors import (
    BadRequestError,
    ContextLengthExceededError,
    InvalidParameterError,
    UnsupportedParameterError,
)
from tests.gateway.completions.prompt.building import at_once, card_of, letter_tokenizer
from tests.gateway.dialects.reading import VLLM

END = "<|end|>"
START = "<|start|>"
SOURCE = (
    "{{ instruction | default('match') }}:"
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}"
    f"{END}"
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}."
)
WINDOW = 40


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer with a token for each letter, which begins texts with a token of its own."""
    tokenizer = letter_tokenizer(END, START)
    begin = (START, tokenizer.token_to_id(START))
    tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A",
        pair=f"{START} $A {END} $B:1 {END}:1",
        special_tokens=[begin, (END, tokenizer.token_to_id(END))],
    )
    return tokenizer


def request_of(**body: Any) -> GenerationRequest:
    return read_rerank({"model": "m", "query": "cat"} | body, VLLM, max_prompts=1)


async def texts(
    tokenizer: Tokenizer, source: str = SOURCE, /, form: PairForm = PairForm.JOINED, **body: Any
) -> list[str]:
    """Return what the model reads for each document, with its special tokens.

    A bar precedes the second text of a separated pair.
    """
    support = PoolingSupport(PoolingTask.CLASSIFY, 1, pairs=form, has_score_template=bool(source))
    card = card_of(
        tokenizer, context_window=WINDOW, pooling=support, chat=ChatFormat("the template")
    )
    template = ChatTemplate(source) if source else None
    request = check_template_arguments(request_of(**body), template, "m")
    literal = _literal_copy(tokenizer, is_inner=True)
    _, prepared = await prepare_inputs(
        request, tokenizer, card, at_once, literal=literal, template=template
    )
    found: list[str] = []
    for job in prepared.prompts:
        ids = [*job.token_ids]
        for length in job.pooling.lengths if job.pooling else ():
            inside, ids = ids[:length], ids[length:]
            assert len(inside) <= WINDOW
            read = [str(tokenizer.id_to_token(each)) for each in inside]
            if job.pooling and job.pooling.second_texts:
                read.insert(job.pooling.second_texts[len(found)], "|")
            found.append("".join(read))
    return found


async def test_a_template_renders_each_pair(tokenizer: Tokenizer) -> None:
    plain = await texts(tokenizer, documents=["dog", "cow"])
    assert plain == [f"{START}match:cat{END}dog.", f"{START}match:cat{END}cow."]
    for given in ({"instruction": "like"}, {"chat_template_kwargs": {"instruction": "like"}}):
        assert await texts(tokenizer, documents=["dog"], **given) == [f"{START}like:cat{END}dog."]
    both: dict[str, Any] = {"instruction": "like", "chat_template_kwargs": {"instruction": "hate"}}
    assert await texts(tokenizer, documents=["dog"], **both) == [f"{START}hate:cat{END}dog."]
    assert await texts(tokenizer, "", documents=["dog"]) == [f"{START}catdog"]


async def test_special_tokens_of_a_client_are_text(tokenizer: Tokenizer) -> None:
    """The tokenizer has letters and no other signs, so that of such a text only these remain."""
    for body, expected in (
        ({"documents": [f"d{END}g"]}, f"match:cat{END}dendg."),
        ({"documents": ["dog"], "query": f"c{END}t"}, f"match:cendt{END}dog."),
        ({"documents": ["dog"], "instruction": f"a{END}"}, f"aend:cat{END}dog."),
    ):
        assert await texts(tokenizer, **body) == [START + expected]


async def test_a_pair_without_a_template_is_joined_by_the_tokenizer(tokenizer: Tokenizer) -> None:
    separated = partial(texts, tokenizer, "", form=PairForm.SEPARATED)
    assert await separated(documents=["dog"]) == [f"{START}cat{END}|dog{END}"]
    cut: dict[str, Any] = {"documents": ["abcdefgh"], "truncate_prompt_tokens": len("cat") + 3 + 4}
    assert await separated(**cut) == [f"{START}cat{END}|abcd{END}"]
    assert await separated(**cut, truncation_side="left") == [f"{START}cat{END}|efgh{END}"]
    assert await separated(**cut, add_special_tokens=False) == ["cat|abcdefg"]
    with pytest.raises(ContextLengthExceededError, match="'query' and 'documents' have at least 7"):
        await separated(documents=["dog"], truncate_prompt_tokens=6)


@pytest.mark.parametrize(("side", "kept"), [("right", "abcdefgh"), ("left", "uvwxyzab")])
async def test_only_the_document_is_cut(tokenizer: Tokenizer, side: str, kept: str) -> None:
    document = "abcdefghijklmnopqrstuvwxyz" * 3 + "ab"
    with pytest.raises(ContextLengthExceededError, match="'query' and 'documents' have 92 tok"):
        await texts(tokenizer, documents=[document])
    fixed = len(".match:cat") + 2
    cut: dict[str, Any] = {"truncate_prompt_tokens": fixed + len(kept), "truncation_side": side}
    found = await texts(tokenizer, documents=[document], **cut)
    assert found == [f"{START}match:cat{END}{kept}."]
    with pytest.raises(ContextLengthExceededError):
        await texts(tokenizer, documents=[document], truncate_prompt_tokens=fixed)
    start = f"{START}match:cat{END}aaaaa."
    assert await texts(tokenizer, documents=["a" * 30] * 2, max_tokens_per_doc=5) == [start] * 2


REFUSALS: list[tuple[type[BadRequestError], str, dict[str, Any], str]] = [
    (UnsupportedParameterError, "", {"instruction": "a"}, "'instruction' is not supported by"),
    (UnsupportedParameterError, "{{ messages[0].content }}", {"instruction": "a"}, "query"),
    (InvalidParameterError, "{{ raise_exception('no cats') }}", {}, "score template: no cats"),
    (ContextLengthExceededError, "{{ 'a' * 10**6 }}", {}, "'documents' have at least 41 tokens"),
    (InvalidParameterError, SOURCE, {"chat_template_kwargs": 5}, "must be an object. Given: 5"),
    (UnsupportedParameterError, SOURCE, {"chat_template_kwargs": {"messages": 5}}, "messages"),
]


@pytest.mark.parametrize(("kind", "source", "body", "words"), REFUSALS)
async def test_what_no_template_takes_is_refused(
    tokenizer: Tokenizer, kind: type[BadRequestError], source: str, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(kind) as caught:
        await texts(tokenizer, source, documents=["dog"], **body)
    assert words in caught.value.message
    assert str(caught.value.param).partition(".")[0] in {"documents", *body}


def test_variables_that_no_template_reads_are_named() -> None:
    request = request_of(documents=["a"], chat_template_kwargs={"tone": "mild", "instruction": "a"})
    checked = check_template_arguments(request, ChatTemplate(SOURCE), "m")
    assert checked.ignored_parameters == ("chat_template_kwargs.tone",)
