"""Choose the model and the dialect of a request, among those that its caller may use."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from redis.exceptions import RedisError

from gateway.dialects.bodies import read_models
from gateway.dialects.profile import Profile
from gateway.dialects.profile_choice import choose_model, choose_profile
from gateway.models.access import allows_served, find_adapter
from gateway.models.alias_and_adapter_caches import AdapterBook, AliasBook
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.platform.settings import Settings
from gateway.records.adapters import Adapter
from gateway.records.aliases import Alias
from gateway.records.errors import (
    ApiError,
    MissingParameterError,
    ModelNotFoundError,
    ModelRetiredError,
    queue_unavailable,
)
from gateway.records.principal import Principal
from gateway.records.times import utc_now

_EMPTY: Final[Mapping[str, Any]] = {}


class ModelChoice(NamedTuple):
    """One model that may run a request."""

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

    @property
    def names(self) -> Sequence[str]:
        """What may have a price: the adapter, then the model by its own name."""
        model = self.model if self.served is None else self.served.card.model
        return (model,) if self.adapter is None else (self.adapter.id, model)

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


class Fallback(NamedTuple):
    """A model that is tried if those before it in the request or in its alias cannot run it."""

    name: str
    """The name that the request has for it."""
    choice: ModelChoice


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

    async def fallbacks(
        self, principal: Principal, body: Mapping[str, Any], choice: ModelChoice
    ) -> tuple[Fallback, ...]:
        """Return what follows the first choice: the rest of its alias, then `models` of the body.

        Raises InvalidParameterError, and ModelNotFoundError or ModelRetiredError, which names the
        position of a model that the principal cannot use.
        """
        asked = body.get("model")
        name = asked if isinstance(asked, str) else choice.model
        found = [Fallback(name, each) for each in self._rest(principal, body, choice)]
        for index, name in enumerate(read_models(body)):
            other = self._choose(principal, name, body)
            if other.is_unknown and other.refusal is None:
                try:
                    await self._catalogue.look_up(name)
                except RedisError:
                    raise queue_unavailable() from None
                other = self._choose(principal, name, body)
            refusal = other.refusal or (ModelNotFoundError(name) if other.is_unknown else None)
            if refusal is not None:
                refusal.param = f"models[{index}]"
                refusal.message = f"'{refusal.param}': {refusal.message}"
                raise refusal
            found += [Fallback(name, each) for each in (other, *self._rest(principal, body, other))]
        others = dict[Sequence[str], Fallback]()
        for each in found:
            others.setdefault(each.choice.names, each)
        others.pop(choice.names, None)
        return tuple(others.values())

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
        models = self._order(principal, alias, body)
        return next(filter(self._is_ready, models), models[0])

    def _order(self, principal: Principal, alias: Alias, body: Mapping[str, Any]) -> list[str]:
        return alias.order(principal.tenant_id, end_user_of(body))

    def _rest(
        self, principal: Principal, body: Mapping[str, Any], choice: ModelChoice
    ) -> list[ModelChoice]:
        """Return the choices after that of an alias; empty for others."""
        alias = choice.alias
        if alias is None or not alias.later_models or choice.refusal is not None:
            return []
        models = self._order(principal, alias, body)
        later = models[models.index(choice.model) + 1 :]
        return [ModelChoice(each, self._catalogue.known(each), alias) for each in later]

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
