// OpenAI's client for JavaScript, with its defaults. tests/clients/test_openai_js.py runs it against a server whose
// address, model and key are in the environment.

import assert from "node:assert/strict";
import test from "node:test";

import OpenAI from "openai";

const { CLIENT_BASE_URL: baseURL, CLIENT_KEY: apiKey, CLIENT_MODEL: model } = process.env;
const client = new OpenAI({ baseURL, apiKey });
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "What is the capital of France?" },
];
const greedy = { model, messages, temperature: 0 };

test("a chat streams what it answers and counts the same", async () => {
  const whole = await client.chat.completions.create(greedy);
  assert.match(whole.choices[0].message.content, /Paris/);
  assert.equal(whole.choices[0].finish_reason, "stop");
  const stream = client.chat.completions.stream({ ...greedy, stream_options: { include_usage: true } });
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
  const { prompt_tokens, completion_tokens, total_tokens } = await stream.totalUsage();
  assert.equal(prompt_tokens, whole.usage.prompt_tokens);
  assert.equal(completion_tokens, whole.usage.completion_tokens);
  assert.equal(total_tokens, prompt_tokens + completion_tokens);
});

test("chunks are read one by one, the usage last", async () => {
  const wanted = { ...greedy, stream: true, stream_options: { include_usage: true } };
  const chunks = [];
  for await (const chunk of await client.chat.completions.create(wanted)) chunks.push(chunk);
  const last = chunks.pop();
  assert.deepEqual(last.choices, []);
  assert.ok(last.usage.completion_tokens > 0);
  assert.match(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), /Paris/);
  assert.equal(chunks.at(-1).choices[0].finish_reason, "stop");
});

test("choices differ and are the same streamed", async () => {
  const wanted = { model, messages, temperature: 1.2, n: 3, seed: 5, max_completion_tokens: 8 };
  const whole = await client.chat.completions.create(wanted);
  const texts = whole.choices.map((choice) => choice.message.content);
  assert.equal(texts.length, 3);
  assert.ok(new Set(texts).size > 1);
  const final = await client.chat.completions.stream(wanted).finalChatCompletion();
  assert.deepEqual(final.choices.map((choice) => choice.message.content), texts);
});

test("a stop string ends the text in front of it", async () => {
  const { choices } = await client.chat.completions.create({ ...greedy, stop: ["never said", "Paris"] });
  assert.equal(choices[0].message.content, "The capital of France is ");
  assert.equal(choices[0].finish_reason, "stop");
});

test("logprobs name each token and its alternatives", async () => {
  const wanted = { ...greedy, logprobs: true, top_logprobs: 3, max_tokens: 5 };
  const { choices } = await client.chat.completions.create(wanted);
  const tokens = choices[0].logprobs.content;
  assert.equal(tokens.length, 5);
  assert.equal(Buffer.from(tokens.flatMap((token) => token.bytes)).toString(), choices[0].message.content);
  for (const token of tokens) assert.equal(token.top_logprobs.length, 3);
  const final = await client.chat.completions.stream(wanted).finalChatCompletion();
  assert.deepEqual(final.choices[0].logprobs.content, tokens);
});

test("a JSON schema is parsed, whole and streamed", async () => {
  const schema = {
    type: "object",
    properties: { country: { enum: ["France", "Spain"] } },
    required: ["country"],
    additionalProperties: false,
  };
  const wanted = {
    ...greedy,
    response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema } },
  };
  const whole = await client.chat.completions.parse(wanted);
  const city = whole.choices[0].message.parsed;
  assert.deepEqual(Object.keys(city), ["country"]);
  assert.ok(schema.properties.country.enum.includes(city.country));
  // The client's streams parse what a schema library made; of a plain schema they hand out the text.
  assert.deepEqual(JSON.parse(await client.chat.completions.stream(wanted).finalContent()), city);
});

test("a completion echoes its prompt", async () => {
  const wanted = { model, prompt: ["The capital of France is", "One, two,"], temperature: 0, max_tokens: 2, echo: true };
  const { choices } = await client.completions.create({ ...wanted, logprobs: 1 });
  assert.match(choices[0].text, /^The capital of France is Paris/);
  assert.equal(choices[1].logprobs.tokens.join(""), choices[1].text);
});

test("models are listed and found", async () => {
  const names = [];
  for await (const found of client.models.list()) names.push(found.id);
  assert.deepEqual(names, [model]);
  assert.equal((await client.models.retrieve(model)).id, model);
});

const refused = {
  model: [{ model: "another" }, OpenAI.NotFoundError, "model", "model_not_found"],
  value: [{ temperature: 9 }, OpenAI.BadRequestError, "temperature", "invalid_value"],
  "value, streamed": [{ temperature: 9, stream: true }, OpenAI.BadRequestError, "temperature", "invalid_value"],
  type: [{ n: "2" }, OpenAI.BadRequestError, "n", "invalid_type"],
};
for (const [name, [change, kind, param, code]] of Object.entries(refused)) {
  test(`a refusal is the client's own exception: ${name}`, async () => {
    await assert.rejects(client.chat.completions.create({ ...greedy, ...change }), (error) => {
      assert.ok(error instanceof kind, error);
      assert.deepEqual([error.param, error.code, error.type], [param, code, "invalid_request_error"]);
      assert.ok(error.requestID);
      return true;
    });
  });
}

test("a wrong key is an authentication error", async () => {
  const stranger = client.withOptions({ apiKey: "no-key-of-this-server" });
  await assert.rejects(stranger.chat.completions.create(greedy), (error) => {
    assert.ok(error instanceof OpenAI.AuthenticationError, error);
    assert.equal(error.code, "invalid_api_key");
    return true;
  });
});

// The Python side waits until both of these are aborted on the server.
test("a stream is left by breaking out of its loop", async () => {
  const stream = await client.chat.completions.create({ ...greedy, stream: true, ignore_eos: true });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  assert.ok(stream.controller.signal.aborted);
});

test("a stream is cancelled by its signal", async () => {
  const leaving = new AbortController();
  const wanted = { ...greedy, stream: true, ignore_eos: true };
  const stream = await client.chat.completions.create(wanted, { signal: leaving.signal });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) leaving.abort();
});
