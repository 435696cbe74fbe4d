"""Usage and costs as OpenAI's clients read them: `/v1/organization/usage/...` and `/costs`."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, NamedTuple

from fastapi import APIRouter, Depends, Path, Query
from pydantic import BaseModel, Field

from contract.tier import ServiceTier
from gateway.accounts.routes_common import FLAG, MAX_TEXT_CHARACTERS, PLAIN, PRINTABLE
from gateway.billing.usage.parts import NOTHING, Dimension, UsageFilter, UsageSums, add
from gateway.billing.usage.periods import DAY, HOUR, Bucket, Span
from gateway.billing.usage.query import FIRST_YEAR, LAST_YEAR
from gateway.billing.usage.routes import CanSeeOwnUsage, Ledger, own_usage
from gateway.billing.usage.service import ReportRequest, UsageService, UsageSlice
from gateway.http.services import AllServices
from gateway.models.catalogue import Catalogue
from gateway.records.errors import InvalidParameterError, must
from gateway.records.limits import JWT_PREFIX
from gateway.records.principal import Principal
from gateway.records.times import day_of, hour_of, utc_now
from gateway.records.usage_record import MICRO

MOST_RESULTS: Final = 10_000
"""Sums of one page."""
MOST_VALUES: Final = 100
"""Values of one filter."""
_FIRST, _LAST = (
    int(datetime(year, 1, 1, tzinfo=UTC).timestamp()) for year in (FIRST_YEAR, LAST_YEAR)
)

router = APIRouter(prefix="/v1/organization", tags=["Usage"])


class _Width(NamedTuple):
    """A width of buckets, and how many of them a page has by default and at most."""

    bucket: Bucket
    length: timedelta
    floor: Callable[[datetime], datetime]
    default: int
    most: int


_WIDTHS: Final = {
    "1h": _Width(Bucket.HOUR, HOUR, hour_of, 24, 168),
    "1d": _Width(Bucket.DAY, DAY, day_of, 7, 31),
}
_COSTS: Final = {"1d": _Width(Bucket.DAY, DAY, day_of, 7, 180)}


class Kind(StrEnum):
    """What a model does; each model does one of these."""

    COMPLETIONS = "completions"
    EMBEDDINGS = "embeddings"
    TRANSCRIPTIONS = "audio_transcriptions"


class BucketBody(BaseModel):
    """The sums of one hour or day."""

    object: Literal["bucket"] = "bucket"
    start_time: int = Field(description="Unix time in seconds, inclusive.")
    end_time: int = Field(description="Exclusive.")
    results: list[dict[str, Any]] = Field(description="Empty without requests.")


class OrganizationPage(BaseModel):
    """Buckets of usage or costs, by time."""

    object: Literal["page"] = "page"
    data: list[BucketBody]
    has_more: bool
    next_page: str | None = Field(description="`page` for the next page; null on the last page.")


def _listed(name: str, description: str) -> Any:
    """Declare a list of the query, which clients send as `name[]`, or as `name` several times."""
    text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS, pattern=PRINTABLE)]
    bound = {"max_length": MOST_VALUES, "description": description}

    async def read(
        plain: Annotated[list[text] | None, Query(alias=name, **bound)] = None,
        brackets: Annotated[
            list[text] | None, Query(alias=f"{name}[]", include_in_schema=False, **bound)
        ] = None,
    ) -> tuple[str, ...] | None:
        return None if plain is None and brackets is None else (*(plain or ()), *(brackets or ()))

    return Depends(read)


Names = tuple[str, ...] | None
_Projects = Annotated[Names, _listed("project_ids", "Only these projects.")]
_Keys = Annotated[Names, _listed("api_key_ids", "Only these keys, by their ids.")]
_Users = Annotated[Names, _listed("user_ids", "Only these people, by the subjects of their JWTs.")]
_Models = Annotated[Names, _listed("models", "Only these models.")]
_Groups = Annotated[Names, _listed("group_by", "Fields that results have values of.")]
_Time = Query(ge=_FIRST, le=_LAST, description="Unix time in seconds.")


class _Asked(NamedTuple):
    """The period and the page of a request."""

    start: datetime
    end: datetime
    page: str | None
    limit: int | None
    width: str

    def buckets(self, widths: Mapping[str, _Width]) -> tuple[Bucket, list[Span], str | None]:
        """Return the buckets of the page, and the next page. Raises InvalidParameterError."""
        if self.width not in widths:
            rule = f"be one of {', '.join(widths)}, for which there are sums"
            raise must("bucket_width", rule, self.width)
        width = widths[self.width]
        limit = width.default if self.limit is None else self.limit
        if not 1 <= limit <= width.most:
            raise must("limit", f"be from 1 to {width.most} with this 'bucket_width'", limit)
        start = self.start
        if self.page is not None:
            seconds = int(self.page[:12]) if self.page.isdecimal() else -1
            if not start.timestamp() <= seconds < self.end.timestamp():
                raise must("page", "be 'next_page' of a page of the same request", self.page)
            start = datetime.fromtimestamp(seconds, UTC)
        spans = list[Span]()
        while start < self.end and len(spans) < limit:
            end = min(width.floor(start) + width.length, self.end)
            spans.append(Span(start, end))
            start = end
        return width.bucket, spans, str(int(start.timestamp())) if start < self.end else None


async def _asked(
    start_time: Annotated[int, _Time, PLAIN],
    end_time: Annotated[int | None, _Time, PLAIN] = None,
    bucket_width: Annotated[
        str, Query(max_length=MAX_TEXT_CHARACTERS, description="`1h`, except of costs, or `1d`.")
    ] = "1d",
    limit: Annotated[int | None, Query(description="Buckets of one page."), PLAIN] = None,
    page: Annotated[
        str | None,
        Query(min_length=1, max_length=20, pattern=PRINTABLE, description="`next_page` before."),
    ] = None,
) -> _Asked:
    start = datetime.fromtimestamp(start_time, UTC)
    end = utc_now() if end_time is None else datetime.fromtimestamp(end_time, UTC)
    if end_time is not None and end <= start:
        raise must("end_time", "be after 'start_time'", end_time)
    return _Asked(start, end, page, limit, bucket_width)


AskedOfOpenAI = Annotated[_Asked, Depends(_asked)]


@router.get("/usage/{kind}", summary="Report usage as OpenAI does")
async def usage(
    services: AllServices,
    ledger: Ledger,
    principal: CanSeeOwnUsage,
    kind: Annotated[Kind, Path(description="What the models do.")],
    asked: AskedOfOpenAI,
    *,
    project_ids: _Projects = None,
    user_ids: _Users = None,
    api_key_ids: _Keys = None,
    models: _Models = None,
    batch: Annotated[bool | None, Query(description="Only batches, or no batches."), FLAG] = None,
    group_by: _Groups = None,
) -> OrganizationPage:
    """Report the usage of models that generate, that embed or rank, or that transcribe.

    The sums and what you see of them are those of `GET /v1/usage`.
    """
    groups = _groups(group_by, _FIELDS)
    tiers = None
    if batch is not None:
        tiers = tuple(each.value for each in ServiceTier if (each is ServiceTier.BATCH) is batch)
    only = _only(
        principal,
        {Dimension.PROJECT: project_ids, Dimension.MODEL: models, Dimension.SERVICE_TIER: tiers},
        keys=api_key_ids,
        users=user_ids,
    )
    bucket, spans, following = asked.buckets(_WIDTHS)
    slices = await _slices(ledger, principal, bucket, spans, {*groups, "model"}, only)
    kinds = _kinds(services[Catalogue], slices)
    of_kind = [each for each in slices if kinds[each.values[Dimension.MODEL]] is kind]
    return _page(spans, _grouped(of_kind, groups), following, _RESULTS[kind], _FIELDS)


@router.get("/costs", summary="Report costs as OpenAI does")
async def costs(
    ledger: Ledger,
    principal: CanSeeOwnUsage,
    asked: AskedOfOpenAI,
    *,
    project_ids: _Projects = None,
    api_key_ids: _Keys = None,
    group_by: _Groups = None,
) -> OrganizationPage:
    """Report costs in dollars. A `line_item` is a model."""
    groups = _groups(group_by, _COST_FIELDS)
    only = _only(principal, {Dimension.PROJECT: project_ids}, keys=api_key_ids)
    bucket, spans, following = asked.buckets(_COSTS)
    slices = await _slices(ledger, principal, bucket, spans, groups, only)
    return _page(spans, _grouped(slices, groups), following, _cost, _COST_FIELDS)


_FIELDS: Final = {
    "project_id": Dimension.PROJECT,
    "user_id": Dimension.KEY,
    "api_key_id": Dimension.KEY,
    "model": Dimension.MODEL,
    "batch": Dimension.SERVICE_TIER,
    "service_tier": Dimension.SERVICE_TIER,
}
_COST_FIELDS: Final = {
    "project_id": Dimension.PROJECT,
    "line_item": Dimension.MODEL,
    "api_key_id": Dimension.KEY,
}
_DIMENSIONS: Final = _FIELDS | _COST_FIELDS

Group = tuple[Any, ...]


def _groups(given: Names, known: Mapping[str, Dimension]) -> tuple[str, ...]:
    names = {name for text in given or () for name in text.split(",")}
    if unknown := names - known.keys():
        raise must("group_by", f"name any of {', '.join(known)}", min(unknown))
    return tuple(name for name in known if name in names)


def _only(
    principal: Principal,
    wanted: Mapping[Dimension, Names],
    *,
    keys: Names,
    users: Names = None,
) -> dict[Dimension, tuple[str, ...]]:
    """Return the values to which a report is limited. Raises PermissionDeniedError."""
    for project_id in wanted.get(Dimension.PROJECT) or ():
        own_usage(principal, UsageFilter(tenant_id=None, project_id=project_id))
    for key in keys or ():
        own_usage(principal, UsageFilter(tenant_id=None, credential_id=key))
    if users is not None:
        of_users = tuple(f"{JWT_PREFIX}{user}" for user in users)
        keys = of_users if keys is None else tuple({*keys} & {*of_users})
    given = {**wanted, Dimension.KEY: keys}
    return {dimension: values for dimension, values in given.items() if values is not None}


async def _slices(
    ledger: UsageService,
    principal: Principal,
    bucket: Bucket,
    spans: Sequence[Span],
    groups: Iterable[str],
    only: Mapping[Dimension, tuple[str, ...]],
) -> list[UsageSlice]:
    if not spans:
        return []
    request = ReportRequest(
        wanted=own_usage(principal, UsageFilter(tenant_id=None)),
        span=Span(spans[0].start, spans[-1].end),
        bucket=bucket,
        dimensions=tuple({_DIMENSIONS[name]: None for name in sorted(groups)}),
        only=only,
    )
    report = await ledger.report(request, after=None, limit=MOST_RESULTS)
    if report.next is not None:
        raise InvalidParameterError(
            f"'limit' must be smaller: the page would have more than {MOST_RESULTS} sums. "
            f"Given: {len(spans)} buckets. Group by fewer fields, or filter.",
            param="limit",
        )
    return report.slices


def _kinds(catalogue: Catalogue, slices: Sequence[UsageSlice]) -> dict[str, Kind]:
    """Return what each model does: as its workers announce it, else as its counts show it."""
    sums = defaultdict[str, UsageSums](lambda: NOTHING)
    for each in slices:
        model = each.values[Dimension.MODEL]
        sums[model] = add((sums[model], each.sums))
    return {model: _kind(catalogue, model, whole) for model, whole in sums.items()}


def _kind(catalogue: Catalogue, model: str, sums: UsageSums) -> Kind:
    known = catalogue.known(model)
    if sums.audio_seconds if known is None else known.card.clip_seconds:
        return Kind.TRANSCRIPTIONS
    generates = sums.completion_tokens if known is None else known.card.pooling is None
    return Kind.COMPLETIONS if generates else Kind.EMBEDDINGS


def _grouped(
    slices: Iterable[UsageSlice], groups: tuple[str, ...]
) -> dict[datetime, dict[Group, UsageSums]]:
    """Return the sums of each bucket and of each value of its groups, by the bucket's start."""
    found = defaultdict[datetime, dict[Group, UsageSums]](dict)
    for each in slices:
        bucket, group = found[each.span.start], _values(each.values, groups)
        bucket[group] = add((bucket.get(group, NOTHING), each.sums))
    return found


def _values(values: Mapping[Dimension, str], groups: Iterable[str]) -> Group:
    key, tier = values.get(Dimension.KEY, ""), values.get(Dimension.SERVICE_TIER)
    is_token = key.startswith(JWT_PREFIX)
    special = {
        "user_id": key.removeprefix(JWT_PREFIX) if is_token else None,
        "api_key_id": None if is_token else key,
        "batch": tier == ServiceTier.BATCH,
    }
    return tuple(
        (name, special[name] if name in special else values[_DIMENSIONS[name]] or None)
        for name in groups
    )


def _page(
    spans: Iterable[Span],
    found: Mapping[datetime, Mapping[Group, UsageSums]],
    following: str | None,
    result: Callable[[UsageSums], dict[str, Any]],
    fields: Iterable[str],
) -> OrganizationPage:
    absent = dict.fromkeys(fields)
    data = [
        BucketBody(
            start_time=int(span.start.timestamp()),
            end_time=int(span.end.timestamp()),
            results=[
                {**result(sums), **absent, **dict(group)}
                for group, sums in found.get(span.start, {}).items()
            ],
        )
        for span in spans
    ]
    return OrganizationPage(data=data, has_more=following is not None, next_page=following)


def _completions(sums: UsageSums) -> dict[str, Any]:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": sums.prompt_tokens,
        "input_cached_tokens": sums.cached_tokens,
        "input_uncached_tokens": sums.prompt_tokens - sums.cached_tokens,
        "output_tokens": sums.completion_tokens,
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "num_model_requests": sums.requests,
    }


def _embeddings(sums: UsageSums) -> dict[str, Any]:
    return {
        "object": "organization.usage.embeddings.result",
        "input_tokens": sums.prompt_tokens,
        "num_model_requests": sums.requests,
    }


def _transcriptions(sums: UsageSums) -> dict[str, Any]:
    return {
        "object": "organization.usage.audio_transcriptions.result",
        "seconds": sums.audio_seconds,
        "num_model_requests": sums.requests,
    }


def _cost(sums: UsageSums) -> dict[str, Any]:
    amount = {"value": sums.cost_micros / MICRO, "currency": "usd"}
    return {"object": "organization.costs.result", "amount": amount}


_RESULTS: Final = {
    Kind.COMPLETIONS: _completions,
    Kind.EMBEDDINGS: _embeddings,
    Kind.TRANSCRIPTIONS: _transcriptions,
}
