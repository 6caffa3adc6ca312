"use strict";
// Draws the charts, fills the tables of their numbers when these are opened, and searches settings.

const specs = JSON.parse(document.getElementById("specs").textContent);
const options = {
  renderer: "svg",
  logLevel: 1, // errors; Vega-Lite warns of every chart whose height is that of its rows
  ast: true, // expressions are interpreted: the page's policy allows no code out of texts
  tooltip: { theme: "custom" },
  actions: { export: { svg: true, png: true }, source: false, compiled: false, editor: false },
};

// On a narrow screen lines are told apart by the legend's dashes and shapes alone, and a legend has
// as many columns as there is room for its names.
function fitting(spec, width) {
  if (width > 480) return spec;
  const { datasets, ...rest } = spec;
  const narrow = JSON.parse(JSON.stringify(rest), (_, value) => {
    const names = value?.legend?.columns && value.scale?.domain;
    if (!names) return value;
    const longest = Math.max(...names.map((name) => name.length));
    const room = Math.max(1, Math.floor((width - 70) / (24 + 7 * longest)));
    return { ...value, legend: { ...value.legend, columns: Math.min(value.legend.columns, room) } };
  });
  if (narrow.layer) narrow.layer = narrow.layer.filter((layer) => layer.name !== "ends");
  return { ...narrow, datasets };
}

async function draw(place) {
  try {
    await vegaEmbed(place, fitting(specs[place.dataset.chart], place.clientWidth), options);
  } catch (error) {
    place.textContent = `This chart could not be drawn: ${error.message}`;
    place.classList.add("failed");
    console.error(error);
  }
}

async function drawAll() {
  for (const place of document.querySelectorAll(".chart")) {
    await draw(place);
    await new Promise((next) => setTimeout(next)); // the page answers between two charts
  }
  document.body.dataset.drawn = "all";
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

function row(cells, name) {
  const made = document.createElement("tr");
  made.append(...cells.map((cell) => element(name, cell ?? "")));
  return made;
}

function tableOf(rows) {
  const columns = [...new Set(rows.flatMap(Object.keys))].filter((name) => name !== "order");
  const table = document.createElement("table");
  table.createTHead().append(row(columns, "th"));
  table.createTBody().append(...rows.map((values) => row(columns.map((c) => values[c]), "td")));
  return table;
}

for (const details of document.querySelectorAll(".numbers")) {
  details.addEventListener("toggle", () => {
    const place = details.querySelector(".scroll");
    const chart = details.parentElement.querySelector(".chart").dataset.chart;
    if (details.open && !place.firstChild) place.append(tableOf(specs[chart].datasets.rows));
  });
}

function searchSettings() {
  const search = document.getElementById("search");
  if (!search) return;
  const differing = document.getElementById("differing");
  const rows = [...document.querySelectorAll(".configuration tbody tr")];
  const update = () => {
    const wanted = search.value.toLowerCase();
    for (const line of rows) {
      const differs = !differing?.checked || line.classList.contains("marked");
      line.hidden = !(differs && line.textContent.toLowerCase().includes(wanted));
    }
    const shown = rows.filter((line) => !line.hidden).length;
    document.getElementById("found").textContent = `${shown} of ${rows.length} fields`;
  };
  search.addEventListener("input", update);
  differing?.addEventListener("change", update);
  update();
}

searchSettings();
drawAll();
