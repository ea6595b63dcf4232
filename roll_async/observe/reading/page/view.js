"use strict";
// The page: charts of metrics, the list of samples, lanes, differences. Its data come from a server, or lie in the page.

const $ = (id) => document.getElementById(id);
const EMBEDDED = $("data").textContent ? JSON.parse($("data").textContent) : null;
const EVERY_MS = 5000, PAGE_ROWS = 50;
const state = { run: 0, view: "overview", runs: [], metrics: [], offset: 0, charts: [] };

// ---- where data come from

async function ask(path) {
  const answer = await fetch(`api/${path}`);
  if (!answer.ok) throw new Error(`${path}: ${await answer.text()}`);
  return answer.json();
}

const source = EMBEDDED ? {
  runs: async () => EMBEDDED.runs,
  metrics: async (run) => ({ generation: 1, from: 0, columns: EMBEDDED.metrics[run] }),
  lanes: async (run) => EMBEDDED.lanes[run],
  differences: async () => EMBEDDED.differences,
  samples: async (run, asked) => selected(EMBEDDED.samples[run], asked),
  group: async (run, row) => EMBEDDED.samples[run].groups[`${row.step}/${row.group_id}`],
} : {
  runs: () => ask("runs"),
  metrics: (run, known) => ask(`runs/${run}/metrics?from=${known.length}&generation=${known.generation}`),
  lanes: (run) => ask(`runs/${run}/lanes`),
  differences: () => ask("differences"),
  samples: (run, asked) => ask(`runs/${run}/samples?${new URLSearchParams(asked)}`),
  group: (run, row) => ask(`runs/${run}/groups/${row.id}`),
};

/** What the server does with a filter, for a page without one. */
function selected(samples, asked) {
  const fits = (row) =>
    (!asked.domain || row.domain === asked.domain) && (!asked.outcome || row.outcome === asked.outcome) &&
    (!asked.lowest || (row.score !== null && row.score >= Number(asked.lowest))) &&
    (!asked.highest || (row.score !== null && row.score <= Number(asked.highest))) &&
    (!asked.first_step || row.step >= Number(asked.first_step)) && (!asked.last_step || row.step <= Number(asked.last_step));
  const orders = {
    newest: (a, b) => b.step - a.step || a.id - b.id, oldest: (a, b) => a.step - b.step || a.id - b.id,
    best: (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity) || b.step - a.step,
    worst: (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity) || b.step - a.step,
    longest: (a, b) => b.tokens - a.tokens,
  };
  const rows = samples.rows.filter(fits).sort(orders[asked.order]);
  return { count: rows.length, rows: rows.slice(asked.offset, asked.offset + PAGE_ROWS), choices: samples.choices };
}

// ---- tooltip

function showTip(event, ...content) {
  const tip = $("tip");
  tip.replaceChildren(...content);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 16, innerHeight - box.height - 8))}px`;
}
function hideTip() { $("tip").hidden = true; }

// ---- charts

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
/** A colour between that of the card and the given one: areas are large, and what lies on them is to be read. */
function soft(colour) {
  const parts = (hex) => [1, 3, 5].map((i) => parseInt((hex.length === 4 ? hex.replace(/[0-9a-f]/gi, "$&$&") : hex).slice(i, i + 2), 16));
  const [card, given] = [parts(css("--card")), parts(colour)];
  return `rgb(${given.map((value, i) => Math.round(0.62 * value + 0.38 * card[i])).join(" ")})`;
}
const waits = ["rollouts", "rewards", "collation", "roles", "weights", "validation", "checkpoint", "records"];
/** title, note, series (label, key, options), and how they are drawn. */
const CHARTS = [
  { title: "Reward", note: "mean score of the trained answers; validation", big: true,
    series: [["reward", "reward/mean", { smooth: true }], ["validation reward", "validation/reward", { points: true }], ["validation accuracy", "validation/accuracy", { points: true }]] },
  { title: "Who waits: the trainer", note: "share of the step without work, by cause", stacked: true, top: 1, percent: true,
    series: waits.map((name) => [name, `idle/trainer_${name}`]) },
  { title: "Where a step's time goes", note: "seconds", stacked: true,
    series: [["wait for a batch", "time/wait_batch_s"], ["log-probs", "time/logprobs_s"], ["train", "time/train_s"], ["weight push", "time/weight_sync_s"], ["validation", "time/validation_s"], ["checkpoint", "time/save_s"]] },
  { title: "Who waits: the engines", note: "share of the step with requests, by engine; idle mean", percent: true, top: 1, series: [["idle, mean", "idle/engines"]], prefix: "busy/" },
  { title: "Throughput", note: "trained tokens per second", zero: true, series: [["tokens/s", "throughput/tokens_per_s", { fill: true }]] },
  { title: "Staleness", note: "versions between sampling and training", zero: true, series: [["mean", "staleness/mean"], ["oldest token", "staleness/max", { stepped: true }]] },
  { title: "Queue", note: "groups finished and waiting, and being generated", zero: true, series: [["waiting", "groups/buffered"], ["in flight", "groups/in_flight"]] },
  { title: "Weight pushes", note: "seconds of a step; pause of the engines", zero: true, series: [["push", "time/weight_sync_s"], ["engines paused", "time/pause_s"]] },
  { title: "Answer length", note: "sampled tokens", zero: true, series: [["mean", "response/length_mean"], ["longest", "response/length_max"]] },
  { title: "Engine against trainer", note: "mean log-ratio estimate (kl) of trained tokens", series: [["kl", "correction/kl"]] },
  { title: "Effective sample size", note: "share of the batch that counts after correction", top: 1, zero: true, series: [["ess", "correction/ess"]] },
  { title: "Gradient norm", note: "mean over the optimizer steps", zero: true, series: [["norm", "trainer/grad_norm"]] },
];

const column = (run, key) => (state.metrics[run] && state.metrics[run].columns[key]) || null;

function smoothed(values, window = 5) {
  return values.map((value, i) => {
    const part = values.slice(Math.max(0, i - window + 1), i + 1).filter((one) => one !== null);
    return value === null || !part.length ? null : part.reduce((a, b) => a + b, 0) / part.length;
  });
}

/** [label, values, colour, options] of what a chart shows of a run; keys that it has not are left out. */
function linesOf(chart, run) {
  const keys = [...chart.series];
  if (chart.prefix && state.metrics[run])
    for (const key of Object.keys(state.metrics[run].columns)) if (key.startsWith(chart.prefix)) keys.push([key.slice(chart.prefix.length), key]);
  const lines = [];
  keys.forEach(([label, key, options = {}], i) => {
    const values = column(run, key);
    if (!values || values.every((value) => value === null)) return;
    if (chart.stacked && values.every((value) => !value || value < 1e-4)) return;
    const colour = css(`--c${i % 8}`);
    if (options.smooth) lines.push([`${label}, mean of 5 steps`, smoothed(values), colour, { ...options, wide: true }], [`${label}, each step`, values, `${colour}66`, options]);
    else lines.push([label, values, colour, options]);
  });
  return lines;
}

function plotted(chart) {
  const mine = linesOf(chart, state.run), other = state.run === 0 ? 1 : 0;
  let lines = mine, steps = column(state.run, "step") || [];
  if (state.runs.length > 1 && !chart.stacked) {
    const theirs = linesOf(chart, other).filter(([, , , options]) => !(options.smooth && !options.wide));
    const aligned = new Map((column(other, "step") || []).map((step, i) => [step, i]));
    const all = [...new Set([...steps, ...aligned.keys()])].sort((a, b) => a - b);
    const place = new Map(steps.map((step, i) => [step, i]));
    const spread = (values, places) => all.map((step) => (places.has(step) ? values[places.get(step)] : null));
    lines = [...mine.map(([label, values, ...rest]) => [label, spread(values, place), ...rest]),
      ...theirs.map(([label, values, colour, options]) => [`${state.runs[other].name}: ${label}`, spread(values, aligned), colour, { ...options, dashed: true }])];
    steps = all;
  }
  return [steps, lines];
}

function draw(box, chart) {
  const [steps, lines] = plotted(chart);
  box.replaceChildren(element("h2", {}, chart.title, " ", element("small", {}, chart.note || "")));
  if (!steps.length || !lines.length) return box.append(element("p", { class: "empty" }, "nothing of it yet"));
  const legend = element("div", { class: "legend" }, ...lines.map(([label, , colour, options]) => {
    const mark = element("i", { class: options.dashed ? "dashed" : null });
    mark.style.background = chart.stacked ? soft(colour) : colour;
    mark.style.borderColor = colour;
    return element("span", {}, mark, label);
  }));
  const place = element("div");
  box.append(legend, place);
  let data = lines.map(([, values]) => values);
  if (chart.stacked) { // uPlot draws the first series first: the tallest sum has to come before the others
    const sums = steps.map(() => 0);
    data = data.map((values) => values.map((value, i) => (sums[i] += value || 0))).reverse();
  }
  const shown = chart.stacked ? [...lines].reverse() : lines;
  const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { stroke: css("--line"), width: 1 }, font: "11px system-ui" };
  const format = (value) => (chart.percent ? `${Math.round(value * 100)} %` : number(value, 4));
  const plot = new uPlot({
    width: place.clientWidth || 400, height: chart.big ? 240 : 180,
    scales: { x: { time: false }, y: { range: (_, low, high) => rangeOf(chart, low, high) } },
    axes: [{ ...axis, size: 32, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }, { ...axis, size: 56, values: (_, ticks) => ticks.map(format) }],
    series: [{}, ...shown.map(([label, , colour, options]) => ({
      label, stroke: colour, width: chart.stacked ? 0.6 : options.wide ? 2.2 : 1.4, fill: chart.stacked ? soft(colour) : options.fill ? `${colour}22` : undefined,
      dash: options.dashed ? [5, 4] : undefined, spanGaps: true,
      points: { show: options.points || steps.length === 1, size: 6, fill: colour },
      paths: options.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    }))],
    cursor: { sync: { key: "steps" }, points: { size: 7 }, drag: { x: true, y: false } },
    hooks: { setCursor: [(self) => tipOf(self, steps, lines, format)] },
  }, [steps, ...data], place);
  place.addEventListener("mouseleave", hideTip);
  state.charts.push({ plot, place });
}

function rangeOf(chart, low, high) {
  if (low === null) return [0, 1];
  if (chart.stacked || chart.zero || chart.percent) low = Math.min(0, low);
  if (chart.top) return [low, Math.max(chart.top, high)];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low === 0 ? 0 : low - room, high + room];
}

function tipOf(self, steps, lines, format) {
  const i = self.cursor.idx, box = self.over.getBoundingClientRect();
  if (i === null || i === undefined || !self.over.matches(":hover")) return;
  const rows = lines.filter(([, values]) => values[i] !== null && values[i] !== undefined).map(([label, values, colour]) => {
    const mark = element("i");
    mark.style.background = colour;
    return element("div", {}, mark, `${label}  ${format(values[i])}`);
  });
  showTip({ clientX: box.left + self.cursor.left, clientY: box.top + self.cursor.top }, element("b", {}, `step ${steps[i]}`), ...rows);
}

function drawCharts() {
  state.charts.forEach(({ plot }) => plot.destroy());
  state.charts = [];
  const boxes = CHARTS.map((chart) => element("div", { class: chart.big ? "card big" : "card" }));
  $("charts").replaceChildren(...boxes);
  boxes.forEach((box, i) => draw(box, CHARTS[i]));
  const any = $("any");
  offer(any, Object.keys((state.metrics[state.run] || { columns: {} }).columns).sort());
  const place = element("div");
  $("anychart").replaceChildren(place);
  draw(place, { title: any.value || "", series: [["value", any.value]] });
}

// ---- overview

function drawSummary() {
  const run = state.runs[state.run];
  const fact = (name, value, kind = null) => element("div", { class: kind }, element("span", {}, name), element("b", {}, value));
  const shown = element("b", { class: `state-${run.state}` }, run.reason ? `${run.state}: ${run.reason}` : run.state);
  $("summary").replaceChildren(element("div", {}, element("span", {}, "state"), shown), fact("step", `${run.step} / ${run.max_steps}`),
    run.reward === null && run.loss !== null ? fact("loss", number(run.loss)) : fact("reward", number(run.reward)),
    fact("run", `${run.name} · ${run.id}`), ...(run.waits ? [fact("who waits", run.waits, "wide")] : []),
    ...(run.continue ? [fact("continue with", run.continue, "wide")] : []));
  $("advisories").replaceChildren(...run.advisories.map(({ title, advice }) => element("div", { class: "advisory" }, element("b", {}, title), ". ", advice)));
  document.title = `${run.name}: step ${run.step}, ${run.state}`;
}

// ---- samples

const COLUMNS = [["step", "step", 1], ["group", "group_id", 1], ["domain", "domain"], ["outcome", "outcome"], ["score", "score", 1], ["advantage", "advantage", 1], ["tokens", "tokens", 1], ["version", "version", 1], ["turns", "parts", 1], ["answer", "preview"]];

async function listSamples() {
  const asked = Object.fromEntries([...new FormData($("filters"))].filter(([, value]) => value !== ""));
  const run = state.run, found = await source.samples(run, { ...asked, offset: state.offset });
  for (const name of ["domain", "outcome"]) offer($("filters").elements[name], found.choices[name], ["all"]);
  if (["domain", "outcome"].some((name) => asked[name] && !found.choices[name].includes(asked[name]))) return listSamples();
  const last = Math.min(state.offset + PAGE_ROWS, found.count);
  $("place").textContent = found.count ? `${state.offset + 1}–${last} of ${found.count}` : "no sample fits";
  $("before").disabled = state.offset === 0;
  $("after").disabled = last >= found.count;
  $("list").tHead.replaceChildren(element("tr", {}, ...COLUMNS.map(([title, , numeric]) => element("th", { class: numeric && "number" }, title))));
  $("list").tBodies[0].replaceChildren(...found.rows.map((row) => {
    const line = element("tr", { tabindex: 0, onclick: () => openGroup(run, row, line), onkeydown: (event) => event.key === "Enter" && openGroup(run, row, line) },
      ...COLUMNS.map(([, key, numeric]) => element("td", { class: numeric ? "number" : key === "preview" ? "text" : null }, ...(numeric ? [number(row[key])] : visible(String(row[key]).replaceAll("\n", " ⏎ "))))));
    return line;
  }));
  if (!$("group").children.length && found.rows.length) await openGroup(run, found.rows[0], $("list").tBodies[0].rows[0]);
}

/** Make these the choices, after one for all of them; what is chosen stays where it is among them. */
function offer(select, values, all = []) {
  const before = select.value, texts = [...all, ...values];
  if (select.options.length === texts.length && texts.every((text, i) => select.options[i].textContent === text)) return;
  select.replaceChildren(...texts.map((text, i) => element("option", { value: i < all.length ? "" : text }, text)));
  if (values.includes(before)) select.value = before;
}

async function openGroup(run, row, line) {
  document.querySelectorAll("#list tr.chosen").forEach((other) => other.classList.remove("chosen"));
  if (line) line.classList.add("chosen");
  const rows = await source.group(run, row);
  $("group").replaceChildren(groupView(rows, rows.find((other) => other.id === row.id) || rows[0]));
}

// ---- lanes

async function drawLanes() {
  const spans = await source.lanes(state.run), box = $("lanechart");
  const title = element("h2", {}, "Lanes ", element("small", {}, "what the trainer did, and which engine ran requests; drag to look closer, double click to see all"));
  if (!spans.length) return box.replaceChildren(title, element("p", { class: "empty" }, "no trace yet (tracking.trace)"));
  const kindOf = (name) => name.replace(/ of step \d+$/, "");
  const names = [...new Set(spans.map((span) => kindOf(span.name)))], tracks = new Map();
  for (const span of spans) {
    if (!tracks.has(span.track)) tracks.set(span.track, { spans: [], slots: 1 });
    const track = tracks.get(span.track);
    track.spans.push(span);
    track.slots = Math.max(track.slots, span.slot);
  }
  const order = [...tracks].sort(([a], [b]) => (b === "trainer") - (a === "trainer") || a.localeCompare(b));
  const first = spans.reduce((low, span) => Math.min(low, span.begin), Infinity), last = spans.reduce((high, span) => Math.max(high, span.end), 0);
  // The beginning of what lies in the trace is often one span: the newest two minutes are what is looked at.
  let [begin, end] = drawLanes.window || [Math.max(first, last - 120), last];
  const canvas = element("canvas", { class: "lanes" }), left = 170;
  const colourOfName = (name) => css(`--c${(name === "request" ? 0 : 1 + Math.max(0, names.filter((one) => one !== "request").indexOf(name))) % 8}`);
  const height = (track) => Math.max(24, Math.min(150, track.slots * 7));
  function paint() {
    const width = box.clientWidth - 30, tall = order.reduce((sum, [, track]) => sum + height(track) + 10, 26), ratio = devicePixelRatio || 1;
    canvas.width = width * ratio; canvas.height = tall * ratio; canvas.style.height = `${tall}px`;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui";
    const x = (time) => left + ((time - begin) / (end - begin)) * (width - left);
    let top = 4;
    canvas.hits = [];
    for (const [name, track] of order) {
      const room = height(track), one = room / track.slots;
      pen.fillStyle = css("--soft");
      pen.fillText(name.length > 25 ? `${name.slice(0, 24)}…` : name, 0, top + 15);
      pen.fillStyle = css("--page");
      pen.fillRect(left, top, width - left, room);
      for (const span of track.spans) {
        if (span.end < begin || span.begin > end) continue;
        const from = Math.max(left, x(span.begin)), to = Math.min(width, x(span.end)), y = top + (span.slot - 1) * one;
        pen.fillStyle = colourOfName(kindOf(span.name));
        pen.fillRect(from, y, Math.max(1, to - from), Math.max(1, one - (one > 3 ? 1 : 0.4)));
        canvas.hits.push([from, Math.max(to, from + 1), y, y + one, name, span]);
      }
      top += room + 10;
    }
    pen.fillStyle = css("--soft");
    const increment = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600, 7200].find((one) => (end - begin) / one <= 10) || 14400;
    for (let time = Math.ceil((begin - first) / increment) * increment; time <= end - first; time += increment) pen.fillText(`${Number(time.toFixed(1))} s`, x(first + time) - 8, top + 12);
  }
  const timeAt = (event) => begin + (Math.max(0, event.offsetX - left) / (canvas.clientWidth - left)) * (end - begin);
  canvas.addEventListener("mousemove", (event) => {
    const hit = (canvas.hits || []).find(([a, b, c, d]) => event.offsetX >= a && event.offsetX <= b && event.offsetY >= c && event.offsetY < d);
    if (!hit) return hideTip();
    const [, , , , track, span] = hit;
    showTip(event, element("span", {}, `${track}, ${span.name}\n${number(span.end - span.begin)} s, from ${number(span.begin - first, 5)} s on`));
  });
  canvas.addEventListener("mouseleave", hideTip);
  canvas.addEventListener("mousedown", (event) => { canvas.pressed = timeAt(event); });
  canvas.addEventListener("mouseup", (event) => {
    const [a, b] = [canvas.pressed, timeAt(event)].sort((one, other) => one - other);
    if (b - a > (end - begin) / 100) { [begin, end] = drawLanes.window = [a, b]; paint(); }
  });
  canvas.addEventListener("dblclick", () => { [begin, end] = [first, last]; drawLanes.window = null; paint(); });
  const legend = element("div", { class: "legend" }, ...names.slice(0, 12).map((name) => {
    const mark = element("i");
    mark.style.background = colourOfName(name);
    return element("span", {}, mark, name);
  }));
  box.replaceChildren(title, legend, canvas);
  paint();
  drawLanes.paint = paint;
}

// ---- comparison

async function drawDifferences() {
  const rows = await source.differences(), [one, other] = state.runs;
  const keys = ["reward/mean", "validation/accuracy", "throughput/tokens_per_s", "staleness/mean", "idle/trainer", "idle/engines", "response/length_mean"];
  const steps = new Set(column(1, "step") || []), common = (column(0, "step") || []).filter((step) => steps.has(step)), step = common[common.length - 1];
  const at = (run, key) => { const values = column(run, key); return values ? values[column(run, "step").indexOf(step)] : null; };
  const table = (head, lines) => element("table", {}, element("thead", {}, element("tr", {}, ...head.map((title) => element("th", {}, title)))), element("tbody", {}, ...lines.map((line) => element("tr", {}, ...line.map((cell) => element("td", {}, ...visible(String(cell))))))));
  $("differences").replaceChildren(element("h2", {}, step ? `At step ${step}, the last that both have` : "No step that both have"),
    table(["metric", one.name, other.name], keys.map((key) => [key, number(at(0, key)), number(at(1, key))])),
    element("h2", { class: "later" }, rows.length ? "What their configs say differently" : "Their configs say the same"),
    rows.length ? table(["key", one.name, other.name], rows) : "");
}

// ---- together

function drawRuns() {
  $("runs").replaceChildren(...state.runs.map((run, i) => element("button", { class: i === state.run ? "chosen" : null, onclick: () => choose(i) }, `${run.name} (${run.state})`)));
  document.querySelector('[data-view="compare"]').hidden = state.runs.length < 2;
}

function choose(run) {
  Object.assign(state, { run, offset: 0 });
  $("group").replaceChildren();
  drawLanes.window = null;
  drawRuns();
  drawSummary();
  show(state.view);
}

function show(view) {
  state.view = view;
  history.replaceState(null, "", `#view-${view}`); // a page that is loaded again shows the same
  for (const name of ["overview", "samples", "lanes", "compare"]) $(name).hidden = name !== view;
  document.querySelectorAll("#views button").forEach((button) => button.classList.toggle("chosen", button.dataset.view === view));
  return guarded({ overview: async () => drawCharts(), samples: listSamples, lanes: drawLanes, compare: drawDifferences }[view]);
}

/** An error is told on the page; the next try may do. */
async function guarded(work) {
  try {
    await work();
    $("trouble").hidden = true;
  } catch (error) {
    $("trouble").textContent = `The page could not be brought up to date: ${error.message}`;
    $("trouble").hidden = false;
  }
}

async function refresh() {
  state.runs = await source.runs();
  let changed = false;
  for (let run = 0; run < state.runs.length; run++) {
    const known = state.metrics[run] || { generation: 0, length: 0, columns: {} };
    const found = await source.metrics(run, known);
    const count = Math.max(0, ...Object.values(found.columns).map((values) => values.length));
    changed ||= count > 0 || found.from !== known.length;
    const columns = found.from === 0 ? {} : known.columns;
    for (const key of new Set([...Object.keys(columns), ...Object.keys(found.columns)]))
      columns[key] = [...(columns[key] || Array(found.from).fill(null)), ...(found.columns[key] || Array(count).fill(null))];
    state.metrics[run] = { generation: found.generation, length: found.from + count, columns };
  }
  drawRuns();
  drawSummary();
  // Not under the mouse of a reader, who may have drawn a part of a chart larger.
  if (changed && state.view !== "lanes" && !document.querySelector(".u-over:hover")) await show(state.view);
}

document.querySelectorAll("#views button").forEach((button) => button.addEventListener("click", () => show(button.dataset.view)));
$("filters").addEventListener("input", () => { state.offset = 0; guarded(listSamples); });
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("before").addEventListener("click", () => { state.offset = Math.max(0, state.offset - PAGE_ROWS); guarded(listSamples); });
$("after").addEventListener("click", () => { state.offset += PAGE_ROWS; guarded(listSamples); });
$("any").addEventListener("change", () => drawCharts());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(state.view));
addEventListener("resize", () => {
  state.charts.forEach(({ plot, place }) => plot.setSize({ width: place.clientWidth, height: plot.height }));
  if (state.view === "lanes" && drawLanes.paint) drawLanes.paint();
});
(async () => {
  const asked = location.hash.replace("#view-", "");
  await guarded(refresh);
  if (["samples", "lanes", "compare"].includes(asked)) await show(asked);
  document.body.dataset.ready = "yes";
  if (!EMBEDDED) setInterval(() => guarded(refresh), EVERY_MS);
})();
