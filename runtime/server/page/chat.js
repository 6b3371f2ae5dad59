// The conversation.

const chat = {messages: [], busy: null, template: true, follow: true};
const NUMBERS = ["temperature", "max_tokens", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

function parameters() {
  const given = NUMBERS.map((name) => [name, byId(name).value.trim()]).filter(([, value]) => value !== "");
  const stop = byId("stop_text").value;
  return {...Object.fromEntries(given.map(([name, value]) => [name, Number(value)])), ...(stop ? {stop: [stop]} : {})};
}

function bubble(role, text) {
  byId("empty")?.remove();
  const body = make("div", {class: "text"});
  const element = make("article", {class: `message ${role}`, "aria-label": role === "user" ? "You" : "Model"}, body);
  byId("messages").append(element);
  show(body, text);
  return element;
}

// Text with its code and what is bold. Only text is put in: nothing that a model writes becomes an element.
function show(body, text) {
  const pieces = text.split(/^```/m);
  body.replaceChildren(
    ...pieces.map((piece, index) => {
      if (index % 2 === 0) return make("p", {}, ...inline(index ? piece.replace(/^[^\n]*\n?/, "") : piece));
      const [, language, code] = piece.match(/^([^\n]*)\n?([\s\S]*)$/);
      return make("pre", {tabindex: "0", ...(language ? {"data-language": language.trim()} : {})}, make("code", {}, code));
    }).filter((each) => each.tagName === "PRE" || each.textContent.trim()),
  );
}
const inline = (text) =>
  text.trim().split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (/^`[^`]+`$/.test(part)) return make("code", {}, part.slice(1, -1));
    return /^\*\*[^*]+\*\*$/.test(part) ? make("strong", {}, part.slice(2, -2)) : part;
  });

function scrollDown() {
  const box = byId("messages");
  if (chat.follow) box.scrollTop = box.scrollHeight;
}

async function send() {
  const question = byId("question").value;
  if (!question.trim() || chat.busy) return;
  byId("question").value = "";
  grow();
  chat.follow = true;
  const conversation = chat.messages;
  conversation.push({role: "user", content: question});
  bubble("user", question);
  const answer = bubble("assistant", "");
  answer.classList.add("waiting");
  scrollDown();
  chat.busy = new AbortController();
  turn(true);
  const text = {content: "", reasoning: ""};
  const figures = {began: performance.now(), first: 0, last: 0, tokens: 0, reason: ""};
  try {
    for await (const chunk of stream(chat.busy.signal)) take(chunk, text, figures, answer);
  } catch (error) {
    if (error.name === "AbortError") figures.reason = "stopped";
    else answer.append(make("p", {class: "error", role: "alert"}, error.message || "The connection broke."));
  }
  if (text.content || text.reasoning) conversation.push({role: "assistant", content: text.content});
  else conversation.pop();
  answer.classList.remove("waiting");
  answer.append(make("p", {class: "figures"}, summary(figures)));
  scrollDown();
  chat.busy = null;
  turn(false);
}

function take(chunk, text, figures, answer) {
  if (chunk.error) throw new Error(chunk.error.message);
  if (chunk.usage) figures.tokens = chunk.usage.completion_tokens;
  const [choice] = chunk.choices ?? [];
  if (!choice) return;
  figures.reason = choice.finish_reason ?? figures.reason;
  const delta = choice.delta ?? {content: choice.text};
  text.reasoning += delta.reasoning_content ?? "";
  text.content += delta.content ?? "";
  if (!text.content && !text.reasoning) return;
  figures.last = performance.now();
  figures.first ||= figures.last;
  answer.classList.remove("waiting");
  if (text.reasoning) {
    const fold = answer.querySelector("details") ?? make("details", {}, make("summary", {}, "Reasoning"), make("p"));
    if (!fold.isConnected) answer.prepend(fold);
    fold.lastChild.textContent = text.reasoning.trim();
  }
  show(answer.querySelector(".text"), text.content);
  scrollDown();
}

function summary({began, first, last, tokens, reason}) {
  const parts = [];
  if (tokens) parts.push(`${tokens} tokens`);
  if (first) parts.push(`first after ${duration((first - began) / 1e3)}`);
  if (tokens > 1 && last > first) parts.push(`${short((tokens - 1) / ((last - first) / 1e3))} tokens/s`);
  if (reason) parts.push({stop: "ended by itself", length: "cut at the limit"}[reason] ?? reason);
  return parts.join(" · ");
}

// The events of an answer.
async function* stream(signal) {
  const system = byId("system").value.trim();
  const messages = [...(system ? [{role: "system", content: system}] : []), ...chat.messages];
  const asked = chat.template ? {messages} : {prompt: messages.map((each) => each.content).join("\n"), max_tokens: 256};
  const body = JSON.stringify({...asked, ...parameters(), stream: true, stream_options: {include_usage: true}});
  const path = chat.template ? "v1/chat/completions" : "v1/completions";
  const reader = (await ask(path, {method: "POST", body, signal})).body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function turn(busy) {
  byId("send").hidden = busy;
  byId("stop").hidden = !busy;
  byId("messages").setAttribute("aria-busy", busy);
  if (!busy && matchMedia("(hover: hover)").matches) byId("question").focus();
}

function grow() {
  const box = byId("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

function startChat() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("question").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  byId("question").addEventListener("input", grow);
  byId("stop").addEventListener("click", () => chat.busy?.abort());
  byId("clear").addEventListener("click", () => {
    chat.busy?.abort();
    chat.messages = [];
    byId("messages").replaceChildren();
    byId("question").focus();
  });
  byId("messages").addEventListener("scroll", () => {
    const box = byId("messages");
    chat.follow = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
  });
  byId("parameters").addEventListener("submit", (event) => event.preventDefault());
}
