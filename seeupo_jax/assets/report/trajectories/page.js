"use strict";
// The state is the address: #SPLIT/ITERATION/GROUP/MEMBER?tint=entropy&beside=0,2&stop=done

let state = read();
let drawn = {}; // the parts of the address that the list and the view show now

function read() {
  const [path, query = ""] = location.hash.slice(1).split(/\?(.*)/s);
  const given = new URLSearchParams(query);
  const own = { tint: given.get("tint") ?? "", beside: given.get("beside") ?? "", folds: given.get("folds") ?? "" };
  for (const key of Object.keys(own)) given.delete(key);
  if (!(own.tint in TINTS)) own.tint = "";
  return { path: path.split("/").map(decoded).join("/"), ...own, query: given };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a link that was cut in the middle of a character
  }
}

/** The address of the state with some parts changed. */
function address(changes) {
  const { path, tint, beside, folds, query } = { ...state, ...changes };
  const given = new URLSearchParams(query);
  for (const [key, value] of Object.entries({ tint, beside, folds })) if (value) given.set(key, value);
  const text = given.toString().replaceAll("%2C", ",");
  return `#${path.split("/").map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Goes to a changed state; `replace` leaves no step to come back to. */
function go(changes, replace = false) {
  const next = address(changes);
  state = { ...state, ...changes }; // the next key may come before the new address is heard of
  if (replace) location.replace(next);
  else location.hash = next;
}

function draw() {
  state = read();
  const query = state.query.toString();
  const shownView = `${state.path} ${state.tint} ${state.beside} ${state.folds}`;
  if (drawn.query !== query) list(state.query);
  if (drawn.query !== query || drawn.path !== state.path) {
    const place = listed.indexOf(placeOf.get(state.path));
    moveTo(place >= 0 ? place : drawn.query === query ? cursor : 0);
  }
  if (drawn.view !== shownView) drawView();
  drawn = { query, path: state.path, view: shownView };
}

/** A function that runs once calls have stopped for `ms`. */
function later(ms, run) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(run, ms, ...given);
  };
}

const filter = later(120, () => {
  const query = new URLSearchParams();
  for (const { name, value } of document.getElementById("filters").elements) if (name && value) query.set(name, value);
  go({ query }, true);
});
// A key that is held down opens where it stops.
const openAtCursor = later(100, () => listed.length && go({ path: keyOf(listed[cursor]), beside: "" }, true));

function step(by) {
  moveTo(cursor + by);
  if (state.path) openAtCursor();
}

async function openHere() {
  if (!listed.length) return;
  go({ path: keyOf(listed[cursor]), beside: state.beside });
  document.getElementById("view").focus();
}

function nextTint(by) {
  const tints = Object.keys(TINTS);
  go({ tint: tints[(tints.indexOf(state.tint) + by + tints.length) % tints.length] }, true);
}

function sibling(by) {
  const group = groupOf.get(groupKey(placeOf.get(state.path)));
  const place = group.indexOf(placeOf.get(state.path)) + by;
  go({ path: keyOf(group[(place + group.length) % group.length]), beside: state.beside === "all" ? "all" : "" });
}

function toList() {
  go({ path: "", beside: "" });
  document.getElementById("list").focus();
}

const HELP = document.getElementById("help");
const KEYS = {
  j: () => step(1),
  k: () => step(-1),
  "/": () => (toListOnPhone(), document.getElementById("q").focus()),
  "?": () => HELP.showModal(),
};
const VIEW_KEYS = {
  t: () => nextTint(1),
  T: () => nextTint(-1),
  s: toggleGroup,
  o: toggleFolds,
  "[": () => sibling(-1),
  "]": () => sibling(1),
  Escape: toList,
};
const LIST_KEYS = {
  ArrowDown: () => step(1),
  ArrowUp: () => step(-1),
  PageDown: () => step(10),
  PageUp: () => step(-10),
  Home: () => step(-listed.length),
  End: () => step(listed.length),
  Enter: openHere,
};

function toListOnPhone() {
  if (state.path && !document.getElementById("browse").offsetParent) go({ path: "", beside: "" });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || HELP.open) return;
  const target = event.target;
  if (target.matches("input:not([type=checkbox], [type=radio]), select, textarea")) {
    if (event.key === "Escape" || (event.key === "Enter" && target.id === "q")) {
      event.preventDefault();
      document.getElementById("list").focus();
    }
    return;
  }
  const inList = target.id === "list" || (target === document.body && event.key === "Enter");
  const known = state.path && placeOf.has(state.path);
  const act = KEYS[event.key] ?? (inList && LIST_KEYS[event.key]) ?? null;
  const run = act || (known && VIEW_KEYS[event.key]) || (target.token && tokenKey(event.key, target));
  if (!run) return;
  event.preventDefault();
  run();
}

function tokenKey(key, target) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[key];
  if (!by) return null;
  const tokens = [...target.closest(".column").querySelectorAll(".token")];
  return () => tokens[tokens.indexOf(target) + by]?.focus();
}

function tell(event) {
  const token = event.target.closest?.(".token")?.token;
  const info = document.getElementById("info");
  if (!token) return;
  info.replaceChildren(...shown(describe(token)));
  info.hidden = false;
}

/** Called when the index is here. */
function start() {
  document.getElementById("name").append(...shown(INDEX.name));
  document.title = `Trajectories: ${plain(INDEX.name).join("")}`;
  if (INDEX.report !== null) Object.assign(document.getElementById("report"), { href: INDEX.report, hidden: false });
  makeFilters();
  if (state.query.size) document.getElementById("more").open = innerWidth > 700;
  draw();
  document.body.dataset.ready = "true";
}

addEventListener("hashchange", draw);
addEventListener("resize", drawRows);
addEventListener("keydown", onKey);
document.getElementById("list").addEventListener("scroll", () => requestAnimationFrame(drawRows), { passive: true });
document.getElementById("filters").addEventListener("input", filter);
document.getElementById("filters").addEventListener("submit", (event) => event.preventDefault());
document.getElementById("clear").onclick = () => go({ query: new URLSearchParams() });
document.getElementById("help-button").onclick = () => HELP.showModal();
document.getElementById("view").addEventListener("mouseover", tell);
document.getElementById("view").addEventListener("focusin", tell);
for (const link of document.querySelectorAll(".skip")) {
  link.onclick = (event) => {
    event.preventDefault();
    document.getElementById(link.dataset.skip).focus();
  };
}
