// The map of slots, on the two principal axes or by UMAP. Each slot is a point, and a picture if
// there is room.
import { $, ago, ask, colour, element, known, onTheme, percent, plural, unknown } from "./lib.js";

const CELL = 58; // pixels of a cell for one picture
const HUES = 12;

export class MapSection {
  constructor(open, pictures) {
    Object.assign(this, { open, pictures, canvas: $("#map-canvas"), tip: $("#map-tip"), chosen: -1 });
    this.images = new Map(); // url -> image
    const redraw = () => this.draw();
    new ResizeObserver(redraw).observe(this.canvas);
    onTheme(redraw);
    $("#map-colour").addEventListener("change", redraw);
    for (const name of ["by", "producer"]) $(`#map-${name}`).addEventListener("change", () => this.refresh());
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => this.choose(-1));
    this.canvas.addEventListener("click", (event) => { const at = this.at(event); if (at >= 0) this.open(this.data.slots[at]); });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.choose(-1));
  }

  async refresh() {
    const section = $("#map"), note = $("#map-note"), producer = $("#map-producer").value;
    try {
      this.data = await ask("learner", "memory/map", { by: $("#map-by").value, ...(producer ? { producer } : {}) });
      if (this.chosen >= this.data.slots.length) this.choose(-1);
      note.textContent = this.data.slots.length ? `${plural(this.data.slots.length, "slot")}; ${this.tells()}` : producer ? "no slot of this producer" : "too few slots";
      $("#map-colour option[value=labels]").disabled = !this.data.labels;
      this.draw();
      known(section);
      await this.fetchPictures();
    } catch (error) { note.textContent = unknown(section, "The places of the slots", error); }
  }

  tells() {
    if (this.data.by === "umap") return `by UMAP, ${ago(this.data.at)}`;
    const [first, second] = this.data.share.map(percent);
    return `${this.data.note ? `${this.data.note}; until then ` : ""}the axes have ${first} and ${second} of the variance`;
  }

  place(at) {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    return [width / 2 + this.data.x[at] * (width / 2 - 34), height / 2 - this.data.y[at] * (height / 2 - 34)];
  }

  /** Return one slot for each cell of the screen that has slots. */
  spread() {
    const cells = new Map();
    this.data.slots.forEach((slot, at) => {
      const [x, y] = this.place(at);
      const cell = `${Math.floor(x / CELL)},${Math.floor(y / CELL)}`;
      if (!cells.has(cell)) cells.set(cell, at);
    });
    return [...cells.values()];
  }

  async fetchPictures() {
    if (!this.pictures.most || !this.data.slots.length) return;
    const { slots, ids } = this.data;
    const shown = this.spread().map((at) => ({ slot: slots[at], id: ids[at] }));
    await this.pictures.fetch(shown);
    await Promise.all([...new Set(shown.map((one) => this.pictures.byId.get(one.id)?.url))].filter((url) => url && !this.images.has(url)).map(async (url) => {
      const image = new Image();
      image.src = url;
      await image.decode().then(() => this.images.set(url, image), () => {});
    }));
    for (const url of this.images.keys()) if (this.images.size > 64) this.images.delete(url);
    this.draw();
  }

  colours() {
    const { labels, duplicates } = this.data;
    if ($("#map-colour").value === "labels" && labels) {
      const none = colour("--muted"), shade = (label) => (label < 0 ? none : `hsl(${(360 * (label % HUES)) / HUES} 60% 52%)`);
      const classes = [...new Set(labels)].sort((a, b) => a - b), named = classes.slice(0, HUES + 1);
      this.explain(named.map((label) => [shade(label), label < 0 ? "no class" : `class ${label}`]), classes.length - named.length);
      return (at) => shade(labels[at]);
    }
    const sorted = [...(duplicates ?? [])].sort((a, b) => a - b), most = Math.max(1, sorted[Math.floor(0.98 * (sorted.length - 1))] ?? 1);
    const [least, greatest] = [channels(colour("--muted")), channels(colour("--many"))];
    const shade = (share) => `rgb(${least.map((value, n) => Math.round(value + share * (greatest[n] - value))).join()})`;
    this.explain(sorted.length ? [[shade(0), "no duplicate"], [shade(1), `${plural(most, "duplicate")} or more`]] : []);
    return (at) => shade(Math.min(1, (duplicates?.[at] ?? 0) / most));
  }

  /** Show what the colours mean: pairs of a colour and its text, and the number of texts left out. */
  explain(pairs, more = 0) {
    const told = JSON.stringify([pairs, more]);
    if (told === this.told) return;
    this.told = told;
    $("#map-legend").replaceChildren(...pairs.map(([shade, text]) => {
      const mark = element("i");
      mark.style.background = shade;
      return element("span", {}, mark, text);
    }), more ? `and ${more} more` : "");
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!this.data || !width) return;
    const scale = devicePixelRatio || 1, pen = this.canvas.getContext("2d");
    this.canvas.width = width * scale; this.canvas.height = height * scale;
    pen.scale(scale, scale);
    const shaded = this.colours();
    pen.globalAlpha = 0.75;
    this.data.slots.forEach((slot, at) => {
      const [x, y] = this.place(at);
      pen.fillStyle = shaded(at);
      pen.beginPath(); pen.arc(x, y, 2.6, 0, 7); pen.fill();
    });
    pen.globalAlpha = 1;
    pen.imageSmoothingEnabled = false;
    for (const at of this.spread()) this.picture(pen, at, 34, shaded(at));
    if (this.chosen >= 0 && this.chosen < this.data.slots.length) this.picture(pen, this.chosen, 72, colour("--accent"), true);
  }

  picture(pen, at, side, edge, big = false) {
    const found = this.pictures.byId.get(this.data.ids[at]), image = found && this.images.get(found.url);
    const [x, y] = this.place(at);
    if (image) {
      pen.fillStyle = edge;
      pen.fillRect(x - side / 2 - 1.5, y - side / 2 - 1.5, side + 3, side + 3);
      pen.drawImage(image, found.x * found.tile, found.y * found.tile, found.tile, found.tile, x - side / 2, y - side / 2, side, side);
    } else if (big) {
      pen.strokeStyle = edge; pen.lineWidth = 2;
      pen.beginPath(); pen.arc(x, y, 7, 0, 7); pen.stroke();
    }
  }

  at(event) {
    if (!this.data) return -1;
    const { left, top } = this.canvas.getBoundingClientRect();
    return this.nearest(event.clientX - left, event.clientY - top, () => true, 24);
  }

  nearest(x, y, allowed, limit) {
    let best = -1, least = limit * limit;
    this.data.slots.forEach((slot, at) => {
      const [u, v] = this.place(at), distance = (u - x) ** 2 + (v - y) ** 2;
      if (distance < least && allowed(u - x, v - y)) { best = at; least = distance; }
    });
    return best;
  }

  choose(at) {
    if (at === this.chosen) return;
    this.chosen = at;
    this.tip.hidden = at < 0;
    if (at >= 0) {
      const [x, y] = this.place(at), { duplicates, labels } = this.data;
      this.tip.textContent = `slot ${this.data.slots[at]}${duplicates ? `, ${plural(duplicates[at], "duplicate")}` : ""}${labels && labels[at] >= 0 ? `, class ${labels[at]}` : ""}`;
      this.tip.style.left = `${Math.min(x + 14, this.canvas.clientWidth - 170)}px`;
      this.tip.style.top = `${Math.max(4, y - 70)}px`;
    }
    this.draw();
  }

  key(event) {
    if (!this.data?.slots.length) return;
    const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === "Enter" && this.chosen >= 0) this.open(this.data.slots[this.chosen]);
    else if (way) {
      const [x, y] = this.chosen >= 0 ? this.place(this.chosen) : [this.canvas.clientWidth / 2, this.canvas.clientHeight / 2];
      const next = this.chosen < 0 ? this.nearest(x, y, () => true, 1e6)
        : this.nearest(x, y, (dx, dy) => dx * way[0] + dy * way[1] > Math.abs(dx * way[1] + dy * way[0]) && dx * dx + dy * dy > 100, 1e6);
      if (next >= 0) this.choose(next);
    } else return;
    event.preventDefault();
  }
}

function channels(text) { return text.match(/[\d.]+/g).slice(0, 3).map(Number); }
