"""Changes of accounts in Redis behind the back of the scripts."""

from typing import Any, Final

from gateway.limits.counters import AUDIO_FIELD, FIELD, AccountNumbers

_PLACES: Final = {name: place for place, name in enumerate(AccountNumbers._fields, start=1)}
_PLANT: Final = f"""
local numbers = {{struct.unpack('>dddddddddd', redis.call('HGET', KEYS[1], '{FIELD}'))}}
local audio = redis.call('HGET', KEYS[1], '{AUDIO_FIELD}')
local day, settled, held = numbers[1], 0, 0
if audio then day, settled, held = struct.unpack('>ddd', audio) end
numbers[11], numbers[12] = settled, held
for i = 1, #ARGV, 2 do
  local place = tonumber(ARGV[i])
  numbers[place] = numbers[place] + ARGV[i + 1]
end
redis.call('HSET', KEYS[1], '{FIELD}', struct.pack('>dddddddddd', unpack(numbers, 1, 10)),
  '{AUDIO_FIELD}', struct.pack('>ddd', day, numbers[11], numbers[12]))
"""


def plant(account: str, **by: int) -> tuple[Any, ...]:
    """Return the command that adds to fields of `AccountNumbers` of an account."""
    pairs = [word for name, number in by.items() for word in (_PLACES[name], number)]
    return "EVAL", _PLANT, 1, account, *pairs
