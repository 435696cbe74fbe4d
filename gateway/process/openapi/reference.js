// The reference: search, the language of all examples, copies, and requests.
"use strict";

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

// Opens what hides the target of a link, and marks the operation in the menu.
const open = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let each = target?.closest("details"); each; each = each.parentElement.closest("details")) each.open = true;
  target?.scrollIntoView();
  const here = location.pathname + location.hash.split(".")[0];
  for (const link of document.querySelectorAll("nav li > a")) {
    if (link.getAttribute("href") === here) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
};
addEventListener("hashchange", open);
open();

// The index is a page; it is loaded with the first letter.
const MOST = 12;
const find = document.getElementById("find"), found = document.getElementById("found");
let index;
const load = async () => {
  const page = new DOMParser().parseFromString(await (await fetch("/docs/search")).text(), "text/html");
  return [...page.querySelectorAll("#index li")].map((entry) => {
    const link = entry.querySelector("a");
    return { entry, name: link.textContent.toLowerCase(), text: entry.textContent.toLowerCase() };
  });
};
const show = async () => {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  index ||= load();
  const entries = await index;
  const order = ({ name }) => [name === words[0], name.startsWith(words[0]), words.every((word) => name.includes(word)), true].indexOf(true);
  const matching = words.length ? entries.filter((each) => words.every((word) => each.text.includes(word))) : [];
  matching.sort((one, other) => order(one) - order(other) || one.name.length - other.name.length);
  found.replaceChildren(...matching.slice(0, MOST).map((each) => document.importNode(each.entry, true)));
  if (words.length && !matching.length) found.append(make("li", { textContent: "Nothing found." }));
  found.hidden = !words.length;
};
find.addEventListener("input", show);
find.form.addEventListener("submit", (event) => {
  event.preventDefault();
  found.querySelector("a")?.click();
});
document.addEventListener("keydown", (event) => {
  const isTyping = event.target.closest("input, textarea");
  if ((event.key === "k" && (event.ctrlKey || event.metaKey)) || (event.key === "/" && !isTyping)) {
    event.preventDefault();
    find.focus();
  }
});

// One choice of the language for all examples.
const choose = (language) => {
  for (const input of document.querySelectorAll(".tabs input")) input.checked = input.value === language;
};
if (localStorage.getItem("language")) choose(localStorage.getItem("language"));
document.addEventListener("change", ({ target }) => {
  if (!target.matches(".tabs input")) return;
  const top = target.getBoundingClientRect().top;
  localStorage.setItem("language", target.value);
  choose(target.value);
  scrollBy(0, target.getBoundingClientRect().top - top);
});

const copy = async (button, text) => {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Press Ctrl+C";
  }
};
for (const samples of document.querySelectorAll(".samples")) {
  const button = make("button", { type: "button", className: "copy", textContent: "Copy" });
  button.addEventListener("click", () => {
    const shown = [...samples.querySelectorAll("pre")].find((each) => each.checkVisibility());
    getSelection().selectAllChildren(shown.firstElementChild);
    copy(button, shown.textContent);
  });
  samples.append(button);
}

// Requests run with the rights of the console's session, or with a key that this tab keeps.
const session = async () => {
  const response = await fetch("/console/try", { redirect: "manual" });
  return response.ok ? response.json() : null;
};
const field = (label, control) => make("label", { textContent: label }, control);

async function prepare(part) {
  const { method, path, body } = part.dataset;
  const login = await session();
  const key = make("input", { type: "password", autocomplete: "off", value: sessionStorage.getItem("key") || "" });
  const places = [...path.matchAll(/\{(\w+)\}/g)].map(([, name]) => [name, make("input", { required: true })]);
  const query = make("input", { placeholder: "limit=10" });
  const text = body === undefined ? null : make("textarea", { value: body, spellcheck: false });
  const send = make("button", { textContent: "Send" }), state = make("p", { className: "muted" }), answer = make("pre", { tabIndex: 0, hidden: true });
  state.setAttribute("role", "status");
  const form = make("form", {},
    login ? make("p", { className: "muted", textContent: `With the rights of ${login.name}, and charged like any other request.` }) : field("Your key", key),
    ...places.map(([name, input]) => field(name, input)),
    ...(text ? [field("Body", text)] : [field("Query", query)]),
    send, state, answer);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!login) sessionStorage.setItem("key", key.value.trim());
    const filled = places.reduce((made, [name, input]) => made.replace(`{${name}}`, encodeURIComponent(input.value)), path);
    const headers = { Accept: "application/json", ...(text && { "Content-Type": "application/json" }) };
    if (login) headers["X-Csrf-Token"] = login.csrf;
    else headers.Authorization = `Bearer ${key.value.trim()}`;
    const url = (login ? "/console/try" : "") + filled + (!text && query.value ? `?${query.value}` : "");
    send.disabled = true;
    answer.hidden = false;
    answer.textContent = "";
    const start = performance.now();
    try {
      const response = await fetch(url, { method, headers, body: text?.value, redirect: "error" });
      const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader();
      for (let part = await reader?.read(); part && !part.done; part = await reader.read()) answer.textContent += part.value;
      try {
        answer.textContent = JSON.stringify(JSON.parse(answer.textContent), null, 2);
      } catch { /* A stream, or CSV. */ }
      state.textContent = `Status ${response.status} in ${Math.round(performance.now() - start)} ms`;
    } catch (error) {
      state.textContent = error.message;
    }
    send.disabled = false;
  });
  part.append(form);
}
for (const part of document.querySelectorAll(".try")) {
  part.hidden = false;
  part.addEventListener("toggle", () => part.querySelector("form") || prepare(part), { once: true });
}
