"""Request and response bodies of aliases."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, Field

from gateway.accounts.aliases.service import MAX_MODELS
from gateway.accounts.shared.fields import ListBody, Name, RecordBody, RequestBody
from gateway.records.aliases import MAX_WEIGHT, Sticky

Weight = Annotated[int, Field(strict=True, ge=0, le=MAX_WEIGHT)]
Weights = Annotated[
    dict[Name, Weight],
    Field(
        min_length=1,
        max_length=MAX_MODELS,
        description="Share of the callers by model: the ids under which workers announce them.",
    ),
]


class AliasDefinition(RequestBody):
    """What an alias stands for."""

    weights: Weights
    sticky: Sticky = Field(
        Sticky.TENANT,
        description="Whose requests go to the same model: the tenant's, or those of each `user`.",
    )
    fallback: Name | None = Field(
        None, description="Model of requests whose own model has no worker."
    )
    sunset_at: AwareDatetime | None = Field(
        None, description="When requests for the alias begin to fail."
    )
    replacement: Name | None = Field(
        None,
        description="What the error after `sunset_at` names. Default: the model with the largest "
        "weight.",
    )


class AliasBody(RecordBody):
    """A public model name that splits its requests over models."""

    object: Literal["model_alias"] = "model_alias"
    name: str
    weights: dict[str, int]
    sticky: Sticky
    fallback: str | None
    sunset_at: datetime | None
    deprecated_at: datetime | None = Field(description="When the alias got its `sunset_at`.")
    replacement: str
    created_at: datetime


class AliasList(ListBody[AliasBody]):
    """All aliases, by name."""


class RemovedAlias(BaseModel):
    """A removed alias."""

    object: Literal["model_alias.deleted"] = "model_alias.deleted"
    name: str
    deleted: Literal[True] = True
