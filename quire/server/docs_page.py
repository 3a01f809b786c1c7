"""The page at /docs: it reads /openapi.json and shows its paths and fields. Loads nothing from elsewhere."""

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>Quire API</title>
<style>
  body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
  code { font: 13px monospace }
  summary { cursor: pointer; padding: .2em 0 }
  b { display: inline-block; width: 5em }
  table { border-collapse: collapse; margin: .5em 0 1em 2em }
  td { border-bottom: 1px solid #ddd; padding: .15em .8em .15em 0; vertical-align: top }
</style>
<h1>Quire API</h1>
<p id="about">Reads <a href="openapi.json">openapi.json</a> ...</p>
<p id="login" hidden>API key: <input id="key" type="password"> <button id="show">Show</button></p>
<div id="paths"></div>
<script>
const find = name => document.getElementById(name);
function add(tag, text, parent) {
  const one = document.createElement(tag);
  if (text) one.textContent = text;
  parent.append(one);
  return one;
}
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).filter(one => one !== "null").join(" or ");
  if (schema.type === "array") return "list of " + typeOf(schema.items || {});
  return schema.type || "anything";
}
function addFields(schema, parent) {
  if (schema.description) add("p", schema.description, parent);
  const table = add("table", "", parent);
  for (const [name, value] of Object.entries(schema.properties || {})) {
    const row = add("tr", "", table);
    add("code", name, add("td", "", row));
    add("td", typeOf(value), row);
  }
}
async function show() {
  const key = find("key").value;
  const answer = await fetch("openapi.json", key ? {headers: {authorization: "Bearer " + key}} : {});
  find("login").hidden = answer.ok;
  if (!answer.ok) return;
  const api = await answer.json();
  find("about").textContent = api.info.title + " " + api.info.version;
  find("paths").replaceChildren();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, route] of Object.entries(methods)) {
      const part = add("details", "", find("paths")), head = add("summary", "", part);
      add("b", method.toUpperCase(), head);
      add("code", path, head);
      add("span", " " + (route.description || ""), head);
      const content = route.requestBody && route.requestBody.content["application/json"].schema;
      if (content) addFields(api.components.schemas[typeOf(content)], part);
    }
  }
}
find("show").onclick = show;
show();
</script>
</html>
"""
