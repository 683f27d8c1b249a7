// Requests, elements, and formats of numbers. Names from producers go through `element`, which
// inserts them as text. No code here writes HTML, so a name cannot inject any.

const LONGEST = 25_000; // milliseconds; the other process answers a question within 22 s

/** Ask one process with a role and a question, or the whole run with "run". */
export async function ask(role, question, args = {}) {
  const query = new URLSearchParams(args).toString();
  return send(`api/${question ? `${role}/${question}` : role}${query ? `?${query}` : ""}`);
}

/** Send the bytes of a file with a question. */
export function post(role, question, file) {
  return send(`api/${role}/${question}`, { method: "POST", body: file, headers: { "content-type": "application/octet-stream" } });
}

async function send(address, { headers = {}, ...options } = {}) {
  const answer = await fetch(address, { signal: AbortSignal.timeout(LONGEST), ...options, headers: { accept: "application/json", ...headers } })
    .catch(() => { throw new Error("the process that serves this page does not answer: it has stopped or is restarting, or the network is away"); });
  if (answer.status === 401) location.href = "login";
  const body = await answer.json().catch(() => { throw new Error(notJson(answer.status)); });
  if (!answer.ok) throw new Error(body.error ?? `status ${answer.status}`);
  return body;
}

function notJson(status) {
  if (status === 413) return "the proxy of this page refuses a file of this size (status 413)";
  if ([502, 503, 504].includes(status)) return `the proxy of this page does not reach the process that serves it (status ${status}): it has stopped or is restarting`;
  return `the answer is not JSON (status ${status})`;
}

/** Return an error as the end of a sentence with "because"; the list of conditions has its address. */
export function reason(message) { return message.replace(/ at http.*/, ""); }

/** Mark that a section has its data. */
export function known(section) {
  section.classList.remove("unknown", "stale");
  section.dataset.known = "yes";
}

/** Hide the empty parts of a section, or mark its old data, and return a sentence that says why. */
export function unknown(section, what, error) {
  const old = section.dataset.known;
  section.classList.add(old ? "stale" : "unknown");
  return `${what} ${old ? "are no longer updated" : "are not known"}, because ${reason(error.message)}.`;
}

/** Return the first element of the page that matches a selector. */
export const $ = (selector) => document.querySelector(selector);

/** Create an element with attributes, listeners (`onclick`) and children (elements or text). */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

export function number(value, digits = 3) {
  if (value == null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential(1);
  if (size >= 1e9) return `${(value / 1e9).toPrecision(digits)}G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(digits)}M`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  if (size >= 1) return String(Number(value.toFixed(2)));
  return size === 0 ? "0" : size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(digits)));
}

/** Return a number with a noun, such as "1 slot" or "2 slots". */
export function plural(count, noun) { return `${number(count)} ${noun}${count === 1 ? "" : "s"}`; }

/** Return the first names, and the number of the others. */
export function few(names, between = ", ", most = 5) {
  return names.slice(0, most).join(between) + (names.length > most ? ` and ${names.length - most} more` : "");
}

export function rate(value) { return `${number(value < 10 ? value : Math.round(value))} /s`; }

/** Return a share as `status` and `watch` spell it, such as "46 %" or "2.5 %". */
export function percent(share) {
  if (share > 0.99 && share < 1) return `${Math.min(100 * share, 99.99).toFixed(2)} %`;
  return `${(100 * share).toFixed(share === 0 || share >= 0.1 ? 0 : 1)} %`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit ? value.toPrecision(3) : Math.round(value)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

let ahead = 0; // seconds by which the clock of the run's machine is ahead of this machine's clock

/** Take the time of the run's machine, in Unix seconds. */
export function setClock(now) { if (now) ahead = now - Date.now() / 1000; }

/** Return the time since a moment of the run's machine as text. */
export function ago(at) { return `${duration(Math.max(0, Date.now() / 1000 + ahead - at))} ago`; }

/** Return a colour of the page's style by its name. */
export function colour(name) {
  const probe = element("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

/** Return a shade between "few" and "many" for a share of 0 to 1. */
export function shade(share) {
  return `color-mix(in oklab, var(--many) ${Math.round(100 * Math.min(1, Math.max(0, share)))}%, var(--few))`;
}

export function who(origin) {
  return origin ? (origin.producer === origin.source ? `${origin.producer} / ${origin.id}` : `${origin.producer} / ${origin.source} / ${origin.id}`) : null;
}

export function onTheme(work) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", work);
}

const HELP = JSON.parse($("#help")?.textContent ?? "{}"); // role/figure -> [metric, sentence]

/** Return a name with a tooltip of one sentence and a link to the metric that it shows. */
export function explained(role, figure, text) {
  const found = HELP[`${role}/${figure}`];
  return found ? element("a", { class: "help", title: found[1], href: `docs/metrics#${found[0]}` }, text) : element("span", {}, text);
}

/** Give each cell the title of its column, which a narrow screen shows in front of the cell. */
export function labelCells(table) {
  const name = () => {
    const titles = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.replace(/ \?$/, ""));
    for (const row of table.tBodies[0].rows) [...row.cells].forEach((cell, at) => {
      if (cell.colSpan === 1) cell.dataset.title = titles[at] ?? "";
      cell.classList.toggle("nothing", cell.textContent === "–"); // a narrow screen leaves it out
    });
  };
  new MutationObserver(name).observe(table.tBodies[0], { childList: true });
  name();
}
