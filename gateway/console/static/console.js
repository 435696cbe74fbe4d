"use strict";

// Charts show the values of a column: under the pointer, after a touch, and after arrow keys.

const read = (column) => {
  const figure = column.closest("figure");
  for (const other of figure.querySelectorAll(".column.read")) other.classList.remove("read");
  column.classList.add("read");
  figure.querySelector(".readout").textContent = column.querySelector("title").textContent;
};

for (const kind of ["pointerover", "click"]) {
  document.addEventListener(kind, (event) => {
    const column = event.target.closest?.(".chart .column");
    if (column) read(column);
  });
}

document.addEventListener("keydown", (event) => {
  const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const chart = event.target.closest?.(".chart svg[tabindex]");
  if (!chart || !step) return;
  event.preventDefault();
  const columns = [...chart.querySelectorAll(".column")];
  const at = columns.findIndex((each) => each.classList.contains("read"));
  const next = at < 0 ? (step > 0 ? 0 : columns.length - 1) : at + step;
  if (columns[next]) read(columns[next]);
});

// Times are shown in the zone of the browser, with UTC as their title.
const two = (number) => String(number).padStart(2, "0");
const localize = (root) => {
  for (const time of root.querySelectorAll("time.local")) {
    const at = new Date(time.dateTime);
    if (!at.getTimezoneOffset()) continue;
    time.nextElementSibling.remove();
    time.classList.remove("local");
    time.textContent = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
    const cell = time.closest("td, th");
    cell?.closest("table").tHead?.rows[0].cells[cell.cellIndex]?.querySelector(".utc")?.remove();
  }
};
localize(document);
document.addEventListener("htmx:load", (event) => localize(event.target));

// The menu of the account closes on Esc and where the visitor clicks beside it.
const menu = document.querySelector("details.account");
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !menu?.open) return;
  menu.open = false;
  menu.querySelector("summary").focus();
});
document.addEventListener("click", (event) => {
  if (menu?.open && !menu.contains(event.target)) menu.open = false;
});

// Buttons that need this script appear with it: print a page, and copy a secret or code.
for (const button of document.querySelectorAll("[data-print]")) {
  button.classList.remove("hidden");
  button.addEventListener("click", () => window.print());
}

const copy = async (button, source) => {
  try {
    await navigator.clipboard.writeText(source.textContent);
    button.textContent = "Copied";
  } catch {
    // Browsers refuse without https, but not for text that is selected.
    getSelection().selectAllChildren(source);
    button.textContent = document.execCommand("copy") ? "Copied" : "Press Ctrl+C";
  }
};

for (const source of document.querySelectorAll(".secret, main pre > code")) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "plain copy", textContent: "Copy" });
  button.addEventListener("click", () => copy(button, source));
  (source.closest("pre") || source).after(button);
}

// Whoever logs out leaves nothing in the browser.
document.addEventListener("submit", ({ target: form }) => {
  if (!form.action.includes("/console/logout")) return;
  sessionStorage.clear();
  localStorage.clear();
});

// A form that the browser sends after its session has ended is filled in after the next login. Until
// then the tab keeps it; no file and no token.
const place = `draft ${location.pathname}`;
document.addEventListener("submit", ({ target: form }) => {
  if (form.method !== "post" || !form.closest("main")) return;
  const fields = [...new FormData(form)].filter(([name, value]) => name !== "csrf" && typeof value === "string");
  sessionStorage.setItem(place, JSON.stringify(fields));
});
const draft = JSON.parse(sessionStorage.getItem(place) || "[]");
sessionStorage.removeItem(place);
if (draft.length && new URLSearchParams(location.search).has("draft")) {
  for (const input of document.querySelectorAll("main form[method=post] [name]:not([type=hidden])")) {
    const given = draft.filter(([name]) => name === input.name).map(([, value]) => value);
    if (["checkbox", "radio"].includes(input.type)) input.checked = given.includes(input.value);
    else if (given.length && input.type !== "file") [input.value] = given;
  }
  const notice = Object.assign(document.createElement("p"), { className: "notice", textContent: "Your session had ended. Check the form, then send it again." });
  notice.setAttribute("role", "status");
  document.querySelector("main h1").after(notice);
}

// A form with a file shows how much of it is sent. An error replaces the content of the page.
document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.enctype !== "multipart/form-data") return;
  event.preventDefault();
  const bar = Object.assign(document.createElement("progress"), { value: 0 });
  bar.setAttribute("aria-label", "Sent");
  const button = form.querySelector("button:not([type])");
  button.disabled = true;
  button.after(bar);
  const request = Object.assign(new XMLHttpRequest(), { responseType: "document" });
  request.upload.addEventListener("progress", (sent) => {
    bar.value = sent.loaded / sent.total;
  });
  request.addEventListener("load", () => {
    const main = request.status < 400 ? null : request.response?.querySelector("main");
    if (!main) return location.assign(request.responseURL);
    document.querySelector("main").replaceWith(main);
    main.querySelector("[autofocus]")?.focus();
  });
  // The server may answer before it has read a file that is too large: the browser shows why.
  request.addEventListener("error", () => form.submit());
  request.open("POST", form.action);
  request.send(new FormData(form));
});
