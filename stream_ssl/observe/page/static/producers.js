// The table of producers, one page at a time; silent producers come first.
import { ask, bytes, duration, element, number, plural, rate } from "./lib.js";

const PAGE = 50;
const COLUMNS = [
  ["name", "name"], ["silent", "last message"], ["newest", "first connected"], ["rate", "rate"], ["samples", "samples"],
  ["repeated", "sent again"], ["rejected", "rejected"], [null, "in the memory"], [null, "credit"],
];
const LATE = 60; // seconds of silence after which a connected producer is marked

export class ProducersSection {
  constructor() {
    this.sort = "silent";
    this.limit = PAGE;
    this.round = 0; // every third round also asks for the slots in the memory
    this.body = document.querySelector("#producers-table tbody");
    this.heads = COLUMNS.map(([sort, title], at) => element("th", { scope: "col", class: at > 2 && !["rejected", "in the memory"].includes(title) ? "n" : null },
      sort ? element("button", { onclick: () => { this.sort = sort; this.refresh(); } }, title) : title));
    document.querySelector("#producers-table thead tr").append(...this.heads);
    this.find = document.querySelector("#producers-find");
    this.find.addEventListener("input", () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.refresh(), 250); });
    this.more = document.querySelector("#producers-more");
    this.more.addEventListener("click", () => { this.limit = Math.min(1000, this.limit + 5 * PAGE); this.refresh(); });
  }

  async refresh() {
    const note = document.querySelector("#producers-note");
    try {
      const got = await ask("receiver", "producers", { sort: this.sort, find: this.find.value, limit: this.limit });
      if (!(this.round++ % 3)) this.fates = await ask("learner", "memory/producers").catch(() => null);
      note.textContent = `${number(got.total)} known, ${number(got.connected)} connected${got.found < got.total ? `, ${number(got.found)} found` : ""}`;
      const rows = got.producers.map((one) => row(one, this.fates)).concat(this.find.value || got.found > this.limit ? [] : silent(got.producers, this.fates));
      this.body.replaceChildren(...(rows.length ? rows : [element("tr", {}, element("td", { colspan: COLUMNS.length, class: "empty" }, got.total ? "no producer has this name" : "no producer has connected since the receiver started"))]));
      this.more.hidden = got.found <= this.limit || this.limit >= 1000;
      COLUMNS.forEach(([sort], at) => { if (sort === this.sort) this.heads[at].setAttribute("aria-sort", "descending"); else this.heads[at].removeAttribute("aria-sort"); });
    } catch (error) { note.textContent = error.message; }
  }
}

/** Return the held slots, and their share of the memory beside the share of the stream. */
function inMemory(name, fates) {
  const fate = fates?.producers[name];
  if (!fate) return "–";
  const share = (part, whole) => `${((100 * part) / Math.max(1, whole)).toFixed(0)} %`;
  const near = fate.near_duplicates ? `, ${share(fate.near_duplicates, fate.offered)} dropped as near-duplicates` : "";
  const stream = fate.offered ? `, ${share(fate.offered, fates.offered)} of the stream` : "";
  return `${plural(fate.held, "slot")}: ${share(fate.held, fates.occupied)} of the memory${stream}${near}`;
}

/** Return rows for producers that hold slots but have sent nothing since the receiver started. */
function silent(producers, fates) {
  const known = new Set(producers.map((one) => one.name));
  return Object.keys(fates?.producers ?? {}).filter((name) => !known.has(name) && fates.producers[name].held).map((name) =>
    element("tr", { class: "gone" },
      element("td", { class: "name" }, element("bdi", {}, name)),
      element("td", {}, "before the receiver's start"),
      ...COLUMNS.slice(2, -2).map(([sort]) => element("td", { class: sort === "newest" || sort === "rejected" ? null : "n" }, "–")),
      element("td", {}, inMemory(name, fates)), element("td", { class: "n" }, "–")));
}

function row(one, fates) {
  const rejected = Object.entries(one.rejected).map(([reason, samples]) => `${number(samples)} ${reason}`).join(", ");
  const late = one.connected && one.silent > LATE;
  const key = one.key && one.key !== one.name ? ` key ${one.key}` : "";
  return element("tr", { class: one.connected ? null : "gone" },
    element("td", { class: "name", title: one.agent }, element("bdi", {}, one.name), element("span", { class: "muted" }, key)),
    element("td", { class: late ? "late" : null }, one.connected ? `${duration(one.silent).join(" ")} ago` : `disconnected, ${duration(one.silent).join(" ")} ago`),
    element("td", {}, `${duration(one.since).join(" ")} ago` + (one.hellos > 1 ? `, ${number(one.hellos)} connections` : "")),
    element("td", { class: "n" }, one.rate == null ? "–" : rate(one.rate).join(" ")),
    element("td", { class: "n", title: bytes(one.bytes).join(" ") }, number(one.samples)),
    element("td", { class: "n" }, number(one.repeated)),
    element("td", { class: rejected ? "late" : null }, rejected || "–"),
    element("td", {}, inMemory(one.name, fates)),
    element("td", { class: "n" }, one.connected ? bytes(one.credit).join(" ") : "–"));
}
