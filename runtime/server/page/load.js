// Load and latency, from /metrics.

const KEPT = 180; // samples
const WINDOW = 30; // seconds that rates of tokens and latencies are of
const history = [];

const PLOTS = [
  {id: "requests", title: "Requests", format: short, lines: [["running", (at) => at.now.running], ["waiting", (at) => at.now.waiting]]},
  {
    id: "tokens",
    title: "Tokens a second",
    format: short,
    lines: [["generated", (at) => at.rate("generated", 5)], ["prompt", (at) => at.rate("prompt", 5)]],
  },
  {id: "kv", title: "KV cache in use", format: (value) => `${(100 * value).toFixed(1)}%`, lines: [["used", (at) => at.now.kv]]},
  {id: "ttft", title: "Time to first token", format: duration, lines: quantiles("time_to_first_token_seconds")},
  {id: "itl", title: "Time between tokens", format: duration, lines: quantiles("inter_token_latency_seconds")},
  {id: "e2e", title: "Whole requests", format: duration, lines: quantiles("e2e_request_latency_seconds")},
];

function quantiles(name) {
  return [["p50", (at) => at.quantile(name, 0.5)], ["p95", (at) => at.quantile(name, 0.95)]];
}

// Prometheus' text format, as far as this server writes it.
function parse(text) {
  const found = {values: {}, buckets: {}};
  for (const line of text.split("\n")) {
    const [, name, labels, value] = line.match(/^toolkit:(\w+)\{(.*)\} (\S+)$/) ?? [];
    if (!name) continue;
    if (name.endsWith("_bucket")) {
      const bound = labels.match(/le="([^"]+)"/)[1];
      (found.buckets[name.slice(0, -7)] ??= []).push([bound === "+Inf" ? Infinity : Number(bound), Number(value)]);
    } else found.values[name] = (found.values[name] ?? 0) + Number(value);
  }
  return found;
}

function sample(text) {
  const {values, buckets} = parse(text);
  return {
    at: performance.now() / 1e3,
    buckets,
    running: values.num_requests_running,
    waiting: values.num_requests_waiting,
    kv: values.kv_cache_usage_perc,
    generated: values.generation_tokens_total,
    prompt: values.prompt_tokens_total,
    ended: values.request_success_total,
    queries: values.prefix_cache_queries_total,
    hits: values.prefix_cache_hits_total,
  };
}

// What can be said at a sample: its values, and what changed in the seconds before.
class Moment {
  constructor(index) {
    this.index = index;
    this.now = history[index];
  }
  before(seconds) {
    let index = this.index;
    while (index > 0 && this.now.at - history[index].at < seconds) index -= 1;
    return history[index];
  }
  rate(name, seconds) {
    const then = this.before(seconds);
    return then === this.now ? NaN : Math.max(0, this.now[name] - then[name]) / (this.now.at - then.at);
  }
  // As PromQL's histogram_quantile: linear within a bucket.
  quantile(name, share) {
    const [now, then] = [this.now.buckets[name] ?? [], this.before(WINDOW).buckets[name] ?? []];
    const counts = now.map(([bound, count], index) => [bound, count - (then[index]?.[1] ?? 0)]);
    const total = counts.at(-1)?.[1] ?? 0;
    if (!(total > 0)) return NaN;
    let [low, below] = [0, 0];
    for (const [bound, count] of counts) {
      if (count >= share * total) {
        return bound === Infinity ? low : low + ((bound - low) * (share * total - below)) / Math.max(count - below, 1e-9);
      }
      [low, below] = [bound, count];
    }
    return low;
  }
}

const TILES = [
  ["running", "Running", (at) => short(at.now.running)],
  ["waiting", "Waiting", (at) => short(at.now.waiting)],
  ["throughput", "Tokens/s", (at) => short(at.rate("generated", 5))],
  ["used", "KV cache", (at) => `${(100 * at.now.kv).toFixed(1)}%`],
  ["first", "First token", (at) => duration(at.quantile("time_to_first_token_seconds", 0.5))],
  ["between", "Between tokens", (at) => duration(at.quantile("inter_token_latency_seconds", 0.5))],
  ["hits", "Prefix hits", (at) => (at.now.queries ? `${Math.round((100 * at.now.hits) / at.now.queries)}%` : "–")],
  ["ended", "Requests ended", (at) => short(at.now.ended)],
];

function startLoad() {
  byId("tiles").append(
    ...TILES.map(([id, title]) => make("div", {}, make("dt", {}, title), make("dd", {id: `tile-${id}`}, "–"))),
  );
  byId("plots").append(...PLOTS.map(figure));
}

function figure(plot) {
  const [area, values] = [make("div", {class: "area"}), make("ul", {class: "legend"})];
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    plot.pointed = (event.clientX - box.left) / box.width;
    redraw(plot);
  });
  area.addEventListener("pointerleave", () => {
    plot.pointed = undefined;
    redraw(plot);
  });
  Object.assign(plot, {area, values});
  return make("figure", {id: `plot-${plot.id}`}, make("figcaption", {}, plot.title), area, values);
}

function redraw(plot) {
  const [width, height] = [600, 150];
  const end = history.at(-1)?.at ?? 0;
  const span = Math.max(30, end - (history[0]?.at ?? end));
  const series = plot.lines.map(([, value]) => history.map((_, index) => value(new Moment(index))));
  const most = Math.max(...series.flat().filter(Number.isFinite), 0);
  const top = most > 0 ? round(most) : 1;
  const x = (index) => width - ((end - history[index].at) / span) * width;
  const y = (value) => height - (value / top) * (height - 8);
  const lines = series.flatMap((values, number) =>
    runs(values).flatMap((run) => {
      const path = `M${run.map((index) => `${x(index).toFixed(1)} ${y(values[index]).toFixed(1)}`).join("L")}`;
      const below = `${path}V${height}H${x(run[0]).toFixed(1)}Z`;
      const line = draw("path", {d: path, class: `line c${number}`});
      return number ? [line] : [draw("path", {d: below, class: `below c${number}`}), line];
    }),
  );
  let shown = history.length - 1;
  const marks = [];
  if (plot.pointed !== undefined && history.length) {
    const moment = end - (1 - plot.pointed) * span;
    shown = history.reduce((best, each, index) => (Math.abs(each.at - moment) < Math.abs(history[best].at - moment) ? index : best), 0);
    marks.push(draw("line", {class: "mark", x1: x(shown), x2: x(shown), y1: 0, y2: height}));
  }
  const grid = [0.25, 0.5, 0.75].map((part) => draw("line", {class: "grid", x1: 0, x2: width, y1: height * part, y2: height * part}));
  const texts = plot.lines.map(([name], number) => `${name} ${plot.format(series[number][shown] ?? NaN)}`);
  const picture = draw(
    "svg",
    {viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `${plot.title}: ${texts.join(", ")}`},
    ...grid,
    ...lines,
    ...marks,
  );
  plot.area.replaceChildren(picture, make("span", {class: "top"}, most > 0 ? plot.format(top) : ""));
  plot.values.replaceChildren(
    ...plot.lines.map(([name], number) =>
      make("li", {}, make("i", {class: `c${number}`}), `${name} `, make("b", {}, plot.format(series[number][shown] ?? NaN))),
    ),
    ...(plot.pointed === undefined ? [] : [make("li", {class: "when"}, `${Math.round(end - history[shown].at)} s ago`)]),
  );
}

// Indices of values that follow each other.
function runs(values) {
  const found = [];
  values.forEach((value, index) => {
    if (!Number.isFinite(value)) return;
    if (index && Number.isFinite(values[index - 1])) found.at(-1).push(index);
    else found.push([index]);
  });
  return found;
}

// The next of 1, 1.5, 2, 3, 5, 7.5, 10, … that is no less.
function round(value) {
  const unit = 10 ** Math.floor(Math.log10(value));
  return unit * [1, 1.5, 2, 3, 5, 7.5, 10].find((step) => step * unit >= value * 0.9999);
}

// One look at the server: whether it is there, and its load.
async function look() {
  let text = "";
  try {
    text = await (await ask("metrics")).text();
    state(true, "ready");
  } catch (error) {
    state(false, error.status ? error.message : "not reachable");
    return;
  }
  const now = sample(text);
  if (now.running === undefined) return state(false, "loading");
  history.push(now);
  if (history.length > KEPT) history.shift();
  const moment = new Moment(history.length - 1);
  const rate = moment.rate("generated", 5);
  const pulse = [];
  if (now.running) pulse.push(`${now.running} running`);
  if (now.waiting) pulse.push(`${now.waiting} waiting`);
  if (pulse.length && rate > 0) pulse.push(`${short(rate)} tokens/s`);
  byId("pulse").textContent = pulse.join(" · ") || "idle";
  for (const [id, , value] of TILES) byId(`tile-${id}`).textContent = value(moment);
  if (!byId("load").hidden) PLOTS.forEach(redraw);
}

function state(good, text) {
  byId("dot").className = good ? "good" : "bad";
  if (byId("state").textContent !== text) byId("state").textContent = text;
}
