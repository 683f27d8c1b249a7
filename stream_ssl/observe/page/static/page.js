// The page: it sends the requests and fills the sections. The modules need no build step.
import { Charts } from "./charts.js";
import { GroupSection } from "./group.js";
import { HeldOutSection } from "./held_out.js";
import { MemorySection } from "./memory.js";
import { MapSection } from "./map.js";
import { ProducerDialog } from "./producer.js";
import { ProducersSection } from "./producers.js";
import { $, ago, ask, bytes, duration, element, explained, few, labelCells, number, percent, rate, reason, setClock } from "./lib.js";

const ROLES = ["receiver", "learner"];
const states = {}; // role -> its last state, or { error }
let answered = null; // when the last answers came
const PHONE = matchMedia("(max-width: 40rem)");

/** Ask again `seconds` after each answer, while `where` and the page are visible, or `always`. */
function repeat(seconds, where, work, always = false) {
  let visible = !where;
  const round = async () => {
    if (always || (visible && !document.hidden)) {
      try { await work(); } catch (error) { console.warn(error); }
    }
    setTimeout(round, visible ? seconds * 1000 : 400);
  };
  if (where) new IntersectionObserver((entries) => { visible = entries.at(-1).isIntersecting; }, { rootMargin: "200px" }).observe(where);
  round();
}

// [name, role, figure, text whose first word is large, whether it is shown]
const TILES = [
  ["received", "receiver", "received", rate],
  ["trained", "learner", "trained", (v, f) => `${rate(v)} new, ${rate(f.replayed ?? 0)} again`],
  ["lag", "learner", "lag", duration],
  ["loss", "learner", "loss", (v) => v.toFixed(3)],
  ["updates", "learner", "steps", (v) => `${number(v)} /s`],
  ["memory", "learner", "slots", (v, f) => `${percent(v / Math.max(1, f.capacity))} of ${number(f.capacity)}`],
  ["producers", "receiver", "producers", (v) => `${number(v)} connected`],
  ["journal", "receiver", "journal", bytes],
  ["held out, kNN", "learner", "held_out", percent, (v) => v > 0],
  ["checkpoint", "learner", "checkpoint_age", (v, f) => (f.checkpoint_step != null ? `${duration(v)} ago` : "none yet")],
];

const TIPS = { trained: "Samples that updates use. New samples come from the stream. Those that are trained on again were drawn from the memory." };

/** Ask for the states and show them. An old verdict must not stay, whatever the answer is. */
async function refreshStates() {
  const run = await ask("run").catch((error) => unreachable(error.message));
  try { showRun(run); } catch (error) {
    console.warn(error);
    showRun(unreachable("the answer has a form that this page does not know. Reload the page"));
  }
}

function showRun(run) {
  const { problems, conditions: { present, absent, unknown } } = run;
  ROLES.forEach((role) => { states[role] = run.states[role]; });
  showAnswers(run.answers, problems[0]);
  const tells = new Map(ROLES.flatMap((role) => (states[role]?.watched ?? []).map((one) => [one.name, one.summary])));
  const list = (title, names) => (names.length ? [element("li", { class: "names" }, element("b", {}, title), ...names.map((name) => element("span", { title: tells.get(name) ?? null }, name)))] : []);
  const starting = ROLES.filter((role) => states[role]?.starting);
  $("#checks").replaceChildren(
    ...grouped(problems).map((same) => element("li", { class: `bad ${same[0].severity}` },
      element("span", {}, element("b", {}, same[0].name), ` — ${few(same.map(({ says }) => says), "; ")}. `, same[0].remedy ? `${same[0].remedy} ` : ""),
      ...(same[0].runbook ? [element("a", { href: same[0].runbook }, "what to do")] : []))),
    ...starting.map((role) => element("li", { class: "wait" }, `the ${role} is starting`)),
    ...list("unknown", unknown), ...list("do not hold", absent));
  const counts = [[present, present.length === 1 ? "holds" : "hold"], [absent, absent.length === 1 ? "does not" : "do not"], [unknown, "unknown"]];
  const told = counts.filter(([names], at) => !at || names.length).map(([names, verb]) => `${names.length} ${verb}`).join(", ");
  $("#conditions summary").textContent = `Conditions: ${told}`;
  if (!run.answers) $("#conditions").open = true; // nothing else tells the reason
  charts.limits = limitsOf(run);
  setClock(states.learner?.now ?? states.receiver?.now);
  memory.pictures.since(states.learner?.started);
  charts.starts = { receiver: states.receiver?.started, learner: states.learner?.started };
  charts.events = grouped(problems).filter(([{ since }]) => since != null).map((same) => ({ at: Math.min(...same.map(({ since }) => since)), name: same[0].name }));
  const bad = present.length, grave = problems.some(({ severity }) => severity === "critical");
  const verdict = $("#verdict");
  const look = !bad && !starting.length && run.answers?.some(({ question, level }) => question === "Health" && level === "watch");
  const text = !run.answers ? "no answer" : bad ? `${bad} ${bad === 1 ? "condition needs" : "conditions need"} attention` : starting.length ? "starting" : look ? "worth a look" : "healthy";
  if (verdict.textContent !== text) verdict.textContent = text;
  const name = states.learner?.run ?? states.receiver?.run ?? document.body.dataset.run;
  document.title = `${bad || look ? "▲" : starting.length ? "○" : "●"} ${bad ? text.replace(" need attention", "").replace(" needs attention", "") : text} — ${name} on ${document.body.dataset.host}`;
  verdict.className = `pill ${grave ? "bad" : bad || look ? "warn" : starting.length ? "wait" : "ok"}`;
  const missing = ROLES.filter((role) => states[role]?.error).map((role) => `The ${role}'s figures are missing, because ${reason(states[role].error)}.`);
  $("#figures-note").textContent = missing.join(" ");
  $("#tiles").replaceChildren(...TILES.flatMap(([name, role, figure, format, shown]) => {
    const figures = states[role]?.figures ?? {};
    const value = figures[figure];
    if (states[role]?.error || (shown && !(value != null && shown(value)))) return [];
    const none = name === "loss" && states.learner?.facts?.updates_done ? "none last update skipped" : "–";
    const [big, ...small] = (value == null ? none : format(value, figures)).split(" ");
    return [element("div", {}, element("dt", {}, explained(role, figure, name)), element("dd", { title: TIPS[name] ?? null }, big, element("small", {}, small.join(" "))))];
  }));
}

/** Return lists of the problems with one name and one remedy, which differ by producer. */
function grouped(problems) {
  const found = new Map();
  for (const one of problems) {
    const key = `${one.name} ${one.remedy}`;
    found.set(key, [...(found.get(key) ?? []), one]);
  }
  return [...found.values()];
}

/** Return the levels that the charts draw, by name. */
function limitsOf({ limits, states: { learner, receiver } }) {
  const classes = learner?.facts?.held_out_classes, { journal, room } = receiver?.figures ?? {};
  return { ...limits, chance: learner?.facts?.chance, held_out_chance: classes ? 1 / classes : null, held_out_first: learner?.facts?.held_out_first,
    journal: journal + room || null };
}

/** Return what the page shows if its own process does not answer. */
function unreachable(says) {
  const problem = { name: "down", says, remedy: "The state of the run is unknown.", severity: "critical", runbook: document.body.dataset.down };
  return { states: Object.fromEntries(ROLES.map((role) => [role, { error: says }])), problems: [problem], answers: null, conditions: { present: ["down"], absent: [], unknown: [] } };
}

function showAnswers(answers, problem) {
  answered = answers ? new Date() : answered;
  const old = answered ? ` The answers below are from ${answered.toLocaleString()}.` : "";
  $("#no-answer").replaceChildren(...(answers ? [] : [element("li", { class: "bad" },
    element("b", {}, "No answer"), element("span", { class: "level" }, "now"), element("p", {}, `${problem.says[0].toUpperCase()}${problem.says.slice(1)}.${old}`),
    element("span", { class: "links" }, element("a", { href: problem.runbook }, problem.name)))]));
  const list = $("#answers-list");
  list.classList.toggle("old", !answers); // the last answers stay, and are marked as out of date
  if (answers && PHONE.matches) answers.unshift(answers.pop()); // "To do" fits on the first screen of a phone only as the first
  list.replaceChildren(...(answers ? answers.map(({ question, level, word, says, links }) => element("li", { class: level },
    element("b", {}, question), element("span", { class: "level" }, word), element("p", {}, says.replace(/(\d) (?=%)/g, "$1\u00a0")),
    element("span", { class: "links" }, ...links.map(([text, href]) => element("a", { href }, text))))) : [...list.children]));
}

async function showCheckpoints() {
  const body = $("#checkpoints-table tbody");
  try {
    const { checkpoints } = await ask("learner", "checkpoints").catch(async (error) => {
      const read = await ask("receiver", "checkpoints").catch(() => ({ checkpoints: [] })); // it reads the same folder
      if (!read.checkpoints.length) throw error;
      return read;
    });
    body.replaceChildren(...(checkpoints.length ? checkpoints.map((one) => one.error
      ? element("tr", {}, element("td", {}, one.name), element("td", { colspan: 4, class: "late" }, one.error))
      : element("tr", {},
        element("td", {}, one.name, one.latest ? element("span", { class: "muted" }, " latest") : ""),
        element("td", { class: "n" }, number(one.step)), element("td", { class: "n" }, number(one.samples)),
        element("td", { class: "n" }, bytes(one.bytes)),
        element("td", { title: new Date(one.created * 1000).toISOString() }, ago(one.created))))
      : [element("tr", {}, element("td", { colspan: 5, class: "empty" }, "none yet"))]));
  } catch (error) {
    body.replaceChildren(element("tr", {}, element("td", { colspan: 5, class: "empty" }, error.message)));
  }
}

const charts = new Charts($("#charts"));
const group = new GroupSection();
const memory = new MemorySection();
const heldOut = new HeldOutSection(memory.pictures);
const map = new MapSection((slot) => memory.open(slot), memory.pictures);
const producers = new ProducersSection(memory.pictures);
new ProducerDialog(memory);

document.querySelectorAll("table").forEach(labelCells);
addEventListener("click", ({ target }) => { if (target.closest?.('a[href="#health"]')) $("#conditions").open = true; });

repeat(2, null, refreshStates, true); // the title tells the health of a tab in the background
repeat(4, $("#charts"), () => charts.refresh());
repeat(3, null, () => group.refresh());
repeat(10, null, () => heldOut.refresh());
repeat(6, $("#memory"), () => memory.refresh());
repeat(10, $("#map"), () => map.refresh());
repeat(3, $("#producers"), () => producers.refresh());
repeat(15, $("#checkpoints"), showCheckpoints);
