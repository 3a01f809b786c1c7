// The page: tabs, colours, the key field. Each tab is a module with `mount(panel) -> {show(), hide()}`.

import { getJson, setKey, whenKeyNeeded } from "./api.js";
import { find, setText } from "./dom.js";
import * as chat from "./chat.js";
import * as config from "./config.js";
import * as engine from "./engine.js";
import * as metrics from "./metrics.js";
import * as plan from "./plan.js";
import * as requests from "./requests.js";

const MODULES = { chat, engine, requests, plan, metrics, config };
const NAMES = Object.keys(MODULES);
const views = {};
let current = "";

function open(name, { focus = false } = {}) {
  if (name === current) return;
  if (current) {
    views[current].hide();
    mark(current, false);
  }
  current = name;
  mark(name, true);
  if (!views[name]) views[name] = MODULES[name].mount(find(`panel-${name}`));
  views[name].show();
  if (focus) find(`tab-${name}`).focus();
  if (location.hash !== `#${name}`) history.replaceState(null, "", `#${name}`);
  document.title = name === "chat" ? "Quire" : `Quire: ${name}`;
}

function mark(name, isSelected) {
  const tab = find(`tab-${name}`);
  tab.setAttribute("aria-selected", String(isSelected));
  tab.tabIndex = isSelected ? 0 : -1;
  find(`panel-${name}`).hidden = !isSelected;
}

for (const name of NAMES) find(`tab-${name}`).addEventListener("click", () => open(name));

find("tabs").addEventListener("keydown", (event) => {
  const at = NAMES.indexOf(current);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: NAMES.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  open(NAMES[(to + NAMES.length) % NAMES.length], { focus: true });
});

const fromHash = () => (NAMES.includes(location.hash.slice(1)) ? location.hash.slice(1) : "chat");
addEventListener("hashchange", () => {
  if (NAMES.includes(location.hash.slice(1))) open(fromHash());
});

// --- colours: as the system, light, dark ---

const THEMES = ["", "light", "dark"];
function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("quire-theme", theme);
  find("theme").setAttribute("aria-label", `Colours: ${theme || "as the system"}`);
}
find("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "";
  setTheme(THEMES[(THEMES.indexOf(now) + 1) % THEMES.length]);
});
setTheme(THEMES.includes(localStorage.getItem("quire-theme")) ? localStorage.getItem("quire-theme") : "");

// --- the key ---

whenKeyNeeded(() => {
  if (find("key-form").hidden) {
    find("key-form").hidden = false;
    find("key").focus();
  }
});
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(find("key").value.trim());
  find("key").value = "";
  find("key-form").hidden = true;
  views[current].hide();
  views[current].show();
  greet();
});

async function greet() {
  try {
    const { version } = await getJson("version");
    setText(find("server-state"), `version ${version}`);
  } catch (error) {
    setText(find("server-state"), error.status === 401 ? "" : error.message);
  }
}

open(fromHash());
greet();
