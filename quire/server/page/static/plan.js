// The tab "Plan": what a deployment would serve, simulated by /debug/plan.

import { getJson, postJson } from "./api.js";
import { el, Figures, percent, seconds, setText, short } from "./dom.js";

const SLIDERS = [
  // name, label, lowest, highest, first value; sliders move by powers of ten, so that 1 and 10000 are both easy to reach
  ["rate", "Requests per second", 0.1, 200, 4], ["prompt_tokens", "Prompt tokens", 1, 100000, 1000],
  ["output_tokens", "Output tokens", 1, 4096, 200], ["prefix_tokens", "Shared system prompt, tokens", 0, 100000, 0],
  ["replicas", "Replicas", 1, 64, 1], ["tensor_parallel_size", "Devices per layer (tensor parallel)", 1, 16, 1],
  ["pipeline_parallel_size", "Pipeline stages", 1, 16, 1],
  ["slo_ttft", "Objective: first token within ms", 10, 60000, 1000], ["slo_itl", "Objective: ms per token", 1, 1000, 50],
];
const WAIT_MS = 500;

export function mount(panel) {
  const hardware = el("select", { id: "plan-hardware" });
  const model = el("select", { id: "plan-model" });
  const interconnect = el("select", { id: "plan-interconnect" }, el("option", { value: "" }, "the hardware's own links"));
  const expertParallel = el("input", { type: "checkbox", id: "plan-experts" });
  const findReplicas = el("input", { type: "checkbox", id: "plan-find" });
  const state = el("p", { className: "quiet", role: "status" });
  const figures = new Figures("Simulated figures");
  const about = el("p", { className: "quiet" });
  const inputs = {};
  let timer = 0;
  let isRunning = false;
  let isStale = false;

  const sliders = SLIDERS.map(([name, label, low, high, first]) => {
    const number = el("input", { type: "number", id: `plan-${name}`, min: low, max: high, step: name === "rate" ? "any" : 1, value: String(first) });
    const range = el("input", { type: "range", min: 0, max: 1000, value: String(toSlider(first, low, high)), "aria-label": `${label}, slider` });
    range.addEventListener("input", () => {
      number.value = String(fromSlider(Number(range.value), low, high, name === "rate"));
      later();
    });
    number.addEventListener("input", () => {
      range.value = String(toSlider(Number(number.value), low, high));
      later();
    });
    inputs[name] = number;
    return el("div", {}, el("label", { for: number.id }, label), el("div", { className: "slider" }, range, number));
  });

  const later = () => {
    clearTimeout(timer);
    timer = setTimeout(simulate, WAIT_MS);
  };
  for (const one of [hardware, model, interconnect, expertParallel, findReplicas]) one.addEventListener("change", later);

  async function simulate() {
    if (isRunning) {
      isStale = true;
      return;
    }
    isRunning = true;
    isStale = false;
    state.className = "quiet busy";
    setText(state, "Simulating");
    const body = { hardware: hardware.value, model: model.value, find_replicas: findReplicas.checked, num_requests: 150 };
    if (interconnect.value) body.interconnect = interconnect.value;
    body.enable_expert_parallel = expertParallel.checked;
    for (const [name, input] of Object.entries(inputs)) body[name] = Number(input.value);
    try {
      show(await postJson("debug/plan", body));
      state.className = "quiet";
      setText(state, "Simulated: the real scheduler under a virtual clock, with costs computed for the hardware, not measured.");
    } catch (error) {
      state.className = "bad";
      setText(state, error.message);
    } finally {
      isRunning = false;
      if (isStale) simulate();
    }
  }

  function show(answer) {
    const found = answer.figures;
    const ms = (value) => (value === null ? "\u2013" : seconds(value / 1e3));
    figures.update([
      ...("replicas_needed" in answer ? [["replicas needed", answer.replicas_needed === null ? "more do not help" : String(answer.replicas_needed)]] : []),
      ["meet the objectives", percent(found.good_share)], ["requests/s", short(found.request_throughput)],
      ["output tokens/s", short(found.output_throughput)], ["TTFT p50", ms(found.p50_ttft_ms)], ["TTFT p95", ms(found.p95_ttft_ms)],
      ["between tokens p50", ms(found.p50_itl_ms)], ["between tokens p95", ms(found.p95_itl_ms)], ["whole p95", ms(found.p95_e2e_ms)],
      ["KV cache in use", percent(found.mean_kv_cache_usage)], ["prefix hits", percent(found.prefix_hit_rate)],
      ...division(answer),
      ["preemptions", String(found.num_preemptions)], ["rejected", String(found.num_refused)],
    ]);
    const devices = answer.basis.tensor_parallel * answer.basis.pipeline_parallel;
    setText(about, `${answer.replicas} x ${devices} ${answer.basis.hardware.name}: ${answer.basis.hardware.source}. ` +
      "The same with more questions (sweeps, traces, drafts, measured costs): quire plan.");
  }

  panel.append(
    el("h2", {}, "Plan"),
    el("p", { className: "quiet" }, "How many requests would this model serve elsewhere, and how fast?"),
    el("div", { className: "row" }, el("label", {}, "Model", model), el("label", {}, "Hardware", hardware), el("label", {}, "Between devices", interconnect),
      el("label", {}, expertParallel, "Experts whole on a device"), el("label", {}, findReplicas, "Find the number of replicas"),
      el("button", { type: "button", className: "main", id: "plan-run", onclick: simulate }, "Simulate")),
    el("div", { className: "grid" }, ...sliders), state, figures.root, about,
  );

  return {
    async show() {
      try {
        const config = await getJson("debug/config");
        if (!hardware.options.length) hardware.append(...config.plan_hardware.map((one) => el("option", {}, one)));
        if (interconnect.options.length === 1) interconnect.append(...config.plan_interconnects.map((one) => el("option", {}, one)));
        model.replaceChildren(...config.models.map((one) => el("option", {}, one.model)));
      } catch (error) {
        state.className = "bad";
        setText(state, error.status === 404 ? "The server was started with --disable-debug." : error.message);
      }
    },
    hide() {
      clearTimeout(timer);
    },
  };
}

// Memory of the fullest device, room for tokens, and what a decode step spends on exchanges.
function division(answer) {
  const gigabytes = (value) => `${(value / 1e9).toFixed(1)} GB`;
  const most = (name) => Math.max(...answer.basis.memory.map((one) => one[name]));
  const step = answer.steps[Math.min(1, answer.steps.length - 1)];
  return [
    ["weights per device", gigabytes(most("weights_bytes"))], ["KV cache, tokens", short(answer.kv_tokens)],
    [`decode step of ${step.requests}`, seconds(step.step_s)], ["of it in exchanges", percent(step.exchange_s / step.step_s)],
  ];
}

const shift = (low) => (low > 0 ? 0 : 1);

function toSlider(value, low, high) {
  const by = shift(low);
  const share = Math.log((Math.max(value, low) + by) / (low + by)) / Math.log((high + by) / (low + by));
  return Math.round(1000 * Math.min(share, 1));
}

function fromSlider(place, low, high, isFraction) {
  const by = shift(low);
  const value = (low + by) * ((high + by) / (low + by)) ** (place / 1000) - by;
  return isFraction ? +value.toPrecision(2) : Math.round(+value.toPrecision(2));
}
