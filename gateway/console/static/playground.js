// Sends the form of the playground and shows the answers as they arrive.
"use strict";

const form = document.getElementById("playground");
const facts = document.getElementById("facts");
const problem = document.getElementById("problem");
const talk = document.getElementById("talk");
const stop = document.getElementById("stop");
const send = document.getElementById("send");

const CHAT = "chat/completions", TEXT = "completions", MESSAGES = "messages", RESPONSES = "responses";

let messages = []; // The conversation so far, in the form of chats, without the system message.
let running = null; // The AbortController of the request in progress.
let last = null; // The endpoint and body of the request that was last sent.

const value = (name) => form.elements[name].value;
const isChat = () => value("endpoint") !== TEXT;

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function parsed(name, label, kind) {
  const text = value(name).trim();
  if (!text) return undefined;
  let data;
  try {
    data = JSON.parse(text);
  } catch (error) {
    throw new Error(`${label}: ${error.message}`);
  }
  if (kind === "list" ? !Array.isArray(data) : typeof data !== "object" || data === null || Array.isArray(data)) {
    throw new Error(`${label}: must be a JSON ${kind}.`);
  }
  return data;
}

// One conversation in the forms of the endpoints.
const SHAPES = {
  [TEXT]: (request, { prompt }) => ({ ...request, prompt }),
  [CHAT]: (request, { system, said }) =>
    ({ ...request, messages: [...(system ? [{ role: "system", content: system }] : []), ...said] }),
  [MESSAGES]: ({ stop: stops, stream_options: _, tools, ...request }, { system, said }) => {
    const turns = [];
    for (const each of said) {
      const content = each.role === "tool"
        ? [{ type: "tool_result", tool_use_id: each.tool_call_id, content: each.content }]
        : [...(each.content ? [{ type: "text", text: each.content }] : []),
          ...(each.tool_calls || []).map((call) => ({
            type: "tool_use", id: call.id, name: call.function.name,
            input: JSON.parse(call.function.arguments || "{}"),
          }))];
      const role = each.role === "assistant" ? "assistant" : "user";
      if (turns.at(-1)?.role === role) turns.at(-1).content.push(...content);
      else turns.push({ role, content });
    }
    return {
      ...request, ...(system && { system }), messages: turns, ...(stops && { stop_sequences: stops }),
      ...(tools && { tools: tools.map(({ function: each }) =>
        ({ name: each.name, description: each.description, input_schema: each.parameters })) }),
    };
  },
  [RESPONSES]: ({ max_tokens, stream_options: _, response_format: shape, tools, ...request }, { system, said }) => ({
    ...request, store: false, ...(system && { instructions: system }),
    ...(max_tokens && { max_output_tokens: max_tokens }),
    input: said.flatMap((each) => each.role === "tool"
      ? [{ type: "function_call_output", call_id: each.tool_call_id, output: each.content }]
      : [...(each.content ? [{ role: each.role, content: each.content }] : []),
        ...(each.tool_calls || []).map((call) => ({
          type: "function_call", call_id: call.id, name: call.function.name, arguments: call.function.arguments,
        }))]),
    ...(tools && { tools: tools.map(({ function: each }) => ({ type: "function", ...each })) }),
    ...(shape && { text: { format: { type: "json_schema", ...shape.json_schema } } }),
  }),
};

function body(said = [...messages, { role: "user", content: value("prompt") }]) {
  const endpoint = value("endpoint"), request = { model: value("model") };
  for (const input of form.querySelectorAll("[data-number]")) {
    if (input.value !== "") request[input.name] = Number(input.value);
  }
  const stops = value("stop").split("\n").filter((line) => line);
  if (stops.length) request.stop = stops;
  if (form.elements.logprobs.checked) {
    if (endpoint === TEXT) request.logprobs = 5;
    if (endpoint === CHAT) Object.assign(request, { logprobs: true, top_logprobs: 5 });
  }
  const schema = parsed("schema", "JSON schema", "object");
  if (schema) request.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = isChat() ? parsed("tools", "Tools", "list") : undefined;
  if (tools) request.tools = tools;
  if (form.elements.stream.checked) {
    request.stream = true;
    request.stream_options = { include_usage: true };
  }
  const shaped = SHAPES[endpoint](request, { system: value("system").trim(), prompt: value("prompt"), said });
  return Object.assign(shaped, parsed("others", "Other parameters", "object"));
}

function post(action, endpoint, request, signal) {
  return fetch(`/console/playground/${endpoint}${action}`, {
    method: "POST",
    headers: {
      "Accept": "application/json",
      "Content-Type": "application/json",
      "X-Csrf-Token": form.dataset.csrf,
      "X-Api-Dialect": "openai",
      "X-Include-Cost": "true",
    },
    body: JSON.stringify(request),
    redirect: "error",
    signal,
  });
}

function complain(text) {
  problem.textContent = text;
  problem.className = text ? "problem" : "";
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway responded with status ${response.status}.`;
  }
}

// What one choice has said so far, and its elements.
class Choice {
  constructor(place, number) {
    this.text = "";
    this.calls = [];
    this.output = make("div", { className: "output assistant", tabIndex: 0, role: "region" });
    this.output.setAttribute("aria-label", `Answer ${number + 1}`);
    this.reasoning = make("div", { className: "output" });
    this.panel = make("details", { className: "hidden" }, make("summary", { textContent: "Reasoning" }), this.reasoning);
    this.called = make("div");
    this.readout = make("p", { className: "readout muted hidden" });
    this.readout.setAttribute("aria-live", "polite");
    this.finish = make("p", { className: "muted finish" });
    place.append(make("section", { className: "choice" }, this.panel, this.output, this.readout, this.called, this.finish));
    this.output.addEventListener("click", (event) => this.read(event.target));
    this.output.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      const tokens = [...this.output.children];
      if (!step || !tokens.length) return;
      event.preventDefault();
      const at = tokens.findIndex((each) => each.classList.contains("read"));
      this.read(tokens[Math.min(Math.max(at + step, 0), tokens.length - 1)]);
    });
  }

  say(text) {
    this.text += text;
    this.output.append(text);
  }

  think(text) {
    this.panel.classList.remove("hidden");
    this.reasoning.append(text);
  }

  // A token in one of five classes, from surprising to certain.
  token(text, logprob, top) {
    const share = Math.exp(logprob ?? 0);
    const span = make("span", { className: `token p${Math.min(4, Math.floor(share * 5))}`, textContent: text });
    span.top = top;
    this.text += text;
    this.output.append(span);
  }

  read(span) {
    if (!span?.top) return;
    this.output.querySelector(".read")?.classList.remove("read");
    span.classList.add("read");
    this.readout.classList.remove("hidden");
    this.readout.textContent = span.top.map(([text, logprob]) =>
      `${JSON.stringify(text)} ${(100 * Math.exp(logprob)).toFixed(1)} %`).join(", ");
  }

  call(index, { id, name, text }) {
    const call = (this.calls[index] ||= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (id) call.id = id;
    if (name) call.function.name = name;
    if (text) call.function.arguments += text;
    this.called.replaceChildren(...this.calls.filter((each) => each).map((each) =>
      make("pre", { className: "call", textContent: `${each.function.name}(${each.function.arguments})` })));
  }

  end(reason) {
    if (reason) this.finish.textContent = `Finish reason: ${reason}`;
  }
}

// Readers of the parts of an answer: events of a stream, or the one body.
function readChoice(choice, shown) {
  const part = choice.delta || choice.message || choice, found = choice.logprobs;
  const thought = part.reasoning_content ?? part.reasoning;
  if (thought) shown.think(thought);
  if (found?.content) {
    for (const each of found.content) shown.token(each.token, each.logprob, each.top_logprobs.map((top) => [top.token, top.logprob]));
  } else if (found?.tokens) {
    found.tokens.forEach((token, index) => shown.token(token, found.token_logprobs[index], Object.entries(found.top_logprobs?.[index] || {})));
  } else if (part.content ?? part.text) {
    shown.say(part.content ?? part.text);
  }
  (part.tool_calls || []).forEach((call, index) =>
    shown.call(call.index ?? index, { id: call.id, name: call.function.name, text: call.function.arguments }));
  shown.end(choice.finish_reason);
}

function readBlock(block, index, shown) {
  if (block.type === "text") shown.say(block.text);
  if (block.type === "thinking") shown.think(block.thinking);
  if (block.type === "tool_use") {
    const given = Object.keys(block.input || {}).length ? JSON.stringify(block.input) : "";
    shown.call(index, { id: block.id, name: block.name, text: given });
  }
}

function readItem(item, index, shown) {
  if (item.type === "message") for (const each of item.content) shown.say(each.text ?? each.refusal ?? "");
  if (item.type === "reasoning") for (const each of item.content || item.summary || []) shown.think(each.text);
  if (item.type === "function_call") shown.call(index, { id: item.call_id, name: item.name, text: item.arguments });
}

const READERS = {
  [TEXT]: (part, choice) => (part.choices || []).forEach((each) => readChoice(each, choice(each.index))),
  [MESSAGES]: (part, choice, answer) => {
    const shown = choice(0), delta = part.delta || {};
    Object.assign(answer, { id: part.message?.id || part.id || answer.id });
    answer.usage = { ...answer.usage, ...part.message?.usage, ...part.usage };
    if (part.content) part.content.forEach((block, index) => readBlock(block, index, shown));
    if (part.content_block) readBlock(part.content_block, part.index, shown);
    if (delta.text) shown.say(delta.text);
    if (delta.thinking) shown.think(delta.thinking);
    if (delta.partial_json) shown.call(part.index, { text: delta.partial_json });
    shown.end(part.stop_reason || delta.stop_reason);
  },
  [RESPONSES]: (part, choice, answer) => {
    const shown = choice(0), whole = part.response || (part.output && part);
    if (whole) {
      Object.assign(answer, { id: whole.id, usage: whole.usage || answer.usage });
      if (whole.status !== "in_progress" && whole.status !== "queued") shown.end(whole.incomplete_details?.reason || whole.status);
      if (whole.error) throw new Error(whole.error.message);
    }
    if (part.output) part.output.forEach((item, index) => readItem(item, index, shown));
    if (part.type === "response.output_text.delta") shown.say(part.delta);
    if (/^response\.reasoning\w*\.delta$/.test(part.type)) shown.think(part.delta);
    if (part.type === "response.output_item.done" && part.item.type === "function_call") readItem(part.item, part.output_index, shown);
  },
};
READERS[CHAT] = READERS[TEXT];

function report(answer, began, firstAt) {
  const times = [];
  if (firstAt) times.push(`first token after ${Math.round(firstAt - began)} ms`);
  times.push(`${Math.round(performance.now() - began)} ms in all`);
  const usage = answer.usage, given = usage?.prompt_tokens ?? usage?.input_tokens;
  facts.textContent = (usage
    ? `${given} tokens in, ${usage.completion_tokens ?? usage.output_tokens} out; ` : "") + times.join(", ") + ". ";
  if (typeof usage?.cost === "number") facts.append(`$${usage.cost}. `);
  if (answer.id) facts.append(make("a", { href: `/console/requests/${encodeURIComponent(answer.id)}`, textContent: "Receipt" }));
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value: part, done } = await reader.read();
    if (done) return;
    const blocks = (rest + part).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data: "))
        .map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// Runs a request and shows its choices in a place; returns them.
async function run({ endpoint, request }, place, signal) {
  const began = performance.now(), answer = {}, choices = [];
  const response = await post("", endpoint, request, signal);
  if (!response.ok) throw new Error(await failure(response));
  const isStream = (response.headers.get("content-type") || "").startsWith("text/event-stream");
  const choice = (index) => (choices[index] ||= new Choice(place, index));
  let firstAt = 0;
  for await (const part of isStream ? events(response) : [await response.json()]) {
    if (part.error && !part.output) throw new Error(part.error.message);
    answer.id = part.id || answer.id;
    answer.usage = part.usage || answer.usage;
    READERS[endpoint](part, choice, answer);
    if (!firstAt && isStream && choices.some((each) => each.text || each.calls.length)) firstAt = performance.now();
  }
  report(answer, began, firstAt);
  return choices;
}

// The fields for the results of calls, and the button that sends them.
function askForResults(place, calls) {
  const fields = calls.map((call, index) => {
    const id = `result-${talk.children.length}-${index}`;
    const label = make("label", { htmlFor: id, textContent: `Result of ${call.function.name}` });
    return make("div", { className: "field" }, label, make("textarea", { id, className: "short" }));
  });
  const button = make("button", { type: "button", textContent: "Send the results" });
  button.addEventListener("click", () => {
    const results = calls.map((call, index) => ({
      role: "tool", tool_call_id: call.id, content: fields[index].querySelector("textarea").value,
    }));
    converse(results, () => button.remove());
  });
  place.append(...fields, button);
}

// Sends messages after the conversation; they and the answer become part of it if it ends well.
async function converse(added, sent) {
  if (running) return;
  complain("");
  facts.textContent = "";
  let place;
  try {
    const said = [...messages, ...added], endpoint = value("endpoint");
    last = { endpoint, request: body(said) };
    place = make("article", {}, ...added.map((each) => make("p", { className: "user", textContent: each.content })));
    talk.append(place);
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    const [first] = await run(last, place, running.signal);
    if (endpoint !== TEXT && first) {
      const calls = first.calls.filter((each) => each);
      messages = [...said, { role: "assistant", content: first.text, ...(calls.length && { tool_calls: calls }) }];
      if (calls.length) askForResults(place, calls);
      sent();
    }
  } catch (error) {
    if (error.name === "AbortError") facts.textContent = "Stopped.";
    else complain(error.message);
    if (place && !place.querySelector(".choice")) place.remove();
  } finally {
    running = null;
    send.disabled = false;
    stop.disabled = true;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = value("prompt");
  converse([{ role: "user", content: prompt }], () => {
    // What was typed meanwhile stays.
    if (value("prompt") === prompt) form.elements.prompt.value = "";
  });
});

form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

stop.addEventListener("click", () => running?.abort());

document.getElementById("clear").addEventListener("click", () => {
  messages = [];
  talk.replaceChildren();
});

document.getElementById("estimate").addEventListener("click", async () => {
  complain("");
  try {
    const response = await post(":estimate", value("endpoint"), body());
    if (!response.ok) throw new Error(await failure(response));
    const found = await response.json();
    const dollars = (micros) => `$${(micros / 1e6).toFixed(6)}`;
    facts.textContent = `${found.prompt_tokens} tokens in, at most ${found.completion_tokens_max} out: ` +
      `${dollars(found.cost.prompt_micros)} to ${dollars(found.cost.max_micros)}.`;
  } catch (error) {
    complain(error.message);
  }
});

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

// JSON as a literal of Python.
function python(data, indent = "") {
  if (data === null) return "None";
  if (typeof data === "boolean") return data ? "True" : "False";
  if (typeof data !== "object") return JSON.stringify(data);
  const inner = `${indent}    `;
  const entries = Array.isArray(data)
    ? data.map((each) => python(each, inner))
    : Object.entries(data).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, inner)}`);
  const [open, close] = Array.isArray(data) ? "[]" : "{}";
  return entries.length ? `${open}\n${entries.map((entry) => `${inner}${entry},\n`).join("")}${indent}${close}` : open + close;
}

// The method of the vendor's client for each endpoint; the parameters that only Sluice has go beside.
const METHODS = { [TEXT]: "completions", [CHAT]: "chat.completions", [MESSAGES]: "messages", [RESPONSES]: "responses" };
const EXTRA = ["top_k", "min_p", "repetition_penalty"];

const WRITERS = {
  curl: (endpoint, request) =>
    `curl ${quoted(`${form.dataset.url}/${endpoint}`)} \\\n` +
    `  -H "Authorization: Bearer $SLUICE_KEY" \\\n  -H "Content-Type: application/json" \\\n` +
    `  -d ${quoted(JSON.stringify(request))}`,
  python: (endpoint, { stream, stream_options: _, ...request }) => {
    const isOpenAi = endpoint !== MESSAGES, name = isOpenAi ? "OpenAI" : "Anthropic";
    const own = EXTRA.filter((each) => each in request && (isOpenAi || each !== "top_k"));
    const extra = Object.fromEntries(own.map((each) => [each, request[each]]));
    const known = Object.fromEntries(Object.entries(request).filter(([each]) => !own.includes(each)));
    const url = isOpenAi ? form.dataset.url : form.dataset.url.replace(/\/v1$/, "");
    return `# pip install ${name.toLowerCase()}\nimport os\n\nfrom ${name.toLowerCase()} import ${name}\n\n` +
      `client = ${name}(base_url=${JSON.stringify(url)}, api_key=os.environ["SLUICE_KEY"])\n` +
      `answer = client.${METHODS[endpoint]}.create(\n    **${python(known, "    ")},\n` +
      (own.length ? `    extra_body=${python(extra, "    ")},\n` : "") + `)\nprint(answer.to_json())`;
  },
  node: (endpoint, { stream, stream_options: _, ...request }) => {
    const isOpenAi = endpoint !== MESSAGES, name = isOpenAi ? "OpenAI" : "Anthropic";
    const url = isOpenAi ? form.dataset.url : form.dataset.url.replace(/\/v1$/, "");
    return `// npm install ${isOpenAi ? "openai" : "@anthropic-ai/sdk"}\nimport ${name} from "${isOpenAi ? "openai" : "@anthropic-ai/sdk"}";\n\n` +
      `const client = new ${name}({\n  baseURL: ${JSON.stringify(url)},\n  apiKey: process.env.SLUICE_KEY,\n});\n` +
      `const answer = await client.${METHODS[endpoint]}.create(${JSON.stringify(request, null, 2)});\nconsole.log(answer);`;
  },
};

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    complain("");
    try {
      const { endpoint, request } = last || { endpoint: value("endpoint"), request: body() };
      const text = WRITERS[button.dataset.copy](endpoint, request);
      document.getElementById("code").textContent = text;
      await navigator.clipboard?.writeText(text).catch(() => {});
    } catch (error) {
      complain(error.message);
    }
  });
}

function adapt() {
  for (const element of form.querySelectorAll(".chat-only")) {
    element.classList.toggle("hidden", !isChat());
  }
}
form.elements.endpoint.append(new Option("Messages", MESSAGES), new Option("Response", RESPONSES));
for (const element of form.querySelectorAll(".hidden:not(.chat-only)")) element.classList.remove("hidden");
form.elements.endpoint.addEventListener("change", adapt);
adapt();
