// Transcribes a file as JSON, with times of segments, and as a stream.
import { createReadStream } from "node:fs";

import OpenAI from "openai";

const openai = new OpenAI({ maxRetries: 0 });
const { MODEL: model, FILE } = process.env;
const ask = (more) =>
  openai.audio.transcriptions.create({ model, file: createReadStream(FILE), ...more });
const whole = await ask({});
const verbose = await ask({ response_format: "verbose_json" });
const events = [];
for await (const event of await ask({ stream: true })) events.push(event);
console.log(JSON.stringify({ whole, verbose, events }));
