// Conversations: kept in this browser, answered by /v1/chat/completions.

import { Refusal, events } from "./api.js";
import { AnswerView, element } from "./render.js";

const $ = (id) => document.getElementById(id);
const FIELDS = ["system", "tools", "temperature", "max_tokens", "seed"];
const KEPT = "ninfer.conversations";
const MOST = 100;

let all = load();
let now = all[0] || fresh();
let running = null; // the AbortController of the answer under way
let partial = null; // what has come of it

function load() {
  try {
    return JSON.parse(localStorage.getItem(KEPT)) || [];
  } catch {
    return [];
  }
}

function keep() {
  all = [now, ...all.filter((one) => one !== now && one.id !== now.id)].filter((one) => one.messages.length).slice(0, MOST);
  for (;;) {
    try {
      localStorage.setItem(KEPT, JSON.stringify(all));
      return;
    } catch { // the browser's room is full: the oldest goes
      if (all.length < 2) return;
      all.pop();
    }
  }
}

function fresh() {
  return { id: crypto.randomUUID ? crypto.randomUUID() : String(Math.random()), title: "", messages: [], settings: {} };
}

function listed() {
  $("conversations").replaceChildren(...all.map((one) => element("li", { class: one.id === now.id ? "now" : "" },
    element("button", { class: "open", onclick: () => open(one), "aria-current": one.id === now.id ? "true" : undefined }, one.title || "…"),
    element("button", { class: "drop", "aria-label": `Delete ${one.title}`, onclick: () => drop(one) }, "✕"))));
}

function open(one) {
  running?.abort();
  running = null;
  busy(false);
  now = one;
  for (const field of FIELDS) $(field).value = now.settings[field] ?? "";
  $("thinking").checked = now.settings.thinking ?? true;
  drawn(false);
  shown();
  listed();
  $("text").focus();
}

function drop(one) {
  if (!confirm(`Delete “${one.title}”?`)) return;
  all = all.filter((other) => other.id !== one.id);
  localStorage.setItem(KEPT, JSON.stringify(all));
  if (one.id === now.id) open(all[0] || fresh());
  else listed();
}

function shown() {
  const box = $("messages");
  box.replaceChildren();
  if (!now.messages.length) box.append(element("p", { class: "empty" }, "Nothing leaves this machine. Ask something."));
  now.messages.forEach((message, at) => {
    if (message.role === "assistant") {
      const view = new AnswerView();
      view.show(message, false);
      footed(view, message, at);
      box.append(view.root);
    } else if (message.role === "tool") {
      box.append(element("details", { class: "call" }, element("summary", {}, "Result"), element("pre", {}, message.content)));
    } else {
      box.append(element("div", { class: "user" }, message.content));
    }
  });
  pending();
  box.scrollTop = box.scrollHeight;
}

function footed(view, message, at) {
  const last = at === now.messages.length - 1;
  view.foot(...(message.figures || []).map((words) => element("span", {}, words)),
    message.content ? element("button", { type: "button", onclick: () => navigator.clipboard?.writeText(message.content) }, "Copy") : null,
    last ? element("button", { type: "button", onclick: again }, "Again") : null);
}

// What an answer waits for. Calls without a result get a field for it: the page runs no tools, a person does. A question whose
// answer never came (the server was gone, the page was left) can be asked again.
function pending() {
  const last = now.messages.at(-1);
  if (!last || running) return;
  if (last.role !== "assistant") {
    $("messages").append(element("div", { class: "figures" }, "No answer came.", element("button", { type: "button", onclick: again }, "Ask again")));
    return;
  }
  if (!last.tool_calls?.length) return;
  const fields = last.tool_calls.map((call) => [call, element("textarea", { rows: 2, "aria-label": `Result of ${call.function.name}` })]);
  const send = () => {
    for (const [call, field] of fields) now.messages.push({ role: "tool", tool_call_id: call.id, content: field.value });
    answer();
  };
  $("messages").append(element("div", {}, ...fields.flatMap(([call, field]) => [element("label", {}, `Result of ${call.function.name}`, field)]),
    element("button", { type: "button", onclick: send }, "Send results")));
}

function again() {
  while (now.messages.length && now.messages.at(-1).role === "assistant") now.messages.pop();
  if (now.messages.length) answer();
}

function request() {
  const settings = now.settings;
  const sent = now.messages.map(({ figures, ...message }) => message);
  const body = { messages: sent, stream: true, stream_options: { include_usage: true }, prompt_cache_key: now.id };
  if (settings.system) body.messages = [{ role: "system", content: settings.system }, ...sent];
  if (settings.tools) {
    try {
      body.tools = JSON.parse(settings.tools);
    } catch (error) {
      throw new Refusal(0, `Tools are not JSON: ${error.message}`);
    }
  }
  for (const field of ["temperature", "max_tokens", "seed"]) if (settings[field] !== "" && settings[field] !== undefined) body[field] = Number(settings[field]);
  if (settings.thinking === false) body.enable_thinking = false;
  return body;
}

function add(message, delta) {
  if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content || "") + delta.reasoning_content;
  if (delta.content) message.content += delta.content;
  for (const call of delta.tool_calls || []) {
    message.tool_calls ??= [];
    const known = (message.tool_calls[call.index] ??= { id: call.id, type: "function", function: { name: "", arguments: "" } });
    known.function.name += call.function.name || "";
    known.function.arguments += call.function.arguments || "";
  }
}

const said = (message) => message.content || message.reasoning_content || message.tool_calls;

// The page is left: what has come stays, as of an answer that was stopped.
function left() {
  if (!running || !said(partial)) return;
  partial.figures = ["stopped"];
  now.messages.push(partial);
  keep();
}

function figures(usage, finish, first, seconds) {
  const words = [`${usage.completion_tokens} tokens`, `first after ${first.toFixed(2)} s`];
  if (usage.completion_tokens > 1 && seconds > 0) words.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} tokens/s`);
  const cached = usage.prompt_tokens_details?.cached_tokens;
  words.push(`${usage.prompt_tokens} prompt tokens${cached ? `, ${cached} cached` : ""}`);
  if (finish === "length") words.push("cut at the limit");
  return words;
}

async function answer() {
  for (const field of FIELDS) now.settings[field] = $(field).value;
  now.settings.thinking = $("thinking").checked;
  const mine = now, box = $("messages"), message = { role: "assistant", content: "" }, view = new AnswerView();
  const control = new AbortController();
  $("problem").textContent = "";
  running = control;
  partial = message;
  busy(true);
  keep();
  shown();
  listed();
  box.append(view.root);
  view.show(message, true);
  const began = performance.now();
  let first = null, finish = null, usage = null, due = false;
  const draw = () => {
    due = false;
    const low = box.scrollHeight - box.scrollTop - box.clientHeight < 80;
    view.show(message, running === control);
    if (low) box.scrollTop = box.scrollHeight;
  };
  try {
    for await (const event of events("v1/chat/completions", request(), control.signal)) {
      const choice = event.choices[0];
      usage = event.usage || usage;
      if (!choice) continue;
      finish = choice.finish_reason || finish;
      if (Object.keys(choice.delta).some((name) => name !== "role" && choice.delta[name])) first ??= performance.now();
      add(message, choice.delta);
      if (!due) {
        due = true;
        requestAnimationFrame(draw);
      }
    }
  } catch (error) {
    if (error.name !== "AbortError") {
      $("problem").textContent = error.message;
      if (error.status === 401) $("key").click();
    } else message.figures = ["stopped"];
  }
  if (running === control) running = null;
  busy(running !== null);
  if (usage && first) message.figures = figures(usage, finish, (first - began) / 1000, (performance.now() - first) / 1000);
  if (said(message) && !mine.messages.includes(message)) mine.messages.push(message);
  keep();
  if (mine === now) shown();
  listed();
}

function drawn(yes) {
  $("side").classList.toggle("shown", yes);
  $("drawer").setAttribute("aria-expanded", String(yes));
}

function busy(yes) {
  $("send").hidden = yes;
  $("stop").hidden = !yes;
}

function grow() {
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

export function start() {
  $("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = $("text").value;
    if (running || !text.trim()) return;
    now.messages.push({ role: "user", content: text });
    now.title ||= text.trim().slice(0, 60);
    $("text").value = "";
    grow();
    answer();
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("ask").requestSubmit();
    }
  });
  $("text").addEventListener("input", grow);
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    running?.abort();
    drawn(false);
  });
  addEventListener("pagehide", left);
  $("stop").addEventListener("click", () => running?.abort());
  $("new").addEventListener("click", () => open(fresh()));
  $("drawer").addEventListener("click", () => drawn(!$("side").classList.contains("shown")));
  $("talk").addEventListener("click", () => drawn(false));
  if (matchMedia("(max-width: 44rem)").matches) $("text").placeholder = "Message"; // there is no Escape, and no room to say so
  open(now);
}
