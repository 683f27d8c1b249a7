// The table of producers, one page at a time; silent producers come first.
import { $, ask, bytes, duration, element, known, number, percent, rate, reason, unknown } from "./lib.js";
import { addressOf } from "./producer.js";

const PAGE = 50;
const MOST = 1000; // rows of one answer
// [order of the receiver or of these rows, title, tooltip]. The receiver sorts by its own columns, the page by those of the learner.
const COLUMNS = [
  [null, "newest", "The newest picture of the producer in the memory."],
  ["name", "name", "The name of the producer's key on the allow-list; in plain text, its own name."],
  ["silent", "last seen", "The time since the producer's last message."],
  ["rate", "rate", "Samples per second in the last ten seconds."],
  ["samples", "received", "Samples received for the first time since the receiver's start.", "producer_samples_total"],
  ["admitted", "used", "Samples that were new and could be decoded, since the learner's start: they passed the near-duplicate test.", "producer_admitted_samples_total"],
  ["dropped", "dropped", "Samples dropped before they were encoded, by reason.", "dropped_samples_total"],
  ["bad", "bad samples", "Samples that the receiver refused or the learner could not decode, by reason.", "quarantined_samples_total"],
  ["slots", "slots", "Slots of the memory that it holds. Guaranteed slots are kept for it once it has filled them.", "producer_guaranteed_slots"],
  ["repeated", "sent again", "Samples sent again after a lost acknowledgement, and left out.", "duplicate_samples_total"],
  ["newest", "first connected", "The time since the producer first connected."],
  [null, "may send", "Bytes that the producer may send before the next acknowledgement (its credit).", "credit_bytes"],
];
const OF_LEARNER = { admitted: (use) => use.admitted ?? 0, dropped: (use) => total(use.dropped), slots: (use) => use.slots ?? 0 };
const total = (counts) => Object.values(counts ?? {}).reduce((sum, count) => sum + count, 0);
export const listed = (counts) => Object.entries(counts ?? {}).map(([reason, samples]) => `${number(samples)} ${reason.replaceAll("_", "-")}`).join(", ") || "–";
const NUMBERS = new Set([3, 4, 5, 9, 11]); // columns of one number
const PATIENCE = 1000; // milliseconds that the table waits for the learner, which answers between two steps
const LATE = 60; // seconds of silence after which a connected producer is marked

export class ProducersSection {
  constructor(pictures) {
    this.pictures = pictures;
    this.sort = "silent";
    this.limit = PAGE;
    this.round = 0; // every third round also asks for the slots in the memory
    this.fates = null; // what the learner knows of the producers
    this.why = "the learner has not answered yet"; // the reason while there are none
    this.body = $("#producers-table tbody");
    this.heads = COLUMNS.map(([sort, title, tip, metric], at) => {
      const name = metric ? element("a", { class: "help", href: `docs/metrics#stream_ssl_${metric}`, title: "what this counts" }, "?") : "";
      return element("th", { scope: "col", class: NUMBERS.has(at) ? "n" : null, title: tip },
        sort ? element("button", { onclick: () => { this.sort = sort; this.refresh(); } }, title) : title, metric ? " " : "", name);
    });
    $("#producers-table thead tr").append(...this.heads);
    this.find = $("#producers-find");
    this.find.addEventListener("input", () => { clearTimeout(this.timer); this.timer = setTimeout(() => this.refresh(), 250); });
    this.more = $("#producers-more");
    this.more.addEventListener("click", () => { this.limit = Math.min(MOST, this.limit + 5 * PAGE); this.refresh(); });
  }

  async refresh() {
    const section = $("#producers"), note = $("#producers-note");
    try {
      const ours = this.sort in OF_LEARNER || this.sort === "bad"; // the receiver cannot sort by it, so all rows are needed
      const got = await ask("receiver", "producers", { sort: this.sort in OF_LEARNER ? "name" : this.sort === "bad" ? "rejected" : this.sort, find: this.find.value, limit: ours ? MOST : this.limit });
      if (!(this.round++ % 3) && !this.asking) {
        this.asking = this.askLearner().finally(() => { this.asking = null; });
        await Promise.race([this.asking, new Promise((done) => { setTimeout(done, PATIENCE); })]);
      }
      const gap = this.fates ? "" : `. Their used and dropped samples and their slots are not known, because ${reason(this.why)}.`;
      note.textContent = `${number(got.total)} since the receiver started, ${number(got.connected)} connected${got.found < got.total ? `, ${number(got.found)} found` : ""}${gap}`;
      const uses = this.fates?.uses ?? {}, use = (one) => uses[one.name] ?? {};
      const weight = this.sort === "bad" ? (one) => total(one.rejected) + total(use(one).bad) : OF_LEARNER[this.sort] && ((one) => OF_LEARNER[this.sort](use(one)));
      if (weight) got.producers = got.producers.sort((one, other) => weight(other) - weight(one)).slice(0, this.limit);
      const rows = got.producers.map((one) => row(one, this.fates)).concat(this.find.value || got.found > this.limit ? [] : silent(got.producers, this.fates));
      const focused = this.body.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
      this.body.replaceChildren(...(rows.length ? rows : [element("tr", {}, element("td", { colspan: COLUMNS.length, class: "empty" }, got.total ? "no producer has this name" : "no producer has connected since the receiver started"))]));
      if (focused) [...this.body.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
      this.more.hidden = got.found <= this.limit || this.limit >= MOST;
      COLUMNS.forEach(([sort], at) => { if (sort === this.sort) this.heads[at].setAttribute("aria-sort", "descending"); else this.heads[at].removeAttribute("aria-sort"); });
      this.painting ??= this.paint().catch((error) => console.warn(error)).finally(() => { this.painting = null; });
      known(section);
    } catch (error) {
      note.textContent = unknown(section, "The connections and the rates", error);
      if (section.dataset.known) return;
      const rows = silent([], await ask("learner", "memory/producers").catch(() => null), "–");
      section.classList.toggle("unknown", !rows.length);
      this.body.replaceChildren(...rows);
    }
  }

  /** Ask what happened to the samples of each producer. The table does not wait long for the answer. */
  async askLearner() {
    try { this.fates = await ask("learner", "memory/producers"); } catch (error) { this.fates = null; this.why = error.message; }
  }

  /** Fetch and show the pictures of the rows on the screen. */
  async paint() {
    const tiles = [...this.body.querySelectorAll(".tile[data-id]")].filter((tile) => {
      const { top, bottom } = tile.getBoundingClientRect();
      return bottom > -100 && top < innerHeight + 100;
    });
    if (this.pictures.most && tiles.length) await this.pictures.fetch(tiles.map(({ dataset }) => ({ slot: dataset.slot, id: dataset.id })));
    for (const tile of tiles) this.pictures.paint(tile, tile.dataset.id);
  }
}

/** Return the samples that the receiver refused or the learner could not decode, by reason. */
export function badOf(rejected, use) {
  const bad = { ...use.bad };
  for (const [reason, samples] of Object.entries(rejected ?? {})) bad[reason] = (bad[reason] ?? 0) + samples;
  return bad;
}

/** Return a line of past rates, from 0 to the largest. */
export function spark(past) {
  const most = Math.max(...past, 1e-9), drawn = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const points = past.map((value, at) => `${(100 * at) / Math.max(1, past.length - 1)},${19 - (18 * value) / most}`);
  const line = document.createElementNS(drawn.namespaceURI, "polyline");
  line.setAttribute("points", points.join(" "));
  drawn.setAttribute("viewBox", "0 0 100 20");
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("class", "spark");
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", `past rates, ${number(past.at(-1))}/s now, at most ${number(most)}/s`);
  drawn.append(line);
  return drawn;
}

/** Return the held slots beside the guarantee, and their share of the memory. */
export function inMemory(name, fates) {
  const use = fates?.uses?.[name], held = use?.slots ?? fates?.producers[name]?.held;
  if (held == null) return "–";
  const share = percent(held / Math.max(1, fates.occupied));
  return `${number(held)}${use?.guaranteed == null ? "" : ` (${number(use.guaranteed)} guaranteed)`}, ${share} of the memory`;
}

/** Return rows for producers that only the learner knows, such as those of an earlier start of the receiver. */
function silent(producers, fates, seen = "before the receiver's start") {
  const known = new Set(producers.map((one) => one.name));
  return Object.keys(fates?.producers ?? {}).filter((name) => !known.has(name) && fates.producers[name].held).map((name) => {
    const use = fates.uses[name] ?? {}, told = { admitted: number(use.admitted), dropped: listed(use.dropped), bad: listed(use.bad), slots: inMemory(name, fates) };
    return element("tr", { class: "gone" },
      newest(name, fates),
      element("td", { class: "name" }, element("a", { href: addressOf(name) }, element("bdi", {}, name))),
      element("td", {}, seen),
      ...COLUMNS.slice(3).map(([sort], at) => element("td", { class: NUMBERS.has(at + 3) ? "n" : null }, told[sort] ?? "–")));
  });
}

/** Return the cell for the newest picture, which `paint` fills when it is visible. */
function newest(name, fates) {
  const slot = fates?.producers[name]?.newest;
  return element("td", {}, element("span", { class: "tile small", "data-slot": slot?.slot, "data-id": slot?.id }));
}

function row(one, fates) {
  const use = fates?.uses?.[one.name] ?? {}, bad = badOf(one.rejected, use);
  const late = one.connected && one.silent > LATE;
  const key = one.key && one.key !== one.name ? ` key ${one.key}` : "";
  return element("tr", { class: one.connected ? null : "gone" },
    newest(one.name, fates),
    element("td", { class: "name", title: one.agent }, element("a", { href: addressOf(one.name) }, element("bdi", {}, one.name)), element("span", { class: "muted" }, key)),
    element("td", { class: late ? "late" : null }, one.connected ? `${duration(one.silent)} ago` : `disconnected, ${duration(one.silent)} ago`),
    element("td", { class: "n" }, one.rate == null ? "–" : rate(one.rate), one.past.length > 1 ? spark(one.past) : ""),
    element("td", { class: "n", title: bytes(one.bytes) }, number(one.samples)),
    element("td", { class: "n" }, number(use.admitted)),
    element("td", {}, listed(use.dropped)),
    element("td", { class: total(bad) ? "late" : null }, listed(bad)),
    element("td", {}, inMemory(one.name, fates)),
    element("td", { class: "n" }, number(one.repeated)),
    element("td", {}, `${duration(one.since)} ago` + (one.hellos > 1 ? `, ${number(one.hellos)} connections` : "")),
    element("td", { class: "n" }, one.connected ? bytes(one.credit) : "–"));
}
