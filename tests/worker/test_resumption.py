"""Resumption without an engine: reported outputs, and draws of random generators."""

from dataclasses import replace

from contract.sampling import Mirostat, SamplerChain, SamplingSpec
from tests.support.cases import all_cases
from worker.engine.base import EngineRequest, SequenceEnd, SequenceOutput
from worker.engine.vllm.resumption import (
    ResumedSequences,
    _draw_again,
    output_arguments,
    replayed_token_ids,
)

MIROSTAT = SamplerChain(order=[], mirostat=Mirostat(2, 5.0, 0.1))


def request(**changes: object) -> EngineRequest:
    plain = EngineRequest(
        id="r",
        prompt_token_ids=[1],
        output_token_ids=[2, 3],
        max_tokens=9,
        sampling=SamplingSpec(seed=1),
        seed=1,
        cache_salt="",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]  # whatever the test names


def test_only_mirostat_samples_earlier_tokens_again() -> None:
    mirostat = request(sampling=SamplingSpec(seed=1, chain=MIROSTAT))
    greedy = request(sampling=SamplingSpec(seed=1, temperature=0.0, chain=MIROSTAT))
    other = request(sampling=SamplingSpec(seed=1, chain=SamplerChain(order=[])))

    assert replayed_token_ids(mirostat) == [2, 3]
    assert output_arguments(mirostat) == {}
    for each in (request(), greedy, other):
        assert replayed_token_ids(each) == []
        assert list(output_arguments(each).values()) == [[2, 3]]
    assert output_arguments(request(output_token_ids=[])) == {}


def test_replayed_tokens_are_not_output() -> None:
    resumed = ResumedSequences()
    resumed.add("a", prompt_tokens=7, replayed_tokens=2)
    first = SequenceOutput("a", [5], logprobs=[[(5, -1.0)]], cached_tokens=4, prompt_tokens=7)
    other = SequenceOutput("b", [8], cached_tokens=3, prompt_tokens=6)

    assert resumed.own([first, other]) == [other]
    assert resumed.own([SequenceOutput("a", [6])]) == []
    own = SequenceOutput("a", [7], logprobs=[[(7, -2.0)]])
    assert resumed.own([own]) == [
        SequenceOutput("a", [7], logprobs=[[(7, -2.0)]], cached_tokens=0, prompt_tokens=7)
    ]
    assert resumed.own([own]) == [own], "the prompt is reported once"


def test_sequence_that_ends_during_replay_is_reported() -> None:
    resumed = ResumedSequences()
    resumed.add("a", prompt_tokens=7, replayed_tokens=2)
    (reported,) = resumed.own([SequenceOutput("a", [5], SequenceEnd.ABORTED)])
    assert (reported.token_ids, reported.end) == ([], SequenceEnd.ABORTED)


def test_dropped_sequence_is_not_followed() -> None:
    resumed = ResumedSequences()
    resumed.add("a", prompt_tokens=7, replayed_tokens=2)
    resumed.remove(["a", "unknown"])
    output = SequenceOutput("a", [5])
    assert resumed.own([output]) == [output]


@all_cases("tokens", [1, 2, 15, 16, 17, 1000])
def test_generator_continues_after_single_draws(tokens: int) -> None:
    import torch

    single, together = (torch.Generator().manual_seed(2**62 + 1) for _ in range(2))
    for _ in range(tokens):
        torch.randint(0, 2**31, (1,), generator=single, dtype=torch.long)
    _draw_again(together, tokens)
    draws = [torch.randint(0, 2**31, (3,), generator=each) for each in (single, together)]
    assert draws[0].tolist() == draws[1].tolist()
