// The picture of the plan.

const COLORS = 9;

function drawPlan(info) {
  const {model_info: model} = info;
  byId("facts").replaceChildren(
    make("b", {}, info.model),
    `: ${model.architecture}, ${model.layers} layers × ${model.hidden_size}, vocabulary ${info.vocab_size.toLocaleString("en")}, context ` +
      `${info.max_model_len.toLocaleString("en")}, ${model.quantization === "keep" ? "" : `weights ${model.quantization}, `}target ${info.target}, up to ${info.max_batch} sequences, ` +
      `${size(info.kv_bytes_per_token)} of cache a token. toolkit ${info.version}, ${info.fingerprint}`,
  );
  const names = {arena: "activations", kv: "KV cache"};
  bar("memory", Object.entries(info.memory).filter(([, bytes]) => bytes).map(([name, bytes]) => [names[name] ?? name, bytes]));
  bar("encodings", info.weights.map((each) => [`${each.encoding} (${each.tensors} tensors)`, each.bytes]));
  const ops = info.graph.flatMap((part) => part.ops.map((op) => [op, part.layers.length || 1]));
  const total = ops.reduce((sum, [op, times]) => sum + op.bytes * times, 0) || 1;
  const families = new Map();
  for (const [op, times] of ops) families.set(op.family, (families.get(op.family) ?? 0) + op.bytes * times + 1e-6 * times);
  const ranked = [...families.keys()].sort((one, other) => families.get(other) - families.get(one));
  const color = (family) => `c${Math.min(ranked.indexOf(family), COLORS)}`;
  byId("families").replaceChildren(...ranked.map((family) => make("li", {}, make("i", {class: color(family)}), family)));
  drawStrip(info.graph);
  byId("parts").replaceChildren(...info.graph.map((part, number) => drawPart(part, number, total, color)));
}

function bar(id, entries) {
  const total = entries.reduce((sum, [, bytes]) => sum + bytes, 0);
  byId(id).setAttribute("aria-label", entries.map(([name, bytes]) => `${name} ${size(bytes)}`).join(", ") || "unknown");
  byId(id).replaceChildren(...entries.map(([name, bytes], index) => make("span", {class: `c${index}`, "--part": bytes / total, title: name})));
  byId(`${id}-legend`).replaceChildren(
    ...entries.map(([name, bytes], index) => make("li", {}, make("i", {class: `c${index}`}), `${name} `, make("b", {}, size(bytes)))),
  );
}

const tint = (number) => `${[90, 30, 60, 10, 75, 45][number % 6]}%`;

function drawStrip(graph) {
  const cells = graph.flatMap((part, number) => part.layers.map((layer) => [layer, number, part.name]));
  cells.sort(([one], [other]) => one - other);
  byId("strip").setAttribute("aria-label", `${cells.length} layers`);
  byId("strip").replaceChildren(...cells.map(([layer, number, name]) => make("i", {"--tint": tint(number), title: `layer ${layer}: as ${name}`})));
}

function drawPart(part, number, total, color) {
  const times = part.layers.length || 1;
  const bytes = part.ops.reduce((sum, op) => sum + op.bytes, 0);
  const heading = make(
    "h3",
    {},
    ...(part.layers.length ? [make("i", {"--tint": tint(number)})] : []),
    part.name[0].toUpperCase() + part.name.slice(1),
    make("small", {}, `${bytes ? `${size(bytes)}${times > 1 ? ` × ${times}` : ""}` : ""}`),
  );
  return make("article", {class: "part"}, heading, make("ol", {}, ...part.ops.map((op) => drawOp(op, times, total, color))));
}

function drawOp(op, times, total, color) {
  const [, kind, , place] = op.op.match(/^([^:]*)(:(.*))?$/);
  const share = (op.bytes * times) / total;
  const name = (place ?? "").replace(/^.*\.\d+\./, "");
  return make(
    "li",
    {class: `op ${color(op.family)}`, "--share": share},
    make("b", {}, kind),
    make("small", {title: `${op.op}, ${op.family}`}, name || op.family),
    make("span", {}, op.bytes ? `${size(op.bytes)}${share >= 0.001 ? ` · ${(100 * share).toFixed(1)}%` : ""}` : ""),
  );
}
