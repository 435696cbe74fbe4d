"""Upload a file with LiteLLM, run it as a batch, read the results, and cancel another batch."""

import json
import os
import sys
import time

import litellm

to_sluice = {
    "custom_llm_provider": "openai",
    "api_base": os.environ["OPENAI_BASE_URL"],
    "api_key": os.environ["OPENAI_API_KEY"],
}
wanted = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
file = litellm.create_file(
    file=("input.jsonl", os.environ["LINES"].encode()), purpose="batch", **to_sluice
)
batch = litellm.create_batch(input_file_id=file.id, **wanted, **to_sluice)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.2)
    batch = litellm.retrieve_batch(batch_id=batch.id, **to_sluice)
output = litellm.file_content(file_id=batch.output_file_id, **to_sluice).text
second = litellm.create_batch(input_file_id=file.id, **wanted, **to_sluice)
cancelled = litellm.cancel_batch(batch_id=second.id, **to_sluice)
listed = [each.id for each in litellm.list_batches(limit=2, **to_sluice).data]
json.dump(
    {
        "status": batch.status,
        "output": [json.loads(line)["custom_id"] for line in output.splitlines()],
        "cancelled": cancelled.status,
        "listed": listed == [second.id, batch.id],
    },
    sys.stdout,
)
