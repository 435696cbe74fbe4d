"""The profile and the model that a request gets."""

import logging
from dataclasses import replace

import pytest

from contract.dialect import Dialect
from gateway.dialects.profile import PROFILES
from gateway.dialects.profile_choice import choose_model, choose_profile
from gateway.platform.settings import Settings
from gateway.records.errors import InvalidParameterError, MissingParameterError
from gateway.records.principal import Principal
from gateway.records.scopes import DEFAULT_SCOPES
from tests.support.cases import all_cases

NOBODY = Principal(
    tenant_id="acme",
    tenant_weight=1.0,
    credential_id="key_1",
    scopes=DEFAULT_SCOPES,
    allowed_models=None,
)
OMLX = Settings(default_dialect=Dialect.OMLX)


def chosen(
    header: str | None,
    own: Dialect | None = None,
    model: str = "",
    *,
    settings: Settings = OMLX,
) -> Dialect:
    """Return the dialect of a request."""
    principal = replace(NOBODY, dialect=own)
    return choose_profile(header, principal, model_dialect=model, settings=settings).name


def test_profile_header_precedes_key_tenant_model_and_server() -> None:
    assert chosen("vllm", Dialect.FIREWORKS, "llamacpp") is Dialect.VLLM
    assert chosen(None, Dialect.FIREWORKS, "llamacpp") is Dialect.FIREWORKS
    assert chosen(None, None, "llamacpp") is Dialect.LLAMACPP
    assert chosen(None) is Dialect.OMLX
    assert chosen(None, settings=Settings()) is Dialect.OPENAI


@all_cases("dialect", Dialect)
def test_every_dialect_can_be_named_and_has_a_profile(dialect: Dialect) -> None:
    assert chosen(dialect.value) is dialect
    assert chosen(f" {dialect.value.upper()} ") is dialect
    assert PROFILES[dialect].name is dialect


@all_cases("header", ["", "klingon", "openai,vllm", "x" * 5000, "öpenai"])
def test_unknown_dialect_of_the_header_is_refused_naming_the_known_ones(header: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        chosen(header, Dialect.VLLM)
    assert caught.value.param == "X-Api-Dialect"
    assert len(caught.value.message) < 400
    for dialect in Dialect:
        assert dialect.value in caught.value.message


def test_dialect_that_only_a_newer_worker_knows_is_ignored_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    assert chosen(None, None, "esperanto") is Dialect.OMLX
    assert chosen(None, None, "esperanto") is Dialect.OMLX
    assert [record.getMessage() for record in caplog.records] == [
        'a worker announces the unknown dialect "esperanto"'
    ]


@all_cases(
    ("name", "default", "allowed", "served", "expected"),
    [
        ("a", "b", None, {"a", "b"}, "a"),
        ("unknown", "b", None, {"a"}, "unknown"),
        (None, "b", None, {"a"}, "b"),
        (None, "b", {"b", "c"}, {"b", "c"}, "b"),
        (None, "b", {"a"}, {"a", "b"}, "a"),
        (None, None, None, {"a"}, "a"),
        (None, None, {"a"}, {"a", "b"}, "a"),
        (None, None, {"a", "z"}, {"a", "b"}, "a"),
        (None, None, {"z"}, {"a", "b"}, "z"),
        ("default", None, None, {"a"}, "a"),
        ("default", "b", None, {"a", "b"}, "b"),
        ("default", None, None, {"a", "default"}, "default"),
        ("default", None, None, {"a", "b"}, "default"),
    ],
)
def test_missing_model_means_the_default_or_the_only_one(
    name: str | None,
    default: str | None,
    allowed: set[str] | None,
    served: set[str],
    expected: str,
) -> None:
    principal = replace(
        NOBODY,
        default_model=default,
        allowed_models=None if allowed is None else frozenset(allowed),
    )
    assert choose_model(name, principal, served) == expected


@all_cases(
    ("allowed", "served"), [(None, {"a", "b"}), ({"a", "b"}, {"a", "b", "c"}), (None, set())]
)
def test_missing_model_is_refused_if_it_is_ambiguous(
    allowed: set[str] | None, served: set[str]
) -> None:
    principal = replace(NOBODY, allowed_models=None if allowed is None else frozenset(allowed))
    with pytest.raises(MissingParameterError) as caught:
        choose_model(None, principal, served)
    assert caught.value.param == "model"
