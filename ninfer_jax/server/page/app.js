// Two views, the key, and what the server says of itself.

import { Refusal, key } from "./api.js";
import { start } from "./chat.js";
import { draw, status } from "./dashboard.js";

const $ = (id) => document.getElementById(id);
const VIEWS = ["chat", "dashboard"];
let asked = false;

function view(name, focus) {
  for (const other of VIEWS) {
    const chosen = other === name, tab = $(`tab-${other}`);
    $(other).hidden = !chosen;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    if (chosen && focus) tab.focus();
  }
  $("drawer").hidden = name !== "chat";
  history.replaceState(null, "", name === "chat" ? location.pathname : `#${name}`);
  look();
}

const shown = () => VIEWS.find((name) => !$(name).hidden);

async function look() {
  if (document.hidden) return;
  try {
    const said = await status();
    $("model").textContent = document.title = said.model.id;
    const stage = Object.entries(said.progress).at(-1);
    const loading = stage ? `${stage[0]} ${stage[1].total ? Math.floor(100 * stage[1].done / stage[1].total) : 0} %` : "";
    $("phase").textContent = said.phase === "ready" ? said.model.meta?.device ?? "" : `${said.phase} ${loading}`;
    if (shown() === "dashboard") draw(said);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    $("phase").textContent = error.status === 401 ? "needs a key" : error.message;
    if (error.status === 401 && !asked) keyed();
  }
}

function keyed() {
  asked = true;
  $("key-value").value = key.get();
  $("ask-key").returnValue = "";
  if (!$("ask-key").open) $("ask-key").showModal();
}

$("key").addEventListener("click", keyed);
$("ask-key").addEventListener("close", () => {
  if ($("ask-key").returnValue === "save") key.set($("key-value").value.trim());
  look();
});
for (const name of VIEWS) {
  $(`tab-${name}`).addEventListener("click", () => view(name));
  $(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") view(VIEWS.find((other) => other !== name), true);
  });
}
start();
view(location.hash === "#dashboard" ? "dashboard" : "chat");
setInterval(() => (shown() === "dashboard" || $("phase").textContent.startsWith("loading") ? look() : undefined), 1000);
