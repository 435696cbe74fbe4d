"""Styles of JSON in the ids of calls: known early, never changed, and enough to write it again."""

import json
from typing import Any

from gateway.dialects.json_styles import restyled, style_of
from gateway.dialects.wire import WrittenObject
from tests.support.cases import all_cases

ID = f"toolu_{'0' * 24}"
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"separators": (",", ":")},
    *({"indent": indent} for indent in (1, 2, 8, "\t")),
]


@all_cases(
    "value",
    [
        {"a": 1, "b": [1, {"c": "d"}, [], {}]},
        {"path": "é", "text": "ü" * 100},
        {"é": None},
        {'"k\\': "\\u00e9 \n", "b": [True, 1.5]},
        {"text": "a" * 100, "b": 1},
    ],
)
def test_style_is_known_early_and_writes_the_input_again(value: dict[str, Any]) -> None:
    for layout in LAYOUTS:
        for is_escaped in (True, False):
            text = json.dumps(value, ensure_ascii=is_escaped, **layout)
            style = style_of(text, is_whole=True)
            assert style
            written = restyled(value, ID + style)
            assert written == value
            shown = written.text if isinstance(written, WrittenObject) else None
            assert (shown or json.dumps(value, ensure_ascii=False)) == text
            known = [style_of(text[:end], is_whole=False) for end in range(len(text))]
            assert {*known} <= {None, style}
            assert None not in known[known.index(style) :] if style in known else len(text) <= 64


def test_other_texts_and_ids_have_no_style() -> None:
    for text in ("", "{}", "[1]", '{ "a":1}', '{"a":', '{"é'):
        assert style_of(text, is_whole=True) == ""
        assert style_of(text, is_whole=False) is None
    for id_ in (ID, f"{ID}x", f"{ID}cc", "toolu_01A09q90qw90lq917835lq9c", "call_1", ""):
        assert not isinstance(restyled({"a": 1}, id_), WrittenObject)
