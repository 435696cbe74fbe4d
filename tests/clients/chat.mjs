// Calls a chat endpoint with OpenAI's client for Node, and prints what that gives as JSON.
//
//   node chat.mjs METHOD BASE_URL KEY < parameters.json
import { text } from "node:stream/consumers";
import OpenAI from "openai";

const [method, baseURL, apiKey] = process.argv.slice(2);
const { completions } = new OpenAI({ baseURL, apiKey, maxRetries: 0 }).chat;
const parameters = JSON.parse(await text(process.stdin));

const methods = {
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
  // The one function that there is gives what stands in `result`.
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
    return { content: await completions.runTools({ ...others, tools: runnable }).finalContent(), given };
  },
};

let told;
try {
  told = { value: await methods[method]() };
} catch (error) {
  if (!(error instanceof OpenAI.APIError)) throw error;
  const { status, code, param, type, message } = error;
  told = { error: { class: error.constructor.name, status, code, param, type, message } };
}
process.stdout.write(JSON.stringify(told));
