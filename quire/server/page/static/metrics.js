// The tab "Metrics": what Prometheus reads, as a table.

import { getText } from "./api.js";
import { el, LiveTable, setText, short } from "./dom.js";

const EVERY_MS = 2000;
const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;

export function mount(panel) {
  const filter = el("input", { id: "metrics-filter", type: "search", placeholder: "vllm: or a word" });
  const hasZeros = el("input", { id: "metrics-zeros", type: "checkbox" });
  const notice = el("p", { className: "notice", role: "status", hidden: true });
  const table = new LiveTable("Series of /metrics", [
    { title: "series", value: (one) => one.name }, { title: "labels", value: (one) => one.labels },
    { title: "value", value: (one) => one.value, number: true }, { title: "what", value: (one) => one.help },
  ]);
  let timer = 0;
  let series = [];
  panel.append(
    el("h2", {}, "Metrics"), notice,
    el("div", { className: "row" }, el("label", {}, "Filter", filter), el("label", {}, hasZeros, "Show zeros"),
      el("a", { href: "metrics" }, "as Prometheus reads it")),
    table.root,
  );

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = series.filter((one) => (hasZeros.checked || one.number !== 0) &&
      words.every((word) => `${one.name} ${one.labels} ${one.help}`.toLowerCase().includes(word)));
    table.update(rows, `${rows.length} of ${series.length} series`);
  }
  filter.addEventListener("input", draw);
  hasZeros.addEventListener("change", draw);

  async function refresh() {
    try {
      series = parse(await getText("metrics"));
      notice.hidden = true;
      draw();
    } catch (error) {
      notice.hidden = false;
      setText(notice, error.message);
    }
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

/** Prometheus' text format as rows; of a histogram one row with its count, mean and two quantiles. */
export function parse(text) {
  const helps = {};
  const kinds = {};
  const rows = [];
  const histograms = new Map();
  for (const line of text.split("\n")) {
    if (line.startsWith("# HELP ")) {
      const [, , name, ...words] = line.split(" ");
      helps[name] = words.join(" ");
    } else if (line.startsWith("# TYPE ")) {
      const [, , name, kind] = line.split(" ");
      kinds[name] = kind;
    } else {
      const found = LINE.exec(line);
      if (!found || found[1].endsWith("_created")) continue;
      const [, name, labels = "", value] = found;
      const base = name.replace(/_(bucket|sum|count)$/, "");
      if (base !== name && kinds[base] === "histogram") addTo(histograms, base, name.slice(base.length + 1), labels, Number(value));
      else rows.push({ name, labels, number: Number(value), value: short(Number(value), 5), help: helps[name] ?? helps[name.replace(/_total$/, "")] ?? "" });
    }
  }
  for (const one of histograms.values()) {
    const mean = one.count ? `mean ${short(one.sum / one.count)}, p50 ${quantile(one, 0.5)}, p95 ${quantile(one, 0.95)}` : "none";
    rows.push({ name: one.name, labels: one.labels, number: one.count, value: `${one.count}: ${mean}`, help: helps[one.name] ?? "" });
  }
  return rows.sort((a, b) => (a.name < b.name ? -1 : 1));
}

function addTo(histograms, name, part, labels, value) {
  const bound = /(?:^|,)le="([^"]*)"/.exec(labels)?.[1];
  const rest = labels.replace(/(^|,)le="[^"]*"/, "").replace(/^,/, "");
  const key = `${name}{${rest}}`;
  if (!histograms.has(key)) histograms.set(key, { name, labels: rest, buckets: [], sum: 0, count: 0 });
  const one = histograms.get(key);
  if (part === "bucket") one.buckets.push([bound === "+Inf" ? Infinity : Number(bound), value]);
  else one[part] = value;
}

/** As histogram_quantile: linear within a bucket. */
function quantile({ buckets, count }, share) {
  let [lower, before] = [0, 0];
  for (const [bound, total] of buckets) {
    if (total >= share * count && total > before) {
      return bound === Infinity ? `> ${short(lower)}` : short(lower + ((bound - lower) * (share * count - before)) / (total - before));
    }
    [lower, before] = [bound, total];
  }
  return "\u2013";
}
