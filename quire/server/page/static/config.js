// The tab "Config": what runs, and which settings are not the default.

import { getJson } from "./api.js";
import { el, LiveTable, setText } from "./dom.js";

export function mount(panel) {
  const filter = el("input", { id: "config-filter", type: "search", placeholder: "a name or a word" });
  const onlyChanged = el("input", { id: "config-changed", type: "checkbox" });
  const notice = el("p", { className: "notice", role: "status", hidden: true });
  const boxes = el("div");
  let tables = [];
  panel.append(
    el("h2", {}, "Config"), notice,
    el("div", { className: "row" }, el("label", {}, "Filter", filter), el("label", {}, onlyChanged, "Only what differs from its default")), boxes,
  );

  function draw() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const [table, settings, title] of tables) {
      const rows = settings.filter((one) => (!onlyChanged.checked || differs(one)) &&
        words.every((word) => `${one.name} ${one.doc}`.toLowerCase().includes(word)));
      table.update(rows, `${title}: ${rows.length} of ${settings.length} settings`);
    }
  }
  filter.addEventListener("input", draw);
  onlyChanged.addEventListener("change", draw);

  return {
    async show() {
      try {
        const config = await getJson("debug/config");
        notice.hidden = true;
        const sections = [...config.models.map((one) => [`Engine of ${one.model}`, one.settings]), ["Server", config.server]];
        tables = sections.map(([title, settings]) => [new LiveTable(title, columns()), settings, title]);
        boxes.replaceChildren(...tables.flatMap(([table, , title]) => [el("h3", {}, title), table.root]));
        draw();
      } catch (error) {
        notice.hidden = false;
        setText(notice, error.status === 404 ? "The server was started with --disable-debug." : error.message);
      }
    },
    hide() {},
  };
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const differs = (one) => !same(one.value, one.default);
const text = (value) => (value === null || value === "" || same(value, []) ? "none" : Array.isArray(value) ? value.join(", ") : String(value));

function columns() {
  return [
    { title: "setting", value: (one) => one.name }, { title: "value", value: (one) => text(one.value) },
    { title: "default", value: (one) => (one.default === "auto" || (one.default === null && differs(one)) ? "chosen at the start" : text(one.default)) },
    { title: "reason", value: (one) => one.reason ?? (differs(one) ? "given" : "") },
    { title: "what it is for", value: (one) => one.doc },
  ];
}
