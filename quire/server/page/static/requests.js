// The tab "Requests": where the time of a request went, and why its cached prefix ended.

import { getJson } from "./api.js";
import { el, seconds, setText, svg } from "./dom.js";

const EVERY_MS = 2000;
const PHASES = ["prepare", "queued", "prefill", "decode", "detokenize", "deliver"];
/** What a reason of the prefix cache means; docs/how-to/prefix-cache.md has more. */
const MISSES = {
  cold: "no block like this is known", evicted: "it was cached, and its block was needed for others",
  different_token: "a cached prompt has the same beginning and differs here",
  template_changed: "the cached prompt was made by another chat template", other_salt: "the same tokens are cached under another cache_salt",
  other_tenant: "the same tokens are cached for another tenant", adapter: "the same tokens are cached for another adapter",
  below_one_page: "the prompt has no full block that leaves a token to compute", last_token: "all is cached but the last token, which must be computed",
  caching_off: "prefix caching is off", reading_skipped: "the request asked not to read the cache",
  prompt_logprobs: "prompt_logprobs need every position computed", no_store: "the request that computed it asked for it not to be kept",
  still_computing: "a running request was about to fill it", cache_reset: "it was cached before the cache was reset",
  preempted: "the request lost its blocks and computed them again", no_checkpoint: "no recurrent state was kept there",
};

export function mount(panel) {
  const notice = el("p", { className: "notice", role: "status", hidden: true });
  const body = el("tbody");
  const table = el(
    "table", {}, el("caption", {}, "The latest requests, those that run first"),
    el("thead", {}, el("tr", {}, ...["request", "status", "tenant", "tokens", "whole time"].map((one) => el("th", { scope: "col" }, one)))), body,
  );
  const detail = el("div", { className: "card", "aria-live": "polite" }, el("p", { className: "quiet" }, "Choose a request."));
  panel.append(
    el("h2", {}, "Requests"), notice,
    el("div", { className: "split" }, el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Latest requests" }, table), detail),
  );
  let chosen = "";
  let timer = 0;
  let found = [];

  async function refresh() {
    try {
      found = (await getJson("debug/requests?limit=100")).requests;
      notice.hidden = found.length > 0;
      setText(notice, "No request has come since the server started. Chats of this page are shown here, too.");
      drawList();
    } catch (error) {
      notice.hidden = false;
      setText(notice, error.status === 404 ? "The server was started with --disable-debug." : error.message);
    }
  }

  function drawList() {
    // Rows are kept by request, so that a focused button stays where it is.
    const old = new Map([...body.rows].map((row) => [row.dataset.id, row]));
    const rows = found.map((one) => {
      const row = old.get(one.id) ?? makeRow(one);
      row.className = one.id === chosen ? "chosen" : "";
      const texts = [null, one.status || "running", one.tenant, `${one.prompt_tokens} + ${one.output_tokens}`, total(one)];
      texts.forEach((text, at) => text !== null && setText(row.cells[at], String(text)));
      return row;
    });
    rows.forEach((row, at) => body.rows[at] !== row && body.insertBefore(row, body.rows[at] ?? null));
    while (body.rows.length > rows.length) body.deleteRow(-1);
    const one = found.find((each) => each.id === chosen);
    if (one && !one.status) show(one);
  }

  function makeRow(one) {
    const button = el("button", { type: "button", className: "link" }, one.id);
    button.addEventListener("click", () => {
      chosen = one.id;
      show(found.find((each) => each.id === one.id) ?? one);
      drawList();
    });
    const row = el("tr", {}, el("td", {}, button), el("td"), el("td"), el("td", { className: "number" }), el("td", { className: "number" }));
    row.dataset.id = one.id;
    return row;
  }

  function show(one) {
    detail.replaceChildren(...describe(one));
  }

  return {
    show() {
      refresh();
      timer = setInterval(refresh, EVERY_MS);
    },
    hide() {
      clearInterval(timer);
    },
  };
}

const total = (one) => seconds(Object.values(one.phases).reduce((sum, ms) => sum + ms, 0) / 1e3);

function describe(one) {
  const phases = PHASES.filter((name) => one.phases[name]);
  const table = el(
    "table", {}, el("caption", {}, "Receipt"),
    el("tbody", {}, ...phases.map((name) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { className: "number" }, seconds(one.phases[name] / 1e3))))),
  );
  const facts = [
    `${one.path}, model ${one.model || "none"}, tenant ${one.tenant}, status ${one.status || "running"}`,
    `${one.prompt_tokens} prompt tokens (${one.metrics.cached_tokens ?? 0} cached), ${one.output_tokens} output tokens` +
      (one.metrics.tokens_per_second ? `, ${one.metrics.tokens_per_second.toFixed(1)} tokens/s` : "") +
      (one.metrics.preemptions ? `, preempted ${one.metrics.preemptions} times` : ""),
  ];
  const misses = one.events.filter((event) => event.kind === "scheduled").map((event) =>
    el("li", {}, event.miss === null
      ? `After ${seconds(event.at_ms / 1e3)}: all of the prefix that can be used was cached (${event.cached_tokens} tokens).`
      : `After ${seconds(event.at_ms / 1e3)}: the cached prefix ended at token ${event.miss_position}: ${MISSES[event.miss] ?? event.miss} (${event.miss}).`));
  return [
    el("h3", {}, one.id), ...facts.map((text) => el("p", {}, text)), timeline(one),
    el("h3", {}, "Why its prefix ended"), misses.length ? el("ul", {}, ...misses) : el("p", { className: "quiet" }, "It was not scheduled yet."),
    table,
    el("details", {}, el("summary", {}, `${one.events.length} events, ${one.chunks.length} parts`),
      el("pre", {}, [...one.events.map((event) => `${event.at_ms.toFixed(1)} ms  ${event.kind}  handle ${event.handle}`),
        ...one.chunks.map((part) => `${part[0].toFixed(1)} ms  ${part[4]}  ${part[1].toFixed(1)} ms, tokens ${part[2]} to ${part[2] + part[3]}`)].join("\n"))),
  ];
}

/** Phases as one bar, events as lines in it, parts of the prompt below. */
function timeline(one) {
  const whole = Math.max(Object.values(one.phases).reduce((sum, ms) => sum + ms, 0), 1e-3);
  const width = 600;
  const x = (ms) => Math.min(Math.max(ms / whole, 0), 1) * width;
  const words = PHASES.filter((name) => one.phases[name]).map((name) => `${name} ${seconds(one.phases[name] / 1e3)}`);
  const picture = svg("svg", { class: "timeline", viewBox: `0 0 ${width} 74`, role: "img", "aria-label": `Timeline: ${words.join(", ")}` });
  let at = 0;
  for (const name of PHASES) {
    const ms = one.phases[name] ?? 0;
    const bar = svg("rect", { class: `p-${name}`, x: x(at), y: 16, width: Math.max(x(at + ms) - x(at), ms ? 0.7 : 0), height: 20 });
    bar.append(svg("title", {}, `${name}: ${seconds(ms / 1e3)}`));
    picture.append(bar);
    if (x(at + ms) - x(at) > 52) picture.append(svg("text", { x: x(at) + 2, y: 12 }, name));
    at += ms;
  }
  for (const event of one.events) {
    const line = svg("line", { class: "event", x1: x(event.at_ms), x2: x(event.at_ms), y1: 16, y2: 40 });
    line.append(svg("title", {}, `${event.kind} after ${seconds(event.at_ms / 1e3)}`));
    picture.append(line);
  }
  for (const [start, ms, , count, kind] of one.chunks) {
    const bar = svg("rect", { class: kind === "swapped" ? "p-swapped" : "p-chunk", x: x(start), y: 44, width: Math.max(x(start + ms) - x(start), 1), height: 10 });
    bar.append(svg("title", {}, `${kind}: ${count} tokens, ${seconds(ms / 1e3)}`));
    picture.append(bar);
  }
  picture.append(svg("text", { x: 0, y: 70 }, "0"), svg("text", { x: width, y: 70, "text-anchor": "end" }, seconds(whole / 1e3)));
  return picture;
}
