// Requests to the server that this page came from, with the key that this browser keeps.

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => localStorage.getItem("ninfer.key") || "",
  set: (value) => (value ? localStorage.setItem("ninfer.key", value) : localStorage.removeItem("ninfer.key")),
};

async function ask(path, options = {}) {
  const headers = key.get() ? { Authorization: `Bearer ${key.get()}` } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...headers, ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "the server does not answer");
  }
  if (response.ok || response.status === 503 && path === "health") return response;
  let said = `${response.status} ${response.statusText}`;
  try {
    said = (await response.json()).error.message;
  } catch { /* not in our words */ }
  throw new Refusal(response.status, said);
}

export const get = async (path) => (await ask(path)).json();

// The JSON objects of a streamed answer, one after the other.
export async function* events(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(0, event.error.message);
      yield event;
    }
  }
}
