// The tab "Engine": what the engine cores do now, from the events of /debug/state.

import { events } from "./api.js";
import { bytes, el, Figures, LiveTable, percent, seconds, setText, short } from "./dom.js";
import { barPlot, blockMap, linePlot } from "./plots.js";

const MAX_POINTS = 300;
const RETRY_MS = 3000;

export function mount(panel) {
  const notice = el("p", { className: "notice", role: "status" }, "Connecting");
  const pause = el("button", { type: "button", id: "engine-pause", "aria-pressed": "false" }, "Pause");
  const boxes = el("div");
  let isPaused = false;
  let abort = null;
  const shown = new Map(); // "model/index" -> EngineView
  panel.append(el("div", { className: "row" }, el("h2", {}, "Engine"), pause), notice, boxes);
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    setText(pause, isPaused ? "Resume" : "Pause");
  });

  function update(state) {
    notice.hidden = state.models.length > 0;
    setText(notice, "No model is in memory.");
    const known = new Set();
    for (const model of state.models) {
      // A core that does not answer leaves what was seen last; its problem is shown above it.
      const engines = model.engines.length ? model.engines : [null];
      for (const engine of engines) {
        const key = `${model.names[0]}/${engine?.index ?? 0}`;
        known.add(key);
        if (!shown.has(key)) {
          shown.set(key, new EngineView(`${model.names[0]}${engines.length > 1 ? `, engine ${engine.index}` : ""}`));
          boxes.append(shown.get(key).root);
        }
        shown.get(key).update(state, model, engine);
      }
    }
    for (const [key, view] of shown) {
      if (!known.has(key)) {
        view.root.remove();
        shown.delete(key);
      }
    }
  }

  async function listen(signal) {
    while (!signal.aborted) {
      try {
        for await (const event of events("debug/state?stream=true&interval=1", { signal })) {
          if (event.event === "state" && !isPaused) update(JSON.parse(event.data));
        }
        throw new Error("the server has ended the stream");
      } catch (error) {
        if (signal.aborted) return;
        notice.hidden = false;
        setText(notice, error.status === 404 ? "The server was started with --disable-debug." : `Not connected: ${error.message}`);
        if (error.status === 401 || error.status === 403 || error.status === 404) return;
      }
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }

  return {
    show() {
      abort = new AbortController();
      listen(abort.signal);
    },
    hide() {
      abort?.abort();
    },
  };
}

const COLUMNS = ["generated_tps", "computed_tps", "running", "waiting", "kv_usage", "ttft_p50", "ttft_p95", "itl_mean", "itl_p95",
  "prefix_hit_rate", "acceptance_rate", "mfu", "mbu"];

class EngineView {
  constructor(name) {
    this.series = Object.fromEntries(["time", ...COLUMNS].map((one) => [one, []]));
    this.chosen = null;
    this.problem = el("p", { className: "bad", role: "status" });
    this.figures = new Figures(`Figures of ${name}`);
    this.plots = {};
    const plots = [
      ["rate", "Tokens per second", "generated", "computed"], ["load", "Requests", "running", "waiting"],
      ["ttft", "Time to first token, ms", "p50", "p95"], ["itl", "Time between tokens, ms", "mean", "p95"],
      ["kv", "KV cache in use, prefix hits", "in use", "hits"], ["steps", "Tokens of the latest steps", "decode", "prompts"],
    ].map(([key, title, a, b]) => {
      this.plots[key] = el("div");
      return el(
        "div", { className: "card" }, el("h3", {}, title), this.plots[key],
        el("div", { className: "quiet" }, el("span", { className: "key-a" }, a), " ", el("span", { className: "key-b" }, b)),
      );
    });
    this.batch = new LiveTable("Running", batchColumns());
    this.queue = new LiveTable("Waiting", queueColumns());
    this.tenants = new LiveTable("Tenants", tenantColumns());
    this.blocks = el("div");
    this.canvases = [];
    this.tree = el("div");
    this.rest = el("div", { className: "quiet" });
    this.root = el(
      "section", { "aria-label": name }, el("h3", {}, name), this.problem, this.figures.root,
      el("div", { className: "grid" }, ...plots),
      el("h3", {}, "Batch"), this.batch.root, el("h3", {}, "Queue"), this.queue.root,
      el("h3", {}, "Blocks of the KV cache"), this.blocks,
      el("h3", {}, "Prefix tree"), this.tree, el("h3", {}, "Tenants"), this.tenants.root, this.rest,
    );
  }

  update(state, model, engine) {
    this.addPoints(model.series);
    setText(this.problem, model.problem);
    if (engine === null) return;
    this.drawFigures(state, model, engine);
    this.drawPlots(engine);
    this.batch.update(engine.batch, `${engine.num_running} of at most ${engine.max_num_seqs} running`);
    this.queue.update(engine.queue, `${engine.num_waiting + engine.num_swapped} waiting, in the order of service`);
    this.tenants.update(mergedTenants(state.tenants, engine.tenants));
    this.drawBlocks(engine);
    this.drawTree(engine.prefixes);
    this.drawRest(state, model, engine);
  }

  addPoints(series) {
    for (const name of ["time", ...COLUMNS]) {
      this.series[name].push(...series[name]);
      this.series[name].splice(0, Math.max(0, this.series[name].length - MAX_POINTS));
    }
  }

  drawFigures(state, model, engine) {
    const last = (name) => this.series[name][this.series[name].length - 1] ?? null;
    const predicted = model.predicted_wait_s;
    this.figures.update([
      ["running", `${engine.num_running} / ${engine.max_num_seqs}`], ["waiting", String(engine.num_waiting)],
      ["swapped", String(engine.num_swapped)], ["KV cache in use", percent(last("kv_usage"))],
      ["tokens/s generated", short(last("generated_tps"))], ["tokens/s computed", short(last("computed_tps"))],
      ["TTFT p50", seconds(last("ttft_p50"))], ["time between tokens", seconds(last("itl_mean"))],
      ["wait predicted", predicted === null ? "not measured" : seconds(predicted)],
      ["drafts accepted", model.speculation ? percent(last("acceptance_rate")) : "off"],
      ...(last("mfu") === null ? [] : [["MFU / MBU", `${percent(last("mfu"))} / ${percent(last("mbu"))}`]]),
      ["restarts", String(model.restarts)], ["engine memory", bytes(engine.process.rss_bytes)],
    ]);
  }

  drawPlots(engine) {
    const { series, plots } = this;
    const line = (key, title, a, b, { names, scale = 1, unit = "" }) => {
      const columns = [a, b].map((name) => series[name].map((value) => (value === null ? null : scale * value)));
      linePlot(plots[key], title, series.time, columns, { names, unit });
    };
    const ms = { scale: 1e3, unit: " ms" };
    line("rate", "Tokens per second", "generated_tps", "computed_tps", { names: ["generated", "computed"] });
    line("load", "Requests", "running", "waiting", { names: ["running", "waiting"] });
    line("ttft", "Time to first token", "ttft_p50", "ttft_p95", { names: ["p50", "p95"], ...ms });
    line("itl", "Time between tokens", "itl_mean", "itl_p95", { names: ["mean", "p95"], ...ms });
    line("kv", "KV cache", "kv_usage", "prefix_hit_rate", { names: ["in use", "prefix hits"] });
    const bars = engine.steps.slice(-90).map((step) => [step[4] - step[5], step[5]]);
    const took = engine.steps.length ? seconds(engine.steps[engine.steps.length - 1][2]) : "none";
    barPlot(plots.steps, "Steps", bars, `Tokens of the latest ${bars.length} steps; the last took ${took}`);
  }

  drawBlocks(engine) {
    if (this.canvases.length !== engine.blocks.length) {
      this.canvases = engine.blocks.map(() => [el("canvas", { role: "img" }), el("p", { className: "quiet" })]);
      const swatches = [["row", "a request, older is paler"], ["shared", "shared"], ["cached", "cached, in use by none"], ["free", "free"],
        ["other", "in transfer"]].map(([kind, words]) => [el("span", { className: `swatch s-${kind}` }), ` ${words}  `]);
      this.blocks.replaceChildren(...this.canvases.flat(), el("p", { className: "quiet" }, ...swatches.flat()));
    }
    engine.blocks.forEach((map, at) => {
      const [canvas, words] = this.canvases[at];
      blockMap(canvas, map, this.chosen);
      const text = `${map.num_blocks} blocks of ${engine.block_size} tokens: ${map.used} in use, ${map.cached} cached, ${map.free} free` +
        (map.blocks_per_cell > 1 ? `; each square is one of ${map.blocks_per_cell}` : "");
      setText(words, text);
      canvas.setAttribute("aria-label", text);
    });
  }

  /** Nodes come parents first; a run of blocks without a branch is one line. */
  drawTree(prefixes) {
    const lists = new Map([[0, el("ul", { className: "tree" })]]);
    for (const node of prefixes.nodes) {
      const parent = lists.get(node.parent);
      if (!parent) continue;
      const kept = node.cached_blocks === node.num_blocks ? "" : `, ${node.cached_blocks} still cached`;
      const words = `${node.num_blocks} block${node.num_blocks > 1 ? "s" : ""}${kept}; ${node.users} users` +
        (node.num_children ? `, ${node.num_children} branches` : "") + (node.is_salted ? "; of one tenant or salt" : "");
      const inner = el("ul");
      if (node.num_children) lists.set(node.id, inner);
      parent.append(el("li", {}, words, node.num_children ? inner : ""));
    }
    const count = el("p", { className: "quiet" },
      `${prefixes.num_cached_blocks} cached blocks, ${prefixes.num_nodes} prefixes${prefixes.is_cut ? "; the most used are shown" : ""}`);
    const isOpen = this.tree.querySelector("details")?.open ?? false;
    this.tree.replaceChildren(count, el("details", { open: isOpen }, el("summary", {}, "Show the tree"), lists.get(0)));
  }

  drawRest(state, model, engine) {
    const swap = engine.swap_blocks ? `${engine.swap_blocks_used} of ${engine.swap_blocks} blocks` : "none";
    const drafts = model.speculation ? JSON.stringify(model.speculation.method ?? "on") : "off";
    const parts = model.processes.filter((one) => one.engine === engine.index).flatMap((one) => Object.entries(one.memory))
      .filter(([name]) => name !== "huge_pages_asked").map(([name, size]) => `${name.replace("_", " ")} ${bytes(size)}`).join(", ");
    const huge = model.processes.filter((one) => one.engine === engine.index).reduce((sum, one) => sum + one.huge_bytes, 0);
    setText(this.rest, `Swap space: ${swap}. Tier behind the cache: ${engine.tier || "none"}. Speculation: ${drafts}. ` +
      `Engine process ${engine.process.pid}: ${seconds(engine.process.cpu_s)} of CPU, ${engine.process.num_threads} threads${parts ? `; memory: ${parts}; in huge pages ${bytes(huge)}` : ""}. ` +
      `Server process ${state.server.pid}: ${bytes(state.server.rss_bytes)}. ` +
      `This look took ${seconds(engine.collect_s)}; ${state.num_viewers} viewer${state.num_viewers === 1 ? "" : "s"}.`);
  }
}

function mergedTenants(ofServer, ofEngine) {
  const fair = new Map(ofEngine.map((one) => [one.name, one]));
  return ofServer.map((one) => ({ ...one, ...(fair.get(one.name) ?? {}) }));
}

const col = (title, value, number = false) => ({ title, value, number });

function batchColumns() {
  return [
    col("row", (one) => one.row, true), col("request", (one) => one.id), col("tenant", (one) => one.tenant || "\u2013"),
    col("phase", (one) => one.phase), col("prompt", (one) => one.prompt_tokens, true), col("computed", (one) => one.computed_tokens, true),
    col("output", (one) => one.output_tokens, true), col("at most", (one) => one.max_tokens, true),
    col("cached", (one) => one.cached_tokens, true), col("blocks", (one) => one.num_blocks, true),
    col("preempted", (one) => one.preemptions, true), col("age", (one) => seconds(one.age_s), true),
  ];
}

function queueColumns() {
  return [
    col("request", (one) => one.id), col("tenant", (one) => one.tenant || "\u2013"), col("state", (one) => one.phase),
    col("prompt", (one) => one.prompt_tokens, true), col("waited", (one) => seconds(one.waited_s), true),
    col("turn in about", (one) => (one.predicted_wait_s === null ? "\u2013" : seconds(one.predicted_wait_s)), true),
    col("why", (one) => one.why + (one.missing_blocks ? ` (${one.missing_blocks} lacking)` : "")),
    col("behind", (one) => one.behind || "\u2013"),
  ];
}

function tenantColumns() {
  return [
    col("tenant", (one) => one.name), col("weight", (one) => one.weight, true), col("requests", (one) => one.num_requests, true),
    col("running", (one) => one.running ?? "\u2013", true), col("waiting", (one) => one.waiting ?? "\u2013", true),
    col("served", (one) => (one.served === undefined ? "\u2013" : short(one.served)), true),
    col("operator", (one) => (one.is_operator ? "yes" : "no")),
  ];
}
