"""Fields that several bodies of the management API share."""

from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from gateway.platform.database.paging import Page
from gateway.records.checks import MAX_NAME_CHARACTERS
from gateway.records.limits import MAX_LIMIT, FromPlan, LimitName, read_limit_changes

T = TypeVar("T")

_LIMIT: Final = {"type": "integer", "minimum": 0, "maximum": MAX_LIMIT}

_GIVEN: Final = {
    "type": "object",
    "description": "Absent limits stay unchanged. Null: no limit; `plan`: the plan's limit.",
    "additionalProperties": False,
    "properties": {
        name.value: {"anyOf": [_LIMIT, {"type": "null"}, {"const": FromPlan.FROM_PLAN.value}]}
        for name in LimitName
    },
}
_SHOWN: Final = {
    "type": "object",
    "description": "Own limits. Null: no limit; absent: the plan's limit.",
    "properties": {name.value: {"anyOf": [_LIMIT, {"type": "null"}]} for name in LimitName},
}

LimitsGiven = Annotated[dict[str, Any], WithJsonSchema(_GIVEN)]
LimitsShown = Annotated[dict[str, int | None], WithJsonSchema(_SHOWN)]
Name = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARACTERS)]


class RequestBody(BaseModel):
    """A request body; unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid")

    def given(self) -> dict[str, Any]:
        """Return the parsed values of the fields that the body contains."""
        return {name: getattr(self, name) for name in self.model_fields_set}


class RecordBody(BaseModel):
    """A response body with fields of a record."""

    model_config = ConfigDict(from_attributes=True)

    @classmethod
    def of(cls, record: object) -> Self:
        """Return the response body of a record."""
        return cls.model_validate(record)


class ListBody(BaseModel, Generic[T]):
    """A page of a list."""

    object: Literal["list"] = "list"
    data: list[T]
    has_more: bool = Field(description="Whether more entries follow; request them with `after`.")

    @classmethod
    def of(cls, page: Page[Any]) -> Self:
        """Return the response body of a page of records."""
        return cls.model_validate({"data": page.entries, "has_more": page.has_more})


class BodyWithLimits(RequestBody):
    """A request body with the field `limits`."""

    def options(self) -> dict[str, Any]:
        """Return the arguments for the service. Raises InvalidParameterError."""
        options = self.given()
        if "limits" in options:
            options["limits"] = read_limit_changes(options["limits"])
        return options
