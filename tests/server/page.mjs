// What a person sees and does on the page, in a headless Chromium. Run by check_page.py.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";

const { modules, address, locked, pictures, only } = JSON.parse(process.argv[2]);
const require = createRequire(`${modules}/`);
const { default: chromium } = await import(require.resolve("@sparticuz/chromium"));
const { default: puppeteer } = await import(require.resolve("puppeteer-core"));

// No service of the browser's own, and no name but loopback's: what still left would fail.
const flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run",
  "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"];
const browser = await puppeteer.launch({ executablePath: await chromium.executablePath(), args: flags, headless: "shell" });

const TOOLS = JSON.stringify([{ type: "function", function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } } }]);
const DESK = { width: 1200, height: 800 }, PHONE = { width: 390, height: 844, isMobile: true, hasTouch: true, deviceScaleFactor: 2 };
const complaints = [], asked = new Set();

// A page of its own storage; what it complains of and whom it asks is written down.
async function opened(where, viewport, allowed = () => false) {
  const page = await (await browser.createBrowserContext()).newPage();
  page.setDefaultTimeout(60_000);
  page.on("console", (told) => ["error", "warn", "issue"].includes(told.type()) && !allowed(told.text()) && complaints.push(told.text()));
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => asked.add(new URL(request.url()).origin));
  page.on("dialog", (dialog) => dialog.accept());
  await page.setViewport(viewport);
  await page.goto(where);
  return page;
}

const words = (page, selector) => page.$eval(selector, (found) => found.innerText.trim());
const until = (page, test, ...given) => page.waitForFunction(test, { polling: 20 }, ...given);
const picture = (page, name) => page.screenshot({ path: join(pictures, `${name}.png`) });
const focused = (page) => page.evaluate(() => document.activeElement.id || document.activeElement.className);
const done = (page) => until(page, () => !document.querySelector("#send").hidden && !document.querySelector(".busy"));
const status = async () => (await fetch(`${address}/api/status`)).json();

async function say(page, text) {
  await page.type("#text", text);
  await page.keyboard.press("Enter");
}

const checks = {
  async "an answer streams: its thoughts open while it thinks, then its text"() {
    const page = await opened(address, DESK);
    await until(page, () => document.querySelector("#model").textContent === "tiny");
    assert.equal(await focused(page), "text");
    assert.equal(await words(page, "#phase"), "script");
    await say(page, "Think aloud");
    await until(page, () => document.querySelector("details.thought[open] summary")?.textContent === "Thinking …");
    const lengths = new Set();
    while (await page.$(".busy")) lengths.add(await page.$eval(".answer", (found) => found.textContent.length));
    assert(lengths.size > 4, `the answer was seen in ${lengths.size} lengths`);
    await done(page);
    assert.match(await words(page, "details.thought:not([open]) summary"), /^Thoughts \(\d+ characters\)$/);
    assert.equal(await words(page, ".answer pre code"), "print(2 + 2)");
    assert.equal(await words(page, ".answer strong"), "four");
    assert.match(await words(page, ".figures"), /\d+ tokens\s*first after [\d.]+ s\s*[\d.]+ tokens\/s\s*\d+ prompt tokens, 11 cached/);
    assert.equal(await focused(page), "text");
    await picture(page, "chat");
    return page;
  },

  async "text of the model is no markup"() {
    const page = await opened(address, DESK);
    await say(page, "Markup");
    await until(page, () => document.querySelector(".figures"));
    assert.match(await words(page, ".answer .text"), /^<img src=x onerror=.*<b>not bold<\/b> & so on$/);
    assert.equal(await page.$(".answer img"), null);
    return page;
  },

  async "a call is shown, its result is handed back, and the answer goes on"() {
    const page = await opened(address, DESK);
    await page.click("#settings summary");
    await page.type("#tools", TOOLS.slice(1));
    await say(page, "Weather in Paris?");
    await until(page, () => document.querySelector("#problem").textContent);
    assert.match(await words(page, "#problem"), /^Tools are not JSON: /);
    await page.$eval("#tools", (field, text) => { field.value = text; }, TOOLS);
    await page.click("#settings summary");
    await say(page, "Weather in Paris?");
    await until(page, () => document.querySelector("[aria-label='Result of weather']"));
    assert.equal(await words(page, "details.call summary"), "Calls weather");
    assert.equal(await words(page, "details.call pre"), '{\n  "city": "Paris"\n}');
    await picture(page, "call");
    await page.type("[aria-label='Result of weather']", "rain, 9 degrees");
    await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    await until(page, () => [...document.querySelectorAll(".answer .text")].some((one) => one.textContent.startsWith("The tool said:")));
    await done(page);
    assert.equal(await words(page, ".answer:last-child .text"), "The tool said: rain, 9 degrees.");
    return page;
  },

  async "an answer is stopped by Escape and by the button, and the server stops too"() {
    const page = await opened(address, DESK);
    for (const stop of [() => page.keyboard.press("Escape"), () => page.click("#stop")]) {
      await say(page, "Long, please");
      await until(page, () => (document.querySelector(".busy .text")?.textContent.length ?? 0) > 60);
      await stop();
      await done(page);
      assert.match(await words(page, ".answer:last-child .figures"), /^stopped/);
      assert((await words(page, ".answer:last-child .text")).length < 2500);
      let tries = 0;
      while ((await status()).running) assert(tries++ < 200, "the server still writes");
    }
    // Again: the last answer is replaced.
    const before = (await page.$$(".answer")).length;
    await page.evaluate(() => [...document.querySelectorAll(".figures button")].find((one) => one.textContent === "Again").click());
    await until(page, () => document.querySelector(".busy .text"));
    assert.equal((await page.$$(".answer")).length, before);
    await page.keyboard.press("Escape");
    await done(page);
    return page;
  },

  async "conversations survive a reload, can be opened by keyboard and deleted"() {
    const page = await opened(address, DESK);
    for (const text of ["First of all", "Second thing"]) {
      if (text !== "First of all") await page.click("#new");
      await page.click("#settings summary");
      await page.$eval("#system", (field, text) => { field.value = text; }, `System of: ${text}`);
      await page.click("#settings summary");
      await say(page, text);
      await until(page, () => document.querySelector(".figures"));
    }
    await page.reload();
    await until(page, () => document.querySelectorAll("#conversations .open").length === 2);
    assert.equal(await words(page, "#conversations .now"), "Second thing\n✕");
    assert.equal(await words(page, ".user"), "Second thing");
    assert.equal(await words(page, ".answer .text"), "Yes.");
    assert.match(await words(page, ".figures"), /tokens\/s|\d+ tokens/);
    assert.equal(await page.$eval("#system", (field) => field.value), "System of: Second thing");
    await page.focus("#conversations li:last-child .open");
    await page.keyboard.press("Enter");
    await until(page, () => document.querySelector(".user").textContent === "First of all");
    assert.equal(await page.$eval("#system", (field) => field.value), "System of: First of all");
    await page.click("#conversations .now .drop");
    await until(page, () => document.querySelectorAll("#conversations .open").length === 1);
    assert.equal(await words(page, ".user"), "Second thing");
    return page;
  },

  async "a reload in the midst of an answer keeps what has come of it"() {
    const page = await opened(address, DESK);
    await say(page, "Long story");
    await until(page, () => (document.querySelector(".busy .text")?.textContent.length ?? 0) > 60);
    await page.reload();
    await until(page, () => document.querySelector(".user")?.textContent === "Long story");
    assert.match(await words(page, ".answer .text"), /^Tomorrow, and tomorrow, and tomorrow, creeps/);
    assert.match(await words(page, ".answer .figures"), /^stopped/);
    assert.equal((await page.$$(".answer, .user")).length, 2);
    return page;
  },

  async "the dashboard shows slots, memory, pages and what was asked"() {
    const page = await opened(address, DESK);
    await say(page, "Long, for the dashboard");
    await until(page, () => document.querySelector(".busy .text"));
    await page.focus("#tab-chat");
    await page.keyboard.press("ArrowRight");
    assert.equal(await focused(page), "tab-dashboard");
    await until(page, () => /^decode, 7 of 4,096 tokens$/.test(document.querySelector("#slots .meter span:last-child")?.textContent));
    assert.equal((await page.$$("#slots [role=meter]")).length, 4);
    assert.equal(await page.$eval("#pages [role=meter]", (bar) => `${bar.ariaValueNow} of ${bar.ariaValueMax}`), "3 of 64");
    assert.match(await words(page, "#cards"), /^1\nanswers running/);
    assert.match(await words(page, "#legend"), /weights 14\.00 GiB\s*pages 4\.00 GiB\s*states 512\.0 MiB\s*workspace 200\.0 MiB\s*free 5\.30 GiB/);
    const share = await page.$eval("#memory", (bar) => bar.firstChild.getBoundingClientRect().width / bar.getBoundingClientRect().width);
    assert(Math.abs(share - 14 / 24) < 0.01, `${share} of the bar are weights`);
    await until(page, () => [...document.querySelectorAll("#cards .card")].some((one) => /^[1-9][\d.]*tokens a second$/.test(one.textContent)));
    await until(page, () => (document.querySelector("#rate path").getAttribute("d") || "").includes("L"));
    const said = (await status()).recent[0];
    assert((await words(page, "#recent tbody tr")).includes(`${said.prompt_tokens}`));
    assert.equal(await page.evaluate(() => location.hash), "#dashboard");
    await picture(page, "dashboard");
    await page.reload();
    await until(page, () => !document.querySelector("#dashboard").hidden && document.querySelector("#slots .meter"));
    return page;
  },

  async "a key is asked for, kept, and sent"() {
    const page = await opened(locked, DESK, (text) => text.includes("401"));
    await until(page, () => document.querySelector("#ask-key").open);
    assert.equal(await focused(page), "key-value");
    await picture(page, "key");
    await page.type("#key-value", "wrong");
    await page.keyboard.press("Enter");
    await until(page, () => document.querySelector("#phase").textContent === "needs a key");
    await page.click("#key");
    await page.$eval("#key-value", (field) => { field.value = ""; });
    await page.type("#key-value", "secret");
    await page.keyboard.press("Enter");
    await until(page, () => document.querySelector("#phase").textContent === "script");
    await say(page, "Yes?");
    await until(page, () => document.querySelector(".figures"));
    await page.click("#key");
    await page.keyboard.press("Escape");
    await until(page, () => !document.querySelector("#ask-key").open);
    assert.equal(await page.evaluate(() => localStorage.getItem("ninfer.key")), "secret");
    return page;
  },

  async "on a phone nothing sticks out, and conversations are behind a button"() {
    const page = await opened(address, PHONE);
    await say(page, "Think aloud");
    await until(page, () => document.querySelector(".figures"));
    await fits(page, "chat");
    assert.equal(await page.$eval("#side", (side) => getComputedStyle(side).visibility), "hidden");
    await page.tap("#drawer");
    await until(page, () => document.querySelector("#drawer").ariaExpanded === "true");
    await new Promise((go) => setTimeout(go, 300));
    await picture(page, "phone-drawer");
    await page.tap("#conversations .open");
    await until(page, () => document.querySelector("#drawer").ariaExpanded === "false");
    await page.tap("#drawer");
    await page.touchscreen.tap(370, 500);
    await until(page, () => document.querySelector("#drawer").ariaExpanded === "false");
    assert.equal(await page.$eval("#text", (field) => field.getClientRects()[0].height < 60 && field.placeholder), "Message");
    await page.tap("#settings summary");
    await fits(page, "settings");
    await picture(page, "phone-settings");
    await page.tap("#settings summary");
    await picture(page, "phone-chat");
    await page.tap("#tab-dashboard");
    assert.equal(await page.$eval("#drawer", (button) => button.checkVisibility()), false);
    await until(page, () => document.querySelector("#slots .meter"));
    await fits(page, "dashboard");
    await picture(page, "phone-dashboard");
    return page;
  },

  async "light and dark, every text stands out from what is behind it"() {
    const page = await opened(address, DESK);
    await say(page, "Think aloud");
    await until(page, () => document.querySelector(".figures"));
    await page.click("details.thought summary");
    await page.click("#settings summary");
    for (const value of ["light", "dark"]) {
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value }]);
      for (const tab of ["chat", "dashboard"]) {
        await page.click(`#tab-${tab}`);
        if (tab === "dashboard") await until(page, () => document.querySelector("#recent tbody tr"));
        for (const [text, ratio] of await contrasts(page)) assert(ratio >= 4.5, `${value}, ${tab}: "${text}" has a contrast of ${ratio.toFixed(2)}`);
        await picture(page, `${value}-${tab}`);
      }
      const back = await page.evaluate(() => getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number));
      assert(value === "dark" ? Math.max(...back) < 60 : Math.min(...back) > 200);
    }
    return page;
  },

  async "everything can be reached by keyboard, and it shows where one is"() {
    const page = await opened(address, DESK);
    await say(page, "Yes?");
    await until(page, () => document.querySelector(".figures"));
    await page.evaluate(() => document.activeElement.blur());
    const reached = [];
    for (let step = 0; step < 40; step++) {
      await page.keyboard.press("Tab");
      const [name, outline] = await page.evaluate(() => {
        const at = document.activeElement, style = getComputedStyle(at);
        return [at === document.body ? "" : at.id || at.className || at.textContent, `${style.outlineStyle} ${style.outlineWidth}`];
      });
      if (reached.includes(name) || name === "") continue;
      reached.push(name);
      assert.equal(outline, "solid 2px", `${name} does not show that it has the focus`);
    }
    for (const name of ["tab-chat", "key", "new", "open", "drop", "messages", "Copy", "Again", "text", "send"]) assert(reached.includes(name), `${name} is not among ${reached}`);
    const unnamed = await page.$$eval("button, input, textarea, [role=meter]", (all) => all.filter((one) => one.checkVisibility()
      && !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).map((one) => one.outerHTML));
    assert.deepEqual(unnamed, []);
    return page;
  },

  async "a server that goes away is said, and asked again when it is back"() {
    const page = await opened(address, DESK, (text) => text.includes("ERR_") || text.includes("net::"));
    await page.setOfflineMode(true);
    await say(page, "Are you there?");
    await until(page, () => document.querySelector("#problem").textContent === "the server does not answer");
    await page.setOfflineMode(false);
    await page.focus("#messages .figures button");
    await page.keyboard.press("Enter");
    await until(page, () => document.querySelector(".answer .text")?.textContent === "Yes." && !document.querySelector(".busy"));
    assert.equal(await words(page, "#problem"), "");
    return page;
  },
};

async function fits(page, what) {
  const wide = await page.evaluate(() => [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility()
    && !one.closest(".scroll, pre, #side, .hidden, svg") && one.getBoundingClientRect().right > innerWidth + 1).map((one) => one.id || one.className || one.tagName));
  assert.deepEqual(wide, [], `${what}: these stick out`);
  assert(await page.evaluate(() => document.scrollingElement.scrollWidth <= innerWidth), `${what} scrolls sideways`);
}

// [text, WCAG's contrast] of each element that has text of its own.
const contrasts = (page) => page.evaluate(() => {
  const channels = (color) => (color.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const color = channels(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const shown = [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility());
  const ratio = (one, part) => {
    const [a, b] = [light(channels(getComputedStyle(one, part).color)), light(behind(one))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const texts = shown.filter((one) => [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
  return [...texts.map((one) => [one.textContent.trim().slice(0, 40), ratio(one)]),
    ...shown.filter((one) => one.placeholder).map((one) => [one.placeholder, ratio(one, "::placeholder")])];
});

let failed = 0;
for (const [name, check] of Object.entries(checks).filter(([name]) => !only || name.includes(only))) {
  complaints.length = 0;
  try {
    const page = await check();
    assert.deepEqual(complaints, [], "the console is not empty");
    await page.browserContext().close();
    console.log(`ok      ${name}`);
  } catch (error) {
    failed++;
    console.log(`FAILED  ${name}\n        ${String(error.message).split("\n").slice(0, 12).join("\n        ")}${complaints.map((one) => `\n        console: ${one}`)}`);
  }
}
const elsewhere = [...asked].filter((origin) => ![address, locked].includes(origin));
assert.deepEqual(elsewhere, [], "the page asked somebody else");
await browser.close();
process.exit(failed ? 1 : 0);
