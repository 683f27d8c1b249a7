// One producer, in a dialog with its own address: #producer/NAME.
import { $, ask, bytes, duration, element, number, rate } from "./lib.js";
import { badOf, inMemory, listed, spark } from "./producers.js";

const EVERY = 3000; // milliseconds between two questions while the dialog is open
const SHOWN = 24; // the newest pictures

/** Return the address of a producer's dialog. */
export function addressOf(name) { return `#producer/${encodeURIComponent(name)}`; }

export class ProducerDialog {
  constructor(memory) {
    this.memory = memory;
    this.dialog = $("#producer");
    $("#producer-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
    this.dialog.addEventListener("close", () => { clearTimeout(this.timer); if (this.named()) history.replaceState(null, "", "#producers"); });
    $("#producer-mosaic").addEventListener("click", () => this.leave("#mosaic"));
    $("#producer-evicted").addEventListener("click", () => this.leave("#evicted"));
    addEventListener("hashchange", () => this.follow());
    this.follow();
  }

  /** Return the name in the page's address, or nothing. */
  named() {
    if (!location.hash.startsWith("#producer/")) return "";
    try { return decodeURIComponent(location.hash.slice(10)); } catch { return ""; }
  }

  follow() {
    const name = this.named();
    if (!name) { if (this.dialog.open) this.dialog.close(); return; }
    this.name = name;
    $("#producer-title").replaceChildren(element("bdi", {}, name));
    for (const part of ["#producer-facts", "#producer-pictures"]) $(part).replaceChildren();
    $("#producer-note").textContent = "asking";
    if (!this.dialog.open) this.dialog.showModal();
    clearTimeout(this.timer);
    this.refresh();
  }

  /** Close the dialog, and show only this producer's slots and evictions. */
  leave(where) {
    const name = this.name;
    this.dialog.close();
    this.memory.only(name);
    if (where === "#evicted") $("#evicted").open = true;
    $(where).scrollIntoView({ block: "center" });
  }

  async refresh() {
    if (document.hidden) { this.timer = setTimeout(() => this.refresh(), EVERY); return; }
    const name = this.name;
    const [table, fates, slots] = await Promise.allSettled([
      ask("receiver", "producers", { name, limit: 1 }), ask("learner", "memory/producers"),
      ask("learner", "memory/slots", { producer: name, sort: "newest", limit: SHOWN })]);
    if (name !== this.name || !this.dialog.open) return;
    const one = table.value?.producers[0], failed = [table, fates, slots].find((got) => got.reason);
    $("#producer-note").textContent = failed ? failed.reason.message : one ? "" : "It has sent nothing since the receiver started.";
    this.showFacts(one, fates.value, table.value?.past_every);
    if (slots.value) await this.showPictures(slots.value.slots).catch((error) => { $("#producer-note").textContent = error.message; });
    this.timer = setTimeout(() => this.refresh(), EVERY);
  }

  showFacts(one, fates, every) {
    const use = fates?.uses?.[this.name] ?? {};
    const facts = [
      one && ["last seen", `${duration(one.silent)} ago${one.connected ? "" : ", disconnected"}`],
      one && ["rate", one.rate == null ? "–" : rate(one.rate)],
      one?.past.length && [`last ${duration(one.past.length * every)}`, spark(one.past)],
      one && ["received", `${number(one.samples)} samples, ${bytes(one.bytes)}`],
      ["used", number(use.admitted)],
      ["dropped", listed(use.dropped)],
      ["bad samples", listed(badOf(one?.rejected, use))],
      ["slots", inMemory(this.name, fates)],
      one && ["sent again", number(one.repeated)],
      one && ["first connected", `${duration(one.since)} ago, ${number(one.hellos)} connection${one.hellos === 1 ? "" : "s"}`],
      one?.connected && ["may send", bytes(one.credit)],
      one?.agent && ["program", one.agent],
    ].filter(Boolean);
    $("#producer-facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value instanceof Node ? value : element("bdi", {}, value))]));
  }

  async showPictures(rows) {
    const { pictures } = this.memory;
    if (pictures.most) await pictures.fetch(rows);
    $("#producer-pictures").replaceChildren(...(rows.length ? rows.map((row) => {
      const tile = element("button", { class: "tile", "aria-label": `slot ${row.slot}, ${row.origin?.id ?? ""}`, onclick: () => { this.dialog.close(); this.memory.open(row.slot, row); } });
      pictures.paint(tile, row.id);
      return tile;
    }) : [element("p", { class: "empty" }, "no slot holds a sample of this producer")]));
  }
}
