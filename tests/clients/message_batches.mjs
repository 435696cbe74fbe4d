// Runs a batch of messages, reads the results, and cancels and deletes batches.
import Anthropic from "@anthropic-ai/sdk";

const { batches } = new Anthropic({ maxRetries: 0 }).messages;
const requests = JSON.parse(process.env.REQUESTS);
const ended = async ({ id }) => {
  for (;;) {
    const batch = await batches.retrieve(id);
    if (batch.processing_status === "ended") return batch;
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
};
const batch = await ended(await batches.create({ requests }));
const results = {};
for await (const each of await batches.results(batch.id)) {
  results[each.custom_id] = each.result.type;
}
const second = await batches.create({ requests });
const cancelled = await batches.cancel(second.id);
const listed = [];
for await (const each of batches.list({ limit: 1 })) listed.push(each.id);
await ended(second);
const deleted = await batches.delete(second.id);
console.log(
  JSON.stringify({
    counts: batch.request_counts,
    results,
    cancelled: cancelled.cancel_initiated_at !== null,
    listed: listed.slice(0, 2).join() === [second.id, batch.id].join(),
    deleted: deleted.id === second.id,
  }),
);
