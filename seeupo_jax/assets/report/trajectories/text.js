"use strict";
// Text of a model or a tool as nodes: never as markup, hidden characters shown, code coloured.

const CUT = 20000; // characters of a text that are shown before someone asks for all of it
const COLOURED = 200000; // characters of a text up to which code is coloured
// Controls, directions, halves of characters; not line ends, tabs and what joins letters or emoji.
const HIDDEN = /(?![\n\t\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu;
const WORDS =
  "and|as|assert|async|await|break|class|continue|def|del|elif|else|except|finally|for|from|" +
  "global|if|import|in|is|lambda|nonlocal|not|or|pass|raise|return|try|while|with|yield|" +
  "None|True|False|null|true|false";
// JSON and Python have so much in common that one table reads both.
const LEXEME = new RegExp(
  String.raw`(?<comment>#[^\n]*)` +
    String.raw`|(?<string>"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\.)*"?|'(?:[^'\\\n]|\\.)*'?)` +
    String.raw`|(?<number>\b\d[\w.]*)|(?<word>\b(?:${WORDS})\b)|(?<name>\b[A-Za-z_]\w*(?=[(=]))`,
  "g",
);
const BLOCK = new RegExp(
  String.raw`<think>(?<think>[^]*?)(?:</think>|(?![^]))` +
    String.raw`|<tool_call>(?<call>(?:"(?:[^"\\\n]|\\.)*"|[^])*?)(?:</tool_call>|(?![^]))` +
    String.raw`|<tool_response>(?<result>[^]*?)(?:</tool_response>|(?![^]))` +
    "|^(?<fence>`{3,})(?<language>[^\\n`]*)\\n(?<code>[^]*?)(?:^\\k<fence>`*[ \\t]*$|(?![^]))",
  "gm",
);

/** An element `tag.class.class` with properties, and children that are nodes or texts. */
function el(kind, properties = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  const element = document.createElement(tag);
  element.className = classes.join(" ");
  for (const [key, value] of Object.entries(properties)) {
    if (key in element && !key.startsWith("aria")) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children);
  return element;
}

/** Nodes of a text in which every character can be seen. */
function shown(text) {
  const nodes = [];
  let last = 0;
  for (const match of text.matchAll(HIDDEN)) {
    const code = match[0].codePointAt(0);
    const name = `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    if (match.index > last) nodes.push(text.slice(last, match.index));
    nodes.push(el("span.hidden", { title: "a character that is not seen" }, name));
    last = match.index + match[0].length;
  }
  nodes.push(text.slice(last));
  return nodes;
}

/** Nodes of JSON or Python, coloured by what they are. */
function coloured(code) {
  if (code.length > COLOURED) return shown(code);
  const nodes = [];
  let last = 0;
  for (const match of code.matchAll(LEXEME)) {
    const end = match.index + match[0].length;
    let kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
    if (kind === "string" && /^\s{0,9}:/.test(code.slice(end, end + 10))) kind = "key";
    nodes.push(...shown(code.slice(last, match.index)), el(`span.x-${kind}`, {}, ...shown(match[0])));
    last = end;
  }
  nodes.push(...shown(code.slice(last)));
  return nodes;
}

/** JSON with a line a value; only white space changes, numbers and doubled keys stay as written. */
function indented(json) {
  let depth = 0;
  const line = () => "\n" + "  ".repeat(Math.max(0, Math.min(depth, 40)));
  return json.replace(/"(?:[^"\\]|\\.)*"|\{\s*\}|\[\s*\]|\s+|[{}[\],:]/g, (piece) => {
    if (/^\s+$/.test(piece)) return "";
    if (piece === "{" || piece === "[") return (depth++, piece + line());
    if (piece === "}" || piece === "]") return (depth--, line() + piece);
    if (piece === ",") return piece + line();
    return piece === ":" ? ": " : piece;
  });
}

function isJson(text) {
  if (!/^\s*[[{]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** A text in a block of its own, cut where it is long until someone asks for the rest. */
function block(text, nodes = shown, kind = "pre") {
  const element = el(`${kind}.block`, { dir: "auto" });
  if (text.length <= CUT) {
    element.append(...nodes(text));
    return element;
  }
  const all = () => element.replaceChildren(...nodes(text));
  const label = `Show all ${text.length.toLocaleString("en")} characters`;
  element.append(...nodes(text.slice(0, CUT)), el("button.rest", { type: "button", onclick: all }, label));
  return element;
}

function codeBlock(text) {
  const json = text.length <= COLOURED && isJson(text);
  return block(json && text.length > 60 ? indented(text) : text.trim(), coloured);
}

function folded(kind, title, summary, body) {
  const short = summary.length > 160 ? `${summary.slice(0, 160)}…` : summary;
  const line = el("summary", {}, el("b", {}, ...shown(title)), " ", el("span.preview", {}, ...shown(short)));
  const element = el(`details.${kind}`, {}, line);
  // What is folded is made when it is first unfolded.
  element.addEventListener("toggle", () => element.append(body()), { once: true });
  return element;
}

/** How a call reads in one line: name(argument=value, ...), or its text where it is no JSON. */
function callLine(text) {
  try {
    const { name, arguments: given, parameters } = JSON.parse(text);
    if (typeof name !== "string") return oneLine(text);
    const pairs = Object.entries(given ?? parameters ?? {});
    const list = pairs.map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", ");
    return `${name}(${list})`;
  } catch {
    return oneLine(text);
  }
}

function oneLine(text) {
  return text.slice(0, 400).trim().replace(/\s+/g, " ");
}

function isPythonCall(text) {
  return /^\s*\[?\s*[A-Za-z_][\w.]*\([^]*\)\s*\]?\s*$/.test(text);
}

function isJsonCall(text) {
  return isJson(text) && /"(?:name|function)"\s*:/.test(text);
}

/** The nodes of a message: prose, and thoughts, calls, results and code folded. */
function messageNodes({ role, content }) {
  const call = (text) => folded("call", "call", callLine(text), () => codeBlock(text));
  const result = (text) => folded("result", "result", oneLine(text), () => codeBlock(text));
  if (role === "tool" && !content.includes("<tool_response>")) return [result(content)];
  if (role === "assistant" && (isJsonCall(content) || isPythonCall(content))) return [call(content)];
  const nodes = [];
  let last = 0;
  const prose = (end) => {
    const text = content.slice(last, end).trim();
    if (isJson(text)) nodes.push(result(text));
    else if (text) nodes.push(block(text, shown, "div"));
  };
  for (const match of content.matchAll(BLOCK)) {
    const { think, call: called, result: given, code, language } = match.groups;
    prose(match.index);
    last = match.index + match[0].length;
    if (think !== undefined) nodes.push(folded("think", "thinking", oneLine(think), () => block(think.trim())));
    else if (called !== undefined) nodes.push(call(called));
    else if (given !== undefined) nodes.push(result(given));
    else if (role === "assistant") nodes.push(folded("call", language || "code", oneLine(code), () => codeBlock(code)));
    else nodes.push(folded("result", language || "output", oneLine(code), () => codeBlock(code)));
  }
  prose(content.length);
  return nodes.length ? nodes : [el("p.note", {}, "(empty)")];
}
