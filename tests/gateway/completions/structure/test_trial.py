"""Chat templates of models are tried in a sandbox, where hostile ones do no harm."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.completions.structure.checker import GrammarChecker
from tests.gateway.completions.structure.conftest import CHECKPOINT
from tests.gateway.completions.structure.test_checker import PATIENT

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}X{% endfor %}{% endfor %}"
HOSTILE = {
    "silent loop": LOOP.replace("X", "{% if false %}x{% endif %}"),
    "writing loop": LOOP,
    "doubling": "{% set ns = namespace(x='a' * 99999) %}"
    "{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x|length }}",
    "padding": "{{ '%999999999999d' % 1 }}{{ 'a'.ljust(10 ** 11) }}",
    "format": "{{ '{:>99999999999}'.format('a') }}",
    "multiplication": "{{ 'a' * 10 ** 10 }}",
    "growing numbers": "{% set ns = namespace(x=7) %}"
    "{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "replacing": "{% set ns = namespace(x='a') %}"
    "{% for i in range(60) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}{{ ns.x }}",
    "long text": "{% for i in range(9999) %}{{ 'a' * 1000 }}{% endfor %}",
    "syntax": "{% for message in messages %}",
    "unknown filter": "{{ messages | nonsense }}",
    "nesting": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
}
HARMLESS = {
    "plain": "{% for message in messages %}{{ message.content }}{% endfor %}",
    "refusing all": "{{ raise_exception('never') }}",
    "failing": "{{ messages.nothing.at_all }}",
    "wrong use": "{{ messages + 1 }}{{ ''.__class__.__mro__ }}",
    "demo": (CHECKPOINT / "chat_template.jinja").read_text(),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def checker() -> AsyncIterator[GrammarChecker]:
    """One checker, whose sandboxes restart only after a template has ended them."""
    checker = GrammarChecker(PATIENT)
    yield checker
    await checker.aclose()


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
async def test_a_hostile_or_wrong_template_is_refused(checker: GrammarChecker, source: str) -> None:
    assert await checker.try_template(source)


@pytest.mark.parametrize("source", HARMLESS.values(), ids=HARMLESS)
async def test_a_template_may_refuse_conversations(checker: GrammarChecker, source: str) -> None:
    assert await checker.try_template(source) == ""
