// Sends the form of the playground and shows the answers as they arrive.
"use strict";

const form = document.getElementById("playground");
const facts = document.getElementById("facts");
const problem = document.getElementById("problem");
const talk = document.getElementById("talk");
const stop = document.getElementById("stop");
const send = document.getElementById("send");

const CHAT = "chat/completions", TEXT = "completions", MESSAGES = "messages", RESPONSES = "responses";

let sides = [[], []]; // The conversations so far, in the form of chats, without the system message.
let running = null; // The AbortController of the request in progress.
let images = []; // Data URLs of the images that the next message has.
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

const parts = (content) => typeof content === "string" ? (content ? [{ type: "text", text: content }] : []) : content;

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
        : [...parts(each.content).map((part) => part.image_url
          ? { type: "image", source: { type: "base64", media_type: part.image_url.url.slice(5).split(";")[0], data: part.image_url.url.split(",")[1] } }
          : part),
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
      : [...(each.content ? [{ role: each.role, content: typeof each.content === "string" ? each.content : each.content.map((part) => part.image_url
        ? { type: "input_image", image_url: part.image_url.url, detail: "auto" } : { type: "input_text", text: part.text }) }] : []),
        ...(each.tool_calls || []).map((call) => ({
          type: "function_call", call_id: call.id, name: call.function.name, arguments: call.function.arguments,
        }))]),
    ...(tools && { tools: tools.map(({ function: each }) => ({ type: "function", ...each })) }),
    ...(shape && { text: { format: { type: "json_schema", ...shape.json_schema } } }),
  }),
};

// What the user says next: a text, or parts of it and images.
const spoken = () => images.length && isChat()
  ? [{ type: "text", text: value("prompt") }, ...images.map((url) => ({ type: "image_url", image_url: { url } }))]
  : value("prompt");

// How each answer is asked for: as the form says, and beside it with what differs.
const settings = () => value("second")
  ? [{}, { model: value("second"), ...parsed("differences", "Different parameters", "object") }] : [{}];

function body(said = [...sides[0], { role: "user", content: spoken() }], differences = {}) {
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
  return Object.assign(shaped, parsed("others", "Other parameters", "object"), differences);
}

async function post(action, endpoint, request, signal) {
  const ask = () => fetch(`/console/try/v1/${endpoint}${action}`, {
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
  const response = await ask();
  if (response.status !== 403) return response;
  // After a new login in another tab, forms have another token.
  const page = new DOMParser().parseFromString(await (await fetch(location.pathname)).text(), "text/html");
  const token = page.getElementById("playground")?.dataset.csrf;
  if (!token || token === form.dataset.csrf) return response;
  form.dataset.csrf = token;
  return ask();
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
  constructor(place, number, model) {
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
    const role = make("p", { className: "role", textContent: `Assistant: ${model}` });
    place.append(make("section", { className: "choice" }, role, this.panel, this.output, this.readout, this.called, this.finish));
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
    // What comes after the text is the end of the text, which is no part of it.
    const end = [...shown.text + (part.text || "")].length;
    found.tokens.forEach((token, index) => found.text_offset[index] < end && shown.token(token, found.token_logprobs[index], Object.entries(found.top_logprobs?.[index] || {})));
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

// Says in `place` what an answer took, or how far one that was stopped came.
function report(place, answer, began, firstAt, ending = "") {
  const times = ending ? [ending] : [];
  if (firstAt) times.push(`first token after ${Math.round(firstAt - began)} ms`);
  times.push(`${Math.round(performance.now() - began)} ms in all`);
  const usage = answer.usage, given = usage?.prompt_tokens ?? usage?.input_tokens;
  place.textContent = (usage
    ? `${given} tokens in, ${usage.completion_tokens ?? usage.output_tokens} out; ` : "") + times.join(", ") + ". ";
  if (typeof usage?.cost === "number") place.append(`$${usage.cost}. `);
  if (answer.id) place.append(make("a", { href: `/console/requests/${encodeURIComponent(answer.id)}`, textContent: "Receipt" }));
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

// The usage of a request that was stopped, which has a receipt about a second after its end.
async function usageOf(id) {
  for (let attempt = 0; id && attempt < 12; attempt += 1) {
    const response = await fetch(`/console/requests/${encodeURIComponent(id)}`, { headers: { Accept: "application/json" } });
    if (response.status === 200) {
      const found = await response.json();
      return { ...found, cost: found.cost_micros / 1e6 };
    }
    await new Promise((resume) => setTimeout(resume, 500));
  }
  return undefined;
}

// Runs a request and shows its choices in a place; returns them.
async function run({ endpoint, request }, place, line, signal) {
  const began = performance.now(), answer = {}, choices = [];
  try {
    await receive(endpoint, request, place, line, signal, { began, answer, choices });
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    line.textContent = "Stopped.";
    report(line, { ...answer, usage: await usageOf(answer.id) }, began, 0, "Stopped.");
  }
  return choices;
}

async function receive(endpoint, request, place, line, signal, { began, answer, choices }) {
  const response = await post("", endpoint, request, signal);
  if (!response.ok) throw new Error(await failure(response));
  const isStream = (response.headers.get("content-type") || "").startsWith("text/event-stream");
  const choice = (index) => (choices[index] ||= new Choice(place, index, request.model));
  let firstAt = 0;
  for await (const part of isStream ? events(response) : [await response.json()]) {
    if (part.error && !part.output) throw new Error(part.error.message);
    answer.id = part.id || answer.id;
    answer.usage = part.usage || answer.usage;
    READERS[endpoint](part, choice, answer);
    if (!firstAt && isStream && choices.some((each) => each.text || each.calls.length)) firstAt = performance.now();
  }
  report(line, answer, began, firstAt);
}

// The fields for the results of calls, and the button that sends them.
function askForResults(place, calls, side) {
  const fields = calls.map((call, index) => {
    const id = `result-${talk.children.length}-${side}-${index}`;
    const label = make("label", { htmlFor: id, textContent: `Result of ${call.function.name}` });
    return make("div", { className: "field" }, label, make("textarea", { id, className: "short" }));
  });
  const button = make("button", { type: "button", textContent: "Send the results" });
  button.addEventListener("click", () => {
    const results = calls.map((call, index) => ({
      role: "tool", tool_call_id: call.id, content: fields[index].querySelector("textarea").value,
    }));
    converse(results, () => button.remove(), side);
  });
  place.append(...fields, button);
}

// A message of the conversation that is not an answer, with its role.
function said(each) {
  const names = { user: "User", tool: "Tool", assistant: "Assistant" };
  const text = parts(each.content).map((part) => part.text ?? "[image]").join(" ");
  return make("div", {}, make("p", { className: "role", textContent: names[each.role] }),
    make("p", { className: each.role === "assistant" ? "output" : "user", textContent: text }));
}

// Sends messages after the conversation; they and the answer become part of it if it ends well. With
// two settings, both answer; `only` is the side that a result of a tool belongs to.
async function converse(added, sent, only = null) {
  if (running) return;
  complain("");
  facts.replaceChildren();
  let turn;
  try {
    const endpoint = value("endpoint");
    const asked = settings().map((differences, side) => {
      const whole = [...sides[side], ...added];
      return { side, whole, endpoint, request: body(whole, differences) };
    }).filter(({ side }) => only === null || side === only);
    last = asked[0];
    showCode();
    turn = make("article", {}, ...added.map(said));
    const places = asked.map(() => make("div"));
    turn.append(make("div", { className: "pair" }, ...places));
    talk.append(turn);
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    const { signal } = running;
    await Promise.all(asked.map(async (each, index) => {
      const line = make("span");
      facts.append(line, " ");
      const [first] = await run(each, places[index], line, signal);
      if (endpoint === TEXT || !first || signal.aborted) return;
      const calls = first.calls.filter((call) => call);
      sides[each.side] = [...each.whole, { role: "assistant", content: first.text, ...(calls.length && { tool_calls: calls }) }];
      if (calls.length) askForResults(places[index], calls, each.side);
      sent();
    }));
    keep();
  } catch (error) {
    running?.abort();
    complain(error.message);
    if (turn && !turn.querySelector(".choice")) turn.remove();
  } finally {
    running = null;
    send.disabled = false;
    stop.disabled = true;
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = value("prompt");
  converse([{ role: "user", content: spoken() }], () => {
    // What was typed meanwhile stays.
    if (value("prompt") === prompt) form.elements.prompt.value = "";
    attach([]);
  });
});

form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

stop.addEventListener("click", () => running?.abort());

document.getElementById("clear").addEventListener("click", () => {
  sides = [[], []];
  last = null;
  talk.replaceChildren();
  localStorage.removeItem(PLACE);
  history.replaceState(null, "", location.pathname + location.search);
  showCode();
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

// The client of a vendor for an endpoint, and the URL that it needs.
const vendor = (endpoint) => endpoint === MESSAGES
  ? ["Anthropic", form.dataset.url.replace(/\/v1$/, ""), "@anthropic-ai/sdk"] : ["OpenAI", form.dataset.url, "openai"];

const WRITERS = {
  curl: (endpoint, request) =>
    `curl ${quoted(`${form.dataset.url}/${endpoint}`)} \\\n` +
    `  -H "Authorization: Bearer $SLUICE_KEY" \\\n  -H "Content-Type: application/json" \\\n` +
    `  -d ${quoted(JSON.stringify(request))}`,
  python: (endpoint, request) => {
    const [name, url] = vendor(endpoint);
    const own = EXTRA.filter((each) => each in request && (endpoint !== MESSAGES || each !== "top_k"));
    const extra = Object.fromEntries(own.map((each) => [each, request[each]]));
    const known = Object.fromEntries(Object.entries(request).filter(([each]) => !own.includes(each)));
    return `# pip install ${name.toLowerCase()}\nimport os\n\nfrom ${name.toLowerCase()} import ${name}\n\n` +
      `client = ${name}(base_url=${JSON.stringify(url)}, api_key=os.environ["SLUICE_KEY"])\n` +
      `answer = client.${METHODS[endpoint]}.create(\n    **${python(known, "    ")},\n` +
      (own.length ? `    extra_body=${python(extra, "    ")},\n` : "") + ")\n" +
      (request.stream ? "for event in answer:\n    print(event.to_json(indent=None))" : "print(answer.to_json())");
  },
  node: (endpoint, request) => {
    const [name, url, module] = vendor(endpoint);
    return `// npm install ${module}\nimport ${name} from "${module}";\n\n` +
      `const client = new ${name}({\n  baseURL: ${JSON.stringify(url)},\n  apiKey: process.env.SLUICE_KEY,\n});\n` +
      `const answer = await client.${METHODS[endpoint]}.create(${JSON.stringify(request, null, 2)});\n` +
      (request.stream ? "for await (const event of answer) console.log(event);" : "console.log(answer);");
  },
};

let language = "curl";

// Shows the request that was last sent, or else that of the form, as code.
function showCode() {
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.setAttribute("aria-pressed", button.dataset.copy === language);
  }
  try {
    const { endpoint, request } = last || { endpoint: value("endpoint"), request: body() };
    document.getElementById("code").textContent = WRITERS[language](endpoint, request);
  } catch (error) {
    document.getElementById("code").textContent = error.message;
  }
}

for (const button of document.querySelectorAll("[data-copy]")) {
  button.addEventListener("click", async () => {
    language = button.dataset.copy;
    showCode();
    await navigator.clipboard?.writeText(document.getElementById("code").textContent).catch(() => {});
  });
}

// Images of the next message, which the page shows before they are sent.
function attach(urls) {
  images = urls;
  if (!urls.length) document.getElementById("f-images").value = "";
  document.getElementById("shown-images").replaceChildren(...urls.map((src) => make("img", { src, alt: "Attached image" })));
  showCode();
}
document.getElementById("f-images").addEventListener("change", async ({ target }) => {
  attach(await Promise.all([...target.files].map((file) => new Promise((resolve) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.readAsDataURL(file);
  }))));
});

function adapt() {
  for (const element of form.querySelectorAll(".chat-only")) {
    element.classList.toggle("hidden", !isChat());
  }
  const model = form.elements.model.selectedOptions[0]?.value;
  document.getElementById("attach").classList.toggle("hidden", !(isChat() && form.dataset.images.split(" ").includes(model)));
}

// The form and the conversations stay in this browser; a link has them in its fragment, which browsers
// send to nobody.
const PLACE = `playground ${form.dataset.account}`;
const state = () => JSON.stringify({
  fields: [...form.elements].filter((each) => each.name && each.type !== "hidden" && each.type !== "file")
    .map((each) => [each.name, each.type === "checkbox" ? each.checked : each.value]),
  sides,
});

function keep() {
  try {
    localStorage.setItem(PLACE, state());
  } catch {
    // Too large, such as with images: what was kept before stays.
  }
}

function restore(text) {
  const kept = JSON.parse(text);
  for (const [name, given] of kept.fields) {
    const input = form.elements[name];
    if (input?.type === "checkbox") input.checked = given;
    else if (input && ![...(input.options || [])].length) input.value = given;
    else if (input && [...input.options].some((each) => each.value === given)) input.value = given;
  }
  sides = kept.sides;
  const both = sides[1].length > 0;
  const turns = sides.map((side) => make("div", {}, ...side.map(said)));
  if (sides[0].length) talk.append(make("article", { className: "pair" }, ...(both ? turns : [turns[0]])));
}

document.getElementById("link").addEventListener("click", async () => {
  const bytes = new TextEncoder().encode(state());
  history.replaceState(null, "", `#${btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))}`);
  facts.textContent = "The address of this page has the conversation now.";
  await navigator.clipboard?.writeText(location.href).then(() => { facts.textContent = "Copied the link."; }).catch(() => {});
});

form.elements.endpoint.append(new Option("Messages", MESSAGES), new Option("Response", RESPONSES));
for (const element of form.querySelectorAll(".hidden:not(.chat-only)")) element.classList.remove("hidden");
try {
  const linked = location.hash.length > 1 && new TextDecoder().decode(Uint8Array.from(atob(location.hash.slice(1)), (each) => each.charCodeAt(0)));
  const kept = linked || (new URLSearchParams(location.search).has("model") ? null : localStorage.getItem(PLACE));
  if (kept) restore(kept);
} catch {
  complain("The link or what this browser has kept cannot be read.");
}
for (const kind of ["input", "change"]) {
  form.addEventListener(kind, () => {
    adapt();
    showCode();
    keep();
  });
}
adapt();
showCode();
