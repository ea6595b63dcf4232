"use strict";
// Groups, answers and coloured tokens. The text of an answer is hostile: it becomes text nodes, never markup.

/** An element with attributes and children; strings become text. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const HIDDEN = /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/gu;

/** Text as nodes; characters that show nothing, or turn the line round, are written as their code. */
function visible(text) {
  const nodes = [];
  let begin = 0;
  for (const found of text.matchAll(HIDDEN)) {
    if (found.index > begin) nodes.push(text.slice(begin, found.index));
    const code = found[0].codePointAt(0);
    nodes.push(element("span", { class: "ctl" }, `U+${code.toString(16).toUpperCase().padStart(4, "0")}`));
    begin = found.index + found[0].length;
  }
  nodes.push(text.slice(begin));
  return nodes;
}

const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : Number.isInteger(value) ? String(value) : Number(value.toPrecision(digits)).toString();

/** Weight version of each token. */
const versionsOf = (row) => row.version_runs.flatMap(([version, count]) => Array(count).fill(version));

const NOISE = 0.05; // a log-ratio below it is rounding, and is not coloured as if it said something

/** What tokens can be coloured by: values per token (null = no colour), and how they are drawn. */
const COLOURINGS = {
  mask: { name: "loss mask", of: (row) => row.loss_mask, kind: "mask" },
  version: { name: "weight version", of: (row) => masked(row, versionsOf(row)), kind: "one" },
  ratio: {
    name: "log-ratio, trainer to engine", kind: "two", least: NOISE,
    of: (row) => row.trainer_logprobs && masked(row, row.trainer_logprobs.map((p, i) => p - row.behaviour_logprobs[i])),
  },
  surprise: { name: "surprise, -log p of the engine", kind: "one", of: (row) => masked(row, row.behaviour_logprobs.map((p) => -p)) },
  entropy: { name: "entropy of the trainer, nats", kind: "one", of: (row) => row.entropies && masked(row, row.entropies) },
  advantage: {
    name: "advantage", kind: "two",
    of: (row) => masked(row, row.advantages || (row.advantage === null ? null : row.loss_mask.map(() => row.advantage))),
  },
};
const masked = (row, values) => values && values.map((value, i) => (row.loss_mask[i] ? value : null));

/** The colour of a value between the ends of its scale. */
function colourOf(kind, value, low, high, least = 0) {
  if (value === null) return "";
  if (kind === "mask") return value ? "color-mix(in srgb, var(--c2) 26%, transparent)" : "color-mix(in srgb, var(--c6) 34%, transparent)";
  if (kind === "two") {
    const bound = Math.max(Math.abs(low), Math.abs(high), least) || 1;
    const share = Math.min(1, Math.abs(value) / bound);
    return `color-mix(in srgb, var(${value < 0 ? "--c4" : "--c2"}) ${Math.round(8 + 42 * share)}%, transparent)`;
  }
  const share = high > low ? (value - low) / (high - low) : 0;
  return `color-mix(in srgb, var(--c0) ${Math.round(8 + 42 * share)}%, transparent)`;
}

/** [text, start, end] of the row's turns, tools between them included. */
function partsOf(row) {
  const size = row.response_token_ids.length;
  if (!row.turns || row.turns.length === 0) {
    return partsByMask(row, size);
  }
  const parts = [];
  let place = 0;
  for (const turn of row.turns) {
    if (turn.start > place) parts.push(["tool or environment", place, turn.start]);
    const given = `reward ${number(turn.reward)}, advantage ${number(turn.advantage)}`;
    parts.push([`turn ${turn.index + 1}: ${given}`, turn.start, turn.start + turn.num_tokens]);
    place = turn.start + turn.num_tokens;
  }
  if (place < size) parts.push(["tool or environment", place, size]);
  return parts;
}

function partsByMask(row, size) {
  const parts = [];
  for (let i = 0; i < size; i++) {
    const last = parts[parts.length - 1];
    if (last && row.loss_mask[last[1]] === row.loss_mask[i]) last[2] = i + 1;
    else parts.push([row.loss_mask[i] ? "policy" : "tool or environment", i, i + 1]);
  }
  return parts.length > 1 ? parts : parts.map(([, start, end]) => ["", start, end]);
}

/** Colour the spans of a row. Returns the ends of the scale, or null where the row has no such values. */
function colour(spans, row, by) {
  const { of, kind, least } = COLOURINGS[by];
  const values = of(row);
  spans.forEach((span, i) => { span.style.background = values ? colourOf(kind, values[i], ...ends(values), least) : ""; });
  return values ? ends(values) : null;
}

const endsOf = new WeakMap();
function ends(values) {
  if (!endsOf.has(values)) {
    const there = values.filter((value) => value !== null);
    const low = there.reduce((a, b) => Math.min(a, b), Infinity), high = there.reduce((a, b) => Math.max(a, b), -Infinity);
    endsOf.set(values, [low, high]);
  }
  return endsOf.get(values);
}

/** One row: its facts, a selector of colours, its tokens in turns. */
function trajectory(row, branches, choose) {
  const versions = versionsOf(row);
  const pieces = row.response_pieces || row.response_token_ids.map((id) => `[${id}]`);
  const spans = pieces.map((piece, i) => element("span", { "data-token": i }, ...visible(piece)));
  const body = element("div", { class: "tokens" });
  for (const [title, start, end] of partsOf(row)) {
    if (title) body.append(element("span", { class: "turn" }, title));
    body.append(...spans.slice(start, end));
  }
  body.addEventListener("mousemove", (event) => {
    const span = event.target.closest("[data-token]");
    if (!span) return hideTip();
    const i = Number(span.dataset.token), sampled = row.loss_mask[i];
    const lines = [`token ${i}: id ${row.response_token_ids[i]}`, sampled ? "sampled and trained" : "not sampled (mask 0)", `version ${versions[i]}`];
    if (sampled) lines.push(`log p, engine  ${number(row.behaviour_logprobs[i], 4)}`);
    if (sampled && row.trainer_logprobs) lines.push(`log p, trainer ${number(row.trainer_logprobs[i], 4)}`);
    if (sampled && row.entropies) lines.push(`entropy ${number(row.entropies[i])}`);
    if (sampled) lines.push(`advantage ${number(row.advantages ? row.advantages[i] : row.advantage)}`);
    showTip(event, element("span", {}, lines.join("\n")));
  });
  body.addEventListener("mouseleave", hideTip);
  const scale = element("span", { class: "scale" });
  const select = element("select", { id: "colour", "aria-label": "Colour tokens by", onchange: () => recolour() },
    ...Object.entries(COLOURINGS).map(([key, { name }]) => element("option", { value: key }, name)));
  select.value = trajectory.colouring || (row.trainer_logprobs ? "ratio" : "surprise");
  function recolour() {
    trajectory.colouring = select.value;
    const found = colour(spans, row, select.value), kind = COLOURINGS[select.value].kind;
    scale.replaceChildren();
    if (!found) scale.append("this answer has no such values");
    else if (kind === "mask") scale.append(legendBox(colourOf("mask", 1)), "trained", legendBox(colourOf("mask", 0)), "tool, environment or padding");
    else {
      const bound = Math.max(Math.abs(found[0]), Math.abs(found[1]), COLOURINGS[select.value].least || 0);
      const [low, high] = kind === "two" ? [-bound, bound] : found;
      const stops = [0, .25, .5, .75, 1].map((share) => colourOf(kind, low + share * (high - low), low, high));
      const bar = element("i");
      bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
      scale.append(number(low), bar, number(high));
    }
  }
  recolour();
  const facts = Object.entries(row.reward_metrics || {}).map(([name, value]) => `${name} ${number(value)}`);
  return element("div", { class: "card", id: "trajectory" },
    element("div", { class: "tools" }, element("h2", {}, `Answer ${row.sample_id}`), element("label", {}, "Colour by ", select), scale),
    branches.length < 2 ? null : element("div", { class: "tools branches" }, "branches of this trajectory:",
      ...branches.map((branch, i) => element("button", { class: branch === row ? "chosen" : null, onclick: () => choose(branch) }, `branch ${i + 1}`))),
    element("div", { class: "facts" }, ...[`engine ${row.replica || "–"}`, `${row.response_token_ids.length} tokens`, `ended: ${row.outcome || row.finish_reason}`, ...facts]
      .map((fact) => element("span", {}, ...visible(fact)))),
    body);
}

function legendBox(background) {
  const box = element("i");
  box.style.background = background;
  box.style.width = "18px";
  return box;
}

/** The rows of one group: the prompt, its answers side by side, and the one that is opened. */
function groupView(rows, opened) {
  const place = element("div");
  const leads = rows.filter((row, i) => !row.trajectory || rows.findIndex((other) => other.trajectory === row.trajectory) === i);
  const cards = new Map();
  function open(row) {
    const branches = row.trajectory ? rows.filter((other) => other.trajectory === row.trajectory) : [row];
    for (const [lead, card] of cards) card.classList.toggle("chosen", branches.includes(lead));
    place.replaceChildren(trajectory(row, branches, open));
  }
  const mean = leads.reduce((sum, row) => sum + (row.score || 0), 0) / leads.length;
  const answers = leads.slice().sort((a, b) => (b.score ?? 0) - (a.score ?? 0)).map((row) => {
    const versions = row.version_runs.map(([version]) => version);
    const card = element("button", { class: "card answer", onclick: () => open(row) },
      element("header", {},
        element("span", { class: `score ${row.score > mean ? "up" : row.score < mean ? "down" : ""}` }, number(row.score)),
        element("span", {}, row.outcome || row.finish_reason),
        element("span", {}, `${row.loss_mask.reduce((a, b) => a + b, 0)} tokens`),
        element("span", {}, `v${Math.min(...versions)}${Math.max(...versions) > Math.min(...versions) ? `–${Math.max(...versions)}` : ""}`),
        row.num_turns > 1 ? element("span", {}, `${row.num_turns} turns`) : null),
      element("pre", {}, ...visible(row.response.slice(0, 1200))));
    cards.set(row, card);
    return card;
  });
  open(opened);
  return element("div", {},
    element("div", { class: "card prompt" },
      element("h2", {}, `Step ${opened.step}, group ${opened.group_id} `, element("small", {}, ...visible(`${opened.domain} · truth: ${opened.ground_truth.slice(0, 200)}`))),
      element("pre", {}, ...visible(opened.prompt))),
    element("div", { class: "answers" }, ...answers), place);
}
