// Pictures that can be zoomed: the timeline of the step and the arena.

// A picture of `height` by `columns` with a part of its width in view. `axis` gives labels below it; `names` those
// inside, [left, right, top, bottom, text] with shares of the width and of the height, shown where they have room;
// `fit` says how much of the height the part between two shares of the width needs.
function zoomable(id, {height, columns, content, axis, names, fit = () => height}) {
  const box = byId(id);
  const inner = make("div");
  const ticks = make("div", {class: "axis", "aria-hidden": "true"});
  const tags = make("div", {class: "tags", "aria-hidden": "true"});
  const picture = draw("svg", {height, preserveAspectRatio: "none"}, ...content);
  inner.append(picture, tags, ticks);
  box.append(inner);
  let zoom = 1;
  let tall = 0;
  function apply(factor, center) {
    const at = center ?? (box.scrollLeft + box.clientWidth / 2) / inner.clientWidth;
    zoom = Math.min(400, Math.max(1, factor));
    inner.style.width = `${100 * zoom}%`;
    box.classList.toggle("dense", inner.clientWidth < 3 * launches.length);
    ticks.replaceChildren(...labels(axis(inner.clientWidth), inner.clientWidth));
    box.scrollLeft = at * inner.clientWidth - box.clientWidth / 2;
    tall = 0;
    look();
  }
  function look() {
    const pixels = inner.clientWidth;
    const needed = fit(box.scrollLeft / pixels, (box.scrollLeft + box.clientWidth) / pixels);
    if (needed === tall) return;
    tall = needed;
    picture.setAttribute("viewBox", `0 0 ${columns} ${tall}`);
    const scale = height / tall;
    tags.replaceChildren(
      ...names
        .filter(
          ([left, right, top, bottom, text]) =>
            (right - left) * pixels > 12 + 6.5 * text.length && (bottom - top) * scale >= 16 && top < tall,
        )
        .map(([left, , top, bottom, text]) =>
          make("span", {style: `left:${100 * left}%;top:${(scale * (top + bottom)) / 2}px`}, text),
        ),
    );
  }
  const button = (text, label, action) =>
    make("button", {type: "button", "aria-label": label, title: label, onclick: action}, text);
  document.querySelector(`.zoom[data-for=${id}]`).append(
    button("−", "Zoom out", () => apply(zoom / 2)),
    button("+", "Zoom in", () => apply(zoom * 2)),
    button("layer", "Zoom to the selected layer", () => {
      const {part, at} = launches[selected ?? 0].place;
      const [start, end] = spanOf(id, part.launches[at]);
      apply(0.9 / Math.max(1e-6, end - start), (start + end) / 2);
    }),
    button("all", "Show all", () => apply(1)),
  );
  box.addEventListener("scroll", look);
  box.addEventListener("keydown", (event) => {
    const last = launches.length - 1;
    const now = selected ?? -1;
    const next = {ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last}[event.key];
    if (next === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    select(Math.min(last, Math.max(0, next)));
  });
  picture.addEventListener("click", (event) => {
    if (event.target.dataset.launch) select(Number(event.target.dataset.launch));
  });
  new ResizeObserver(() => apply(zoom)).observe(box);
  return {
    show(share) {
      const left = share * inner.clientWidth - box.scrollLeft;
      if (left < 0 || left > box.clientWidth) box.scrollLeft = share * inner.clientWidth - box.clientWidth / 2;
    },
  };
}

// Labels [share of the width, text] that fit beside each other.
function labels(wanted, pixels) {
  let free = 0;
  return wanted
    .filter(([share, text]) => {
      const left = share * pixels;
      const right = left + 10 + 6.5 * text.length;
      return left >= free && right <= pixels && (free = right);
    })
    .map(([share, text]) => make("span", {style: `left:${100 * share}%`}, text));
}

// Where some launches lie on a picture, as shares of its width.
function spanOf(id, members) {
  const first = members[0];
  const last = members.at(-1);
  if (id === "arena") return [first / launches.length, (last + 1) / launches.length];
  return [starts[first] / total, (starts[last] + timeOf(launches[last])) / total];
}

const starts = [];
launches.reduce((sum, launch) => (starts.push(sum), sum + timeOf(launch)), 0);
const WIDE = 10000;

function drawTimeline() {
  const x = (seconds) => (WIDE * seconds) / total;
  const content = layerSpans().map(([name, members], at) => {
    const [start, end] = spanOf("timeline", members);
    return draw("rect", {
      class: at % 2 ? "lane odd" : "lane",
      x: WIDE * start,
      width: WIDE * (end - start),
      y: 0,
      height: 10,
      "data-launch": members[0],
      "data-tip": name,
    });
  });
  for (const launch of launches) {
    const width = x(timeOf(launch));
    const common = {x: x(starts[launch.index]), y: 14, height: 52, "data-launch": launch.index};
    if (measured) content.push(draw("rect", {...common, width, class: `gap c${launch.kernel.color}`}));
    content.push(
      draw("rect", {...common, width: Math.min(width, x(launch.seconds)), class: `fill c${launch.kernel.color}`}),
    );
    if (launch.occupancy !== null) {
      const height = 28 * launch.occupancy;
      content.push(draw("rect", {...common, y: 98 - height, height, width, class: "busy"}));
    }
  }
  const mark = draw("rect", {class: "mark", y: 13, height: 54, width: 0});
  const view = zoomable("timeline", {
    height: measured ? 100 : 68,
    columns: WIDE,
    content: [...content, mark],
    axis: (pixels) => {
      const step = niceStep((total * 90) / pixels);
      return Array.from({length: Math.floor(total / step) + 1}, (_, at) => [
        (at * step) / total,
        duration(at * step),
      ]);
    },
    names: launches.map((launch) => [...spanOf("timeline", [launch.index]), 14, 66, title(launch)]),
  });
  return (launch) => {
    mark.setAttribute("x", launch ? x(starts[launch.index]) : 0);
    mark.setAttribute("width", launch ? x(timeOf(launch)) : 0);
    if (launch) view.show((starts[launch.index] + timeOf(launch) / 2) / total);
  };
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= least);
}

// Stretches of the program in order: before, each layer, after.
function layerSpans() {
  const spans = data.parts.flatMap((part) =>
    part.launches.map((members, at) => [part.layers.length ? `layer ${part.layers[at]}` : part.name, members]),
  );
  return spans.sort((one, other) => one[1][0] - other[1][0]);
}

function drawArena() {
  const HIGH = 280;
  const y = (bytes) => (HIGH * bytes) / Math.max(1, data.arena);
  const makers = new Map();
  for (const launch of launches) {
    launch.args.forEach((arg, at) => {
      if (arg[0] === "arena" && launch.kernel.args[at]?.[1] && !makers.has(arg[1])) makers.set(arg[1], launch);
    });
  }
  const shapes = new Map();
  const content = buffers.map((buffer) => {
    const maker = makers.get(buffer.value) ?? launches[buffer.first];
    const text =
      `${buffer.value}\n${size(buffer.bytes)} at ${number(buffer.offset)}\n` +
      `launches ${buffer.first} to ${buffer.last}, ` +
      `made by ${maker.index} ${title(maker)} (${where(maker)})`;
    const shape = draw("rect", {
      class: `buffer c${maker.kernel.color}`,
      x: buffer.first,
      width: buffer.last + 1 - buffer.first,
      y: y(buffer.offset),
      height: y(buffer.bytes),
      "data-launch": maker.index,
      "data-tip": text,
    });
    shapes.set(buffer.value, shape);
    return shape;
  });
  const cursor = draw("rect", {class: "cursor", y: 0, height: HIGH, width: 0});
  const line = data.live.flatMap((bytes, at) => [`${at},${y(bytes)}`, `${at + 1},${y(bytes)}`]).join(" ");
  content.push(cursor, draw("polyline", {class: "live", points: line}));
  const count = launches.length;
  const view = zoomable("arena", {
    height: HIGH,
    columns: count,
    content,
    axis: () => layerSpans().map(([name, members]) => [members[0] / count, name]),
    names: buffers.map(({value, offset, bytes, first, last}) => [
      first / count,
      (last + 1) / count,
      y(offset),
      y(offset + bytes),
      value,
    ]),
    fit: (left, right) => {
      const seen = buffers.filter(({first, last}) => first < right * count && last + 1 > left * count);
      const end = Math.max(1, ...seen.map(({offset, bytes}) => offset + bytes));
      byId("arena-range").textContent = `0 to ${size(end)} of the arena`;
      return y(end);
    },
  });
  return (launch) => {
    for (const shape of shapes.values()) shape.classList.remove("touched");
    for (const arg of launch?.args ?? []) if (arg[0] === "arena") shapes.get(arg[1])?.classList.add("touched");
    cursor.setAttribute("x", launch ? launch.index : 0);
    cursor.setAttribute("width", launch ? 1 : 0);
    if (launch) view.show((launch.index + 0.5) / launches.length);
  };
}
