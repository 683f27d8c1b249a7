// Charts of the figures over time, drawn by uPlot. Each chart is a card and shows both roles.
import { $, ask, bytes, colour, duration, element, explained, number, onTheme, percent, plural } from "./lib.js";

const MOST_FILE = 32 << 20; // the size of a history to compare, in bytes
const OTHER_TIME = 60; // a change of an epoch by more seconds needs all rows again
const KEEP = 900; // the number of points that a process keeps
const text = (format) => (value) => (value == null ? "–" : format(value));
const NUMBER = text(number), PERCENT = text(percent), SECONDS = text(duration), BYTES = text(bytes);
export const FORMATS = { NUMBER, PERCENT, SECONDS, BYTES };

// Steps between two ticks of an axis of seconds, so that each label is a whole number of its unit.
const TIMES = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000, 8640000];
/** The steps between two moments of a time axis. None is more than four times the one before, so at least one tick lies on each axis. */
export const MOMENTS = [...TIMES.filter((step) => step >= 1 && step <= 864000), ...[30, 60, 180, 365, 1460].map((days) => 86400 * days)];

const r = (name, label) => ({ role: "receiver", name, label });
const l = (name, label) => ({ role: "learner", name, label });
const CHARTS = [
  { title: "Stream, samples/s", lines: [r("received", "received"), l("trained", "trained, new"), l("replayed", "trained again"), r("repeated", "sent again")], format: NUMBER, zero: true },
  { title: "Lag", lines: [l("lag", "oldest waiting sample")], format: SECONDS, zero: true, levels: { limit: "lag" } },
  { title: "Loss", lines: [l("loss", "loss")], format: NUMBER, smooth: true, levels: { chance: "chance" }, reach: true },
  { title: "Learning rate", lines: [l("learning_rate", "rate")], format: NUMBER, zero: true },
  { title: "Gradient norm", lines: [l("gradient", "norm")], format: NUMBER, smooth: true, zero: true },
  { title: "Held-out images, accuracy", lines: [l("held_out", "kNN"), l("held_out_linear", "linear")], format: PERCENT, some: true, levels: { chance: "held_out_chance", "kNN at the start": "held_out_first" }, reach: true },
  { title: "Stream, accuracy", lines: [l("knn", "kNN"), l("linear", "linear"), l("majority", "majority")], format: PERCENT, some: true },
  { title: "Memory, samples/s", lines: [l("inserted", "admitted"), l("refused", "refused")], format: NUMBER, zero: true },
  { title: "Effective rank", lines: [l("memory_rank", "memory"), l("stream_rank", "stream")], format: NUMBER, levels: { collapse: "collapsed_rank" } },
  { title: "Duplicates of a slot", lines: [l("duplicates_p50", "median"), l("duplicates_p90", "90 %"), l("duplicates_max", "maximum")], format: NUMBER, zero: true },
  { title: "Collisions", lines: [l("collisions", "calibrated"), l("collisions_true", "true, by labels"), l("near_duplicates", "near-duplicates")], format: PERCENT, zero: true, levels: { limit: "collisions" } },
  { title: "Age of slots, samples", lines: [l("age_p50", "median"), l("age_p90", "90 %"), l("age_max", "oldest")], format: NUMBER, zero: true },
  { title: "Turnover of the memory", lines: [l("turnover", "slots with recent samples")], format: PERCENT, zero: true },
  { title: "Journal", lines: [r("journal", "on disk"), r("lag_bytes", "not yet read")], format: BYTES, zero: true, levels: { budget: "journal" } },
  { title: "Producers", lines: [r("producers", "connected")], format: NUMBER, zero: true, counts: true },
];
const FLAT = 1e4; // a change of a value by less than this part of it is drawn as a constant
const WHOLE = [...Array(12).keys()].flatMap((power) => [1, 2, 5].map((first) => first * 10 ** power)); // steps between counts
const LEVELS = { // a sentence on each level that a chart draws
  limit: "Above it, the condition of this name begins.",
  chance: "The value of an encoder that has learned nothing.",
  "kNN at the start": "The accuracy of kNN before the first update. An encoder that learns leaves it behind.",
  collapse: "Below it, the embeddings have collapsed.",
  budget: "The journal's limit on disk (journal.budget). Then producers wait.",
};
const SMOOTHED = 15; // a running mean has the points of this part of a line on each side
const COLOURS = ["--s0", "--s1", "--s2", "--s3"];

export class Charts {
  constructor(parent) {
    this.parent = parent;
    this.tables = {}; // role -> columns
    this.limits = {}; // name -> value of a level that a chart draws
    this.events = []; // { at, name }: conditions that hold, by the time they began
    this.past = []; // { at, name }: what else has happened
    this.range = null; // the chosen times, [from, to] in Unix seconds; null: all
    this.other = null; // the history of another run
    this.starts = {}; // role -> the start of its process, in Unix seconds
    this.cards = CHARTS.map((chart) => new Chart(chart, (range) => this.choose(range), (at, near) => this.hovered(at, near)));
    parent.append(...this.cards.map((card) => card.figure));
    for (const radio of document.querySelectorAll("input[name=track]")) {
      radio.addEventListener("change", () => { this.choose(null); this.tables = {}; this.refresh(); });
    }
    for (const [id, by] of Object.entries({ in: [0.25, -0.25], out: [-0.5, 0.5], back: [-0.5, -0.5], on: [0.5, 0.5] })) {
      $(`#range-${id}`).addEventListener("click", () => this.move(...by));
    }
    $("#range-reset").addEventListener("click", () => this.choose(null));
    $("#compare").addEventListener("change", (event) => this.compare(event.target));
    $("#compare-end").addEventListener("click", () => this.show(null, ""));
    onTheme(() => this.cards.forEach((card) => card.rebuild()));
    this.hovered(null);
  }

  async refresh() {
    const track = chosenTrack();
    await Promise.allSettled(["receiver", "learner"].map((role) => this.extend(role, track)));
    this.draw();
  }

  draw() {
    this.past = happened(this.tables, this.starts);
    for (const card of this.cards) card.show(this.tables, this.limits, this.events, this);
    const note = $("#marks-note"), days = this.events.some(({ at }) => Date.now() / 1000 - at > 43200);
    note.hidden = !this.events.length;
    note.textContent = `Vertical dashed lines show when a condition began: ${this.events.map(({ at, name }) => `${name}, ${clock(at, true, days)}`).join("; ")}`;
  }

  /** Name the events near the cursor, or say what the marks are. */
  hovered(at, near) {
    const told = at == null ? [] : this.past.filter((one) => Math.abs(one.at - at) <= near);
    const days = told.some((one) => Date.now() / 1000 - one.at > 43200);
    $("#events-note").textContent = told.length
      ? told.slice(-5).map((one) => `${one.name}, ${clock(one.at, true, days)}`).join("; ")
      : "Short marks at the bottom are checkpoints, starts of processes, changes of the stream, and producers that connect or leave. Point at one to read it.";
  }

  /** Return the first and the last time that the charts have. */
  all() {
    const times = Object.values(this.tables).flatMap(({ time, epoch }) => (time.length ? [time[0] + epoch, time.at(-1) + epoch] : []));
    return times.length ? [Math.min(...times), Math.max(...times)] : null;
  }

  /** Show a range of the time in all charts; null shows all of it. */
  choose(range) {
    this.range = range;
    const note = $("#range-note");
    note.textContent = range ? `${clock(range[0], true)} to ${clock(range[1], true)}` : "";
    $("#range-reset").disabled = !range;
    this.draw();
  }

  /** Move both ends of the range by parts of its length, within the times that exist. */
  move(left, right) {
    const all = this.all();
    if (!all) return;
    const [from, to] = this.range ?? all, span = to - from;
    const length = Math.min(all[1] - all[0], Math.max(10, span * (1 - left + right)));
    const start = Math.min(all[1] - length, Math.max(all[0], from + span * left));
    this.choose(length >= all[1] - all[0] ? null : [start, start + length]);
  }

  /** Draw the history of another run from a file of `stream-ssl status RUN --history`. */
  async compare(input) {
    const [file] = input.files;
    input.value = ""; // the same file may be chosen again
    if (!file) return;
    try {
      if (file.size > MOST_FILE) throw new Error(`it has more than ${text(bytes)(MOST_FILE)}`);
      const found = checked(JSON.parse(await file.text()));
      this.show(found, `dashed: ${found.run}, from its start on`);
    } catch (error) { this.show(null, `${file.name} is not a history from \`stream-ssl status RUN --history\`: ${error.message}`); }
  }

  show(other, note) {
    this.other = other;
    $("#compare-note").textContent = note;
    $("#compare-end").hidden = !other;
    this.draw();
  }

  async extend(role, track) {
    const held = this.tables[role];
    const since = track === "recent" && held?.time.length ? held.time.at(-1) + 0.01 : 0;
    const { every, epoch, ...columns } = await ask(role, "history", { track, since });
    if (track !== chosenTrack()) return; // another one was chosen meanwhile
    if (!since) { this.tables[role] = { ...columns, epoch }; return; }
    const same = Object.keys(columns).sort().join() === Object.keys(held).filter((name) => name !== "epoch").sort().join();
    if (!same || Math.abs(epoch - held.epoch) > OTHER_TIME) { // another version has other series, and after a boot the process counts other seconds
      delete this.tables[role];
      return this.extend(role, track);
    }
    held.epoch = epoch; // the system clock may have changed
    for (const [name, values] of Object.entries(columns)) {
      held[name].push(...values);
      held[name].splice(0, held[name].length - KEEP);
    }
  }
}

function chosenTrack() { return $("input[name=track]:checked").value; }

/** Return what happened in the times of the columns, the earliest first: { at, name }. */
export function happened(tables, starts) {
  const found = Object.entries(starts).flatMap(([role, at]) => (at && tables[role] ? [{ at, name: `the ${role} started` }] : []));
  const changes = (role, series, name) => {
    const { time = [], epoch, [series]: values } = tables[role] ?? {};
    for (let row = 1; values && row < time.length; row += 1) {
      const [before, now] = [values[row - 1], values[row]];
      if (before != null && now != null && before !== now) found.push({ at: time[row] + epoch, name: name(now, before) });
    }
  };
  changes("learner", "checkpoint_step", (step) => `checkpoint at step ${number(step)}`);
  changes("learner", "drifts", () => "the stream changed");
  changes("receiver", "producers", (now, before) => `${plural(Math.abs(now - before), "producer")} ${now > before ? "connected" : "left"}`);
  return found.sort((one, other) => one.at - other.at);
}

/** Return the running mean of a line, each over the same time to both sides; null where the line has no value. */
export function smoothed(values) {
  const reach = Math.max(1, Math.round(values.length / SMOOTHED / 2));
  return values.map((value, at) => {
    const side = Math.min(reach, at, values.length - 1 - at);
    const near = values.slice(at - side, at + side + 1).filter((v) => v != null);
    return value == null ? null : near.reduce((sum, v) => sum + v, 0) / near.length;
  });
}

/** Return whether a process has given no values for a while. */
function isOld({ time, epoch }, now) {
  const every = time.length > 1 ? time.at(-1) - time.at(-2) : 0;
  return !time.length || now - time.at(-1) - epoch > Math.max(20, 3 * every);
}

/** Return a history if each role has a time and columns of numbers of one length. */
function checked(told) {
  const roles = ["receiver", "learner"].filter((role) => told?.[role]);
  if (!roles.length) throw new Error("it has neither a receiver nor a learner");
  for (const role of roles) {
    const { time, epoch, every, ...columns } = told[role];
    const good = (values) => Array.isArray(values) && values.length === time.length && values.every((v) => v === null || Number.isFinite(v));
    if (!Array.isArray(time) || time.length > 2 * KEEP || !good(time) || !Number.isFinite(epoch)) throw new Error(`the ${role} has no times`);
    for (const [name, values] of Object.entries(columns)) if (!good(values)) throw new Error(`the ${role} has a wrong column ${name.slice(0, 40)}`);
  }
  return { ...told, run: String(told.run ?? "another run").slice(0, 80) };
}

class Chart {
  constructor({ title, lines, format, zero, some, levels = {}, reach, counts, smooth }, choose, hovered) {
    Object.assign(this, { title, lines, format, zero, some, reach, counts, smooth, choose, hovered, levelsOf: levels, levels: [] });
    this.keys = element("span", { class: "keys" });
    this.plot = element("div", { class: "plot", role: "img", "aria-label": title });
    this.figure = element("figure", { class: "card chart" }, element("figcaption", {}, title, this.keys), this.plot);
    this.values = lines.map(() => element("b", {}, "–"));
    new ResizeObserver(() => this.chart?.setSize({ width: this.plot.clientWidth, height: this.plot.clientHeight })).observe(this.plot);
  }

  show(tables, limits, events, charts) {
    const { range, other, starts } = charts, all = charts.all();
    this.range = range;
    this.levels = Object.entries(this.levelsOf).map(([name, limit]) => ({ name, value: limits[limit] })).filter(({ value }) => value != null);
    this.events = events;
    this.past = charts.past;
    // A series without values has no line. A chart without lines has no card.
    const there = this.lines.filter(({ role, name }) => tables[role]?.[name]?.some((v) => v != null && (v !== 0 || !this.some)));
    const drawn = there.length > 1 ? there.filter((line, at) => at === 0 || tables[line.role][line.name].some((v) => v)) : there;
    this.figure.hidden = drawn.length === 0;
    if (!drawn.length) return;
    const own = drawn.map(({ role, name }) => [tables[role].time.map((at) => at + tables[role].epoch), tables[role][name]]);
    this.whole = all; // of both processes, so that the end of a dead process is seen
    const compared = drawn.filter(({ role, name }) => other?.[role]?.time.length && other[role][name]);
    this.data = uPlot.join([...own, ...compared.map(({ role, name }) => {
      const { time, [name]: values } = other[role], shift = (starts[role] ?? this.whole[0]) - time[0];
      return [time.map((at) => at + shift), values];
    }), ...(this.smooth ? own.map(([time, values]) => [time, smoothed(values)]) : [])]);
    this.newest = drawn.map(({ role, name }) => (isOld(tables[role], all[1]) ? null : tables[role][name].at(-1)));
    this.compared = compared.map((line) => drawn.indexOf(line));
    const names = [...drawn.map((line) => line.label), ...this.levels.map(({ name, value }) => `${name} ${this.format(value)}`), ...this.compared].join();
    if (names !== this.names) { this.names = names; this.drawn = drawn; this.rebuild(); }
    else this.chart.setData(this.data);
    drawn.forEach((line, at) => { this.values[at].textContent = this.format(this.newest[at]); });
    this.plot.setAttribute("aria-label", `${this.title}: ${drawn.map((line, at) => `${line.label} ${this.values[at].textContent}`).join(", ")}`);
  }

  rebuild() {
    if (!this.data) return;
    this.chart?.destroy();
    this.keys.replaceChildren(...this.drawn.map((line, at) => {
      const mark = element("i");
      mark.style.background = `var(${COLOURS[at]})`;
      return element("span", {}, mark, explained(line.role, line.name, line.label), " ", this.values[at]);
    }), ...this.levels.map(({ name, value }) => element("span", { title: LEVELS[name] }, element("i", { class: "dashed" }), name, " ", element("b", {}, this.format(value)))));
    const muted = colour("--muted"), grid = { stroke: colour("--line"), width: 1 };
    const axis = { stroke: muted, grid, ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    this.chart = new uPlot({
      width: this.plot.clientWidth || 320, height: this.plot.clientHeight || 150,
      padding: [8, 24, 0, 0], legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: false, dist: 5 }, bind: { dblclick: () => () => { this.choose(null); return null; } } },
      scales: { x: { range: () => this.range ?? this.whole }, y: { range: (u, least, most) => this.span(least, most) } },
      axes: [{ ...axis, size: 26, space: 70, incrs: MOMENTS, values: (u, ticks) => ticks.map((at) => clock(at, ticks[1] - ticks[0] < 60)) },
        { ...axis, size: 56, space: 32, ...(this.format === SECONDS ? { incrs: TIMES } : this.counts ? { incrs: WHOLE } : {}), values: (u, ticks) => labels(ticks, this.format) }],
      series: [{}, ...this.drawn.map((line, at) => ({ label: line.label, stroke: colour(COLOURS[at]), width: this.smooth ? 1 : 1.6, alpha: this.smooth ? 0.4 : 1, spanGaps: true, points: { show: false } })),
        ...this.compared.map((at) => ({ label: `${this.drawn[at].label}, other run`, stroke: colour(COLOURS[at]), width: 1.2, dash: [5, 4], alpha: 0.75, spanGaps: true, points: { show: false } })),
        ...(this.smooth ? this.drawn.map((line, at) => ({ label: `${line.label}, running mean`, stroke: colour(COLOURS[at]), width: 1.8, spanGaps: true, points: { show: false } })) : [])],
      hooks: { setSelect: [(u) => this.select(u)], setCursor: [(u) => this.point(u)], draw: [(u) => this.marks(u)] },
    }, this.data, this.plot);
  }

  /** Show the times between the ends of a drag in all charts. */
  select(u) {
    const { left, width } = u.select;
    if (width < 5) return;
    const range = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    this.choose(range);
  }

  /** Return the range of the axis. It contains the levels that are not far, and with `reach` all of them. */
  span(least, most) {
    for (const { value } of most == null ? [] : this.levels) if (this.reach || value < 3 * most) { least = Math.min(least, value); most = Math.max(most, value); }
    return span(least, most, this.zero);
  }

  /** Draw each level as a dashed line across with its name, the beginning of each present condition as a dashed line down, and each other event as a short mark. */
  marks(u) {
    const { left, top, width, height } = u.bbox, { ctx } = u;
    const line = (from, to, stroke) => { ctx.strokeStyle = stroke; ctx.beginPath(); ctx.moveTo(...from); ctx.lineTo(...to); ctx.stroke(); };
    ctx.save();
    ctx.setLineDash([6 * devicePixelRatio, 4 * devicePixelRatio]);
    ctx.lineWidth = devicePixelRatio;
    ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.fillStyle = colour("--muted");
    ctx.textAlign = "left";
    ctx.textBaseline = "bottom";
    for (const { name, value } of this.levels) {
      const y = u.valToPos(value, "y", true);
      if (y < top || y > top + height) continue;
      line([left, y], [left + width, y], colour("--muted"));
      ctx.fillText(name, left + 4 * devicePixelRatio, y - 2 * devicePixelRatio);
    }
    for (const { at } of this.events) {
      const x = u.valToPos(at, "x", true);
      if (x >= left && x <= left + width) line([x, top], [x, top + height], colour("--warn"));
    }
    ctx.setLineDash([]);
    for (const { at } of this.past) {
      const x = u.valToPos(at, "x", true);
      if (x >= left && x <= left + width) line([x, top + height - 5 * devicePixelRatio], [x, top + height], colour("--muted"));
    }
    ctx.restore();
  }

  /** Show the values at the cursor in the legend, or the last values without a cursor. */
  point(u) {
    this.hovered(u.cursor.idx == null ? null : u.posToVal(u.cursor.left, "x"), u.posToVal(8, "x") - u.posToVal(0, "x"));
    this.drawn.forEach((line, at) => {
      const column = this.data[at + 1];
      if (u.cursor.idx == null) { this.values[at].textContent = this.format(this.newest[at]); return; }
      const value = column.slice(0, u.cursor.idx + 1).findLast((v) => v != null);
      this.values[at].textContent = this.format(value);
    });
  }
}

/** Return the ends of an axis with room beside the values, below 0 only if values are. A constant has as much room as if it changed. */
export function span(least, most, zero) {
  if (least == null) return [0, 1];
  if (zero) return [0, most > 0 ? most * 1.08 : 1];
  const size = Math.max(Math.abs(least), Math.abs(most)) || 1;
  const room = (most - least > size / FLAT ? most - least : size) * 0.08;
  return [least >= 0 ? Math.max(0, least - room) : least - room, most + room];
}

/** Return labels that state the exact values of evenly spaced ticks. */
export function labels(ticks, format) {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : Math.abs(ticks[0]) || 1;
  if (format === SECONDS) {
    const [size, unit] = step >= 86400 ? [86400, "d"] : step >= 3600 ? [3600, "h"] : step >= 60 ? [60, "min"] : [1, "s"];
    return ticks.map((v) => `${exact(v / size, step / size)} ${unit}`);
  }
  if (format === PERCENT) return ticks.map((v) => `${exact(100 * v, 100 * step)} %`);
  if (format === BYTES) {
    const power = Math.max(0, Math.min(4, Math.floor(Math.log10(Math.max(1, ...ticks)) / 3)));
    return ticks.map((v) => `${exact(v / 1000 ** power, step / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`);
  }
  return ticks.map((v) => exact(v, step));
}

/** Return a tick with as many digits as distinguish it from the next. */
function exact(value, step) {
  if (Math.abs(value) < step / 1e6) return "0";
  const digits = Math.max(1, Math.min(12, Math.floor(Math.log10(Math.abs(value) / step) + 1e-9) + 3));
  const shown = Number(value.toPrecision(digits)), size = Math.abs(shown);
  if (size >= 1e12) return shown.toExponential();
  if (size >= 1e9) return `${Number((shown / 1e9).toPrecision(digits))}G`;
  if (size >= 1e6) return `${Number((shown / 1e6).toPrecision(digits))}M`;
  return size < 1e-3 ? Number(shown.toPrecision(digits)).toExponential() : shown.toLocaleString("en", { maximumFractionDigits: 9 });
}

function clock(at, seconds, day = false) {
  const shown = { ...(day ? { month: "short", day: "numeric" } : {}), hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Date(at * 1000).toLocaleString([], seconds ? { ...shown, second: "2-digit" } : shown);
}

/** A histogram of bars. It has no axis of counts, because only the shape matters. */
export class Histogram {
  constructor(title, metric, note) {
    this.plot = element("div", { class: "plot", role: "img", "aria-label": title });
    this.note = element("span", { class: "keys" }, note);
    this.figure = element("figure", { class: "card chart" }, element("figcaption", {}, metric ? element("a", { class: "help", href: `docs/metrics#stream_ssl_${metric}`, title: `The memory's ${note}.` }, title) : element("span", { title: `The memory's ${note}.` }, title), this.note), this.plot);
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
      width: this.plot.clientWidth, height: this.plot.clientHeight, padding: [8, 24, 0, 0], legend: { show: false }, cursor: { show: false },
      scales: { x: { time: false, range: [this.edges[0], this.edges.at(-1)] }, y: { range: (u, least, most) => [0, most * 1.05 || 1] } },
      axes: [{ ...axis, size: 24, space: 50, grid: { show: false }, values: (u, ticks) => labels(ticks, NUMBER) },
        { ...axis, size: 44, space: 40, incrs: WHOLE, grid: { stroke: colour("--line"), width: 1 }, values: (u, ticks) => labels(ticks, NUMBER) }],
      series: [{}, { fill, stroke: fill, width: 0, paths: uPlot.paths.bars({ size: [0.9, 60] }), points: { show: false } }],
    }, [middles, this.counts], this.plot);
  }
}
