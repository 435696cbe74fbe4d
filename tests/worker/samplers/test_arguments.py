"""How a chain is sent: it arrives as it was sent, and a malformed one is rejected."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.sampling import DEFAULT_SAMPLERS, Dry, Mirostat, SamplerChain, SamplingSpec, Xtc
from worker.samplers.arguments import chain_arguments, chain_parameters, varied
from worker.samplers.parameters import SequenceChain

SPEC = SamplingSpec(
    seed=1,
    temperature=0.8,
    top_k=40,
    repetition_penalty=1.1,
    chain=SamplerChain(
        order=list(DEFAULT_SAMPLERS),
        penalty_last_n=64,
        xtc=Xtc(0.5, 0.1, spares_special=True),
        dry=Dry(multiplier=0.8, base=1.75, allowed_length=2, last_n=-1, breakers=["\n"]),
        mirostat=Mirostat(2, 5.0, 0.1),
    ),
)
[KEY] = chain_arguments(SPEC, seed=0, prompt_tokens=0, breakers=[], spared_token_ids=[])


def travelled(spec: SamplingSpec) -> SequenceChain | None:
    """The parameters that the engine's process parses from a spec."""
    arguments = chain_arguments(
        spec,
        seed=2**63 - 1,
        prompt_tokens=7,
        breakers=[([1, 2], [3]), ([4], [])],
        spared_token_ids=[5, 6],
    )
    return chain_parameters(msgspec.msgpack.decode(msgspec.msgpack.encode(arguments)))


def test_chain_parameters_round_trip() -> None:
    assert travelled(SPEC) == SequenceChain(
        order=DEFAULT_SAMPLERS,
        temperature=0.8,
        top_k=40,
        repetition_penalty=1.1,
        penalty_last_n=64,
        xtc_probability=0.5,
        xtc_threshold=0.1,
        xtc_spared=(5, 6),
        dry_multiplier=0.8,
        dry_base=1.75,
        dry_allowed_length=2,
        dry_last_n=-1,
        dry_breakers=(((1, 2), (3,)), ((4,), ())),
        mirostat_version=2,
        mirostat_tau=5.0,
        mirostat_eta=0.1,
        seed=2**63 - 1,
        prompt_tokens=7,
    )


def test_xtc_spares_tokens_only_if_the_spec_says_so() -> None:
    parameters = travelled(SamplingSpec(seed=1, chain=SamplerChain(order=[], xtc=Xtc(0.5, 0.1))))
    assert parameters is not None
    assert parameters.xtc_spared == ()


def test_sequences_of_a_job_differ_in_seed_and_replayed_tokens() -> None:
    job = {
        **chain_arguments(
            SPEC, seed=3, prompt_tokens=7, breakers=[], spared_token_ids=[], replayed=[8, 9]
        ),
        "other": 1,
    }
    first, second = chain_parameters(job), chain_parameters(varied(job, seed=4, replayed=[8]))
    assert first is not None
    assert first.replayed == (8, 9)
    assert second == replace(first, seed=4, replayed=(8,))
    assert list(varied(job, seed=4, replayed=[8])) == [KEY]
    assert varied({"other": 1}, seed=4, replayed=[]) == varied(None, seed=4, replayed=[]) == {}


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}], ids=["none", "empty", "other"])
def test_request_without_a_chain_has_no_parameters(extra_args: dict[str, Any] | None) -> None:
    assert chain_parameters(extra_args) is None


def test_spec_without_a_chain_is_refused() -> None:
    with pytest.raises(ValueError, match="'spec' must have a chain"):
        travelled(SamplingSpec(seed=1))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", float("nan"), "'temperature' .* must be >= 0.0 and <= 2.0. Given: nan."),
        ("dry_base", float("inf"), "'dry_base' .* Given: inf."),
        ("penalty_last_n", -2, "'penalty_last_n' .* must be >= -1"),
        ("seed", 2**70, "'seed'"),
        ("mirostat_version", 3, "'mirostat_version' .* <= 2"),
        ("xtc_spared", [-1], "'token id'"),
        ("replayed", [-1], "'token id'"),
        ("dry_breakers", [[[1], [-2]]], "'token id'"),
        ("dry_breakers", [[1, 2]], "malformed"),
        ("order", ["nonsense"], "malformed"),
        ("nonsense", 1, "no parameter nonsense"),
    ],
)
def test_malformed_parameter_is_refused(name: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chain_parameters({KEY: {name: value}})


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_NAMES = st.sampled_from(sorted(SequenceChain.__slots__)) | st.text(max_size=5)


@given(_VALUES | st.dictionaries(_NAMES, _VALUES, max_size=5))
def test_arbitrary_input_raises_only_value_error(arguments: object) -> None:
    try:
        parameters = chain_parameters({KEY: arguments})
    except ValueError:
        return
    assert parameters is None or isinstance(parameters, SequenceChain)
