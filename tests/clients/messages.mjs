// Reads messages with Anthropic's package for Node: for each line with a model's name, prints the
// message that a stream of this model makes, or its error, as a line of JSON.
//
//   node messages.mjs BASE_URL
import { createInterface } from "node:readline";
import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "key", maxRetries: 0 });
for await (const model of createInterface({ input: process.stdin })) {
  let result;
  try {
    const stream = client.messages.stream({ model, max_tokens: 9, messages: [] });
    result = { message: await stream.finalMessage() };
  } catch (error) {
    if (!(error instanceof Anthropic.APIError)) throw error;
    result = { error: error.error };
  }
  process.stdout.write(`${JSON.stringify(result)}\n`);
}
