"""A model's queue in shards: the difference of service between tenants stays within its bound.

Each shard has some tenants, and orders them by their counters. A leader reads the lowest counter of
every shard now and then, and writes all of them to every shard. A worker that claims from a shard
learns what was written there, and claims from the shard whose lowest counter, as far as it knows,
is lowest. Tenants arrive and leave at random, and workers claim in any order.
"""

import math
from enum import StrEnum
from random import Random
from typing import Final

import pytest

from tests.support.cases import all_cases

SHARDS: Final = 4
WORKERS: Final = 3
WEIGHTS: Final = (0.5, 1.0, 2.0, 4.0)
TENANTS: Final = 12
MOST_COST: Final = 8
"""Service of a job: U of the bound."""
CLAIMS: Final = 15
"""Between two reads of the leader."""
STEPS: Final = 4_000
BOUND: Final = 2 * (MOST_COST + 2 * CLAIMS * MOST_COST) / min(WEIGHTS)
"""2 * (U + 2 * R), where R is the service between two reads."""


class Fault(StrEnum):
    """A mistake in the design."""

    NO_READS = "workers know only the shards from which they claimed"
    NO_FLOOR = "a tenant that arrives at an idle shard keeps its counter"
    IN_TURNS = "workers claim from the shards in turns"


class Pool:
    """Tenants, shards and workers."""

    def __init__(self, random: Random, fault: Fault | None) -> None:
        self._random, self._fault = random, fault
        self._counters = [0.0] * TENANTS
        self.served = [0.0] * TENANTS
        """Service of each tenant divided by its weight."""
        self.waiting: set[int] = set()
        self._floors = [0.0] * SHARDS
        self._known = [[0.0] * SHARDS for _ in range(WORKERS)]
        self._turns = 0

    def toggle(self, tenant: int) -> None:
        """Let a tenant arrive with many jobs, or leave."""
        if tenant in self.waiting:
            self.waiting.remove(tenant)
            return
        shard = tenant % SHARDS
        lowest = self._lowest(shard)
        floor = 0.0 if self._fault is Fault.NO_FLOOR else self._floors[shard]
        entered = floor if lowest == math.inf else lowest
        self._counters[tenant] = max(self._counters[tenant], entered)
        self.waiting.add(tenant)

    def read(self) -> None:
        """Let the leader read all shards, and write what it read."""
        if self._fault is Fault.NO_READS:
            return
        lowest = [self._lowest(shard) for shard in range(SHARDS)]
        busy = [each for each in lowest if each < math.inf]
        if busy:
            self._floors = [max(each, min(busy)) for each in self._floors]
        self._known = [list(lowest) for _ in range(WORKERS)]

    def claim(self) -> None:
        """Let a worker claim a job, from the first shard that has one."""
        known = self._known[self._random.randrange(WORKERS)]
        order = sorted(range(SHARDS), key=lambda shard: (known[shard], shard))
        if self._fault is Fault.IN_TURNS:
            self._turns += 1
            order = [(self._turns + each) % SHARDS for each in range(SHARDS)]
        for shard in order:
            if (lowest := self._lowest(shard)) < math.inf:
                tenant = next(each for each in self._of(shard) if self._counters[each] == lowest)
                service = self._random.randint(1, MOST_COST) / WEIGHTS[tenant % len(WEIGHTS)]
                self._counters[tenant] += service
                self.served[tenant] += service
                known[shard] = self._lowest(shard)
                return
            known[shard] = math.inf

    def _of(self, shard: int) -> list[int]:
        return [each for each in sorted(self.waiting) if each % SHARDS == shard]

    def _lowest(self, shard: int) -> float:
        return min((self._counters[each] for each in self._of(shard)), default=math.inf)


def worst_difference(seed: int, fault: Fault | None) -> float:
    """Return the greatest difference of service between two tenants that wait all the time."""
    random = Random(seed)
    pool = Pool(random, fault)
    since = dict[int, list[float]]()
    """For each waiting tenant, what everybody had been served when it arrived."""
    worst = 0.0
    for step in range(STEPS):
        if step % CLAIMS == 0:
            pool.read()
        if random.random() < 0.01 or not pool.waiting:
            tenant = random.randrange(TENANTS)
            pool.toggle(tenant)
            since.pop(tenant, None)
            if tenant in pool.waiting:
                since[tenant] = list(pool.served)
        pool.claim()
        for one in since:
            for other in since:
                # From the later of both arrivals until now.
                began = max(since[one], since[other], key=sum)
                gained = [pool.served[each] - began[each] for each in (one, other)]
                worst = max(worst, gained[0] - gained[1])
    return worst


@pytest.mark.parametrize("seed", range(2))
def test_difference_stays_within_the_bound(seed: int) -> None:
    assert 0 < worst_difference(seed, None) <= BOUND


@all_cases("fault", Fault)
def test_planted_fault_exceeds_the_bound(fault: Fault) -> None:
    assert any(worst_difference(seed, fault) > BOUND for seed in range(2))
