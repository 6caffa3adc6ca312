"use strict";
// The index, a row a trajectory, and the chunks of whole records, loaded when they are asked for.

const KEPT = 12; // chunks in memory, about a megabyte each
let INDEX = { name: "", report: null, rows: 0, columns: {}, values: {} };
const placeOf = new Map(); // "train/12/3/1" -> row
const groupOf = new Map(); // "train/12/3" -> rows
const chunks = new Map(); // name -> promise of its records, the last used at the end
const awaited = new Map(); // name -> what to do with its text

// The only address that a script is ever loaded from.
const policy = globalThis.trustedTypes?.createPolicy("chunks", {
  createScriptURL: (name) => `data/${encodeURIComponent(name)}.js`,
}) ?? { createScriptURL: (name) => `data/${encodeURIComponent(name)}.js` };

/** Called by data/index.js. */
function receiveIndex(index) {
  INDEX = index;
  for (let row = 0; row < index.rows; row++) {
    const group = groupKey(row);
    placeOf.set(`${group}/${index.columns.member[row]}`, row);
    if (!groupOf.has(group)) groupOf.set(group, []);
    groupOf.get(group).push(row);
  }
  start();
}

/** Called by a chunk's script, with gzipped JSON in base64. */
function receiveChunk(name, packed) {
  awaited.get(name)?.(packed);
}

/** A value of the index; columns of few different values hold an index into those. */
function at(key, row) {
  const value = INDEX.columns[key][row];
  return key in INDEX.values ? INDEX.values[key][value] : value;
}

function groupKey(row) {
  return `${at("source", row)}/${at("iteration", row)}/${at("group", row)}`;
}

function keyOf(row) {
  return `${groupKey(row)}/${at("member", row)}`;
}

function labelsOf(row) {
  return JSON.parse(at("labels", row));
}

/** The whole record of a row. Rejects where its chunk is missing or cannot be read. */
async function load(row) {
  const name = at("chunk", row);
  const records = chunks.get(name) ?? fetchChunk(name);
  chunks.delete(name);
  chunks.set(name, records);
  records.catch(() => chunks.delete(name));
  for (const old of chunks.keys()) if (chunks.size > KEPT) chunks.delete(old);
  return (await records)[at("place", row)];
}

async function fetchChunk(name) {
  const packed = await new Promise((resolve, reject) => {
    awaited.set(name, resolve);
    const script = document.createElement("script");
    script.onload = () => reject(new Error(`data/${name}.js holds something else.`));
    script.onerror = () =>
      reject(new Error(`data/${name}.js is not there: reload the page, it may have been written again.`));
    script.src = policy.createScriptURL(name);
    document.head.append(script);
    script.addEventListener("load", () => script.remove());
    script.addEventListener("error", () => script.remove());
  }).finally(() => awaited.delete(name));
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}
