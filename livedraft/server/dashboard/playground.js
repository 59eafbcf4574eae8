// A chat with the served model, each token coloured by where it came from.
import { $, duration, el, say } from "./dom.js";

const MAX_TOKENS = 512;
const TITLES = {
  accepted: "accepted: drafted, and the target agreed",
  bonus: "bonus: free, because the whole draft was accepted",
  recovered: "recovered: the target's own token after a miss",
  plain: "plain: nothing was drafted",
};

export class Playground {
  constructor() {
    this.model = null;
    this.messages = [];
    this.running = null;
    $("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.send();
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      $("chat-form").requestSubmit();
    });
    $("new-chat").addEventListener("click", () => {
      this.running?.abort();
      this.messages = [];
      $("chat").replaceChildren();
      say("chat-status", "");
      $("message").focus();
    });
  }

  follow(details) {
    this.model = details.model;
    this.maxTokens = Math.min(MAX_TOKENS, Math.floor(details.max_model_len / 2));
    $("api-key-row").hidden = !details.needs_api_key;
    const learns = Boolean(details.learning?.enabled);
    $("stores").parentElement.hidden = !learns;
  }

  async send() {
    const text = $("message").value.trim();
    if (!text || !this.model) return;
    $("message").value = "";
    const answer = this.add("assistant", text);
    const messages = (this.messages = [...this.messages, { role: "user", content: text }]);
    this.running = new AbortController();
    say("send", "Stop");
    say("chat-status", "Waiting for the first token …");
    const tally = { accepted: 0, bonus: 0, recovered: 0, plain: 0, rounds: 0, proposers: new Set(), text: "" };
    const started = performance.now();
    try {
      await this.stream(messages, (choice) => {
        tally.firstAfter ??= (performance.now() - started) / 1000;
        show(answer, choice, tally);
      });
      this.finish(messages, tally, (performance.now() - started) / 1000);
    } catch (error) {
      const isStopped = error.name === "AbortError";
      say("chat-status", isStopped ? "Stopped." : error.message);
      if (tally.text) this.remember(messages, tally.text);
      else if (this.messages === messages) this.messages = messages.slice(0, -1); // the next message does not come after a question without an answer
    } finally {
      this.running = null;
      say("send", "Send");
    }
  }

  add(role, question) {
    const answer = el("p", { class: role });
    $("chat").append(el("p", { class: "user" }, question), answer);
    $("chat").scrollTop = $("chat").scrollHeight;
    return answer;
  }

  /** Calls `take` with each streamed choice. Throws an Error with the server's sentence. */
  async stream(messages, take) {
    const key = $("api-key").value;
    const body = { model: this.model, messages, stream: true, return_token_kinds: true, temperature: 0, max_tokens: this.maxTokens };
    if (!$("speculates").checked) body.num_speculative_tokens = 0;
    if (!$("stores").checked) body.store = false;
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) },
      body: JSON.stringify(body),
      signal: this.running.signal,
    });
    if (!response.ok) throw new Error(await sentence(response));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") continue;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        for (const choice of chunk.choices) take(choice);
      }
    }
  }

  remember(messages, text) {
    if (this.messages === messages) this.messages = [...messages, { role: "assistant", content: text }];
  }

  finish(messages, tally, seconds) {
    this.remember(messages, tally.text);
    const count = tally.accepted + tally.bonus + tally.recovered + tally.plain;
    const rest = seconds - tally.firstAfter;
    const speed = count > 1 && rest > 0 ? `, then ${Math.round((count - 1) / rest)} tokens a second` : "";
    const by = [...tally.proposers].join(" and ");
    say(
      "chat-status",
      `${count} tokens in ${tally.rounds} passes, ${tally.accepted} of them accepted${by ? ` from ${by}` : ""}. ` +
        `First after ${duration(tally.firstAfter)}${speed}.`,
    );
  }
}

function show(answer, choice, tally) {
  tally.text += choice.delta?.content ?? "";
  const kinds = choice.token_kinds;
  if (!kinds) return;
  tally.rounds += 1;
  if (kinds.proposer) tally.proposers.add(kinds.proposer);
  const log = $("chat");
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  for (const [text, kind] of kinds.tokens) {
    if (kind in tally) tally[kind] += 1;
    if (text) answer.append(el("span", { class: `token ${kind}`, title: TITLES[kind] }, text));
  }
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/** What the server says is wrong. */
export async function sentence(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered ${response.status}.`;
  }
}
