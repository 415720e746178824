// The page of one or several runs: live (server-sent events) or as a report (data in the file itself).
// Everything that comes from a run is put in as text, never as markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const data = document.getElementById("data"); // of a report
const runs = new Map(); // name -> {head, rounds, steps, about, log}
let listed = []; // what the server says of all runs
let chosen = []; // names; the first one is shown in full
let source = null;

// --- small parts

function el(tag, attributes = {}, ...children) {
  const made = /^(svg|path|line|rect|circle|text|title|g)$/.test(tag)
    ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter(child => child != null && child !== ""));
  return made;
}
const known = value => typeof value === "number" && Number.isFinite(value);
function number(value) {
  if (!known(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : String(+value.toPrecision(5));
}
function bytes(value) {
  if (!known(value)) return "–";
  let unit = "B";
  for (const next of ["kB", "MB", "GB", "TB"]) { if (Math.abs(value) < 1000) break; value /= 1000; unit = next; }
  return `${+value.toPrecision(4)} ${unit}`;
}
function time(seconds) {
  if (!known(seconds)) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60;
  return h >= 48 ? `${Math.floor(h / 24)} d ${h % 24} h` : h ? `${h} h ${m} min` : `${m} min ${whole % 60} s`;
}
const share = value => known(value) ? `${(100 * value).toFixed(1)} %` : "–";
const clock = at => known(at) ? new Date(1000 * at).toLocaleString("sv") : "–";
function table(heads, rows, numeric = () => false) {
  const cell = (tag, text, i) => el(tag, { class: numeric(i) ? "n" : false, scope: tag === "th" ? "col" : false }, text);
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads.map((head, i) => cell("th", head, i)))),
    el("tbody", {}, ...rows.map(row => el("tr", {}, ...row.map((text, i) => text instanceof Node ? el("td", {}, text) : cell("td", text, i))))));
}
function section(id, title, ...children) {
  return el("section", { id, "aria-label": title }, el("h2", {}, title), ...children);
}

// --- what comes in

function runOf(name) {
  if (!runs.has(name)) runs.set(name, { name, head: null, rounds: [], steps: [], about: {}, log: null });
  return runs.get(name);
}
function take(message) {
  if (message.runs) listed = message.runs;
  if (message.head) runOf(message.head.name).head = message.head;
  if (message.about) runOf(message.about.run).about = message.about;
  if (message.rows) {
    const rows = runOf(message.run)[message.rows];
    rows.length = message.from;
    for (const row of message.new) rows.push(row);
  }
  if (message.log) runOf(message.run).log = { lines: message.log, left: message.left };
}
let due = 0;
function soon() { // at most twice a second, and once for all that came meanwhile
  if (!due) due = setTimeout(() => { due = 0; requestAnimationFrame(update); }, data ? 0 : 300);
}
function follow() {
  source?.close();
  source = new EventSource(`/events?run=${chosen.map(encodeURIComponent).join("/")}`);
  source.onopen = () => { link.textContent = "live"; };
  source.onerror = () => { link.textContent = "no connection; trying again"; };
  source.onmessage = event => {
    take(JSON.parse(event.data));
    if (!chosen.length && listed.length) choose([[...listed].sort((a, b) => (b.updated ?? 0) - (a.updated ?? 0))[0].name]);
    soon();
  };
}
function choose(names) {
  const hash = "#" + names.map(encodeURIComponent).join("/");
  if (location.hash !== hash) history.replaceState(null, "", hash);
  chosen = names;
  build();
  if (!data) follow();
  update();
}

// --- curves

class Chart {
  constructor(name, x, words) {
    Object.assign(this, { name, x, words, at: null, series: [] });
    this.value = el("span", { class: "dim" });
    this.read = el("div", { class: "read" });
    this.legend = el("ul", { class: "legend" });
    this.svg = el("svg", { tabindex: 0, role: "slider", "aria-label": `${name} by ${x}`, onkeydown: e => this.key(e),
      onpointermove: e => this.point(e), onpointerleave: () => this.move(null), onblur: () => this.move(null) });
    this.root = el("figure", {}, el("figcaption", {}, el("h3", {}, name), this.value), this.svg, this.legend, this.read);
  }
  draw(series) {
    this.series = series.filter(s => s.xs.length);
    const wide = this.root.clientWidth || 340, high = 150, left = 52, low = 18;
    let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
    for (const s of this.series) {
      x0 = Math.min(x0, s.xs[0]); x1 = Math.max(x1, s.xs[s.xs.length - 1]);
      for (const y of s.ys) { if (y < y0) y0 = y; if (y > y1) y1 = y; }
    }
    if (!(y1 >= y0)) return;
    if (x0 === x1) x1 = x0 + 1;
    if (y0 === y1) { y0 -= Math.abs(y0) * .05 || .5; y1 += Math.abs(y1) * .05 || .5; }
    this.px = x => left + (x - x0) / (x1 - x0) * (wide - left - 6);
    const py = y => high - low - (y - y0) / (y1 - y0) * (high - low - 8);
    Object.assign(this, { wide, high, x0, x1, py });
    const parts = [];
    for (const y of ticks(y0, y1, 4)) parts.push(el("line", { class: "grid", x1: left, x2: wide - 6, y1: py(y), y2: py(y) }), el("text", { x: left - 5, y: py(y) + 4, "text-anchor": "end" }, this.words(y)));
    for (const x of ticks(x0, x1, 5).filter(Number.isInteger)) parts.push(el("text", { x: this.px(x), y: high - 3, "text-anchor": "middle" }, number(x)));
    for (const s of this.series) {
      const steps = thin(s.xs, s.ys, 500).map(([x, y], i) => `${i ? "L" : "M"}${this.px(x).toFixed(1)} ${py(y).toFixed(1)}`);
      if (steps.length === 1) steps.push("h2");
      parts.push(el("path", { class: `line s${s.color % 8}${s.thin ? " thin" : ""}`, d: steps.join("") }));
    }
    this.line = el("line", { class: "cursor", y1: 4, y2: high - low, visibility: "hidden" });
    this.svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
    this.svg.setAttribute("aria-valuemin", x0); this.svg.setAttribute("aria-valuemax", x1);
    this.svg.replaceChildren(...parts, this.line);
    const first = this.series[0];
    this.value.textContent = this.words(first.ys[first.ys.length - 1]);
    const several = this.series.length > 1 ? this.series.filter(s => s.name).slice(0, 10) : [];
    this.legend.replaceChildren(...several.map(s => el("li", { class: "k" }, el("svg", { viewBox: "0 0 12 10", "aria-hidden": "true" }, el("path", { class: `line s${s.color % 8}`, d: "M0 5h12" })), s.name)),
      this.series.length > 11 ? el("li", { class: "dim" }, `and ${this.series.length - 10} more`) : "");
    this.move(this.at);
  }
  move(x) {
    this.at = x;
    const at = x ?? this.x1;
    const told = this.series.map(s => [s, nearest(s.xs, at)]).map(([s, i]) => `${s.name ? s.name + " " : ""}${this.words(s.ys[i])}`);
    const text = `${this.x} ${number(at)}: ${told.slice(0, 8).join(", ")}${told.length > 8 ? ", …" : ""}`;
    this.svg.setAttribute("aria-valuenow", at ?? 0); this.svg.setAttribute("aria-valuetext", text);
    this.read.textContent = x == null ? "" : text;
    this.line?.setAttribute("visibility", x == null ? "hidden" : "visible");
    if (x != null && this.line) { this.line.setAttribute("x1", this.px(x)); this.line.setAttribute("x2", this.px(x)); }
  }
  point(event) {
    if (!this.px || !this.series.length) return;
    const box = this.svg.getBoundingClientRect(), where = (event.clientX - box.left) / box.width * this.wide;
    const share = (where - this.px(this.x0)) / (this.px(this.x1) - this.px(this.x0));
    const xs = this.series[0].xs;
    this.move(xs[nearest(xs, this.x0 + share * (this.x1 - this.x0))]);
  }
  key(event) {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined || !this.series.length) return;
    event.preventDefault();
    const xs = this.series[0].xs, now = this.at == null ? xs.length - 1 : nearest(xs, this.at);
    this.move(xs[Math.max(0, Math.min(xs.length - 1, now + by))]);
  }
}
function ticks(low, high, about) {
  const rough = (high - low) / about, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * ([1, 2, 5].find(m => m * unit >= rough) ?? 10), found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle; else high = middle; }
  return Math.abs(xs[high] - x) < Math.abs(x - xs[low]) ? high : low;
}
function thin(xs, ys, most) { // of each stretch the lowest and the highest: no spike is lost
  if (xs.length <= 2 * most) return xs.map((x, i) => [x, ys[i]]);
  const found = [], every = xs.length / most;
  for (let b = 0; b < most; b++) {
    let low = Math.floor(b * every), high = low;
    for (let i = low; i < Math.floor((b + 1) * every); i++) { if (ys[i] < ys[low]) low = i; if (ys[i] > ys[high]) high = i; }
    for (const i of low < high ? [low, high] : high < low ? [high, low] : [low]) found.push([xs[i], ys[i]]);
  }
  return found;
}
function curve(rows, value, x = row => row.n) {
  const xs = [], ys = [];
  for (const row of rows) { const y = value(row); if (known(y)) { xs.push(x(row)); ys.push(y); } }
  return { xs, ys };
}
const ROUND = { // name -> [words, value of a round, of one site in it]
  "training loss": [number, r => r.loss, (r, i) => r.by?.[i]?.[0]],
  "round's time": [time, r => r.seconds],
  "bytes in": [bytes, r => r.in], "bytes out": [bytes, r => r.out],
  "epsilon": [number, r => r.epsilon], "staleness": [number, r => r.staleness], "update's norm": [number, r => r.norm],
};
const STEP = { "loss": ["step loss", number], "lr": ["learning rate", number], "items_per_s": ["tokens or items / s", number], "examples_per_s": ["examples / s", number],
  "seconds": ["step's time", time], "mfu": ["MFU", share], "comm_share": ["communication", share], "memory_bytes": ["memory", bytes] };
function drawCurves() {
  const several = chosen.length > 1, each = !several && view.each.checked, main = runOf(chosen[0]);
  const kinds = new Map(Object.entries(ROUND));
  for (const name of chosen) for (const row of runOf(name).rounds) {
    for (const key in row.trained) if (!kinds.has(key)) kinds.set(key, [number, r => r.trained?.[key]]);
    for (const key in row.metrics) if (!key.includes("/") || view.spread.checked) kinds.set(`evaluated ${key}`, [number, r => r.metrics?.[key], (r, i) => r.own?.[i]?.[key]]);
  }
  for (const [name, [words, value, own]] of kinds) {
    const series = chosen.map((run, i) => ({ name: several ? run : each ? "mean" : "", color: i, ...curve(runOf(run).rounds, value) }));
    if (each && own) (main.head?.names ?? []).forEach((site, i) => series.push({ name: site, color: i + 1, thin: true, ...curve(main.rounds, row => own(row, i)) }));
    chart(name, main.head?.noun ?? "round", words, series);
  }
  for (const [key, [name, words]] of Object.entries(STEP))
    chart(name, "step", words, chosen.map((run, i) => ({ name: several ? run : "", color: i, ...curve(runOf(run).steps, row => row[key], row => row.step) })));
}
function chart(name, x, words, series) {
  const any = series.some(s => s.xs.length);
  if (any && !view.charts.has(name)) {
    view.charts.set(name, new Chart(name, x, words));
    view.curves.append(view.charts.get(name).root);
  }
  view.charts.get(name)?.draw(series);
}

// --- the parts of a run

let view = null;
function build() {
  const choice = (label, input) => el("label", {}, input, label);
  view = { charts: new Map(), row: null };
  view.summary = el("dl"); view.progress = el("progress", { "aria-label": "rounds done" }); view.notices = el("div", { class: "read" });
  view.each = el("input", { type: "checkbox", onchange: update }); view.spread = el("input", { type: "checkbox", onchange: update });
  view.curves = el("div", { class: "charts" });
  view.slider = el("input", { type: "range", min: 1, max: 1, "aria-label": "which round", oninput: () => { view.row = +view.slider.value - 1; drawRound(); } });
  view.newest = el("button", { type: "button", onclick: () => { view.row = null; drawRound(); } }, "Newest");
  view.told = el("div"); view.gantt = el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "A round, site by site" });
  view.matrix = new Matrix(); view.log = new Log();
  view.sites = el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Table of sites" });
  view.graph = el("div"); view.graphs = section("topology", "Who hears whom", view.graph);
  view.settings = el("div", { class: "scrolls", tabindex: 0, role: "region", "aria-label": "Table of settings" });
  view.card = el("pre", { tabindex: 0, role: "region", "aria-label": "Text of the model card" }); view.cards = section("card", "Model card", view.card);
  view.compared = el("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Table of runs side by side" });
  const key = el("ul", { class: "legend" }, ...["fetch", "training", "masking", "uploading", "fold", "commit"].map(name =>
    el("li", { class: "k" }, el("svg", { viewBox: "0 0 12 10", "aria-hidden": "true" }, el("rect", { class: name, width: 12, height: 10 })), name === "training" ? "train" : name === "uploading" ? "upload" : name === "masking" ? "mask" : name)));
  main.replaceChildren(
    section("summary", "Summary", el("h3", { class: "one" }, chosen.join(", ")), view.progress, view.summary, view.notices),
    chosen.length > 1 ? section("compared", "Side by side", view.compared) : "",
    section("curves", "Curves", el("div", { class: "bar" }, chosen.length > 1 ? "" : choice("each site", view.each), choice("spread over sites", view.spread)), view.curves),
    section("rounds", "A round, site by site", el("div", { class: "bar" }, view.slider, view.newest), view.told, key, view.gantt),
    section("all", "All rounds", el("p", { class: "dim" }, "A column a round, a row a site: the longer a site took, the darker; red was refused or lost. Choose one with a click, or with the slider above."), view.matrix.root),
    section("sites", "Sites", view.sites), view.graphs, section("logs", "Log", view.log.bar, view.log.root),
    section("settings", "Settings", view.settings), view.cards);
}
function update() {
  const run = chosen.length ? runOf(chosen[0]) : null;
  drawRuns();
  if (!run?.head || !view) return;
  const { head, about, rounds, steps } = run, sum = key => rounds.reduce((total, row) => total + (row[key] || 0), 0);
  const machine = head.machine, last = rounds[rounds.length - 1], dearest = Math.max(...Object.values(head.epsilon).map(e => e.epsilon));
  const facts = [["State", el("span", { class: head.state }, head.state)], ["Mode", head.mode], [head.noun, head.rounds ? `${head.round} of ${head.rounds}` : head.round],
    ["Doing", head.waiting ? `waits for sites: ${head.waiting[0]} of ${head.waiting[1]}` : head.underWay ? `${head.noun} ${head.underWay}${head.attempt > 1 ? `, attempt ${head.attempt}` : ""}` : ""],
    ["Left", head.state === "running" && known(head.eta) ? time(head.eta) : ""], ["Best", head.best ? `${head.best[0]} ${number(head.best[1])} in ${head.best[2]}` : ""],
    ["Bytes in, out", `${bytes(sum("in"))}, ${bytes(sum("out"))}`], ["Time of rounds", time(sum("seconds"))], ["Simulated clock", known(last?.clock) ? time(last.clock) : ""],
    ["Epsilon", known(dearest) ? `${number(dearest)} at most` : ""], ["Ranks", head.mesh], ["Disagreement", known(last?.trained?.disagreement) ? number(last.trained.disagreement) : ""], ["Moved by averaging", known(last?.trained?.moved) ? number(last.trained.moved) : ""],
    ["Tokens or items / s", steps.length ? number(steps[steps.length - 1].items_per_s) : ""], ["MFU", known(steps[steps.length - 1]?.mfu) ? share(steps[steps.length - 1].mfu) : ""],
    ["CPU", machine?.cores ? `${share(machine.cpu)} of ${machine.cores} cores` : ""], ["Memory", machine?.memory ? `${bytes(machine.memory)} of ${bytes(machine.memoryTotal)}` : ""],
    ...(machine?.gpus ?? []).map((gpu, i) => [`GPU ${i}`, `${share(gpu.use)}, ${bytes(gpu.memory)} of ${bytes(gpu.memoryTotal)}`]),
    ["Began", clock(head.started)], ["Last event", clock(head.updated)], ["Ended", head.finished ? head.finished.reason || "yes" : ""], ["Model in", head.finished?.model ?? ""]];
  view.summary.replaceChildren(...facts.filter(([, value]) => value !== "" && value != null).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  view.progress.max = head.rounds || 1; view.progress.value = head.round;
  view.notices.textContent = head.notices.join(" · ");
  drawCurves(); drawRound(); view.matrix.draw(); drawSites(head); drawGraph(about, head); view.log.draw();
  const settings = about.settings ?? {};
  view.settings.replaceChildren(table(["setting", "value"], Object.entries(settings)));
  view.card.textContent = about.card ?? ""; view.cards.hidden = !about.card;
  if (chosen.length > 1) drawCompared();
  document.title = `${head.round}/${head.rounds} ${head.name} – fedtrain`;
}
function drawRuns() {
  const shown = data ? [...runs.values()].filter(r => r.head).map(({ head }) => ({ ...head, loss: null })) : listed;
  const signs = shown.map(r => r.name).join("/");
  const box = document.getElementById("runs");
  if (box.dataset.signs !== signs) {
    box.dataset.signs = signs;
    const pick = (name, on) => choose(on ? [...chosen, name] : chosen.filter(other => other !== name || chosen.length === 1));
    box.replaceChildren(table(["compare", "run", "state", "round"], shown.map(r => [
      el("input", { type: "checkbox", "aria-label": `compare ${r.name}`, onchange: e => pick(r.name, e.target.checked) }),
      el("a", { href: "#" + encodeURIComponent(r.name), class: "one" }, r.name), el("span"), el("span")])));
  }
  [...box.querySelectorAll("tbody tr")].forEach((row, i) => {
    const r = shown[i], [check, , state, round] = row.children;
    check.firstChild.checked = chosen.includes(r.name);
    state.firstChild.textContent = r.state; state.firstChild.setAttribute("class", r.state);
    round.firstChild.textContent = r.rounds ? `${r.round}/${r.rounds}` : "";
  });
}
function drawCompared() {
  const all = chosen.map(runOf), best = r => r.head?.best;
  const metrics = [...new Set(all.flatMap(r => r.rounds.flatMap(row => Object.keys(row.metrics ?? {}))))].filter(name => !name.includes("/"));
  const last = (r, name) => { for (let i = r.rounds.length - 1; i >= 0; i--) if (r.rounds[i].metrics) return r.rounds[i].metrics[name]; };
  const total = (r, key) => r.rounds.reduce((sum, row) => sum + (row[key] || 0), 0);
  const rows = [["state", ...all.map(r => r.head?.state ?? "–")], ["rounds", ...all.map(r => r.head ? `${r.head.round} of ${r.head.rounds}` : "–")],
    ["training loss", ...all.map(r => number(r.rounds.findLast(row => known(row.loss))?.loss))], ...metrics.map(name => [name, ...all.map(r => number(last(r, name)))]),
    ["best", ...all.map(r => best(r) ? `${best(r)[0]} ${number(best(r)[1])} in ${best(r)[2]}` : "–")],
    ["time of rounds", ...all.map(r => time(total(r, "seconds")))], ["bytes", ...all.map(r => bytes(total(r, "in") + total(r, "out")))]];
  const keys = [...new Set(all.flatMap(r => Object.keys(r.about.settings ?? {})))].sort();
  for (const key of keys) {
    const values = all.map(r => r.about.settings?.[key] ?? "–");
    if (new Set(values).size > 1) rows.push([key, ...values]);
  }
  view.compared.replaceChildren(table(["", ...chosen], rows));
}
function spans(row, marks, phases, until) { // [phase, from, to] of one site in a round
  const found = [], states = [];
  for (let i = 2; i < marks.length; i += 2) states.push([phases[marks[i]], marks[i + 1]]);
  let phase = states.some(([name]) => name === "training") ? "fetch" : "training", since = 0;
  for (const [state, at] of states) { found.push([phase, since, at]); [phase, since] = [state, at]; }
  if (!["done", "refused", "lost"].includes(phase)) found.push([phase, since, Math.max(since, until)]);
  else if (phase !== "done") found.push([phase, since, until]);
  return found;
}
function drawRound() {
  const { head, rounds } = runOf(chosen[0]);
  if (!head || !rounds.length) { view.gantt.textContent = "No round yet."; return; }
  const at = Math.min(view.row ?? rounds.length - 1, rounds.length - 1), row = rounds[at], marks = Object.entries(row.by);
  view.slider.max = rounds.length; view.slider.value = at + 1; view.slider.setAttribute("aria-valuetext", `${head.noun} ${row.n}`);
  const late = ["late", "away", "doubted"].filter(how => row[how]).map(how => `${how}: ${row[how].map(i => head.names[i] ?? i).join(", ")}`);
  const state = row.end ? `committed, ${row.sites ?? 0} sites, ${time(row.seconds)}` : row.failed ? `failed: ${row.failed}` : "under way";
  view.told.replaceChildren(el("p", {}, `${head.noun} ${row.n} (${clock(row.t)}): ${[state, row.loss != null ? `loss ${number(row.loss)}` : "", ...late].filter(Boolean).join("; ")}`));
  if (!marks.length) { view.gantt.replaceChildren(el("p", { class: "dim" }, "No times of single sites are kept of this round.")); return; }
  const whole = Math.max(row.end ? row.end - row.t : head.updated - row.t, ...marks.map(([, m]) => m[m.length - 1] ?? 0), 1e-6);
  const wide = view.gantt.clientWidth || 600, left = Math.min(130, wide / 3), high = 17, x = s => left + s / whole * (wide - left - 60), parts = [];
  const bar = (phase, from, to, y, label) => parts.push(el("rect", { class: phase, x: x(from), y: y + 3, width: Math.max(1, x(to) - x(from)), height: high - 5 }, el("title", {}, `${label}: ${phase} ${time(to - from)}`)));
  let y = 0, last = 0;
  for (const [place, m] of marks) {
    const name = head.names[place] ?? `site ${place}`;
    parts.push(el("text", { x: 0, y: y + 12 }, name.length > 18 ? name.slice(0, 17) + "…" : name));
    const own = spans(row, m, head.phases, row.end ? m[m.length - 1] : whole);
    for (const [phase, from, to] of own) bar(phase, from, to, y, name);
    const end = m[m.length - 1] ?? 0;
    if (head.phases[m[m.length - 2]] === "done") last = Math.max(last, end);
    parts.push(el("text", { x: x(end) + 4, y: y + 12 }, time(end)));
    y += high;
  }
  if (row.end) {
    const end = row.end - row.t, commit = Math.max(last, end - (row.commit ?? 0));
    parts.push(el("text", { x: 0, y: y + 12 }, "fold, commit"));
    bar("fold", last, commit, y, "sum and step"); bar("commit", commit, end, y, "to the disk");
    parts.push(el("text", { x: x(end) + 4, y: y + 12 }, time(end)));
    y += high;
  }
  view.gantt.replaceChildren(el("svg", { viewBox: `0 0 ${wide} ${y + 2}`, role: "img", "aria-label": `${head.noun} ${row.n}: what each site did when` }, ...parts));
}
class Matrix {
  static cell = 7; static high = 12; static left = 120;
  constructor() {
    this.canvas = el("canvas"); this.spacer = el("div");
    this.root = el("div", { id: "matrix", tabindex: 0, role: "region", "aria-label": "All rounds by site",
      onscroll: () => this.soon(), onclick: e => this.pick(e) }, this.canvas, this.spacer);
    new ResizeObserver(() => this.soon()).observe(this.root);
  }
  soon() { this.frame ??= requestAnimationFrame(() => { this.frame = null; this.paint(); }); }
  draw() {
    const { head, rounds } = runOf(chosen[0]), { cell, high, left } = Matrix;
    this.root.closest("section").hidden = !head.names.length;
    this.spacer.style.width = `${left + rounds.length * cell}px`; this.spacer.style.height = `${Math.max(1, head.names.length) * high}px`;
    this.root.style.height = `${Math.min(352, head.names.length * high + 18)}px`;
    this.soon();
  }
  paint() {
    const { head, rounds } = runOf(chosen[0]), { cell, high, left } = Matrix, ratio = devicePixelRatio || 1;
    const wide = this.root.clientWidth, tall = this.root.clientHeight, style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(name);
    if (!wide || !head) return;
    if (this.canvas.width !== wide * ratio || this.canvas.height !== tall * ratio) Object.assign(this.canvas, { width: wide * ratio, height: tall * ratio });
    this.canvas.style.width = `${wide}px`; this.canvas.style.height = `${tall}px`;
    const pen = this.canvas.getContext("2d"), bad = color("--bad"), good = color("--training"), warn = color("--uploading"), text = color("--text");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0); pen.clearRect(0, 0, wide, tall);
    const first = Math.floor(this.root.scrollLeft / cell), top = Math.floor(this.root.scrollTop / high), dx = this.root.scrollLeft, dy = this.root.scrollTop;
    for (let i = first; i < Math.min(rounds.length, first + wide / cell + 1); i++) {
      const row = rounds[i]; let slowest = 1e-9;
      for (const place in row.by) slowest = Math.max(slowest, row.by[place][row.by[place].length - 1] || 0);
      for (let place = top; place < Math.min(head.names.length, top + tall / high + 1); place++) {
        const m = row.by[place], absent = row.late?.includes(place) || row.away?.includes(place);
        if (!m && !absent) continue;
        const phase = m ? head.phases[m[m.length - 2]] : "";
        pen.globalAlpha = absent || phase !== "done" ? 1 : .25 + .75 * m[m.length - 1] / slowest;
        pen.fillStyle = absent || phase === "refused" || phase === "lost" ? bad : phase === "done" ? good : warn;
        pen.fillRect(left + i * cell - dx, place * high - dy, cell - 1, high - 1);
      }
    }
    pen.globalAlpha = 1; pen.fillStyle = color("--card"); pen.fillRect(0, 0, left - 2, tall);
    pen.fillStyle = text; pen.font = "10px system-ui, sans-serif";
    for (let place = top; place < Math.min(head.names.length, top + tall / high + 1); place++) pen.fillText(head.names[place].slice(0, 20), 2, place * high + 9 - dy);
  }
  pick(event) {
    const box = this.root.getBoundingClientRect(), at = Math.floor((event.clientX - box.left - Matrix.left + this.root.scrollLeft) / Matrix.cell);
    if (at >= 0 && at < runOf(chosen[0]).rounds.length) { view.row = at; drawRound(); }
  }
}
function drawSites(head) {
  const counts = ["lost", "refused", "late", "away", "doubted"].filter(what => head.sites.some(site => site[what]));
  const columns = ["round", "examples", "loss", "staleness"].filter(key => head.sites.some(site => site[key] != null));
  const names = [...new Set([...head.sites.map(site => site.name), ...Object.keys(head.epsilon)])], by = new Map(head.sites.map(site => [site.name, site]));
  const spent = Object.keys(head.epsilon).length > 0;
  const rows = names.map(name => {
    const site = by.get(name) ?? {};
    return [name, el("span", { class: site.state }, site.state ?? ""), ...columns.map(key => number(site[key])), ...(spent ? [head.epsilon[name] ? number(head.epsilon[name].epsilon) : "–"] : []),
      ...counts.map(what => String(site[what] ?? 0)), site.reason || (site.counted < 1 ? `counted ${share(site.counted)}` : "")];
  });
  view.sites.replaceChildren(table(["site", "state", ...columns, ...(spent ? ["epsilon"] : []), ...counts.map(what => `times ${what}`), ""], rows, i => i > 1 && i < 2 + columns.length + counts.length + spent),
    head.moreSites ? el("p", {}, `and ${head.moreSites} more`) : "");
}
function drawGraph(about, head) {
  const members = about.members ?? [], edges = about.edges ?? [];
  view.graphs.hidden = !edges.length;
  if (!edges.length) return;
  const size = 340, middle = size / 2, far = middle - 46, states = new Map(head.sites.map(site => [site.name, site.state]));
  const place = i => [middle + far * Math.sin(2 * Math.PI * i / members.length), middle - far * Math.cos(2 * Math.PI * i / members.length)];
  const lines = edges.map(([from, to]) => { const [x1, y1] = place(from), [x2, y2] = place(to); return el("line", { class: "edge", x1, y1, x2, y2 }); });
  const dots = members.map((name, i) => { const [x, y] = place(i), side = x > middle + 1 ? "start" : x < middle - 1 ? "end" : "middle";
    return el("g", {}, el("circle", { class: states.get(name) ?? "waiting", cx: x, cy: y, r: members.length > 60 ? 3 : 6 }, el("title", {}, name)),
      members.length <= 40 ? el("text", { x: x + (side === "start" ? 9 : side === "end" ? -9 : 0), y: y + (side === "middle" ? (y < middle ? -10 : 18) : 4), "text-anchor": side }, name.length > 7 ? name.slice(0, 6) + "…" : name) : ""); });
  const svg = el("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": `${members.length} peers, ${edges.length} edges of ${head.noun} ${head.underWay ?? head.round}` }, ...lines, ...dots);
  svg.style.maxWidth = "26rem";
  view.graph.replaceChildren(svg);
}

// --- the log: only the lines that are in sight are in the page

class Log {
  static high = 18; static page = 200;
  constructor() {
    this.kind = el("select", { "aria-label": "kind of event", onchange: () => this.again() }, el("option", { value: "" }, "all kinds"));
    this.words = el("input", { type: "search", placeholder: "words", "aria-label": "words in a line", oninput: () => { clearTimeout(this.typed); this.typed = setTimeout(() => this.again(), 200); } });
    this.count = el("span", { class: "dim", role: "status" });
    this.bar = el("div", { class: "bar" }, this.kind, this.words, this.count);
    this.inner = el("div");
    this.root = el("div", { id: "log", tabindex: 0, role: "region", "aria-label": "Log", onscroll: () => this.soon() }, this.inner);
    this.again();
  }
  again() { this.pages = new Map(); this.total = 0; this.asked = new Set(); this.whole = this.seen = null; this.bottom = true; if (view) this.draw(); }
  soon() { this.frame ??= requestAnimationFrame(() => { this.frame = null; this.paint(); }); }
  draw() { // after news: the last page may have grown
    const { head } = runOf(chosen[0]);
    if (!head) return;
    const kinds = head.kinds.filter(kind => ![...this.kind.options].some(option => option.value === kind));
    this.kind.append(...kinds.map(kind => el("option", { value: kind }, kind)));
    if (this.seen !== `${head.lines}`) { this.seen = `${head.lines}`; this.fetch(Math.max(0, Math.floor(this.total / Log.page))); }
    this.soon();
  }
  async fetch(page) {
    const name = chosen[0], pages = this.pages;
    if (this.asked.has(page)) return;
    this.asked.add(page);
    const found = await this.ask(name, page * Log.page).catch(() => null);
    this.asked.delete(page);
    if (!found || pages !== this.pages || name !== chosen[0]) return;
    const stay = this.root.scrollHeight - this.root.scrollTop - this.root.clientHeight < 40;
    pages.set(page, found.lines); this.total = found.total;
    this.count.textContent = `${number(found.total)} lines${found.left ? `, the newest; ${number(found.left)} older ones are in events.jsonl` : ""}`;
    this.inner.style.height = `${this.total * Log.high}px`;
    if (stay && this.bottom && !data) this.root.scrollTop = this.root.scrollHeight;
    this.soon();
  }
  async ask(name, at) {
    const kind = this.kind.value, words = this.words.value;
    if (!data) return (await fetch(`/log?${new URLSearchParams({ run: name, at, count: Log.page, kind, words })}`)).json();
    const { log } = runOf(name), low = words.toLowerCase();
    this.whole ??= (log?.lines ?? []).filter(([, its, , text]) => (!kind || its === kind) && text.toLowerCase().includes(low));
    return { total: this.whole.length, lines: this.whole.slice(at, at + Log.page), left: log?.left };
  }
  paint() {
    const first = Math.max(0, Math.floor(this.root.scrollTop / Log.high) - 4), count = Math.ceil(this.root.clientHeight / Log.high) + 8, shown = [];
    for (let i = first; i < Math.min(this.total, first + count); i++) {
      const page = Math.floor(i / Log.page), line = this.pages.get(page)?.[i % Log.page];
      if (!line) { this.fetch(page); continue; }
      const row = el("p", {}, `${clock(line[0])}  ${line[3]}`);
      row.style.top = `${i * Log.high}px`;
      shown.push(row);
    }
    this.inner.replaceChildren(...shown);
  }
}

// --- the start

const link = document.getElementById("link"), main = document.getElementById("run"), theme = document.getElementById("theme");
function paintTheme(dark) {
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  theme.textContent = dark ? "Light" : "Dark";
  if (view) view.matrix.soon();
}
theme.addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme !== "dark";
  try { localStorage.setItem("theme", dark ? "dark" : "light"); } catch { /* a file may not keep it */ }
  paintTheme(dark);
});
let kept = null;
try { kept = localStorage.getItem("theme"); } catch { /* as above */ }
paintTheme(kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches);
const ofHash = () => location.hash.slice(1).split("/").filter(Boolean).map(decodeURIComponent);
window.addEventListener("hashchange", () => choose(ofHash()));
let width = innerWidth;
window.addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; soon(); } });
if (data) {
  const { made, messages } = JSON.parse(data.textContent);
  for (const message of messages) take(message);
  link.textContent = `as of ${clock(made)}`;
  choose(ofHash().length ? ofHash() : [...runs.keys()]);
} else if (ofHash().length) choose(ofHash());
else follow();
