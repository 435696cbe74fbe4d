"""One chat job: deltas of parsed content, resumption after any cut, and failures."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer

from contract.messages import (
    CallPiece,
    Delta,
    GenerationJob,
    Parsing,
    Ranking,
    Resumption,
    SequenceProgress,
)
from contract.outcomes import FinishReason
from contract.queue import JobClaim
from contract.sampling import SamplingSpec
from tests.worker.conftest import make_job
from tests.worker.parsing.cases import HERMES, PARSING, THINK, TOOLS, Whole, whole
from worker.engine.base import SequenceEnd, SequenceOutput
from worker.execution.logprobs import TokenTexts
from worker.execution.running_job import RunningJob
from worker.parsing.base import Parsed
from worker.parsing.own import OwnParsers
from worker.parsing.reader import ParsedOutput, Reader
from worker.queue.replies import ReplyOutbox

TEXT = THINK + HERMES
GREEDY = SamplingSpec(seed=1, temperature=0.0)

Start = Callable[..., tuple[RunningJob, ReplyOutbox]]


@pytest.fixture
def start(tokenizer: Tokenizer) -> Start:
    texts, parsers = TokenTexts(tokenizer), OwnParsers(tokenizer)

    def start(job: GenerationJob) -> tuple[RunningJob, ReplyOutbox]:
        outbox = ReplyOutbox("g1")
        generation = RunningJob(
            JobClaim(job, 1), outbox, tokenizer=tokenizer, texts=texts, parsers=parsers
        )
        generation.begin()
        return generation, outbox

    return start


def chat_job(**changes: Any) -> GenerationJob:
    return make_job(**{"parsing": PARSING, "max_tokens": 1000, **changes})


def feed(
    generation: RunningJob, token_ids: Sequence[int], *, index: int = 0, end: SequenceEnd | None
) -> None:
    """Feed a sequence token by token, with its end at the last one, unless it ends before."""
    sequence = generation.sequences[index]
    for position, token_id in enumerate(token_ids):
        is_last = position == len(token_ids) - 1
        output = SequenceOutput(sequence.id, [token_id], end if is_last else None)
        if generation.receive(output):
            return


def answer_of(deltas: list[Delta], choice: int = 0) -> Whole:
    mine = [delta for delta in deltas if delta.choice == choice]
    parts = [Parsed(delta.text, delta.reasoning, delta.calls) for delta in mine]
    reported = whole(parts)
    return Whole(
        reported.content,
        reported.reasoning,
        reported.calls,
        sum(delta.reasoning_tokens for delta in mine),
    )


def ids_of(tokenizer: Tokenizer, text: str = TEXT) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def test_deltas_hold_reasoning_content_and_calls(start: Start, tokenizer: Tokenizer) -> None:
    generation, outbox = start(chat_job())
    ids = ids_of(tokenizer, TEXT + "</s>")
    feed(generation, ids, end=SequenceEnd.STOP)
    parsed_output = answer_of(outbox.deltas)
    assert parsed_output.reasoning == THINK.removeprefix("<think>").partition("</think>")[0]
    assert parsed_output.content == "\n\nI will look.\n"
    assert [name for name, _ in parsed_output.calls] == ["get_weather", "lookup"]
    assert parsed_output.reasoning_tokens == len(ids_of(tokenizer, THINK.rstrip()))
    assert [each for delta in outbox.deltas for each in delta.token_ids] == ids
    assert outbox.deltas[-1].finish_reason is FinishReason.STOP
    assert outbox.finished[0].completion_tokens == len(ids)


def test_job_without_parsing_is_delivered_unchanged(start: Start, tokenizer: Tokenizer) -> None:
    for parsing in (None, Parsing()):
        generation, outbox = start(chat_job(parsing=parsing))
        feed(generation, ids_of(tokenizer), end=SequenceEnd.LENGTH)
        assert answer_of(outbox.deltas) == Whole(TEXT, "", [], 0)


@pytest.mark.parametrize(
    "parsing",
    [Parsing(), Parsing(finds_reasoning=True), Parsing(tools=TOOLS), PARSING],
    ids=["nothing", "reasoning", "calls", "both"],
)
@pytest.mark.parametrize("stream", [True, False])
def test_special_tokens_and_marks_of_calls_appear_nowhere(
    start: Start, tokenizer: Tokenizer, parsing: Parsing, *, stream: bool
) -> None:
    parsing = msgspec.structs.replace(parsing, hides_special_tokens=True)
    text = "Hi</s> <|user|><tool_call>{}</s></tool_call></tool_call><s> there<|system|>"
    thought = "<think><|assistant|>so<image></think>" if parsing.finds_reasoning else ""
    for shows in (True, False):
        job = chat_job(parsing=parsing, shows_special_tokens=shows, stream=stream, logprobs=0)
        generation, outbox = start(job)
        feed(generation, ids_of(tokenizer, thought + text), end=SequenceEnd.LENGTH)
        answer = answer_of(outbox.deltas)
        assert answer.content == "Hi {} there"
        assert answer.reasoning == ("so" if thought else "")
        assert not answer.calls, "it has no name"
    job = chat_job(parsing=msgspec.structs.replace(parsing, hides_special_tokens=False))
    generation, outbox = start(msgspec.structs.replace(job, shows_special_tokens=True))
    feed(generation, ids_of(tokenizer, thought + text), end=SequenceEnd.LENGTH)
    assert answer_of(outbox.deltas).content == text


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"stream": False},
        {"stop": ["never to be found"]},
        {"stop": ["I will look.\n<tool_call>\nX", "</tool_call>\n<tool_call>\n{}"]},
        {"stop": ['"days": 3']},
        {"stop": ["see — o"], "includes_stop": True},
        {"stop": ["k>\n\nI wil"]},
        {"prompt_token_ids": [300, 9], "parsing": PARSING},
        {"sampling": GREEDY, "n": 3},
    ],
)  # fmt: skip
def test_resumed_response_is_identical_at_every_cut(
    start: Start, tokenizer: Tokenizer, changes: dict[str, Any]
) -> None:
    job = chat_job(**changes)
    uncut, outbox = start(job)
    ids = ids_of(tokenizer)
    feed(uncut, ids, end=SequenceEnd.STOP)
    expected = [answer_of(outbox.deltas, choice) for choice in range(job.n)]
    total = uncut.sequences[0].tokens
    for cut in range(1, total):
        first, reported = start(job)
        feed(first, ids[:cut], end=None)
        first.send_pending()
        known = Resumption([SequenceProgress(ids[:cut])], prompt_tokens=3)
        second, rest = start(msgspec.structs.replace(job, resumption=known))
        assert not rest.deltas
        feed(second, ids[cut:], end=SequenceEnd.STOP)
        deltas = reported.deltas + rest.deltas
        assert [answer_of(deltas, choice) for choice in range(job.n)] == expected, cut
        assert second.sequences[0].tokens == total


def test_opening_of_the_response_comes_from_the_job(start: Start, tokenizer: Tokenizer) -> None:
    opened, closed = ids_of(tokenizer, "<think>\n"), ids_of(tokenizer, "<think>\n</think>\n\n")
    for prompt, opening, reasoning in (
        (closed, len(closed), ""),
        (closed + opened, len(opened), "ok"),
        (closed, 0, "ok"),
    ):
        parsing = msgspec.structs.replace(PARSING, opening_tokens=opening)
        generation, outbox = start(chat_job(prompt_token_ids=prompt, parsing=parsing))
        feed(generation, ids_of(tokenizer, "ok"), end=SequenceEnd.LENGTH)
        assert answer_of(outbox.deltas).reasoning == reasoning


def test_greedy_choices_get_the_same_deltas(start: Start, tokenizer: Tokenizer) -> None:
    generation, outbox = start(chat_job(sampling=GREEDY, n=2))
    feed(generation, ids_of(tokenizer), end=SequenceEnd.LENGTH)
    one, two = (answer_of(outbox.deltas, choice) for choice in range(2))
    assert one == two
    assert len(one.calls) == 2


def test_ranked_choices_are_parsed_separately(start: Start, tokenizer: Tokenizer) -> None:
    generation, outbox = start(chat_job(n=2, ranking=Ranking.SUM))
    feed(generation, ids_of(tokenizer, "so</think>one"), end=SequenceEnd.LENGTH)
    feed(generation, ids_of(tokenizer, "</think>two"), index=1, end=SequenceEnd.LENGTH)
    assert answer_of(outbox.deltas, 0).reasoning == "so"
    assert answer_of(outbox.deltas, 1).content == "two"


def test_call_that_max_tokens_cuts_off_stays_cut_off(start: Start, tokenizer: Tokenizer) -> None:
    generation, outbox = start(chat_job())
    text = '</think><tool_call>{"name": "f", "arguments": {"city": "Par'
    feed(generation, ids_of(tokenizer, text), end=SequenceEnd.LENGTH)
    assert answer_of(outbox.deltas).calls == [("f", '{"city": "Par')]
    assert outbox.deltas[-1].finish_reason is FinishReason.LENGTH


def test_unfinished_mark_is_content_at_the_end(start: Start, tokenizer: Tokenizer) -> None:
    for end in (SequenceEnd.LENGTH, SequenceEnd.STOP):
        generation, outbox = start(chat_job())
        feed(generation, ids_of(tokenizer, "</think>a < b, <tool"), end=None)
        feed(generation, ids_of(tokenizer, "</s>"), end=end)
        assert answer_of(outbox.deltas).content.startswith("a < b, <tool")


def test_stop_string_cuts_within_a_mark(start: Start, tokenizer: Tokenizer) -> None:
    generation, outbox = start(chat_job(stop=["</think>"]))
    feed(generation, ids_of(tokenizer, "well</think>ok"), end=SequenceEnd.STOP)
    assert answer_of(outbox.deltas) == Whole("", "well", [], len(ids_of(tokenizer, "well")))
    assert outbox.deltas[-1].stop_reason == "</think>"


def test_character_of_several_tokens_is_parsed_once_it_is_complete(
    start: Start, tokenizer: Tokenizer
) -> None:
    generation, outbox = start(chat_job())
    ids = ids_of(tokenizer, "</think>日")
    assert len(ids) > 2
    feed(generation, ids, end=None)
    assert answer_of(outbox.deltas).content == "日"
    assert all(delta.text in ("", "日") for delta in outbox.deltas)


class Recorder:
    """A parser that records its input."""

    def __init__(self) -> None:
        self.fed: list[tuple[int, str]] = []

    def feed(self, token_id: int, text: str) -> Parsed:
        self.fed.append((token_id, text))
        return Parsed(text)

    def finish(self, reason: FinishReason) -> Parsed:
        del reason
        return Parsed()


def test_tokens_are_parsed_with_exactly_their_text_once_it_is_complete() -> None:
    recorder = Recorder()
    reader, parsed_output = Reader(recorder, {}), ParsedOutput()

    def fed() -> Iterator[tuple[int, str]]:
        reader.read(parsed_output)
        yield from recorder.fed
        recorder.fed.clear()

    reader.push(1, 3, "abc")
    assert list(fed()) == [(1, "abc")]
    reader.push(2, 3, "a")
    reader.push(3, 0, "")
    assert not list(fed())
    reader.push(4, 2, "bcd")
    assert list(fed()) == [(2, "abc"), (3, "")]
    reader.push(5, 2, "")
    reader.show("efg")
    assert list(fed()) == [(4, "de"), (5, "fg")]
    reader.push(6, 4, "xy")
    reader.push(7, 1, "")
    reader.finish(FinishReason.STOP, parsed_output)
    assert recorder.fed == [(6, "xy")]


def test_pieces_of_a_call_come_as_one_and_its_name_once() -> None:
    parsed_output = ParsedOutput()
    parsed_output.add(Parsed(calls=[CallPiece(0, "f"), CallPiece(0, arguments="{")]))
    parsed_output.add(Parsed(calls=[CallPiece(0, arguments="}"), CallPiece(1, "f")]))
    parsed_output.add(Parsed(calls=[CallPiece(1, arguments="[]")]))
    assert parsed_output.calls == [CallPiece(0, "f", "{}"), CallPiece(1, "f", "[]")]
