// Calls a chat endpoint with the Vercel AI SDK, and prints the results as JSON. With
// OPENAI_BASE_URL and OPENAI_API_KEY: vercel_calls.mjs MODEL
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const { OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const sluice = createOpenAICompatible({
  name: "sluice",
  baseURL,
  apiKey,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const stream = (options) =>
  streamText({
    model: sluice(process.argv[2]),
    prompt: "What is the capital of Italy?",
    temperature: 0,
    maxRetries: 0,
    onError: () => {}, // The parts of the stream have the error.
    ...options,
  });

async function partsOf(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

async function errorOf(options) {
  const part = (await partsOf(stream(options).fullStream)).find(({ type }) => type === "error");
  const { statusCode, message, isRetryable } = part.error;
  return { isCallError: APICallError.isInstance(part.error), statusCode, message, isRetryable };
}

const weather = tool({
  description: "Get the weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: () => '{"degrees": 21}',
});
const question = { prompt: "What is the weather in Paris?", tools: { get_weather: weather } };
const steps = await stream({ ...question, stopWhen: isStepCount(2) }).steps;

// By default, the provider refers to text that earlier responses have.
const sent = [];
const noting = (url, request) => {
  sent.push(JSON.parse(request.body).input.map(({ type, role }) => type ?? role));
  return fetch(url, request);
};
const openai = createOpenAI({ baseURL, apiKey, fetch: noting })(process.argv[2]);
const kept = await stream({ ...question, model: openai, stopWhen: isStepCount(2) }).steps;
const user = (content) => ({ role: "user", content });
const turns = [question.prompt, "And now?"].map(user);
turns.splice(1, 0, ...kept.flatMap(({ response }) => response.messages));
const next = await stream({ prompt: turns, model: openai }).text;

const schema = z.object({ city: z.enum(["Oslo", "Rome"]), warm: z.boolean() });
const objects = stream({ output: Output.object({ schema }) });

const thinking = { sluice: { chat_template_kwargs: { enable_thinking: true } } };
const thought = stream({ providerOptions: thinking, maxOutputTokens: 100 });

console.log(
  JSON.stringify({
    steps: steps.map(({ finishReason, toolCalls, text, usage }) => ({
      finishReason,
      inputs: toolCalls.map(({ input }) => input),
      text,
      tokens: usage.outputTokens,
    })),
    kept: kept.map(({ finishReason, text }) => ({ finishReason, text })),
    sent,
    next,
    partial: await partsOf(objects.partialOutputStream),
    reasoning: await thought.reasoningText,
    answer: await thought.text,
    reasoningTokens: (await thought.usage).outputTokenDetails.reasoningTokens,
    errors: [await errorOf({ temperature: 3 }), await errorOf({ model: sluice("another") })],
  }),
);
