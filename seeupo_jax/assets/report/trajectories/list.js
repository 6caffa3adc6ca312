"use strict";
// The list: filters, order, and only those of its rows that can be seen.

const ROW = 52; // px, as in page.css
const ORDERS = {
  "": ["as written", null],
  newest: ["latest iteration first", (row) => -at("iteration", row)],
  reward: ["highest reward first", (row) => -(at("reward", row) ?? -Infinity)],
  "-reward": ["lowest reward first", (row) => at("reward", row) ?? Infinity],
  weight: ["largest |advantage × M| first", (row) => -(at("weight", row) ?? -1)],
  turns: ["most turns first", (row) => -at("turns", row)],
};
const OUTCOMES = { success: "✓", "no success": "✗", failed: "!", "not judged": "·" };

let filters = {}; // key in the address -> [label, value of a row]
let listed = []; // rows that pass, in order
let cursor = 0; // place in `listed`

function outcomeOf(row) {
  const success = at("success", row);
  if (success !== null) return success ? "success" : "no success";
  return at("failed", row) ? "failed" : "not judged";
}

function outcomeMark(row) {
  const outcome = outcomeOf(row);
  return el(`span.mark.${outcome.replace(" ", "-")}`, { title: outcome, role: "img", "aria-label": outcome }, OUTCOMES[outcome]);
}

function number(value, digits = 2) {
  if (value === null || value === undefined) return "–";
  const small = value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits;
  return (small ? value.toExponential(1) : value.toFixed(digits)).replaceAll("-", "−");
}

/** Makes the filters' controls out of what the index holds. */
function makeFilters() {
  const labels = (INDEX.values.labels ?? []).map((text) => JSON.parse(text));
  filters = {
    split: ["Split", (row) => at("source", row).replace("_", " ")],
    iteration: ["Iteration", (row) => String(at("iteration", row))],
    group: ["Group", (row) => String(at("group", row))],
    outcome: ["Success", outcomeOf],
    stop: ["Stop reason", (row) => at("stop", row)],
    failure: ["Cause of failure", (row) => at("failure", row) ?? ""],
    turns: ["Turns", (row) => String(at("turns", row))],
  };
  for (const key of new Set(labels.flatMap(Object.keys))) {
    filters[`label.${key}`] = [key, (row) => String(labels[INDEX.columns.labels[row]][key] ?? "")];
  }
  const controls = Object.entries(filters).map(([key, [label, valueOf]]) => {
    const counts = new Map();
    for (let row = 0; row < INDEX.rows; row++) counts.set(valueOf(row), (counts.get(valueOf(row)) ?? 0) + 1);
    counts.delete("");
    const values = [...counts.keys()].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
    const options = values.map((value) => el("option", { value }, ...plain(value), ` (${counts.get(value)})`));
    return el("label", {}, ...plain(label), el("select", { name: key }, el("option", { value: "" }, "all"), ...options));
  });
  const orders = Object.entries(ORDERS).map(([value, [label]]) => el("option", { value }, label));
  controls.push(el("label", {}, "Order", el("select", { name: "order" }, ...orders)));
  document.getElementById("selects").replaceChildren(...controls);
  const tasks = INDEX.values.task_id ?? [];
  document.getElementById("tasks").replaceChildren(...tasks.slice(0, 2000).map((value) => el("option", { value })));
}

/** A text for where no elements can stand, with what cannot be seen written out. */
function plain(text) {
  return shown(text).map((node) => node.textContent ?? node);
}

/** Lists what passes the filters of `query` (URLSearchParams). */
function list(query) {
  const wanted = Object.entries(filters).filter(([key]) => query.get(key));
  const text = (query.get("q") ?? "").toLowerCase();
  const ids = (INDEX.values.task_id ?? []).map((id) => id.toLowerCase());
  // A whole id means that task; otherwise what holds the text.
  const matching = text && ids.includes(text) ? (id) => id === text : (id) => id.includes(text);
  const tasks = ids.map(matching);
  const passes = (row) =>
    tasks[INDEX.columns.task_id[row]] && wanted.every(([key, [, valueOf]]) => valueOf(row) === query.get(key));
  listed = Array.from({ length: INDEX.rows }, (_, row) => row).filter(passes);
  const value = ORDERS[query.get("order") ?? ""]?.[1];
  if (value) listed.sort((a, b) => value(a) - value(b) || a - b);
  const judged = listed.filter((row) => at("success", row) !== null);
  const good = judged.filter((row) => at("success", row)).length;
  const rate = judged.length ? ` · ${Math.round((100 * good) / judged.length)}% of ${judged.length.toLocaleString("en")} judged succeed` : "";
  const counts = `${listed.length.toLocaleString("en")} of ${INDEX.rows.toLocaleString("en")}${rate}`;
  document.getElementById("count").textContent = INDEX.rows ? counts : "This run has written no trajectories yet.";
  document.getElementById("active").textContent = wanted.length ? `(${wanted.length} set)` : "";
  for (const control of document.getElementById("filters").elements) {
    const typing = control.id === "q" && control === document.activeElement;
    if (control.name && !typing) control.value = query.get(control.name) ?? "";
  }
}

/** Puts the cursor on a place of the list and keeps it in sight. */
function moveTo(place) {
  cursor = Math.max(0, Math.min(place, listed.length - 1));
  const box = document.getElementById("list");
  document.getElementById("rows").style.height = `${listed.length * ROW}px`; // before it is scrolled
  if (cursor * ROW < box.scrollTop) box.scrollTop = cursor * ROW;
  if ((cursor + 1) * ROW > box.scrollTop + box.clientHeight) box.scrollTop = (cursor + 1) * ROW - box.clientHeight;
  drawRows();
}

/** Draws the rows that are in sight, and a few beside them. */
function drawRows() {
  const box = document.getElementById("list");
  const rows = document.getElementById("rows");
  const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 6);
  const last = Math.min(listed.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW) + 6);
  const places = Array.from({ length: Math.max(0, last - first) }, (_, i) => first + i);
  rows.replaceChildren(...places.map(drawRow));
  if (listed.length) box.setAttribute("aria-activedescendant", `row-${cursor}`);
  else box.removeAttribute("aria-activedescendant");
}

function drawRow(place) {
  const row = listed[place];
  const weight = at("weight", row);
  const facts = [
    keyOf(row),
    at("stop", row),
    `${at("turns", row)} turns`,
    `reward ${number(at("reward", row))}`,
    ...(weight === null ? [] : [`|A·M| ${number(weight)}`]),
  ];
  const element = el(
    `div.row${place === cursor ? ".at" : ""}`,
    { id: `row-${place}`, role: "option", "aria-setsize": listed.length, "aria-posinset": place + 1 },
    outcomeMark(row),
    el("span.task", {}, ...shown(at("task_id", row))),
    el("span.facts", {}, ...shown(facts.join(" · "))),
  );
  element.setAttribute("aria-selected", String(keyOf(row) === state.path));
  element.style.top = `${place * ROW}px`;
  element.onclick = () => {
    moveTo(place);
    go({ path: keyOf(row), beside: "" });
  };
  return element;
}
