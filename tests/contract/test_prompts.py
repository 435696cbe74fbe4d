"""Token ids of prompts on the wire, between this release and others."""

import msgspec
import pytest

from contract.messages import decode_job, encode_job
from contract.prompts import decode_ids, encode_ids, packed
from tests.contract.test_queue import job
from tests.support.cases import all_cases

EDGES = [0, 1, 127, 128, 255, 256, 0xCE, 0xCECECECE, 65_535, 65_536, 2**31, 2**32 - 1]


@all_cases("token_ids", [[], [0], EDGES, EDGES * 2_000])
def test_prompt_is_an_array_that_other_releases_read_and_write(token_ids: list[int]) -> None:
    encoded = encode_ids(packed(token_ids))
    assert msgspec.msgpack.decode(encoded, type=list[int]) == token_ids
    written = msgspec.Raw(msgspec.msgpack.encode(token_ids))
    assert decode_ids(encoded) == decode_ids(written) == packed(token_ids)


@all_cases("prompt", [[-1], [2**32], [1, -5, 2], ["a"], None, b"\1\0\0\0", {}, 7])
def test_job_whose_prompt_has_no_token_ids_cannot_be_decoded(prompt: object) -> None:
    fields = msgspec.msgpack.decode(encode_job(job("j1")))
    encoded = msgspec.msgpack.encode(fields | {"prompt_token_ids": prompt})
    with pytest.raises(msgspec.MsgspecError):
        decode_job(encoded)
