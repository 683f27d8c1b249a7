// The memory: balance, histograms, the mosaic, one slot with its neighbours, and evictions.
import { Histogram } from "./charts.js";
import { $, ago, ask, element, known, number, percent, plural, post, shade, unknown, who } from "./lib.js";

const PAGE = 128; // slots on one page of the mosaic
const MOST_PICTURE = 8 << 20; // the size that the learner accepts, in bytes
const HELD = 4096; // the number of pictures that are kept

/** Return a cell with the name of a sample, which may be written from right to left. */
const named = (name) => element("td", { class: "name", title: name }, element("bdi", {}, name));

/** A cache of pictures by the sample's id. It only requests missing pictures. */
export class Pictures {
  constructor() { this.byId = new Map(); this.most = 64; }

  /** Forget all pictures if the learner has started again, because their ids may name others now. */
  since(started) {
    if (this.started && started && started !== this.started) {
      for (const picture of this.byId.values()) picture.drop();
      this.byId.clear();
    }
    this.started = started ?? this.started;
  }

  async fetch(slots) {
    const wanted = slots.filter((slot) => !this.byId.has(slot.id));
    for (let start = 0; start < wanted.length && this.most; start += this.most) {
      const part = wanted.slice(start, start + this.most);
      const got = await ask("learner", "memory/pictures", { slots: part.map((s) => s.slot).join() });
      this.add(got);
      part.forEach((row, at) => { row.id = got.ids[at] ?? row.id; }); // a slot may hold a newer sample by now
    }
  }

  /** Add the pictures of a sheet that are not in the cache. */
  add(got) {
    const url = URL.createObjectURL(blob(got.sheet));
    const rows = Math.ceil(got.ids.length / got.columns);
    let uses = 0;
    got.ids.forEach((id, at) => {
      if (id === null || this.byId.has(id)) return;
      uses += 1;
      this.byId.set(id, { url, columns: got.columns, rows, x: at % got.columns, y: Math.floor(at / got.columns), tile: got.tile, drop: () => { uses -= 1; if (!uses) URL.revokeObjectURL(url); } });
    });
    if (!uses) URL.revokeObjectURL(url);
    while (this.byId.size > HELD) {
      const [id, picture] = this.byId.entries().next().value;
      this.byId.delete(id);
      picture.drop();
    }
  }

  /** Show a sample's picture, if there is one, as the background of an element. */
  paint(target, id) {
    const picture = this.byId.get(id);
    if (!picture) { target.style.backgroundImage = ""; return; }
    const at = (n, count) => (count > 1 ? `${(100 * n) / (count - 1)}%` : "0");
    target.style.backgroundImage = `url(${picture.url})`;
    target.style.backgroundSize = `${100 * picture.columns}% ${100 * picture.rows}%`;
    target.style.backgroundPosition = `${at(picture.x, picture.columns)} ${at(picture.y, picture.rows)}`;
  }
}

function blob(dataUrl) {
  const [head, body] = dataUrl.split(",");
  const binary = atob(body);
  return new Blob([Uint8Array.from(binary, (sign) => sign.charCodeAt(0))], { type: head.slice(5, head.indexOf(";")) });
}

/** Show a picture that came as a data URL. The page's security policy allows pictures only as blobs. */
function show(image, dataUrl) {
  const url = URL.createObjectURL(blob(dataUrl));
  image.onload = image.onerror = () => URL.revokeObjectURL(url);
  image.src = url;
  return image;
}


export class MemorySection {
  constructor() {
    this.pictures = new Pictures();
    this.offset = 0;
    this.producer = ""; // show only slots and evictions of this producer
    this.rows = [];
    this.histograms = {
      duplicates: new Histogram("Duplicates", "memory_slot_duplicates", "slots by expected duplicates"),
      ages: new Histogram("Age", "memory_age_samples", "slots by samples offered since they were written"),
      drawn: new Histogram("Drawn", "", "slots by number of draws"),
      staleness: new Histogram("Staleness", "", "slots by samples since they were encoded"),
    };
    $("#histograms").append(...Object.values(this.histograms).map((one) => one.figure));
    this.mosaic = $("#mosaic");
    this.mosaic.addEventListener("keydown", (event) => this.move(event));
    $("#mosaic-sort").addEventListener("change", () => this.turn(-Infinity));
    $("#mosaic-producer").addEventListener("change", (event) => this.only(event.target.value));
    $("#mosaic-file").addEventListener("change", (event) => this.search(event.target));
    $("#mosaic-back").addEventListener("click", () => this.turn(-PAGE));
    $("#mosaic-on").addEventListener("click", () => this.turn(PAGE));
    $("#evicted").addEventListener("toggle", () => this.showEvicted());
    $("#dropped").addEventListener("toggle", () => this.showDropped());
    $("#quarantined").addEventListener("toggle", () => this.showQuarantined());
    this.dialog = $("#slot");
    $("#slot-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("click", (event) => { if (event.target === this.dialog) this.dialog.close(); });
  }

  async refresh() {
    const note = $("#memory-note");
    try {
      const summary = await ask("learner", "memory");
      this.pictures.most = summary.pictures;
      $("#map-by option[value=umap]").disabled = !summary.umap;
      this.showSummary(summary);
      await this.showMosaic();
      if ($("#evicted").open) await this.showEvicted();
      if ($("#dropped").open) await this.showDropped();
      if ($("#quarantined").open) await this.showQuarantined();
      known($("#memory"));
    } catch (error) { note.textContent = unknown($("#memory"), "The slots and their pictures", error); }
  }

  showSummary(s) {
    const near = s.near_duplicates == null ? "" : `, ${percent(s.near_duplicates)} near-duplicates`;
    const turn = s.turnover == null ? "" : `, ${percent(s.turnover)} hold one of the last ${plural(s.capacity, "sample")}`;
    const cost = s.learner_share >= 5e-4 ? `; this page uses ${percent(s.learner_share)} of the learner's time` : "";
    $("#memory-note").textContent = `${number(s.occupied)} of ${plural(s.capacity, "slot")}${near}${turn}; eviction by ${s.policy}, similarity by ${s.descriptor}${cost}`;
    const balance = $("#balance");
    const total = s.balance.slots.reduce((sum, [, count]) => sum + count, 0) || 1;
    const most = s.balance.slots[0]?.[1] || 1;
    const { kind, count, effective, unlabelled } = s.balance;
    balance.querySelector("figcaption").textContent = `Slots by ${kind}`;
    const kinds = count === 1 ? kind : { class: "classes", cluster: "clusters" }[kind];
    balance.querySelector("p").textContent = s.occupied ? `${number(count)} ${kinds}, as varied as ${effective} of equal size${unlabelled ? `; ${plural(unlabelled, "slot")} without a label` : ""}` : "no slot holds a sample yet";
    balance.querySelector("ol").replaceChildren(...s.balance.slots.map(([name, count]) => {
      const fill = element("i");
      fill.style.width = `${(100 * count) / most}%`;
      return element("li", { title: plural(count, "slot") }, element("span", {}, `${s.balance.kind} ${name}`),
        element("span", { class: "track" }, fill), element("span", { class: "n" }, percent(count / total)));
    }));
    for (const [name, histogram] of Object.entries(this.histograms)) histogram.show(s.histograms[name] ?? { edges: [], counts: [] });
  }

  /** Show only slots and evictions of one producer; "" shows all. */
  only(producer) {
    this.producer = $("#mosaic-producer").value = producer;
    this.turn(-Infinity);
    this.showEvicted();
  }

  /** Send a picture to the learner, and show the slots that look like it. */
  async search(input) {
    const [file] = input.files;
    input.value = ""; // the same file may be chosen again
    if (!file) return;
    const current = this.begin("Slots like ", element("bdi", {}, file.name));
    try {
      if (file.size > MOST_PICTURE) throw new Error(`the picture has ${number(file.size)} bytes: at most ${number(MOST_PICTURE)} are searched for`);
      const got = await post("learner", "memory/search", file);
      if (!current()) return;
      URL.revokeObjectURL(this.seen);
      this.seen = URL.createObjectURL(blob(got.seen));
      Object.assign($("#slot-picture").style, { backgroundImage: `url(${this.seen})`, backgroundSize: "100% 100%", backgroundPosition: "0 0" });
      $("#slot-facts").replaceChildren(element("dt", {}, "picture"), element("dd", {}, "as the learner would see it"));
      if (this.pictures.most) await this.pictures.fetch(Object.values(got.near).flat());
      if (current()) this.showNear(got.near);
    } catch (error) { if (current()) this.noteNear(error.message); }
  }

  turn(by) {
    this.offset = Math.max(0, by === -Infinity ? 0 : this.offset + by);
    this.showMosaic().catch((error) => { $("#memory-note").textContent = error.message; });
  }

  async showMosaic() {
    const got = await ask("learner", "memory/slots", { sort: $("#mosaic-sort").value, offset: this.offset, limit: PAGE, ...(this.producer ? { producer: this.producer } : {}) });
    if (!got.slots.length && this.offset) { this.turn(-Infinity); return; }
    this.rows = got.slots;
    this.peak = Math.max(this.offset ? this.peak ?? 0 : 0, ...got.slots.map((row) => row.duplicates ?? 0), 1); // below 1, all slots have few duplicates
    $("#mosaic-where").textContent = got.total ? `${number(got.offset + 1)}–${number(got.offset + got.slots.length)} of ${number(got.total)}` : this.producer ? "no slot of this producer" : "empty";
    $("#mosaic-back").disabled = !got.offset;
    $("#mosaic-on").disabled = got.offset + PAGE >= got.total;
    const focused = this.mosaic.contains(document.activeElement) ? [...this.mosaic.children].indexOf(document.activeElement) : -1;
    while (this.mosaic.children.length > this.rows.length) this.mosaic.lastChild.remove();
    this.rows.forEach((row, at) => this.tile(at, row));
    if (focused >= 0) this.mosaic.children[Math.min(focused, this.rows.length - 1)]?.focus();
    if (this.pictures.most) await this.pictures.fetch(this.rows);
    this.rows.forEach((row, at) => this.mosaic.children[at] && this.pictures.paint(this.mosaic.children[at], row.id));
  }

  tile(at, row) {
    let tile = this.mosaic.children[at];
    if (!tile) {
      tile = element("button", { class: "tile", tabindex: at ? -1 : 0, onclick: () => this.open(this.rows[at].slot, this.rows[at]) });
      tile.addEventListener("focus", () => { for (const other of this.mosaic.children) other.tabIndex = other === tile ? 0 : -1; });
      this.mosaic.append(tile);
    }
    const text = `slot ${row.slot}${row.duplicates == null ? "" : `, ${plural(row.duplicates, "duplicate")}`}, ${who(row.origin) ?? "unknown"}`;
    tile.title = text;
    tile.setAttribute("aria-label", text);
    tile.style.setProperty("--mark", shade(this.peak ? (row.duplicates ?? 0) / this.peak : 0));
    if (this.pictures.byId.has(row.id)) this.pictures.paint(tile, row.id); // else its picture is on the way
  }

  move(event) {
    const tiles = [...this.mosaic.children], at = tiles.indexOf(document.activeElement);
    if (at < 0) return;
    const columns = getComputedStyle(this.mosaic).gridTemplateColumns.split(" ").length;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -at, End: tiles.length - 1 - at }[event.key];
    if (event.key === "PageDown" && !$("#mosaic-on").disabled) this.turn(PAGE);
    else if (event.key === "PageUp" && !$("#mosaic-back").disabled) this.turn(-PAGE);
    else if (step === undefined) return;
    else tiles[at + step]?.focus();
    event.preventDefault();
  }

  /** Empty the dialog for a new title. The result tells whether the dialog still shows this title. */
  begin(...title) {
    const asked = this.asked = {};
    $("#slot-title").replaceChildren(...title);
    $("#slot-facts").replaceChildren();
    $("#slot-picture").style.backgroundImage = "";
    $("#slot-original").hidden = true;
    this.noteNear("Waiting for the end of the learner's step …");
    if (!this.dialog.open) this.dialog.showModal();
    return () => asked === this.asked;
  }

  noteNear(text) { $("#slot-near").replaceChildren(element("p", { class: "empty", role: "status" }, text)); }

  /** Show a slot. `row` has the facts that are known before the learner answers. */
  async open(slot, row) {
    const current = this.begin(`Slot ${slot}`);
    const facts = (got) => { this.showFacts(got); this.pictures.paint($("#slot-picture"), got.id); };
    if (row) facts(row);
    try {
      const got = await ask("learner", "memory/slot", { slot });
      if (got.pictures) this.pictures.add(got.pictures);
      if (!current()) return;
      facts(got);
      this.showNear(got.near);
      if (got.origin?.original) this.showOriginal(slot, current);
      const missing = [got, ...Object.values(got.near).flat()].filter(({ id }) => !this.pictures.byId.has(id));
      if (!this.pictures.most || !missing.length) return;
      await this.pictures.fetch(missing);
      if (current()) { facts(got); this.showNear(got.near); }
    } catch (error) { if (current()) this.noteNear(error.message); }
  }

  async showOriginal(slot, current) {
    const { url } = await ask("learner", "memory/original", { slot }).catch(() => ({}));
    if (url && current()) show($("#slot-original"), url).hidden = false;
  }

  showFacts(got) {
    const origin = got.origin;
    const facts = [
      ["producer", origin?.producer ?? "unknown"],
      origin && ["source", origin.source], origin && ["id", origin.id],
      origin && ["captured", new Date(origin.time * 1000).toLocaleString()],
      got.label != null && ["class", got.label],
      got.duplicates != null && ["duplicates", `${number(got.duplicates)} expected`],
      ["drawn", got.drawn === 1 ? "once" : `${number(got.drawn)} times`],
      ["age", plural(got.age, "sample")], ["encoded", `${plural(got.stale, "sample")} ago`],
      got.multiplicity > 1 && ["represents", `${number(got.multiplicity)} samples`],
      ["number of the sample", got.id],
    ].filter(Boolean);
    $("#slot-facts").replaceChildren(...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, element("bdi", {}, value))]));
  }

  showNear(near) {
    const titles = { descriptor: "Nearest by descriptor", embedding: "Nearest by embedding" };
    $("#slot-near").replaceChildren(...Object.entries(near).flatMap(([space, rows]) => [
      element("div", { class: "bar" }, element("h3", {}, titles[space])),
      element("div", { class: "near" }, ...rows.map((row) => {
        const tile = element("button", { class: "tile", "aria-label": `slot ${row.slot}, cosine ${row.cosine.toFixed(3)}, ${who(row.origin) ?? ""}`, title: who(row.origin), onclick: () => this.open(row.slot, row) });
        this.pictures.paint(tile, row.id);
        return element("figure", {}, tile, element("figcaption", {}, row.cosine.toFixed(3)));
      })),
    ]));
  }

  /** Return a cell with the picture of a sample; empty without a picture. */
  gone(id) {
    if (!this.pictures.byId.has(id)) return element("td");
    const tile = element("span", { class: "tile small" });
    this.pictures.paint(tile, id);
    return element("td", {}, tile);
  }

  /** Fill a table of recent samples while it is open. `read` returns the cells of each row. */
  async showRecent(place, read) {
    if (!$(place).open) return;
    const table = $(`${place} table`);
    const note = (text) => [element("td", { colspan: table.tHead.rows[0].cells.length, class: "empty" }, text)];
    let rows;
    try {
      rows = await read();
    } catch (error) { rows = [note(error.message)]; }
    table.tBodies[0].replaceChildren(...(rows.length ? rows : [note("none yet")]).map((cells) => element("tr", {}, ...cells)));
  }

  showDropped() {
    return this.showRecent("#dropped", async () => {
      const { dropped, pictures } = await ask("learner", "memory/dropped");
      if (pictures) this.pictures.add(pictures);
      return dropped.map((one) => [
        this.gone(one.pictures[0]), this.gone(one.pictures[1]), element("td", {}, ago(one.at)), named(who(one.origin) ?? "unknown"),
        element("td", { class: "n" }, one.distance.toFixed(2)),
        element("td", {}, one.label == null || one.twin_label == null ? "–" : one.label === one.twin_label ? `both ${one.label}` : `${one.label} and ${one.twin_label}`),
      ]);
    });
  }

  /** Show the samples that could not be decoded, and what is left of their pictures. */
  showQuarantined() {
    return this.showRecent("#quarantined", async () => {
      const { folder, samples } = await ask("learner", "quarantine");
      $("#quarantined > p").textContent = samples.length ? `The samples are in ${folder}, unless they were too many to write all of them.` : "";
      return samples.map((one) => [
        element("td", {}, ...(one.picture ? [show(element("img", { class: "remains", alt: "what is left of it" }), one.picture)] : [])), element("td", {}, ago(one.at)), named(who(one)), element("td", {}, one.reason.replaceAll("_", "-")),
        element("td", { class: "why" }, element("bdi", {}, one.message)), element("td", { class: "why" }, one.file),
      ]);
    });
  }

  showEvicted() {
    return this.showRecent("#evicted", async () => {
      const { evictions, pictures } = await ask("learner", "memory/evictions", { limit: 50, ...(this.producer ? { producer: this.producer } : {}) });
      if (pictures) this.pictures.add(pictures);
      return evictions.map((one) => [
        this.gone(one.id), element("td", {}, ago(one.at)), named(who(one.origin) ?? "unknown"), element("td", { class: "n" }, number(one.age)),
        this.gone(one.by_id), named(who(one.by) ?? "–"),
        element("td", { class: "n" }, one.slot == null ? "–" : element("button", { onclick: () => this.open(one.slot) }, one.slot)),
      ]);
    });
  }
}
