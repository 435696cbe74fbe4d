"""What the name of a model stands for, among the things that a caller may use."""

from gateway.auth.principal import Principal
from gateway.dispatch.adapter_book import AdapterBook
from gateway.dispatch.adapter_choice import find_adapter
from gateway.dispatch.alias_book import AliasBook
from gateway.dispatch.catalogue import Catalogue, ServedModel
from gateway.errors import ModelNotFoundError
from gateway.tenancy.adapters import Adapter
from gateway.tenancy.aliases import Alias


def find_allowed(
    catalogue: Catalogue,
    adapters: AdapterBook,
    aliases: AliasBook,
    principal: Principal,
    name: str,
) -> Alias | Adapter | ServedModel | None:
    """Return the alias, model or adapter of this name; None if none is known.

    Raises ModelNotFoundError for an alias or a model that the principal may not use.
    """
    if (alias := aliases.find(name)) is not None:
        if not alias.is_allowed(principal.allows_model):
            raise ModelNotFoundError(name)
        return alias
    if (model := catalogue.known(name)) is not None:
        if not allows_served(principal, name, model):
            raise ModelNotFoundError(name)
        return model
    return find_adapter(catalogue, adapters, principal, name)


def allows_served(principal: Principal, name: str, model: ServedModel) -> bool:
    """Whether the principal may use a model, by the requested name or by the model's own."""
    return principal.allows_model(name) or principal.allows_model(model.card.model)
