// Numbers of /api/status, once a second while they are looked at.

import { get } from "./api.js";
import { element } from "./render.js";

const $ = (id) => document.getElementById(id);
const SPAN = 120; // seconds of the curve
const seen = []; // [seconds, tokens generated so far, joules so far]

const whole = (number) => Math.round(number).toLocaleString("en");
const percent = (part, of) => (of ? `${(100 * part / of).toFixed(0)} %` : "–");
const seconds = (value) => (value === null || value === undefined ? "–" : value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(2)} s`);
const bytes = (count) => (count >= 2 ** 30 ? `${(count / 2 ** 30).toFixed(2)} GiB` : `${(count / 2 ** 20).toFixed(1)} MiB`);

function median(values) {
  const sorted = values.filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  return sorted.length ? sorted[sorted.length >> 1] : null;
}

function card(words, value) {
  return element("div", { class: "card" }, element("b", {}, value), element("span", {}, words));
}

function part(share, color) {
  const made = element("i");
  made.style.width = `${100 * Math.min(1, share)}%`;
  if (color) made.style.background = color;
  return made;
}

function meter(name, used, total, words) {
  const bar = element("div", { class: "bar", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": total, "aria-valuenow": used });
  bar.append(part(total ? used / total : 0));
  return element("div", { class: "meter" }, element("span", {}, name), bar, element("span", {}, words));
}

function speed(at, within) {
  const last = seen.at(-1), old = seen.findLast((one) => last[0] - one[0] >= within) || seen[0];
  return last[0] > old[0] ? (last[at] - old[at]) / (last[0] - old[0]) : null;
}

function curve() {
  const end = seen.at(-1)[0];
  const rates = seen.slice(1).map((one, at) => [one[0], Math.max(0, (one[1] - seen[at][1]) / (one[0] - seen[at][0]))]);
  const top = Math.max(1, ...rates.map((one) => one[1]));
  const points = rates.map(([time, rate]) => `${(600 * (1 - (end - time) / SPAN)).toFixed(1)},${(76 - 72 * rate / top).toFixed(1)}`);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  if (points.length) path.setAttribute("d", `M${points.join("L")}`);
  $("rate").replaceChildren(path);
  $("rate").setAttribute("aria-label", `Tokens a second over the last two minutes, at most ${whole(top)}`);
}

function cards(status) {
  const { totals, recent, load, today } = status;
  const rate = speed(1, 5), watts = status.joules === null ? null : speed(2, 5);
  const made = [
    card("answers running", whole(status.running)),
    card("waiting", load ? whole(load.waiting) : "–"),
    card("tokens a second", rate === null ? "–" : rate.toFixed(1)),
    card("to the first token, median", seconds(median(recent.map((one) => one.first_token_s)))),
    card("drafts accepted", percent(totals.accepted, totals.drafted)),
    card("prompt tokens from the cache", percent(totals.cached_tokens, totals.prompt_tokens)),
    card("tokens written today", whole(today.completion_tokens)),
    card("answers today", whole(today.answers)),
  ];
  if (watts !== null) {
    made.push(card("watts", watts.toFixed(0)));
    if (rate) made.push(card("joules a token", (watts / rate).toFixed(2)));
  }
  $("cards").replaceChildren(...made);
}

function memory(plan) {
  $("memory-section").hidden = !plan;
  if (!plan) return;
  const parts = Object.entries(plan.parts).filter(([, count]) => count > 0);
  const total = Math.max(plan.total, parts.reduce((sum, [, count]) => sum + count, 0));
  const color = (at) => `var(--c${at % 5})`;
  $("memory").replaceChildren(...parts.map(([, count], at) => part(count / total, color(at))));
  const entry = (name, count, shade) => {
    const patch = element("i");
    patch.style.background = shade;
    return element("li", {}, patch, `${name} ${bytes(count)}`);
  };
  const free = total - parts.reduce((sum, [, count]) => sum + count, 0);
  $("legend").replaceChildren(...parts.map(([name, count], at) => entry(name, count, color(at))), entry("free", free, "var(--panel)"));
}

function table(recent) {
  $("recent").tBodies[0].replaceChildren(...recent.slice(0, 50).map((one) => {
    const after = one.first_token_s === null ? 0 : one.total_s - one.first_token_s;
    const cells = [
      new Date(one.at * 1000).toLocaleTimeString(), one.route, whole(one.prompt_tokens), whole(one.cached_tokens), whole(one.completion_tokens),
      seconds(one.first_token_s), seconds(one.total_s), after > 0 && one.completion_tokens > 1 ? ((one.completion_tokens - 1) / after).toFixed(1) : "–",
      percent(one.accepted, one.drafted), one.finish_reason,
    ];
    return element("tr", {}, ...cells.map((words) => element("td", {}, words)));
  }));
}

export function draw(status) {
  seen.push([performance.now() / 1000, status.tokens, status.joules ?? 0]);
  while (seen.length > 2 && seen.at(-1)[0] - seen[0][0] > SPAN) seen.shift();
  cards(status);
  curve();
  const load = status.load;
  if (load) {
    const context = status.model.max_model_len;
    $("slots").replaceChildren(...load.slots.map((slot, at) => meter(`slot ${at}`, slot.tokens, context,
      `${slot.state}, ${whole(slot.tokens)} of ${whole(context)} tokens`)));
    $("pages").replaceChildren(meter("pages", load.pages_used, load.pages_total, `${whole(load.pages_used)} of ${whole(load.pages_total)}`));
    const tiers = Object.entries(load.cached_tokens).map(([tier, count]) => `${whole(count)} from ${tier}`);
    $("tiers").textContent = `Prompt tokens from the cache since the start: ${tiers.join(", ") || "none"}`;
  }
  memory(status.memory);
  table(status.recent);
}

export const status = () => get("api/status");
