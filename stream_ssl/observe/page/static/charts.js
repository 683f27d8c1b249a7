// Charts of the figures over time, drawn by uPlot. Each chart is a card and shows both roles.
import { ask, bytes, colour, duration, element, number, onTheme, percent } from "./lib.js";

const KEEP = 900; // the number of points that a process keeps
const text = (format) => (value) => (value == null ? "–" : [format(value)].flat().join(" "));
const NUMBER = text(number), PERCENT = text(percent), SECONDS = text(duration), BYTES = text(bytes);

const r = (name, label) => ({ role: "receiver", name, label });
const l = (name, label) => ({ role: "learner", name, label });
const CHARTS = [
  { title: "Stream, samples/s", lines: [r("received", "received"), l("trained", "trained"), l("replayed", "replayed"), r("repeated", "sent again")], format: NUMBER, zero: true },
  { title: "Lag", lines: [l("lag", "oldest waiting sample")], format: SECONDS, zero: true },
  { title: "Loss, nats", lines: [l("loss", "loss")], format: NUMBER },
  { title: "Learning rate", lines: [l("learning_rate", "rate")], format: NUMBER, zero: true },
  { title: "Gradient norm", lines: [l("gradient", "norm")], format: NUMBER, zero: true },
  { title: "Probes, accuracy", lines: [l("held_out", "held out, kNN"), l("knn", "stream, kNN"), l("linear", "stream, linear"), l("majority", "majority")], format: PERCENT, some: true },
  { title: "Memory, samples/s", lines: [l("inserted", "admitted"), l("refused", "refused")], format: NUMBER, zero: true },
  { title: "Effective rank", lines: [l("memory_rank", "memory"), l("stream_rank", "stream")], format: NUMBER },
  { title: "Duplicates of a slot", lines: [l("duplicates_p50", "median"), l("duplicates_p90", "90 %"), l("duplicates_max", "maximum")], format: NUMBER, zero: true },
  { title: "Collisions", lines: [l("collisions", "calibrated"), l("collisions_true", "true, by labels"), l("near_duplicates", "near-duplicates")], format: PERCENT, zero: true },
  { title: "Age of slots, samples", lines: [l("age_p50", "median"), l("age_p90", "90 %"), l("age_max", "oldest")], format: NUMBER, zero: true },
  { title: "Turnover of the memory", lines: [l("turnover", "slots with recent samples")], format: PERCENT, zero: true },
  { title: "Journal", lines: [r("journal", "on disk"), r("lag_bytes", "not yet read")], format: BYTES, zero: true },
  { title: "Producers", lines: [r("producers", "connected")], format: NUMBER, zero: true },
];
const COLOURS = ["--s0", "--s1", "--s2", "--s3"];

export class Charts {
  constructor(parent) {
    this.parent = parent;
    this.tables = {}; // role -> columns
    this.cards = CHARTS.map((chart) => new Chart(chart));
    parent.append(...this.cards.map((card) => card.figure));
    for (const radio of document.querySelectorAll("input[name=track]")) {
      radio.addEventListener("change", () => { this.tables = {}; this.refresh(); });
    }
    onTheme(() => this.cards.forEach((card) => card.rebuild()));
  }

  async refresh() {
    const track = document.querySelector("input[name=track]:checked").value;
    await Promise.allSettled(["receiver", "learner"].map((role) => this.extend(role, track)));
    for (const card of this.cards) card.show(this.tables);
  }

  async extend(role, track) {
    const held = this.tables[role];
    const since = track === "recent" && held?.time.length ? held.time.at(-1) + 0.01 : 0;
    const { every, epoch, ...columns } = await ask(role, "history", { track, since });
    if (!since) { this.tables[role] = { ...columns, epoch }; return; }
    held.epoch = epoch; // the system clock may have changed
    for (const [name, values] of Object.entries(columns)) {
      held[name].push(...values);
      held[name].splice(0, held[name].length - KEEP);
    }
  }
}

class Chart {
  constructor({ title, lines, format, zero, some }) {
    Object.assign(this, { title, lines, format, zero, some });
    this.keys = element("span", { class: "keys" });
    this.plot = element("div", { class: "plot", role: "img" });
    this.figure = element("figure", { class: "card chart" }, element("figcaption", {}, title, this.keys), this.plot);
    this.values = lines.map(() => element("b", {}, "–"));
    new ResizeObserver(() => this.chart?.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight })).observe(this.plot);
  }

  show(tables) {
    // A series without values has no line. A chart without lines has no card.
    const there = this.lines.filter(({ role, name }) => tables[role]?.[name].some((v) => v != null && (v !== 0 || !this.some)));
    const drawn = there.length > 1 ? there.filter((line, at) => at === 0 || tables[line.role][line.name].some((v) => v)) : there;
    this.figure.hidden = drawn.length === 0;
    if (!drawn.length) return;
    this.data = uPlot.join(drawn.map(({ role, name }) => [tables[role].time.map((at) => at + tables[role].epoch), tables[role][name]]));
    const names = drawn.map((line) => line.label).join();
    if (names !== this.names) { this.names = names; this.drawn = drawn; this.rebuild(); }
    else this.chart.setData(this.data);
    drawn.forEach((line, at) => { this.values[at].textContent = this.format(tables[line.role][line.name].findLast((v) => v != null)); });
    this.plot.setAttribute("aria-label", `${this.title}: ${drawn.map((line, at) => `${line.label} ${this.values[at].textContent}`).join(", ")}`);
  }

  rebuild() {
    if (!this.data) return;
    this.chart?.destroy();
    this.keys.replaceChildren(...this.drawn.map((line, at) => {
      const mark = element("i");
      mark.style.background = `var(${COLOURS[at]})`;
      return element("span", {}, mark, line.label, " ", this.values[at]);
    }));
    const muted = colour("--muted"), grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: muted, grid, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    this.chart = new uPlot({
      width: this.plot.clientWidth || 320, height: this.plot.clientHeight || 150,
      padding: [8, 10, 0, 0], legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false } },
      scales: { y: { range: (u, least, most) => span(least, most, this.zero) } },
      axes: [{ ...axis, size: 26, space: 70, values: (u, ticks) => ticks.map((at) => clock(at, ticks[1] - ticks[0] < 60)) },
        { ...axis, size: 56, space: 32, values: (u, ticks) => ticks.map((v) => this.format(v)) }],
      series: [{}, ...this.drawn.map((line, at) => ({ label: line.label, stroke: colour(COLOURS[at]), width: 1.6, spanGaps: true, points: { show: false } }))],
      hooks: { setCursor: [(u) => this.point(u)] },
    }, this.data, this.plot);
  }

  /** Show the values at the cursor in the legend, or the last values without a cursor. */
  point(u) {
    this.drawn.forEach((line, at) => {
      const column = this.data[at + 1];
      const value = u.cursor.idx == null ? column.findLast((v) => v != null) : column.slice(0, u.cursor.idx + 1).findLast((v) => v != null);
      this.values[at].textContent = this.format(value);
    });
  }
}

function span(least, most, zero) {
  if (least == null) return [0, 1];
  if (zero) return [0, most > 0 ? most * 1.08 : 1];
  const room = (most - least || Math.abs(most) || 1) * 0.08;
  return [least - room, most + room];
}

function clock(at, seconds) {
  const shown = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Date(at * 1000).toLocaleTimeString([], seconds ? { ...shown, second: "2-digit" } : shown);
}

/** A histogram of bars. It has no axis of counts, because only the shape matters. */
export class Histogram {
  constructor(title, note) {
    this.plot = element("div", { class: "plot", role: "img" });
    this.note = element("span", { class: "keys" }, note);
    this.figure = element("figure", { class: "card chart" }, element("figcaption", {}, title, this.note), this.plot);
    this.title = title;
    new ResizeObserver(() => this.draw()).observe(this.plot);
    onTheme(() => this.draw());
  }

  show({ edges, counts }) {
    this.edges = edges; this.counts = counts;
    this.figure.hidden = !counts.length;
    const peak = counts.indexOf(Math.max(...counts));
    this.plot.setAttribute("aria-label", `${this.title}: from ${number(edges[0])} to ${number(edges.at(-1))}, most slots from ${number(edges[peak])} to ${number(edges[peak + 1])}`);
    this.draw();
  }

  draw() {
    this.chart?.destroy();
    if (!this.counts?.length || !this.plot.clientWidth) return;
    const muted = colour("--muted"), fill = colour("--s0");
    const middles = this.counts.map((_, at) => (this.edges[at] + this.edges[at + 1]) / 2);
    const axis = { stroke: muted, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    this.chart = new uPlot({
      width: this.plot.clientWidth, height: this.plot.clientHeight, padding: [8, 8, 0, 0], legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false, range: [this.edges[0], this.edges.at(-1)] }, y: { range: (u, least, most) => [0, most * 1.05 || 1] } },
      axes: [{ ...axis, size: 24, space: 50, grid: { show: false }, values: (u, ticks) => ticks.map((v) => number(v)) },
        { ...axis, size: 44, space: 40, grid: { stroke: colour("--line"), width: 1 }, values: (u, ticks) => ticks.map((v) => number(v)) }],
      series: [{}, { fill, stroke: fill, width: 0, paths: uPlot.paths.bars({ size: [0.9, 60] }), points: { show: false } }],
    }, [middles, this.counts], this.plot);
  }
}
