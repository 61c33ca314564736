// Messages as elements. Text of a model or a user is never read as HTML.

export function element(name, options = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Code between fences and between back-ticks, bold text; all else as it is.
export function formatted(text) {
  const box = document.createDocumentFragment();
  text.split(/^```/m).forEach((part, at) => {
    if (at % 2) {
      const end = part.indexOf("\n");
      box.append(element("pre", {}, element("code", {}, end < 0 ? "" : part.slice(end + 1).replace(/\n$/, ""))));
    } else if (part.trim()) {
      box.append(element("div", { class: "text" }, ...inline((at ? part.replace(/^\n+/, "") : part).trimEnd())));
    }
  });
  return box;
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`")) return element("code", {}, part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**")) return element("strong", {}, part.slice(2, -2));
    return part;
  });
}

export function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

// A view of one answer that grows with it.
export class AnswerView {
  constructor() {
    this.root = element("article", { class: "answer", "aria-label": "Answer" });
    this.thought = this.body = this.text = this.figures = null;
    this.calls = new Map();
    this.thinking = false;
  }

  show(message, busy) {
    if (message.reasoning_content) {
      if (!this.thought) {
        this.body = element("div", { class: "body" });
        this.thought = element("details", { class: "thought", open: busy }, element("summary", {}, ""), this.body);
        this.root.prepend(this.thought);
      }
      const thinking = busy && !message.content && !message.tool_calls;
      this.thought.firstChild.textContent = thinking ? "Thinking …" : `Thoughts (${message.reasoning_content.length} characters)`;
      if (this.thinking && !thinking) this.thought.open = false;
      this.thinking = thinking;
      this.body.textContent = message.reasoning_content;
      if (thinking) this.body.scrollTop = this.body.scrollHeight;
    }
    if (message.content) {
      if (!this.text) {
        this.text = element("div");
        this.root.append(this.text);
      }
      this.text.replaceChildren(formatted(message.content));
    }
    (message.tool_calls || []).forEach((call, at) => {
      if (!this.calls.has(at)) {
        const box = element("details", { class: "call", open: true }, element("summary"), element("pre"));
        this.calls.set(at, box);
        this.root.append(box);
      }
      const box = this.calls.get(at);
      box.firstChild.textContent = `Calls ${call.function.name}`;
      box.children[1].textContent = pretty(call.function.arguments);
    });
    this.root.classList.toggle("busy", busy);
  }

  foot(...children) {
    this.figures?.remove();
    this.figures = element("div", { class: "figures" }, ...children);
    this.root.append(this.figures);
  }
}
