// The ranks of a run side by side. The section is hidden with one process and no parked journal.
import { $, ask, bytes, duration, element, number, percent, plural, rate } from "./lib.js";

export class GroupSection {
  constructor() {
    this.section = $("#group");
    this.link = $('a[href="#group"]');
    this.body = $("#group-table tbody");
  }

  async refresh() {
    const note = $("#group-note"), parked = $("#group-parked");
    let got;
    try { got = await ask("learner", "ranks"); } catch (error) {
      note.textContent = error.message;
      for (const row of this.body.rows) row.className = "gone";  // these rows are out of date
      return;
    }
    const group = got.ranks.length > 1;
    this.section.hidden = this.link.hidden = !group && !got.parked.length;
    this.body.closest(".card").hidden = !group;
    note.textContent = group ? `${got.ranks.length} ranks, ${number(got.steps_per_second)} steps/s; means of the last ten seconds. The memory below is this rank's shard` : "";
    const many = got.parked.length > 1;
    parked.hidden = !got.parked.length;
    parked.textContent = got.parked.length ? `${got.parked.length} journal${many ? "s" : ""} parked until ${many ? "their hosts are" : "its host is"} back: ${got.parked.map(short).join(", ")}` : "";
    this.body.replaceChildren(...got.ranks.map((one) => row(one, one.rank === got.slowest)));
  }
}

const short = (id) => id.slice(0, 8);

function seconds(value) {
  return value != null && value < 1 ? `${number(1000 * value)} ms` : duration(value);
}

function row(one, slowest) {
  const mark = slowest ? [element("span", { class: "mark" }, "slowest")] : [];
  return element("tr", { class: slowest ? "slowest" : null },
    element("th", { scope: "row" }, one.rank, " ", ...mark),
    element("td", { class: "name" }, element("bdi", {}, one.host)),
    element("td", { class: "n" }, one.samples_per_second == null ? "–" : rate(one.samples_per_second)),
    element("td", { class: "n" }, seconds(one.busy_per_step)),
    element("td", { class: "n" }, seconds(one.waited_per_step)),
    element("td", { class: "n" }, one.sent_bytes_per_step == null ? "–" : bytes(one.sent_bytes_per_step)),
    element("td", { class: "n", title: `${number(one.slots)} of ${plural(one.capacity, "slot")}` }, percent(one.slots / Math.max(1, one.capacity))),
    element("td", { title: one.journal }, one.journal ? `${short(one.journal)}, at record ${number(one.record)}` : "–"));
}
