"""GBNF: the parser, and the Lark grammar made of it, which matches the same texts."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.completions.structure.errors import RefusedError
from gateway.completions.structure.gbnf.compile import from_gbnf
from gateway.completions.structure.gbnf.parser import parse_gbnf
from tests.gateway.completions.structure.recogniser import matches
from tests.support.cases import all_cases

Accepts = Callable[[str, str], bool]

ARITHMETIC = (
    "root ::= expr\nexpr ::= term (('+' | '-') term)*\nterm ::= factor (('*' | '/') factor)*\n"
    "factor ::= [0-9]+ | '(' expr ')'"
)

JSON = r"""
# A value, with little white space.
root   ::= object
value  ::= object | array | string | number
         | ("true" | "false" | "null") ws
object ::= "{" ws ( member ("," ws member)* )? "}" ws
member ::= string ":" ws value
array  ::=
  "[" ws (
    value ("," ws value)*   # items
  )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""


@all_cases(
    ("grammar", "good", "bad"),
    [
        (ARITHMETIC, ["7", "12+3", "(1+2)*34", "((9))/2-1"], ["", "1+", "a", "(1", "1 + 2"]),
        (
            JSON,
            ['{"a":1}', '{ "a": 1}', '{"a": [true, -2.5, "x\\n\\u00e9"]}\n  ', "{}"],
            ['{"a"}', "[1]", '{"a": 01}', '{"a":1,}'],
        ),
        ('root ::= [a-z]+ "x"', ["abx", "xx", "xax"], ["x", "ab"]),
        ('root ::= a-1 | B_2\na-1 ::= "p"\nB_2 ::= "q" ', ["p", "q"], ["r"]),
        (r'root ::= "\x41\u00e9\U0001F600\n\t\\\""', ['Aé😀\n\t\\"'], ["A"]),
        (r"root ::= [\u00e9-\u00eb] [^a-c\n] [\]\-x]", ["éd-", "ëé]", "êzx"], ["éa-", "é\n-"]),
        ("root ::= . 'it''s' '\"'", ['xits"', '\nits"'], ['its"']),
        ('root ::= "a" |\n  "b"\n  | "c"\n# end\n  | ', ["", "a", "b", "c"], ["ab"]),
        ("root ::= 'a'{2} 'b'{1,} 'c'{,2} 'd'{0}", ["aab", "aabbcc"], ["ab", "aabccc", "aabd"]),
        ('root ::= "(" root ")" | root root | "x"', ["x", "(x)x", "((xx)x)"], ["", "(", "x)"]),
        ('root ::= root "a" | "b"', ["b", "baaa"], ["", "ab"]),
        ('root ::= "ab" "c" | "a" "bd" | "a" root', ["abc", "abd", "aabd"], ["ab", "acd"]),
        ("root ::= '::=' x\nx ::= 'start: y'", ["::=start: y"], ["::="]),
        ('root ::= "a/b\\\\/" [/]', ["a/b\\//"], ["a/b\\/"]),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else None,
)
def test_grammar_accepts_what_gbnf_defines(
    accepts: Accepts, grammar: str, good: list[str], bad: list[str]
) -> None:
    lark = from_gbnf(grammar)
    assert [text for text in good if not accepts(lark, text)] == []
    assert [text for text in bad if accepts(lark, text)] == []


@all_cases(
    ("grammar", "message"),
    [
        ('start ::= "a"', "must have a rule 'root'"),
        ("", "must have a rule 'root'"),
        ('root ::= "a" foo\n', "line 1, column 14: rule 'foo' is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: rule 'root' is defined twice"),
        ('root ::= "a\n"', "line 1, column 12: a literal or character class is not closed"),
        ("root ::= [a", "line 1, column 12: a literal or character class is not closed"),
        ("root ::= []", "a character class must not be empty"),
        ("root ::= [z-a]", "must be in ascending order"),
        (r'root ::= "\q"', "line 1, column 12: unknown escape"),
        (r'root ::= "\u00"', "expected 4 hexadecimal digits"),
        (r'root ::= "\ud800"', "not a Unicode character"),
        (r'root ::= "\U00110000"', "not a Unicode character"),
        ('root ::= ("a"', "line 1, column 14: expected ')'"),
        ('root ::= "a")', "line 1, column 13: expected the end of the rule"),
        ("root ::= 'a'{3,2}", "maximum of a repetition"),
        ("root ::= 'a'{2001}", "must be at most 2000"),
        ("root ::= 'a'{999999999999}", "expected '}'"),
        ("root = 'a'", "line 1, column 6: expected '::='"),
        ("root ::= " + "(" * 65 + "'a'" + ")" * 65, "not be nested deeper than 64"),
        ("root ::= 'a'" + "+" * 65, "at most 64 repetition operators"),
        ("\x00", "expected a rule name"),
    ],
)
def test_error_has_its_position(grammar: str, message: str) -> None:
    with pytest.raises(RefusedError) as raised:
        from_gbnf(grammar)
    assert message in str(raised.value)


@given(st.text(alphabet="rot:=|()[]{}*+?\"'\\^-.,ab1 \n#x"))
def test_any_text_is_a_grammar_or_is_refused(text: str) -> None:
    source = f"root ::= {text}"
    try:
        lark = from_gbnf(source)
    except RefusedError:
        return
    assert lark.startswith("%llguidance")


def _grammar(choice: random.Random) -> str:
    literals = ['"a"', '"b"', '"ab"', '"ba"', "[ab]", "[a-c]", '"c"', '"aba"', '""']

    def node(depth: int) -> str:
        kind = choice.random()
        if depth <= 0 or kind < 0.3:
            return choice.choice(literals)
        if kind < 0.5:
            return choice.choice(["root", "x", "y"])
        part = (
            f"({alternatives(depth - 1)})" if kind < 0.7 else choice.choice(["[ab]", '"ab"', "x"])
        )
        return part + choice.choice(["", "*", "+", "?", "{2}", "{1,2}", "{0,3}"])

    def alternatives(depth: int) -> str:
        rows = (
            [node(depth) for _ in range(choice.randint(1, 3))] for _ in range(choice.randint(1, 3))
        )
        return " | ".join(" ".join(row) for row in rows)

    return f"root ::= {alternatives(2)}\nx ::= {alternatives(2)}\ny ::= {alternatives(1)}"


@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12, 40))]
)
def test_random_grammars_accept_the_same_as_a_plain_recogniser(accepts: Accepts, seed: int) -> None:
    choice = random.Random(seed)
    words = ["".join(word) for size in range(6) for word in itertools.product("abc", repeat=size)]
    source = _grammar(choice)
    grammar, lark = parse_gbnf(source), from_gbnf(source)
    sample = choice.sample(words, 30)
    expected = [word for word in sample if matches(grammar, word)]
    assert [word for word in sample if accepts(lark, word)] == expected, f"{source}\n{lark}"
