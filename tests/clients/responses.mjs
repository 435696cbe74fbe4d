// Read streams of Responses, given as JSON, with openai-node; print the final response of each.
import { readFileSync } from "node:fs";

import OpenAI from "openai";

const read = [];
for (const body of JSON.parse(readFileSync(0, "utf8"))) {
  const headers = { "content-type": "text/event-stream" };
  const fetch = async () => new Response(body, { headers });
  const client = new OpenAI({ apiKey: "k", baseURL: "http://localhost", fetch, maxRetries: 0 });
  read.push(await client.responses.stream({ model: "m", input: "a" }).finalResponse());
}
console.log(JSON.stringify(read));
