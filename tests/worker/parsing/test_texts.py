"""Calls whose only argument is a text that the model writes as it is."""

import json
from random import Random

from contract.messages import CallPiece
from tests.support.cases import all_cases
from worker.parsing.hermes import HermesCalls

PATCH = '*** Begin Patch\n+"é" \\ }\n*** End Patch\n'


def parsed(text: str, seed: int) -> tuple[str, list[CallPiece]]:
    """Parse a text in pieces of random lengths; with seed 0, of one character."""
    lengths, calls = Random(seed), HermesCalls({"patch"})
    content, pieces, at = "", list[CallPiece](), 0
    while at < len(text):
        size = lengths.randint(1, 9 if seed else 1)
        outside, found = calls.feed(text[at : at + size])
        content, pieces, at = content + outside, pieces + found, at + size
    return content + calls.flush(), pieces


@all_cases("text", [PATCH, "\n  a", "", "  ", "}", '{"a": 1}', "<tool_call", "</tool_ca"])
def test_text_becomes_the_json_that_the_model_could_have_written(text: str) -> None:
    written = {
        "as it is": f" {text}",
        "as JSON": f" {json.dumps({'input': text})}}}\n",
        "as compact JSON": json.dumps({"input": text}, separators=(",", ":")) + "}",
    }
    for seed in range(20):
        for form, arguments in written.items():
            call = f'<tool_call>\n{{"name": "patch", "arguments":{arguments}</tool_call>'
            content, pieces = parsed(f"Hi\n{call}\n{call}", seed)
            assert content == "Hi\n"
            for index in range(2):
                said = "".join(each.arguments for each in pieces if each.index == index)
                assert json.loads(said) == {"input": text}, form


def test_text_that_is_cut_off_stays_cut_off() -> None:
    _, pieces = parsed('<tool_call>{"name": "patch", "arguments": *** Begin\n"</tool', 0)
    assert "".join(each.arguments for each in pieces) == '{"input": "*** Begin\\n\\"'


def test_other_tools_take_json() -> None:
    _, pieces = parsed('<tool_call>{"name": "add", "arguments": {"input": 1}}</tool_call>', 0)
    assert "".join(each.arguments for each in pieces) == '{"input": 1}'
