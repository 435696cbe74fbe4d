// Uploads a file, runs it as a batch, reads the results, and cancels another batch.
import OpenAI, { toFile } from "openai";

const openai = new OpenAI({ maxRetries: 0 });
const content = process.env.LINES;
const file = await openai.files.create({
  file: await toFile(Buffer.from(content), "input.jsonl"),
  purpose: "batch",
});
const wanted = { endpoint: "/v1/chat/completions", completion_window: "24h" };
let batch = await openai.batches.create({ input_file_id: file.id, ...wanted });
while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
  await new Promise((resolve) => setTimeout(resolve, 200));
  batch = await openai.batches.retrieve(batch.id);
}
const output = await (await openai.files.content(batch.output_file_id)).text();
const second = await openai.batches.create({ input_file_id: file.id, ...wanted });
const cancelled = await openai.batches.cancel(second.id);
const listed = [];
for await (const each of openai.batches.list({ limit: 1 })) listed.push(each.id);
console.log(
  JSON.stringify({
    status: batch.status,
    output: output.trim().split("\n").map((line) => JSON.parse(line).custom_id),
    cancelled: cancelled.status,
    listed: listed.slice(0, 2).join() === [second.id, batch.id].join(),
  }),
);
