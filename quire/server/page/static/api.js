// Calls of this server, all below the page's own address. Keeps the API key of this browser tab.

const KEY = "quire-key";
const BASE = new URL(".", document.baseURI);

/** An answer that is not well: `status` (0 = not reached) and the server's own words. */
export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

function headers(extra = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...extra, authorization: `Bearer ${key}` } : extra;
}

/** Called with each 401, so that the page can ask for a key. */
let onKeyNeeded = () => {};
export function whenKeyNeeded(call) {
  onKeyNeeded = call;
}

async function send(path, options) {
  let answer;
  try {
    answer = await fetch(new URL(path, BASE), { cache: "no-store", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiFailure(0, "the server cannot be reached");
  }
  if (answer.ok) return answer;
  if (answer.status === 401) onKeyNeeded();
  let words = `${answer.status} ${answer.statusText}`;
  try {
    words = (await answer.json()).error.message;
  } catch {
    // not an error of this server's catalogue: the status says what there is to say
  }
  throw new ApiFailure(answer.status, words);
}

export async function getJson(path, signal) {
  return (await send(path, { headers: headers(), signal })).json();
}

export async function getText(path, signal) {
  return (await send(path, { headers: headers(), signal })).text();
}

export async function postJson(path, body, signal) {
  const options = { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal };
  return (await send(path, options)).json();
}

/** Server-sent events of a GET, or of a POST with a body: yields {event, data (text)}. */
export async function* events(path, { body, signal } = {}) {
  const asked = { accept: "text/event-stream" };
  const options = { headers: headers(asked), signal };
  if (body !== undefined) {
    options.method = "POST";
    options.headers["content-type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  const answer = await send(path, options);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    left += value;
    let end;
    while ((end = left.indexOf("\n\n")) >= 0) {
      const block = left.slice(0, end);
      left = left.slice(end + 2);
      let event = "message";
      const data = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      }
      if (data.length) yield { event, data: data.join("\n") };
    }
  }
}
