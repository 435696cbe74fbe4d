"""Selection of an adapter by the `model` of a request."""

from contract.messages import WorkerCard
from gateway.auth.principal import Principal
from gateway.dispatch.adapter_book import AdapterBook
from gateway.dispatch.catalogue import Catalogue
from gateway.tenancy.adapters import SEPARATOR, Adapter


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
