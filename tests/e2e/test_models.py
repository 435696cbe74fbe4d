"""`models.list` and `models.retrieve`, from the cards of workers."""

import pytest
from openai import NotFoundError, OpenAI

from tests.support.stack import MODEL, Stack

pytestmark = pytest.mark.e2e


def test_models_are_listed_by_every_gateway(stack: Stack, client: OpenAI) -> None:
    for url in stack.gateways:
        listed = {m.id: m for m in client.with_options(base_url=f"{url}/v1").models.list()}
        model = listed[MODEL]
        assert model.object == "model"
        assert model.model_dump()["ready"] is True
        assert {"best_of", "logit_bias", "min_p"} <= set(model.model_dump()["supported_parameters"])


def test_model_is_retrieved(client: OpenAI) -> None:
    assert client.models.retrieve(MODEL).id == MODEL


def test_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(NotFoundError) as caught:
        client.models.retrieve("nobody/nothing")

    assert caught.value.code == "model_not_found"


def test_key_sees_only_its_models(stack: Stack, client: OpenAI) -> None:
    narrow = client.with_options(api_key=stack.key("narrow", allowed_models=("another",)))

    assert list(narrow.models.list()) == []
    with pytest.raises(NotFoundError):
        narrow.models.retrieve(MODEL)
