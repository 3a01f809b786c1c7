// Demo tools that run in the browser, with the names and arguments of `quire chat --tools demo`.

const CITY = { city: ["string", "Name of the city or time zone"] };
const TWO = { a: ["integer", "A number"], b: ["integer", "A number"] };

const TOOLS = {
  add: ["Add two numbers", TWO, ({ a, b }) => ({ sum: a + b })],
  multiply: ["Multiply two numbers", TWO, ({ a, b }) => ({ product: a * b })],
  calculate: [
    "Calculate an arithmetic expression", { expression: ["string", "For example (3 + 4) * 2.5"] },
    ({ expression }) => ({ result: evaluate(expression) }),
  ],
  get_time: ["Get the local time in a city", CITY, ({ city }) => {
    const zone = findZone(city);
    return { city, time: format(zone, { hour: "2-digit", minute: "2-digit", hourCycle: "h23" }) };
  }],
  get_date: ["Get the date and the day of the week in a city", CITY, ({ city }) => {
    const zone = findZone(city);
    return { city, date: format(zone, { dateStyle: "short" }, "sv"), day: format(zone, { weekday: "long" }), zone };
  }],
};

/** As the field `tools` of a request. */
export const SCHEMAS = Object.entries(TOOLS).map(([name, [description, parameters]]) => ({
  type: "function",
  function: {
    name, description,
    parameters: {
      type: "object",
      properties: Object.fromEntries(Object.entries(parameters).map(([key, [type, words]]) => [key, { type, description: words }])),
      required: Object.keys(parameters),
    },
  },
}));

/** The result of a call as JSON text; {"error": ...} for one that cannot be carried out. */
export function call(name, text) {
  try {
    if (!TOOLS[name]) throw new Error(`there is no tool ${name}; there are ${Object.keys(TOOLS).join(", ")}`);
    const [, parameters, run] = TOOLS[name];
    const given = JSON.parse(text || "{}");
    for (const [key, [type]] of Object.entries(parameters)) {
      const fits = type === "integer" ? Number.isInteger(given[key]) : typeof given[key] === type;
      if (!fits) throw new Error(`${key} must be of type ${type}`);
    }
    return JSON.stringify(run(given));
  } catch (error) {
    return JSON.stringify({ error: error.message });
  }
}

function format(zone, options, language = "en") {
  return new Intl.DateTimeFormat(language, { timeZone: zone, ...options }).format(new Date());
}

function findZone(name) {
  const wanted = name.trim().replaceAll(" ", "_").toLowerCase();
  const zones = ["UTC", ...Intl.supportedValuesOf("timeZone")];
  const found = zones.find((one) => one.toLowerCase() === wanted) ?? zones.find((one) => one.toLowerCase().endsWith(`/${wanted}`));
  if (!found) throw new Error(`no time zone is named ${name.slice(0, 80)}; name one such as Europe/Paris`);
  return found;
}

/** Arithmetic with + - * / % ** and parentheses, by recursive descent: no code is run. */
export function evaluate(text) {
  if (text.length > 200) throw new Error("the expression is too long");
  const tokens = text.match(/\*\*|[0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?|[-+*/%()]|\S/gi) ?? [];
  let at = 0;
  const take = (wanted) => (tokens[at] === wanted ? ((at += 1), true) : false);
  function sum() {
    let value = product();
    for (;;) {
      if (take("+")) value += product();
      else if (take("-")) value -= product();
      else return value;
    }
  }
  function product() {
    let value = signed();
    for (;;) {
      if (take("*")) value *= signed();
      else if (take("/")) value /= signed();
      else if (take("%")) value %= signed();
      else return value;
    }
  }
  function signed() {
    if (take("-")) return -signed();
    if (take("+")) return signed();
    const base = atom();
    return take("**") ? base ** signed() : base;
  }
  function atom() {
    if (take("(")) {
      const value = sum();
      if (!take(")")) throw new Error("a ) is missing");
      return value;
    }
    const token = tokens[at];
    if (token === undefined || !/^[0-9.]/.test(token)) throw new Error(`${token ?? "the end"} is not expected here`);
    at += 1;
    return Number(token);
  }
  const value = sum();
  if (at < tokens.length) throw new Error(`${tokens[at]} is not expected here`);
  if (!Number.isFinite(value)) throw new Error("the result is not a number");
  return value;
}
