"use strict";
// Tokens of a trajectory, tinted by a number; underlines say the same without colour.

const TINTS = {
  "": "Conversation",
  plain: "Tokens",
  turn: "by turn",
  weight: "by advantage × M",
  gap: "by sampler–trainer gap",
  entropy: "by entropy",
};
const LEVELS = 4;
const UNITS = { weight: "", gap: " nats", entropy: " nats" };

/** The number that a tint shows of token `i`; null where there is none. */
function valueOf(tint, record, segment, i) {
  const turn = segment.turn[i];
  if (tint === "weight") return record.weights[turn] ?? null;
  if (tint === "entropy") return segment.entropy[i];
  const [sampler, trainer] = [segment.logp[i], segment.trainer_logp[i]];
  return sampler === null || trainer === null ? null : sampler - trainer;
}

/** The value from which a token has the strongest tint, the largest, and how many are missing: of these records. */
function scaleOf(tint, records) {
  const sizes = [];
  let missing = 0;
  for (const record of records) {
    for (const segment of record.segments) {
      segment.turn.forEach((turn, i) => {
        if (turn < 0) return;
        const value = valueOf(tint, record, segment, i);
        if (value === null) missing++;
        else sizes.push(Math.abs(value));
      });
    }
  }
  if (!sizes.length) return null;
  sizes.sort((a, b) => a - b);
  // One wild token must not make all others look alike: the 95th percentile is the scale.
  const scale = tint === "weight" ? sizes.at(-1) : sizes[Math.floor(0.95 * (sizes.length - 1))];
  return { scale: scale || sizes.at(-1) || 1, largest: sizes.at(-1), missing };
}

/** Classes of a token: its level 0 to 4 and its sign, or its turn's style. */
function tintClass(tint, value, turn, scale) {
  if (tint === "turn") return `h${turn % 5}`;
  if (value === null) return "none";
  const level = Math.min(LEVELS, Math.ceil((LEVELS * Math.abs(value)) / scale.scale - 1e-9));
  return `l${level} ${value < 0 ? "negative" : "positive"}`;
}

/** What tints and underlines mean, with the numbers at which they change. */
function legend(tint, records) {
  if (tint === "plain") return el("p.legend", {}, "What was sampled is on a tint of its own; the rest is context.");
  if (tint === "turn") {
    const turns = Math.max(0, ...records.map((record) => record.turns));
    const samples = Array.from({ length: Math.min(5, turns) }, (_, turn) =>
      el(`span.token.h${turn}`, {}, `turn ${turn + 1}`));
    return el("p.legend", {}, ...spaced(samples), turns > 5 ? " and again from turn 6" : "");
  }
  const scale = scaleOf(tint, records);
  if (!scale) return el("p.legend", {}, `Nothing to tint ${TINTS[tint]}: these records hold no such numbers.`);
  const digits = Math.max(2, Math.min(6, 2 - Math.floor(Math.log10(scale.scale))));
  const step = scale.scale / LEVELS;
  const signs = tint === "entropy" ? [["positive", ""]] : [["negative", "−"], ["positive", "+"]];
  const samples = signs.flatMap(([sign, mark]) =>
    Array.from({ length: LEVELS }, (_, i) => {
      const from = `${mark}${number(i * step, digits)}`;
      const range = i + 1 === LEVELS ? `beyond ${from}` : `to ${mark}${number((i + 1) * step, digits)}`;
      return el(`span.token.l${i + 1}.${sign}`, {}, range);
    }));
  const largest = ` ${UNITS[tint]} · largest here ${number(scale.largest, digits)}`;
  const none = el("span.token.none", {}, `not computed: ${scale.missing.toLocaleString("en")}`);
  return el("p.legend", {}, ...spaced(samples), largest, ...(scale.missing ? [" · ", none] : []));
}

function spaced(nodes) {
  return nodes.flatMap((node) => [node, " "]);
}

/** All segments of a record as blocks of context and of turns. */
function tokenNodes(record, tint, records) {
  const scale = ["plain", "turn"].includes(tint) ? null : scaleOf(tint, records);
  const nodes = [];
  record.segments.forEach((segment, s) => {
    const role = shown(segment.role ? ` · ${segment.role}` : "");
    if (record.segments.length > 1) nodes.push(el("h3", {}, `Segment ${s + 1} of ${record.segments.length}`, ...role));
    let from = 0;
    for (let i = 1; i <= segment.turn.length; i++) {
      if (i < segment.turn.length && segment.turn[i] === segment.turn[from]) continue;
      if (segment.turn[from] < 0) nodes.push(block(segment.text.slice(from, i).join(""), shown, "pre.context"));
      else nodes.push(turnBlock(record, segment, from, i, tint, scale));
      from = i;
    }
  });
  return nodes.length ? nodes : [el("p.note", {}, "This record holds no tokens.")];
}

function turnBlock(record, segment, from, to, tint, scale) {
  const turn = segment.turn[from];
  const tokens = [];
  const name = `token-${record.member}-${record.segments.indexOf(segment)}`;
  for (let i = from; i < to; i++) {
    const value = scale ? valueOf(tint, record, segment, i) : null;
    const classes = tint === "plain" ? "plain" : tintClass(tint, value, turn, scale);
    // Not by `el`: there may be a hundred thousand of them.
    const element = document.createElement("span");
    element.id = `${name}-${i}`;
    element.className = `token ${classes}`;
    element.tabIndex = i === from ? 0 : -1;
    element.append(...tokenText(segment.text[i]));
    element.token = { record, segment, i };
    tokens.push(element);
  }
  const facts = [`turn ${turn + 1}`, `${to - from} tokens`];
  const weight = record.weights[turn] ?? null;
  if (weight !== null) facts.push(`advantage × M ${number(weight, 3)}`);
  for (const [name, key] of [["entropy", "entropy"], ["gap", "gap"]]) {
    const values = [];
    for (let i = from; i < to; i++) values.push(valueOf(key, record, segment, i));
    const known = values.filter((value) => value !== null).map(Math.abs);
    if (known.length) facts.push(`mean ${key === "gap" ? "|gap|" : name} ${number(known.reduce((a, b) => a + b) / known.length, 4)}`);
  }
  const head = el(`p.badge${tint === "turn" ? `.h${turn % 5}` : ""}`, {}, facts.join(" · "));
  return el("section.turn", { "aria-label": facts.join(", ") }, head, el("pre.tokens", { dir: "auto" }, ...tokens));
}

/** A token's text; line ends are marked, and what adds no text is a dotted circle. */
function tokenText(text) {
  if (/^[ -~]+$/.test(text)) return [text];
  if (text === "") return [el("i.part", { title: "a part of a character" })];
  return text.split("\n").flatMap((line, i) => [...(i ? [el("i.end"), "\n"] : []), ...shown(line)]);
}

/** All that is known of a token, in a line. */
function describe({ record, segment, i }) {
  const facts = [`token ${i + 1} of ${segment.turn.length}`, `id ${segment.tokens[i]}`, JSON.stringify(segment.text[i])];
  facts.push(`turn ${segment.turn[i] + 1}`);
  const weight = record.weights[segment.turn[i]] ?? null;
  if (weight !== null) facts.push(`advantage × M ${number(weight, 4)}`);
  if (segment.logp[i] !== null) facts.push(`log-probability ${number(segment.logp[i], 4)}`);
  if (segment.trainer_logp[i] !== null) facts.push(`trainer ${number(segment.trainer_logp[i], 4)}`);
  const gap = valueOf("gap", record, segment, i);
  if (gap !== null) facts.push(`gap ${number(gap, 5)}`);
  if (segment.entropy[i] !== null) facts.push(`entropy ${number(segment.entropy[i], 4)} nats`);
  return facts.join(" · ");
}
