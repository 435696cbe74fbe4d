"""Choose the model and the dialect of a request, among those that its caller may use."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError

from gateway.dialects.profile import Profile
from gateway.dialects.profile_choice import choose_model, choose_profile
from gateway.models.access import allows_served, find_adapter
from gateway.models.books import AdapterBook, AliasBook
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.platform.settings import Settings
from gateway.records.adapters import Adapter
from gateway.records.aliases import Alias
from gateway.records.errors import (
    ApiError,
    MissingParameterError,
    ModelNotFoundError,
    ModelRetiredError,
)
from gateway.records.principal import Principal
from gateway.records.times import utc_now

_EMPTY: Final[Mapping[str, Any]] = {}


class ModelChoice(NamedTuple):
    """The model of a request."""

    model: str
    """Name of the model, or an alias that its workers announce; the base model of an adapter."""
    served: ServedModel | None = None
    """The model as it was known when it was chosen; None if it was unknown."""
    alias: Alias | None = None
    """The alias that the request named, if an operator has defined it."""
    adapter: Adapter | None = None
    """The adapter that the request named."""
    refusal: ApiError | None = None
    """Why the caller may not use the model."""

    @property
    def is_unknown(self) -> bool:
        """Whether nothing has the name that the request gave."""
        return bool(self.model) and not (self.served or self.alias or self.adapter)

    @property
    def dialect(self) -> str:
        """The dialect that the model's worker announces; empty if the caller may not learn it."""
        is_visible = self.refusal is None or isinstance(self.refusal, ModelRetiredError)
        return self.served.card.dialect if self.served is not None and is_visible else ""

    def require(self) -> None:
        """Raise MissingParameterError, ModelNotFoundError or ModelRetiredError if it is refused."""
        if self.refusal is not None:
            raise self.refusal


def end_user_of(body: Mapping[str, Any]) -> str:
    """Return the end user whom a request names; empty if it names none."""
    metadata = body.get("metadata")
    user = body.get("user") or body.get("safety_identifier")
    if user is None and isinstance(metadata, dict):
        user = metadata.get("user_id")
    return user if isinstance(user, str) else ""


@dataclass(eq=False)
class Models:
    """What the name of a model stands for: a model that workers announce, an alias, an adapter."""

    _settings: Settings
    _catalogue: Catalogue
    _aliases: AliasBook
    _adapters: AdapterBook

    async def choose(
        self, principal: Principal, body: Mapping[str, Any], *, header: str | None
    ) -> tuple[ModelChoice, Profile]:
        """Return the model and the profile of a body; `header` is the value of X-Api-Dialect.

        Without a model in the body, it is the principal's default. The choice has a refusal both
        for an unknown model and for one that the principal may not use. Raises
        InvalidParameterError for an invalid header.
        """
        asked = body.get("model")
        name = asked if isinstance(asked, str) else None
        choice, dialect = self._choose(principal, name, body), ""
        if header is None and principal.dialect is None and choice.model:
            try:
                served = await self._look_up(choice)
            except RedisError:
                pass
            else:
                if choice.served is None and served is not None:
                    choice = self._choose(principal, name, body)
                else:
                    choice = choice._replace(served=served)
                dialect = choice.dialect
        profile = choose_profile(header, principal, model_dialect=dialect, settings=self._settings)
        if profile.takes_any_model_name and choice.is_unknown:
            usable = [each for each in self._catalogue.names if principal.allows_model(each)]
            if len(usable) == 1:
                choice = ModelChoice(usable[0], self._catalogue.known(usable[0]))
        return choice, profile

    async def find(self, choice: ModelChoice) -> ServedModel:
        """Return the chosen model, which is ready or asleep.

        Raises its refusal, or the errors of `Catalogue.find`.
        """
        choice.require()
        if choice.served is not None and choice.served.is_ready:
            return choice.served
        try:
            return await self._catalogue.find(choice.model)
        except ModelNotFoundError:
            # The caller does not know which models an alias has.
            name = choice.alias.name if choice.alias else choice.model
            raise ModelNotFoundError(name) from None

    def model_of(self, principal: Principal, alias: Alias, body: Mapping[str, Any] = _EMPTY) -> str:
        """Return the model that runs a request of the principal for an alias.

        It may depend on `user` in the body, or on Anthropic's `metadata.user_id`.
        """
        model = alias.choose(principal.tenant_id, end_user_of(body))
        fallback = alias.fallback
        if fallback is None or self._is_ready(model) or not self._is_ready(fallback):
            return model
        return fallback

    def _choose(
        self, principal: Principal, name: str | None, body: Mapping[str, Any]
    ) -> ModelChoice:
        catalogue = self._catalogue
        refusal: ApiError | None = None
        try:
            chosen = choose_model(name, principal, catalogue.names)
        except MissingParameterError as error:
            return ModelChoice("", refusal=error)
        alias, served = self._aliases.find(chosen), catalogue.known(chosen)
        adapter = None
        if alias is None and served is None:
            adapter = find_adapter(catalogue, self._adapters, principal, chosen)
            if adapter is None:
                alias = self._aliases.matching(chosen, principal.allows_model)
        if alias is not None:
            try:
                if not alias.is_allowed(principal.allows_model):
                    raise ModelNotFoundError(chosen)
                alias.check_current(utc_now())
            except ApiError as error:
                refusal = error
            model = self.model_of(principal, alias, body)
            return ModelChoice(model, catalogue.known(model), alias, refusal=refusal)
        if adapter is not None:
            base = adapter.base_model
            return ModelChoice(base, catalogue.known(base), adapter=adapter)
        if served is None:
            is_allowed = principal.allows_model(chosen)
        else:
            is_allowed = allows_served(principal, chosen, served)
        return ModelChoice(
            chosen, served, refusal=None if is_allowed else ModelNotFoundError(chosen)
        )

    async def _look_up(self, choice: ModelChoice) -> ServedModel | None:
        if choice.served is not None and choice.served.is_ready:
            return choice.served
        return await self._catalogue.look_up(choice.model)

    def _is_ready(self, model: str) -> bool:
        known = self._catalogue.known(model)
        return known is not None and known.is_ready
