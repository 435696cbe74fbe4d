// Calls a chat endpoint with the openai package for Node: reads a JSON array in each line, and
// prints the result of that call as a line of JSON.
//
//   [METHOD, BASE_URL, KEY, PARAMETERS]
import { createInterface } from "node:readline";
import OpenAI from "openai";

const methodsOf = (completions, parameters) => ({
  create: () => completions.create(parameters),
  parse: () => completions.parse(parameters),
  async chunks() {
    const chunks = [];
    for await (const chunk of await completions.create({ ...parameters, stream: true })) {
      chunks.push(chunk);
    }
    return chunks;
  },
  async stream() {
    const content = [];
    const stream = completions.stream(parameters).on("content", (piece) => content.push(piece));
    return { content: content, completion: await stream.finalChatCompletion() };
  },
  // The only function returns `result`.
  async runTools() {
    const { tools, result, ...others } = parameters;
    const given = [];
    const run = (call) => {
      given.push(call);
      return result;
    };
    const runnable = tools.map((tool) => ({
      ...tool,
      function: { ...tool.function, function: run, parse: JSON.parse },
    }));
    const runner = completions.runTools({ ...others, tools: runnable });
    return { content: await runner.finalContent(), given };
  },
});

for await (const line of createInterface({ input: process.stdin })) {
  const [method, baseURL, apiKey, parameters] = JSON.parse(line);
  const { completions } = new OpenAI({ baseURL, apiKey, maxRetries: 0 }).chat;
  let result;
  try {
    result = { value: await methodsOf(completions, parameters)[method]() };
  } catch (error) {
    if (!(error instanceof OpenAI.APIError)) throw error;
    const { status, code, param, type, message } = error;
    result = { error: { class: error.constructor.name, status, code, param, type, message } };
  }
  process.stdout.write(`${JSON.stringify(result)}\n`);
}
