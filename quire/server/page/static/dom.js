// Small helpers for elements, numbers and times. No state.

/** An element with properties, attributes (names with a dash, or `role`) and children. */
export function el(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  setAll(made, props);
  made.append(...children.flat().filter((one) => one !== null && one !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

/** The same for SVG, where everything is an attribute. */
export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function setAll(target, props) {
  for (const [name, value] of Object.entries(props)) {
    if (name.includes("-") || name === "role" || name === "for" || name === "list") target.setAttribute(name, value);
    else if (name.startsWith("on")) target.addEventListener(name.slice(2), value);
    else target[name] = value;
  }
}

/** Set text only where it differs: an unchanged node is not painted again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function find(id) {
  return document.getElementById(id);
}

/** 1234567 -> "1.23M"; null -> a dash. */
export function short(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  const size = Math.abs(value);
  for (const [limit, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${+(value / (unit === "k" ? 1e3 : limit)).toPrecision(digits)}${unit}`;
  }
  return String(Number.isInteger(value) ? value : +value.toPrecision(digits));
}

export function bytes(value) {
  for (const [limit, unit] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= limit) return `${(value / limit).toFixed(1)} ${unit}`;
  }
  return `${value} bytes`;
}

/** Seconds for people: "3.2 ms", "4.5 s", "2 min". */
export function seconds(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value < 0.9995) return `${+(value * 1e3).toPrecision(3)} ms`;
  if (value < 120) return `${+value.toPrecision(3)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${+(value / 3600).toPrecision(3)} h`;
}

export function percent(value) {
  return value === null || value === undefined ? "\u2013" : `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
}

/**
 * A table that keeps its rows: `update` writes only the cells that differ.
 * columns: [{title, value(row) -> text, number: bool}]
 */
export class LiveTable {
  constructor(caption, columns) {
    this.columns = columns;
    this.body = el("tbody");
    this.caption = el("caption", {}, caption);
    const heads = columns.map((one) => el("th", { scope: "col", className: one.number ? "number" : "" }, one.title));
    this.table = el("table", {}, this.caption, el("thead", {}, el("tr", {}, ...heads)), this.body);
    this.root = el("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": caption }, this.table);
  }

  update(rows, caption) {
    if (caption !== undefined) setText(this.caption, caption);
    while (this.body.rows.length > rows.length) this.body.deleteRow(-1);
    rows.forEach((row, index) => {
      let line = this.body.rows[index];
      if (!line) {
        line = this.body.insertRow();
        for (const one of this.columns) line.insertCell().className = one.number ? "number" : "";
      }
      this.columns.forEach((one, at) => setText(line.cells[at], String(one.value(row))));
    });
  }
}

/** A list of figures: `update([[name, text], ...])`. */
export class Figures {
  constructor(label) {
    this.root = el("dl", { className: "figures", "aria-label": label });
  }

  update(pairs) {
    while (this.root.children.length > pairs.length) this.root.lastChild.remove();
    pairs.forEach(([name, text], index) => {
      let box = this.root.children[index];
      if (!box) {
        box = el("div", {}, el("dt"), el("dd"));
        this.root.append(box);
      }
      setText(box.firstChild, name);
      setText(box.lastChild, text);
    });
  }
}
