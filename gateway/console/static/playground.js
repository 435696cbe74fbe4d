// Sends the form of the playground and shows the answer as it arrives.
"use strict";

const form = document.getElementById("playground");
const output = document.getElementById("output");
const facts = document.getElementById("facts");
const problem = document.getElementById("problem");
const talk = document.getElementById("talk");
const stop = document.getElementById("stop");
const send = document.getElementById("send");

let messages = []; // The conversation so far, without the system message.
let running = null; // The AbortController of the request in progress.

const value = (name) => form.elements[name].value;
const isChat = () => value("endpoint") === "chat/completions";

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

function body() {
  const request = { model: value("model") };
  if (isChat()) {
    const system = value("system").trim();
    request.messages = [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages,
      { role: "user", content: value("prompt") },
    ];
  } else {
    request.prompt = value("prompt");
  }
  for (const input of form.querySelectorAll("[data-number]")) {
    if (input.value !== "") request[input.name] = Number(input.value);
  }
  const stops = value("stop").split("\n").filter((line) => line);
  if (stops.length) request.stop = stops;
  if (form.elements.logprobs.checked) {
    Object.assign(request, isChat() ? { logprobs: true, top_logprobs: 5 } : { logprobs: 5 });
  }
  const schema = parsed("schema", "JSON schema", "object");
  if (schema) request.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = isChat() ? parsed("tools", "Tools", "list") : undefined;
  if (tools) request.tools = tools;
  if (form.elements.stream.checked) {
    request.stream = true;
    request.stream_options = { include_usage: true };
  }
  return Object.assign(request, parsed("others", "Other parameters", "object"));
}

function post(action, request, signal) {
  return fetch(`/console/playground/${value("endpoint")}${action}`, {
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

// Five classes, from surprising to certain.
function tokenElement(text, logprob) {
  const span = document.createElement("span");
  const share = Math.exp(logprob);
  span.className = `token p${Math.min(4, Math.floor(share * 5))}`;
  span.title = `${(100 * share).toFixed(1)} %`;
  span.textContent = text;
  return span;
}

function show(choice) {
  const part = choice.delta || choice.message || choice;
  const text = part.content ?? part.text ?? "";
  const probabilities = choice.logprobs;
  if (probabilities?.content) {
    for (const each of probabilities.content) output.append(tokenElement(each.token, each.logprob));
  } else if (probabilities?.tokens) {
    probabilities.tokens.forEach((token, index) =>
      output.append(tokenElement(token, probabilities.token_logprobs[index])));
  } else if (text) {
    output.append(text);
  }
  for (const call of part.tool_calls || []) {
    output.append((call.function.name ? `\n${call.function.name} ` : "") + (call.function.arguments || ""));
  }
  return text;
}

function report(answer, began, firstAt) {
  const times = [];
  if (firstAt) times.push(`first token after ${Math.round(firstAt - began)} ms`);
  times.push(`${Math.round(performance.now() - began)} ms in all`);
  const usage = answer.usage;
  facts.textContent = (usage
    ? `${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out; ` : "") + times.join(", ") + ". ";
  if (typeof usage?.cost === "number") facts.append(`$${usage.cost}. `);
  if (answer.id) {
    const link = document.createElement("a");
    link.href = `/console/requests/${encodeURIComponent(answer.id)}`;
    link.textContent = "Receipt";
    facts.append(link);
  }
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

async function run(request, signal) {
  const began = performance.now();
  const response = await post("", request, signal);
  if (!response.ok) throw new Error(await failure(response));
  let text = "", firstAt = 0;
  const answer = {};
  const isStream = (response.headers.get("content-type") || "").startsWith("text/event-stream");
  const parts = isStream ? events(response) : [await response.json()];
  for await (const part of parts) {
    if (part.error) throw new Error(part.error.message);
    answer.id = part.id || answer.id;
    answer.usage = part.usage || answer.usage;
    for (const choice of part.choices || []) {
      if (choice.index) continue;
      if (!firstAt && isStream) firstAt = performance.now();
      text += show(choice);
    }
  }
  report(answer, began, firstAt);
  return text;
}

function say(role, content) {
  messages.push({ role, content });
  const line = document.createElement("p");
  line.className = role;
  line.textContent = content;
  talk.append(line);
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  complain("");
  output.replaceChildren();
  facts.textContent = "";
  running = new AbortController();
  send.disabled = true;
  stop.disabled = false;
  try {
    const request = body();
    const text = await run(request, running.signal);
    if (isChat()) {
      say("user", value("prompt"));
      say("assistant", text);
      form.elements.prompt.value = "";
    }
  } catch (error) {
    if (error.name === "AbortError") facts.textContent = "Stopped.";
    else complain(error.message);
  } finally {
    running = null;
    send.disabled = false;
    stop.disabled = true;
  }
});

stop.addEventListener("click", () => running?.abort());

document.getElementById("clear").addEventListener("click", () => {
  messages = [];
  talk.replaceChildren();
});

document.getElementById("estimate").addEventListener("click", async () => {
  complain("");
  try {
    const response = await post(":estimate", body());
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
function python(data, indent = "    ") {
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

const WRITERS = {
  curl: (request) =>
    `curl ${quoted(`${form.dataset.url}/${value("endpoint")}`)} \\\n` +
    `  -H "Authorization: Bearer $SLUICE_KEY" \\\n  -H "Content-Type: application/json" \\\n` +
    `  -d ${quoted(JSON.stringify(request))}`,
  python: (request) => {
    const { stream, stream_options: _, ...rest } = request;
    return `# pip install httpx\nimport os\n\nimport httpx\n\nanswer = httpx.post(\n` +
      `    ${JSON.stringify(`${form.dataset.url}/${value("endpoint")}`)},\n` +
      `    headers={"Authorization": f"Bearer {os.environ['SLUICE_KEY']}"},\n` +
      `    json=${python(rest)},\n    timeout=None,\n)\nprint(answer.json())`;
  },
  node: (request) => {
    const { stream, stream_options: _, ...rest } = request;
    return `const answer = await fetch(${JSON.stringify(`${form.dataset.url}/${value("endpoint")}`)}, {\n` +
      `  method: "POST",\n  headers: {\n    "Authorization": \`Bearer \${process.env.SLUICE_KEY}\`,\n` +
      `    "Content-Type": "application/json",\n  },\n` +
      `  body: JSON.stringify(${JSON.stringify(rest, null, 2).replaceAll("\n", "\n  ")}),\n});\nconsole.log(await answer.json());`;
  },
};

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    complain("");
    try {
      const text = WRITERS[button.dataset.copy](body());
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
form.elements.endpoint.addEventListener("change", adapt);
adapt();
