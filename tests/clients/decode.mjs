// Decode the parts of a stream, given as JSON, with openai-node and with eventsource-parser.
import { readFileSync } from "node:fs";

import { createParser } from "eventsource-parser";
import { _iterSSEMessages } from "openai/core/streaming";

const parts = JSON.parse(readFileSync(0, "utf8"));
const body = new ReadableStream({
  start(controller) {
    for (const part of parts) controller.enqueue(new TextEncoder().encode(part));
    controller.close();
  },
});
const openai = [];
for await (const { data } of _iterSSEMessages(new Response(body), new AbortController())) {
  openai.push(data);
}
const parsed = [];
const parser = createParser({ onEvent: ({ data }) => parsed.push(data) });
for (const part of parts) parser.feed(part);
console.log(JSON.stringify([openai, parsed]));
