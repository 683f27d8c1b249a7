// The evaluation on held-out images. The section is hidden in a run without a held-out set.
import { $, ask, duration, element, percent } from "./lib.js";

export class HeldOutSection {
  constructor(pictures) {
    this.pictures = pictures;
    this.section = $("#held-out");
    this.link = $('a[href="#held-out"]');
  }

  async refresh() {
    const note = $("#held-out-note");
    let got;
    try { got = await ask("learner", "held_out"); } catch (error) {
      if (!this.section.hidden) note.textContent = error.message; // the last answer stays
      return;
    }
    this.section.hidden = this.link.hidden = !got.queries;
    if (!got.queries) return;
    note.textContent = got.step == null ? "The next evaluation has not been made yet."
      : `Evaluated at step ${got.step.toLocaleString("en")}, ${duration(got.age)} ago, on ${got.queries.toLocaleString("en")} images that are not in the stream.`;
    $("#confused").replaceChildren(...(got.confused.length ? got.confused.map((one) => {
      const fill = element("i");
      fill.style.width = `${100 * one.share}%`;
      return element("li", {}, element("span", {}, element("bdi", {}, one.label), " taken for ", element("bdi", {}, one.taken_for)),
        element("span", { class: "track" }, fill), element("span", { class: "n" }, percent(one.share)));
    }) : [element("li", { class: "empty" }, got.step == null ? "not known yet" : "no image is taken for another class")]));
    if (got.pictures) this.pictures.add(got.pictures);
    const before = got.before == null ? "earlier" : `${duration(got.before)} ago`;
    $("#held-out-before").textContent = before;
    $("#held-out-table tbody").replaceChildren(...got.shown.map((one) => element("tr", {},
      element("td", {}, element("span", { class: "row" }, this.tile(one), " ", element("bdi", {}, one.label))), this.near(one, one.now), this.near(one, one.before))));
  }

  near(one, rows) {
    const same = rows.filter(({ label }) => label === one.label).length;
    return element("td", {}, rows.length ? element("span", { class: "row" }, ...rows.map((row) => this.tile(row)), ` ${same} of ${rows.length}`) : "–");
  }

  tile({ picture, label }) {
    const tile = element("span", { class: "tile small", role: "img", title: label, "aria-label": label });
    this.pictures.paint(tile, picture);
    return tile;
  }
}
