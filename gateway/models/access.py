"""What the name of a model stands for, among the things that a caller may use."""

from contract.messages import WorkerCard
from gateway.models.alias_and_adapter_caches import AdapterBook, AliasBook
from gateway.models.catalogue import Catalogue, ServedModel
from gateway.records.adapters import SEPARATOR, Adapter
from gateway.records.aliases import Alias
from gateway.records.errors import ModelNotFoundError
from gateway.records.principal import Principal


def find_adapter(
    catalogue: Catalogue, adapters: AdapterBook, principal: Principal, name: str
) -> Adapter | None:
    """Return the adapter that a name selects: its own name, or its base model's name before it.

    None if there is none that the principal may use.
    """
    base, separator, own_name = name.rpartition(SEPARATOR)
    adapter = adapters.find(principal.tenant_id, own_name)
    if adapter is None or not allows_adapter(principal, adapter):
        return None
    if separator:
        model = catalogue.known(base)
        if (base if model is None else model.card.model) != adapter.base_model:
            return None
    return adapter


def allows_adapter(principal: Principal, adapter: Adapter) -> bool:
    """Whether the credential may use and see an adapter: its list of models has one of its names.

    A base model in the list allows none of its adapters.
    """
    return principal.allows_model(adapter.name) or principal.allows_model(adapter.full_name)


def is_runnable(adapter: Adapter, card: WorkerCard) -> bool:
    """Whether the workers of its base model, which announce `card`, can run an adapter."""
    support = card.adapters
    return support is not None and support.max_rank >= adapter.rank


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
    found = find_adapter(catalogue, adapters, principal, name)
    return found or aliases.matching(name, principal.allows_model)


def allows_served(principal: Principal, name: str, model: ServedModel) -> bool:
    """Whether the principal may use a model, by the requested name or by the model's own."""
    return principal.allows_model(name) or principal.allows_model(model.card.model)
