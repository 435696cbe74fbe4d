// A loop of two steps with a tool by each client, at its defaults; prints the results as JSON. With
// OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY: tool_loops.mjs MODEL
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { isStepCount, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const model = process.argv[2];
const { ANTHROPIC_BASE_URL } = process.env;
const prompt = "What is the weather in Paris?";
const messages = [{ role: "user", content: prompt }];
const name = "get_weather";
const description = "Get the weather in a city";
const inputSchema = z.object({ city: z.string() });
const parameters = z.toJSONSchema(inputSchema);
const given = [];
const execute = ({ city }) => {
  given.push(city);
  return `21 degrees in ${city}`;
};

async function vercel(provider) {
  const errors = [];
  const { text } = streamText({
    model: provider(model),
    prompt,
    tools: { [name]: tool({ description, inputSchema, execute }) },
    stopWhen: isStepCount(2),
    onError: ({ error }) => errors.push(error),
  });
  const answer = await text.catch(() => "");
  return errors.length ? String(errors[0]) : answer;
}

const loops = {
  async "openai runTools"() {
    const callable = { name, description, parameters, parse: JSON.parse, function: execute };
    const tools = [{ type: "function", function: callable }];
    const asked = { model, messages, tools, stream: true };
    return new OpenAI().chat.completions.runTools(asked).finalContent();
  },
  async "openai responses"() {
    const client = new OpenAI();
    const tools = [{ type: "function", name, description, parameters }];
    const input = [...messages];
    for (;;) {
      const response = await client.responses.stream({ model, input, tools }).finalResponse();
      const calls = response.output.filter(({ type }) => type === "function_call");
      if (!calls.length) return response.output_text;
      input.push(...response.output);
      for (const { call_id, arguments: text } of calls) {
        input.push({ type: "function_call_output", call_id, output: execute(JSON.parse(text)) });
      }
    }
  },
  async "anthropic toolRunner"() {
    const tools = [betaZodTool({ name, description, inputSchema, run: execute })];
    const asked = { model, max_tokens: 100, messages, tools, stream: true };
    let last;
    for await (const stream of new Anthropic().beta.messages.toolRunner(asked)) {
      last = await stream.finalMessage();
    }
    return last.content.at(-1).text;
  },
  "ai anthropic": () => vercel(createAnthropic({ baseURL: `${ANTHROPIC_BASE_URL}/v1` })),
  "ai openai": () => vercel(createOpenAI()),
  "ai openai chat": () => vercel(createOpenAI().chat),
};

const reported = {};
for (const [client, loop] of Object.entries(loops)) {
  given.length = 0;
  const answer = await loop().catch(String);
  reported[client] = { given: [...given], answer };
}
console.log(JSON.stringify(reported));
