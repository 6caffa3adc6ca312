"use strict";
// One trajectory, its group, and those of the group that are shown beside it.

let drawing = 0; // grows with every view that is begun: a late chunk does not draw over a newer one

async function drawView() {
  const mine = ++drawing;
  const view = document.getElementById("view");
  document.body.classList.toggle("open", state.path !== "");
  document.getElementById("info").hidden = true;
  if (!state.path) {
    view.replaceChildren(el("p.note", {}, "Choose a trajectory in the list. ", el("kbd", {}, "?"), " lists the keys."));
    return;
  }
  const row = placeOf.get(state.path);
  if (row === undefined) {
    const missing = `There is no trajectory ${state.path} here. Only a share of them may have been written.`;
    view.replaceChildren(backButton(), el("p.note", { role: "alert" }, ...shown(missing)));
    return;
  }
  const group = groupOf.get(groupKey(row));
  const rows = group.filter((other) => other === row || isBeside(other));
  view.setAttribute("aria-busy", "true");
  try {
    const records = await Promise.all(rows.map(load));
    if (mine !== drawing) return;
    const kept = view.dataset.path === state.path ? view.scrollTop : 0;
    const focused = document.activeElement;
    const inside = view.contains(focused);
    view.replaceChildren(...header(row, group, records[rows.indexOf(row)]), columns(rows, records));
    // What had the focus is another element now, of the same id.
    if (inside) (document.getElementById(focused.id) ?? view).focus({ preventScroll: true });
    view.dataset.path = state.path;
    view.scrollTop = kept;
    if (state.folds === "all") unfold(true);
  } catch (error) {
    if (mine === drawing) view.replaceChildren(backButton(), el("p.note", { role: "alert" }, ...shown(error.message)));
  }
  view.removeAttribute("aria-busy");
}

function isBeside(row) {
  return state.beside === "all" || state.beside.split(",").includes(String(at("member", row)));
}

function backButton() {
  return el("button.back", { type: "button", onclick: () => go({ path: "", beside: "" }) }, "‹ List");
}

function header(row, group, record) {
  const where = `${at("source", row).replace("_", " ")}, iteration ${record.iteration}, group ${record.group}, member ${record.member}`;
  const facts = [["seed", record.seed], ["policy version", record.policy_version ?? "–"], ...Object.entries(record.labels)];
  if (record.turn_rewards.length) facts.push(["rewards by turn", record.turn_rewards.map((r) => number(r)).join(", ")]);
  const named = Object.entries(record.rewards ?? {}).map(([name, reward]) => `${name} ${number(reward)}`);
  if (named.length) facts.push(["rewards by name, unweighted", named.join(", ")]);
  for (const [name, rewards] of Object.entries(record.named_turn_rewards ?? {})) {
    facts.push([`${name} by turn, unweighted`, rewards.map((r) => number(r)).join(", ")]);
  }
  const list = facts.flatMap(([key, value]) => [el("dt", {}, ...shown(key)), el("dd", {}, ...shown(String(value)))]);
  return [
    backButton(),
    el("h2", { tabIndex: -1 }, outcomeMark(row), " ", ...shown(record.task_id)),
    el("p.where", {}, where),
    el("dl.facts", {}, ...list),
    ...(record.failure === null ? [] : [el("p.failure", {}, el("b", {}, "Failed: "), ...shown(record.failure))]),
    folded("info", "info", oneLine(JSON.stringify(record.info)), () => codeBlock(JSON.stringify(record.info))),
    siblings(row, group),
    choices(group),
  ];
}

/** The group as a table: rewards, advantages, how each ended; a link and a place beside. */
function siblings(row, group) {
  const lines = group.map((other) => {
    const member = at("member", other);
    const link = el("a", { href: address({ path: keyOf(other), beside: "" }) }, String(member));
    if (other === row) link.setAttribute("aria-current", "true");
    const box = el("input", { type: "checkbox", checked: other === row || isBeside(other), disabled: other === row, id: `show-${member}` });
    box.setAttribute("aria-label", `show member ${member} side by side`);
    box.onchange = () => {
      const members = group.filter((one) => one !== row && (one === other ? box.checked : isBeside(one)));
      go({ beside: members.map((one) => at("member", one)).join(",") });
    };
    const cells = [
      box,
      link,
      outcomeMark(other),
      number(at("reward", other)),
      el("span", {}, ...shown(at("stop", other))),
      String(at("turns", other)),
      number(at("advantage", other)),
      number(at("weight", other)),
    ];
    return el(other === row ? "tr.at" : "tr", {}, ...cells.map((cell) => el("td", {}, cell)));
  });
  const names = ["show", "member", "", "reward", "stop", "turns", "advantage", "|A·M|"];
  const head = el("tr", {}, ...names.map((name) => el("th", { scope: "col" }, name)));
  return el(
    "section.siblings",
    { "aria-label": "The group" },
    el("div.wide", {}, el("table", {}, el("thead", {}, head), el("tbody", {}, ...lines))),
  );
}

/** What is shown, and how: a tint, the whole group, everything unfolded. */
function choices(group) {
  const buttons = Object.entries(TINTS).map(([tint, label]) => {
    const input = el("input", { type: "radio", name: "tint", id: `tint-${tint}`, value: tint, checked: state.tint === tint });
    input.onchange = () => go({ tint });
    return el("label", {}, input, " ", label);
  });
  const pressed = (key, change, label) =>
    el("button", { type: "button", id: `toggle-${key}`, onclick: change, "aria-pressed": String(state[key] === "all") }, label);
  if (group.length > 1) buttons.push(pressed("beside", toggleGroup, "Group side by side"));
  if (!state.tint) buttons.push(pressed("folds", toggleFolds, "Unfold all"));
  return el("fieldset.tints", {}, el("legend", {}, "What is shown"), ...buttons);
}

/** The columns: one, or some of the group side by side on one scale. */
function columns(rows, records) {
  const parts = records.map((record, i) => {
    const name = `member ${record.member}`;
    const title = `${name} · reward ${number(record.reward)} · ${record.stop}`;
    const head = records.length > 1 ? [el("h3", {}, outcomeMark(rows[i]), " ", ...shown(title))] : [];
    const body = state.tint ? tokenNodes(record, state.tint, records) : conversation(record);
    return el("section.column", { "aria-label": name }, ...head, ...body);
  });
  const body = el(`div.columns${records.length > 1 ? ".several" : ""}`, {}, ...parts);
  return state.tint ? el("div", {}, legend(state.tint, records), body) : body;
}

function conversation(record) {
  let turn = 0;
  return record.messages.map((message) => {
    const acts = message.role === "assistant" && !("history" in message);
    const weight = acts ? record.weights[turn] ?? null : null;
    const title = acts ? ` · turn ${++turn}${weight === null ? "" : ` · advantage × M ${number(weight, 3)}`}` : "";
    const kind = ["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other";
    return el(
      `section.message.${kind}`,
      {},
      el("h3", {}, ...shown(message.role), el("small", {}, ...shown(message.name ? ` · ${message.name}` : ""), title)),
      ...messageNodes(message),
    );
  });
}

function unfold(open) {
  for (const details of document.querySelectorAll("#view .columns details")) details.open = open;
}

function toggleGroup() {
  go({ beside: state.beside === "all" ? "" : "all" });
}

function toggleFolds() {
  go({ folds: state.folds === "all" ? "" : "all" });
}
