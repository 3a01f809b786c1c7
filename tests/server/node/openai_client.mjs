// OpenAI's own package for Node, unchanged, against a running server. Called by test_openai_node.py:
//   node openai_client.mjs URL_OF_A_SERVER URL_OF_ONE_THAT_ANSWERS_NOTHING
// Writes one JSON object a check: its name, and what it found or why it failed.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [url, silentUrl] = process.argv.slice(2);
const HELLO = [{ role: "user", content: "Hello" }];
const client = clientOf(url);

function clientOf(address, options = {}) {
  return new OpenAI({ baseURL: `${address}/v1`, apiKey: "none", maxRetries: 0, ...options });
}

function chat(fields, options) {
  return client.chat.completions.create({ model: "leaf", messages: HELLO, ...fields }, options);
}

function complete(fields, options) {
  return client.completions.create({ model: "leaf", prompt: "Once", ...fields }, options);
}

async function all(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

// Waits until the server has no answer under way.
async function idle(address) {
  for (let turn = 0; turn < 1000; turn++) {
    const { server_load } = await (await fetch(`${address}/load`)).json();
    if (server_load === 0) return;
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  assert.fail("answers are still under way");
}

const checks = {
  async chat() {
    const answer = await chat({ max_tokens: 5 });
    assert.equal(answer.object, "chat.completion");
    assert.match(answer.id, /^chatcmpl-/);
    assert.equal(answer.choices[0].message.role, "assistant");
    assert.equal(answer.choices[0].finish_reason, "length");
    assert.equal(answer.usage.completion_tokens, 5);
    assert.equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 5);
    return answer.choices[0].message.content;
  },

  async completion() {
    const answer = await complete({ prompt: ["One", "Two"], max_tokens: 4 });
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
    assert.equal(answer.usage.completion_tokens, 8);
  },

  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    assert.deepEqual(names, ["leaf"]);
    assert.equal((await client.models.retrieve("leaf")).object, "model");
  },

  async streaming() {
    const whole = await chat({ max_tokens: 20 });
    const chunks = await all(await chat({ max_tokens: 20, stream: true, stream_options: { include_usage: true } }));
    assert.equal(chunks[0].choices[0].delta.role, "assistant");
    const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(chunks.at(-2).choices[0].finish_reason, "length");
    assert.equal(chunks.at(-1).usage.completion_tokens, 20);
    const pieces = await all(await complete({ max_tokens: 20, stream: true }));
    const joined = pieces.map((piece) => piece.choices[0].text).join("");
    assert.equal(joined, (await complete({ max_tokens: 20 })).choices[0].text);
  },

  async stream_helper() {
    const runner = client.chat.completions.stream({ model: "leaf", messages: HELLO, max_tokens: 6 });
    let text = "";
    runner.on("content", (delta) => (text += delta));
    const answer = await runner.finalChatCompletion();
    assert.equal(answer.choices[0].message.content, text);
    assert.equal(text, (await chat({ max_tokens: 6 })).choices[0].message.content);
  },

  async logprobs() {
    const fields = { max_tokens: 3, logprobs: true, top_logprobs: 4 };
    const { content } = (await chat(fields)).choices[0].logprobs;
    assert.deepEqual(content.map((one) => one.logprob), [-1, -1, -1]);
    assert.deepEqual(content[0].top_logprobs.map((one) => one.logprob), [-0.5, -1, -2.5, -3.5]);
    const chunks = await all(await chat({ ...fields, stream: true }));
    assert.deepEqual(chunks.flatMap((chunk) => chunk.choices[0].logprobs?.content ?? []), content);
    const { logprobs, text } = (await complete({ max_tokens: 3, logprobs: 2 })).choices[0];
    assert.equal(logprobs.tokens.join(""), text);
  },

  async n() {
    const answer = await chat({ max_tokens: 6, n: 3, seed: 9 });
    const texts = answer.choices.map((choice) => choice.message.content);
    assert.equal(new Set(texts).size, 3);
    const streamed = ["", "", ""];
    for (const chunk of await all(await chat({ max_tokens: 6, n: 3, seed: 9, stream: true }))) {
      for (const choice of chunk.choices) streamed[choice.index] += choice.delta.content ?? "";
    }
    assert.deepEqual(streamed, texts);
  },

  async stop() {
    const whole = (await complete({ max_tokens: 30 })).choices[0].text;
    const stop = whole.slice(12, 15);
    const choice = (await complete({ max_tokens: 30, stop: [stop] })).choices[0];
    assert.equal(choice.text, whole.slice(0, whole.indexOf(stop)));
    assert.equal(choice.finish_reason, "stop");
    const chunks = await all(await complete({ max_tokens: 30, stop: [stop], stream: true }));
    assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), choice.text);
  },

  async seeds() {
    const ask = async (seed) => (await complete({ max_tokens: 8, seed })).choices[0].text;
    assert.equal(await ask(5), await ask(5));
    assert.notEqual(await ask(5), await ask(6));
  },

  async errors() {
    const refused = (fields) => chat(fields).then(() => assert.fail("it was answered"), (error) => error);
    const bad = await refused({ temperature: -1 });
    assert.ok(bad instanceof OpenAI.BadRequestError);
    assert.deepEqual([bad.status, bad.param, bad.type], [400, "temperature", "BadRequestError"]);
    assert.ok(bad.requestID);
    const missing = await refused({ model: "gpt-17" });
    assert.ok(missing instanceof OpenAI.NotFoundError);
    assert.equal(missing.param, "model");
    const long = await refused({ messages: [{ role: "user", content: "word ".repeat(5000) }], stream: true });
    assert.ok(long instanceof OpenAI.BadRequestError);
    const nobody = clientOf("http://127.0.0.1:1").models.list();
    await assert.rejects(async () => await nobody, OpenAI.APIConnectionError);
  },

  async timeouts() {
    const silent = clientOf(silentUrl, { timeout: 300 });
    for (const stream of [false, true]) {
      const asked = silent.chat.completions.create({ model: "leaf", messages: HELLO, stream });
      await assert.rejects(async () => await asked, OpenAI.APIConnectionTimeoutError);
    }
    await idle(silentUrl);
  },

  async cancelled_streams() {
    for (const n of [1, 2]) {
      const stream = await complete({ max_tokens: 2000, n, stream: true });
      for await (const chunk of stream) {
        assert.equal(chunk.choices.length, 1);
        break; // ends the request
      }
      await idle(url);
      const controller = new AbortController();
      const other = await complete({ max_tokens: 2000, n, stream: true }, { signal: controller.signal });
      const reading = all(other);
      controller.abort();
      await reading.catch(() => {});
      await idle(url);
    }
  },

  async concurrent_streams() {
    const ask = async (number) => {
      const prompt = [50 + number, 60 + number, 70];
      const chunks = await all(await complete({ prompt, max_tokens: 12, stream: true, return_token_ids: true }));
      return [prompt, chunks.flatMap((chunk) => chunk.choices[0]?.token_ids ?? [])];
    };
    return await Promise.all(Array.from({ length: 64 }, (_, number) => ask(number)));
  },
};

for (const [name, check] of Object.entries(checks)) {
  let outcome;
  try {
    outcome = { found: (await check()) ?? null };
  } catch (error) {
    outcome = { failure: String(error.stack ?? error) };
  }
  console.log(JSON.stringify({ name, ...outcome }));
}
