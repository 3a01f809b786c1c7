// Pictures without a library: lines, bars and maps of blocks.

import { short, svg } from "./dom.js";

const WIDTH = 360;
const HEIGHT = 120;
const LEFT = 34;
const BOTTOM = 14;

/**
 * A line plot over time. `lines`: up to two columns of numbers or null, drawn in colours a and b.
 * Its label says the last values, for those who do not see it.
 */
export function linePlot(root, title, times, lines, { unit = "", names = [] } = {}) {
  const values = lines.flat().filter((one) => one !== null);
  const top = Math.max(...values, 1e-9) * 1.08;
  const [from, to] = [times[0] ?? 0, times[times.length - 1] ?? 1];
  const x = (time) => LEFT + ((WIDTH - LEFT - 4) * (time - from)) / (to - from || 1);
  const y = (value) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - 6) * value) / top;
  const picture = svg("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": describe(title, lines, names, unit) });
  for (const share of [0, 0.5, 1]) {
    const value = (top / 1.08) * share;
    picture.append(
      svg("line", { class: "axis", x1: LEFT, x2: WIDTH - 4, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 3, y: y(value) + 3, "text-anchor": "end" }, short(value, 2)),
    );
  }
  picture.append(svg("text", { x: LEFT, y: HEIGHT - 2 }, `${Math.round(to - from)} s`));
  lines.forEach((line, number) => {
    let path = "";
    let isOpen = false;
    line.forEach((value, at) => {
      if (value === null) isOpen = false;
      else {
        path += `${isOpen ? "L" : "M"}${x(times[at]).toFixed(1)} ${y(value).toFixed(1)}`;
        isOpen = true;
      }
    });
    if (path) picture.append(svg("path", { class: number ? "b" : "a", d: path }));
  });
  root.replaceChildren(picture);
}

function describe(title, lines, names, unit) {
  const last = lines.map((line, at) => `${names[at] ?? ""} ${short(line[line.length - 1])}${unit}`.trim());
  return `${title}: ${last.join(", ")}`;
}

/** Bars in two stacked colours, the newest on the right. `bars`: [[a, b], ...]. */
export function barPlot(root, title, bars, label) {
  const top = Math.max(...bars.map(([a, b]) => a + b), 1);
  const width = (WIDTH - LEFT) / Math.max(bars.length, 1);
  const picture = svg("svg", { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  picture.append(svg("text", { x: LEFT - 3, y: 12, "text-anchor": "end" }, short(top, 2)));
  bars.forEach(([a, b], at) => {
    const scale = (HEIGHT - 6) / top;
    const x = (LEFT + at * width).toFixed(1);
    const wide = Math.max(width - 0.6, 0.4).toFixed(1);
    picture.append(
      svg("rect", { class: "bar-a", x, width: wide, y: (HEIGHT - a * scale).toFixed(1), height: (a * scale).toFixed(1) }),
      svg("rect", { class: "bar-b", x, width: wide, y: (HEIGHT - (a + b) * scale).toFixed(1), height: (b * scale).toFixed(1) }),
    );
  });
  root.replaceChildren(picture);
}

const [FREE, CACHED, SHARED] = [-1, -2, -3];

/** Blocks as squares: the colour says whose they are, paler = older. `chosen`: a row that is shown alone. */
export function blockMap(canvas, map, chosen) {
  const count = map.owners.length;
  const columns = 64;
  const rows = Math.ceil(count / columns);
  const size = 10;
  if (canvas.width !== columns * size || canvas.height !== rows * size) {
    canvas.width = columns * size;
    canvas.height = rows * size;
  }
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const named = { [FREE]: colour("--free"), [CACHED]: colour("--cached"), [SHARED]: colour("--shared") };
  const other = colour("--other");
  const paint = canvas.getContext("2d");
  paint.clearRect(0, 0, canvas.width, canvas.height);
  map.owners.forEach((owner, at) => {
    const isDim = chosen !== null && owner !== chosen;
    paint.globalAlpha = (isDim ? 0.2 : 1) * (owner === FREE ? 1 : 1 - 0.6 * (map.ages[at] / 100));
    paint.fillStyle = owner >= 0 ? rowColour(owner) : (named[owner] ?? other);
    paint.fillRect((at % columns) * size, Math.floor(at / columns) * size, size - 1, size - 1);
  });
  paint.globalAlpha = 1;
}

/** Neighbouring rows get hues that differ much: steps of the golden angle. */
export function rowColour(row) {
  return `hsl(${(row * 137.5) % 360} 62% 50%)`;
}
