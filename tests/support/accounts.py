"""Changes of accounts in Redis behind the back of the scripts."""

from typing import Any, Final

from gateway.limits.accounts import FIELD, AccountNumbers

_PLACES: Final = {name: place for place, name in enumerate(AccountNumbers._fields, start=1)}
_PLANT: Final = f"""
local numbers = {{struct.unpack('>dddddddddd', redis.call('HGET', KEYS[1], '{FIELD}'))}}
for i = 1, #ARGV, 2 do
  local place = tonumber(ARGV[i])
  numbers[place] = numbers[place] + ARGV[i + 1]
end
redis.call('HSET', KEYS[1], '{FIELD}', struct.pack('>dddddddddd', unpack(numbers, 1, 10)))
"""


def plant(account: str, **by: int) -> tuple[Any, ...]:
    """Return the command that adds to fields of `AccountNumbers` of an account."""
    pairs = [word for name, number in by.items() for word in (_PLACES[name], number)]
    return "EVAL", _PLANT, 1, account, *pairs
