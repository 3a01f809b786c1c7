// The tab "Chat": one or several models answer side by side. Each column has a conversation of its own.

import { events, getJson } from "./api.js";
import { el, find, seconds, setText } from "./dom.js";
import * as tools from "./tools.js";

const MAX_ROUNDS = 8; // of calls of tools for one question
const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { answer: { type: "string" }, confidence: { type: "number", minimum: 0, maximum: 1 } },
  required: ["answer", "confidence"],
  additionalProperties: false,
};

let models = [];
const columns = [];

export function mount(panel) {
  const parts = build(panel);
  addColumn(parts);
  return {
    show: () => loadModels(parts),
    hide: () => {},
  };
}

function number(id, label, props) {
  return el("label", {}, label, el("input", { id, type: "number", ...props }));
}

function build(panel) {
  const columnsBox = el("div", { className: "columns" });
  const notice = el("p", { className: "notice", hidden: true, role: "alert" });
  const schema = el("textarea", {
    id: "chat-schema", className: "code", rows: 7, spellcheck: false, value: JSON.stringify(EXAMPLE_SCHEMA, null, 2),
    "aria-describedby": "chat-schema-state",
  });
  const useSchema = el("input", { id: "chat-use-schema", type: "checkbox" });
  const schemaState = el("span", { id: "chat-schema-state", className: "quiet", role: "status" });
  const checkSchema = () => {
    const problem = schemaProblem(schema.value);
    setText(schemaState, problem ? problem : "valid JSON");
    schemaState.className = problem ? "bad" : "quiet";
  };
  schema.addEventListener("input", checkSchema);
  checkSchema();
  const options = el(
    "details", { className: "card" }, el("summary", {}, "Settings: system prompt, sampling, tools, structured answers"),
    el("label", { className: "over" }, "System prompt", el("textarea", { id: "chat-system", rows: 2 })),
    el(
      "div", { className: "row" },
      number("chat-temperature", "Temperature", { min: 0, max: 2, step: 0.1, value: "0.7" }),
      number("chat-top-p", "Top p", { min: 0.01, max: 1, step: 0.01, value: "1" }),
      number("chat-max-tokens", "Maximum tokens", { min: 1, max: 100000, value: "512" }),
      number("chat-seed", "Seed", { placeholder: "none" }),
      el("label", {}, el("input", { id: "chat-logprobs", type: "checkbox" }), "Colour by probability"),
      el("label", {}, el("input", { id: "chat-tools", type: "checkbox" }), "Demo tools"),
    ),
    el("label", {}, useSchema, "Structured answer: JSON of this schema"),
    el("label", { className: "over" }, "JSON schema", schema), schemaState,
  );
  const input = el("textarea", { id: "chat-input", rows: 3, placeholder: "Write a message (Ctrl+Enter sends)" });
  const sendButton = el("button", { type: "submit", className: "main", id: "chat-send" }, "Send");
  const stop = el("button", { type: "button", id: "chat-stop", disabled: true }, "Stop");
  const form = el(
    "form", { className: "compose", "aria-label": "Compose" },
    el("label", { className: "over" }, "Message", input),
    el(
      "div", { className: "row" }, sendButton, stop,
      el("button", { type: "button", id: "chat-clear", onclick: () => columns.forEach(clear) }, "Clear"),
      el("button", { type: "button", id: "chat-add", onclick: () => addColumn(parts) }, "Add a model beside"),
      el("button", { type: "button", id: "chat-export", onclick: exportChats }, "Export"),
    ),
  );
  const parts = { columnsBox, notice, form, input, sendButton, stop, useSchema, schema };
  panel.append(el("h2", {}, "Chat"), notice, options, columnsBox, form);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sendAll(parts);
  });
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  stop.addEventListener("click", () => columns.forEach((one) => one.abort?.abort()));
  return parts;
}

function schemaProblem(text) {
  try {
    const schema = JSON.parse(text);
    return typeof schema === "object" && schema !== null ? "" : "a schema is a JSON object";
  } catch (error) {
    return `not JSON: ${error.message}`;
  }
}

async function loadModels(parts) {
  try {
    models = (await getJson("v1/models")).data.map((one) => one.id);
    parts.notice.hidden = true;
  } catch (error) {
    parts.notice.hidden = false;
    setText(parts.notice, `The list of models cannot be read: ${error.message}`);
    return;
  }
  for (const column of columns) fillSelect(column);
}

function fillSelect(column) {
  const chosen = column.select.value || models[columns.indexOf(column) % (models.length || 1)];
  column.select.replaceChildren(...models.map((name) => el("option", { value: name, selected: name === chosen }, name)));
}

function addColumn(parts) {
  const index = columns.length + 1;
  const select = el("select", { "aria-label": `Model of column ${index}` });
  const log = el("div", { className: "log", role: "log", tabIndex: 0, "aria-label": `Conversation ${index}`, "aria-live": "off" });
  const status = el("div", { className: "stats", role: "status" });
  const remove = el("button", { type: "button", "aria-label": `Remove column ${index}` }, "Remove");
  const root = el("section", { className: "column", "aria-label": `Column ${index}` }, el("div", { className: "row" }, select, remove), log, status);
  const column = { select, log, status, root, remove, messages: [], abort: null };
  remove.addEventListener("click", () => {
    column.abort?.abort();
    columns.splice(columns.indexOf(column), 1);
    root.remove();
    columns.forEach((one) => (one.remove.hidden = columns.length < 2));
  });
  columns.push(column);
  columns.forEach((one) => (one.remove.hidden = columns.length < 2));
  fillSelect(column);
  parts.columnsBox.append(root);
}

function clear(column) {
  column.abort?.abort();
  column.messages = [];
  column.log.replaceChildren();
  setText(column.status, "");
}

function exportChats() {
  const content = columns.map((one) => ({ model: one.select.value, messages: one.messages, statistics: one.status.textContent }));
  const blob = new Blob([JSON.stringify({ exported: new Date().toISOString(), conversations: content }, null, 2)], { type: "application/json" });
  const link = el("a", { href: URL.createObjectURL(blob), download: "quire-chat.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

// --- a question ---

async function sendAll(parts) {
  const text = parts.input.value.trim();
  if (!text || parts.sendButton.disabled) return;
  if (parts.useSchema.checked && schemaProblem(parts.schema.value)) {
    parts.notice.hidden = false;
    setText(parts.notice, `The schema is ${schemaProblem(parts.schema.value)}`);
    return;
  }
  parts.notice.hidden = true;
  parts.input.value = "";
  parts.sendButton.disabled = true;
  parts.stop.disabled = false;
  await Promise.all(columns.map((column) => ask(column, text)));
  parts.sendButton.disabled = false;
  parts.stop.disabled = true;
  parts.input.focus();
}

function settings() {
  const value = (id) => (find(id).value === "" ? undefined : Number(find(id).value));
  const body = {
    temperature: value("chat-temperature"), top_p: value("chat-top-p"), max_tokens: value("chat-max-tokens"), seed: value("chat-seed"),
    stream: true, stream_options: { include_usage: true },
  };
  if (find("chat-logprobs").checked) Object.assign(body, { logprobs: true, top_logprobs: 3 });
  if (find("chat-tools").checked) body.tools = tools.SCHEMAS;
  if (find("chat-use-schema").checked) {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(find("chat-schema").value) } };
  }
  return body;
}

async function ask(column, text) {
  column.messages.push({ role: "user", content: text });
  addMessage(column, "user", "You").text.textContent = text;
  column.abort = new AbortController();
  try {
    for (let round = 0; round < MAX_ROUNDS; round += 1) {
      const answer = await answerOnce(column);
      column.messages.push(answer);
      if (!answer.tool_calls?.length) return;
      for (const one of answer.tool_calls) {
        const result = tools.call(one.function.name, one.function.arguments);
        column.messages.push({ role: "tool", tool_call_id: one.id, content: result });
        addMessage(column, "tool", `Result of ${one.function.name}`).text.textContent = result;
      }
    }
  } catch (error) {
    const words = error.name === "AbortError" ? "stopped" : error.message;
    column.log.append(el("p", { className: error.name === "AbortError" ? "quiet" : "bad", role: "alert" }, words));
  } finally {
    column.abort = null;
    column.log.setAttribute("aria-busy", "false");
  }
}

function addMessage(column, role, who) {
  const text = el("span", {});
  const root = el("div", { className: `message ${role}` }, el("span", { className: "who" }, who), text);
  column.log.append(root);
  column.log.scrollTop = column.log.scrollHeight;
  return { root, text };
}

async function answerOnce(column) {
  const system = find("chat-system").value.trim();
  const messages = system ? [{ role: "system", content: system }, ...column.messages] : column.messages;
  const body = { model: column.select.value, messages, ...settings() };
  const shown = addMessage(column, "assistant", column.select.value);
  const answer = { role: "assistant", content: "" };
  const times = { start: performance.now(), first: 0, last: 0 };
  let usage = null;
  let reasoning = "";
  column.log.setAttribute("aria-busy", "true");
  setText(column.status, "waiting");
  for await (const event of events("v1/chat/completions", { body, signal: column.abort.signal })) {
    if (event.data === "[DONE]") break;
    const chunk = JSON.parse(event.data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const choice = chunk.choices?.[0];
    if (!choice) continue;
    const { delta } = choice;
    times.last = performance.now();
    const thought = delta.reasoning ?? delta.reasoning_content ?? "";
    if (!times.first && (thought || delta.content || delta.tool_calls)) times.first = times.last;
    if (thought) showThought(shown, (reasoning += thought));
    if (delta.content) {
      answer.content += delta.content;
      showText(shown, delta.content, choice.logprobs?.content);
    }
    for (const part of delta.tool_calls ?? []) addCall(answer, shown, part);
    column.log.scrollTop = column.log.scrollHeight;
    setText(column.status, statistics(times, usage, choice.finish_reason));
  }
  setText(column.status, statistics(times, usage, null));
  if (answer.tool_calls) answer.content ||= null;
  return answer;
}

function showThought(shown, text) {
  if (!shown.thinking) {
    shown.thinking = el("div", { className: "thinking" });
    shown.root.insertBefore(el("details", {}, el("summary", {}, "Reasoning"), shown.thinking), shown.text);
  }
  shown.thinking.textContent = text;
}

/** The text of a delta; with log-probabilities each token has a colour and a title that says how likely it was. */
function showText(shown, text, logprobs) {
  if (!logprobs?.length) {
    shown.text.append(text);
    return;
  }
  let at = 0;
  for (const one of logprobs) {
    // A token alone may lack the space before it: the text between two tokens belongs to the second.
    const found = text.indexOf(one.token, at);
    const end = found < 0 ? at : found + one.token.length;
    const share = Math.exp(one.logprob);
    const others = (one.top_logprobs ?? []).map((other) => `${JSON.stringify(other.token)} ${(100 * Math.exp(other.logprob)).toFixed(1)} %`);
    const level = share > 0.9 ? 1 : share > 0.6 ? 2 : share > 0.3 ? 3 : share > 0.1 ? 4 : 5;
    shown.text.append(el("span", { className: `lp${level}`, title: `${(100 * share).toFixed(1)} %\n${others.join("\n")}` }, text.slice(at, end)));
    at = end;
  }
  shown.text.append(text.slice(at));
}

function addCall(answer, shown, part) {
  answer.tool_calls ??= [];
  const known = (answer.tool_calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  known.id ||= part.id ?? "";
  known.function.name += part.function?.name ?? "";
  known.function.arguments += part.function?.arguments ?? "";
  shown.calls ??= shown.root.appendChild(el("pre"));
  setText(shown.calls, answer.tool_calls.map((one) => `${one.function.name}(${one.function.arguments})`).join("\n"));
}

function statistics(times, usage, reason) {
  if (!times.first) return "waiting";
  const parts = [`first token after ${seconds((times.first - times.start) / 1e3)}`];
  if (usage) {
    const rate = usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / ((times.last - times.first) / 1e3 || 1e-3) : null;
    parts.push(`${usage.completion_tokens} tokens`);
    if (rate) parts.push(`${rate.toFixed(1)} tokens/s`);
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`prompt ${usage.prompt_tokens} tokens, ${cached} cached`);
  }
  if (reason && reason !== "stop") parts.push(`ended: ${reason}`);
  return parts.join(" \u00B7 ");
}
