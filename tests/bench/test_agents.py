"""Sessions of the scenario `agents` have the published shape."""

import json
from itertools import islice, pairwise

import pytest
from tokenizers import Tokenizer

from bench.agents import NEW_TOKENS, AgentsMeasurement, Figure, session
from bench.goals import AGENT_GOALS
from bench.starting import CHECKPOINT


def test_a_turn_repeats_the_one_before_it_and_adds_the_published_tokens() -> None:
    encode = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode
    turns = list(islice(session("a", "shared", 12_000), 4))
    for earlier, later in pairwise(turns):
        assert later.messages[: len(earlier.messages)] == earlier.messages
    texts = [[json.loads(each)["content"] for each in turn.messages] for turn in turns]
    sizes = [len(encode("".join(each)).ids) for each in (texts[0], texts[-1])]
    assert sizes[0] == pytest.approx(12_000, rel=0.1)
    assert (sizes[1] - sizes[0]) / 3 == pytest.approx(NEW_TOKENS, rel=0.2)
    # Sessions share their start only.
    [other] = islice(session("b", "shared", 12_000), 1)
    assert [a == b for a, b in zip(turns[0].messages, other.messages, strict=True)] == [True, False]


def test_a_goal_is_judged_by_the_median_of_the_rounds() -> None:
    [redis] = [each for each in AGENT_GOALS if each.text.startswith("Redis")]
    found = AgentsMeasurement()
    assert redis.judge(found)[2] == "not measured"
    row = ("Sluice", "116,428")
    for number, value in enumerate((1.0, 9.0, 2.0)):
        figure = Figure(part="turns", row=row, column="redis ms", round=number, value=value)
        found.figures.append(figure)
    assert redis.judge(found)[1:] == ["2.0 (1.0 to 9.0)", "yes"]
