"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const table = ({columns, rows}) => rows.map((row) => Object.fromEntries(columns.map((name, at) => [name, row[at]])));
  const launches = table(data.launches), weights = table(data.weights), buffers = table(data.buffers);
  const weightOf = new Map(weights.map((weight) => [weight.name, weight]));
  const byId = (id) => document.getElementById(id);
  const timeOf = (launch) => launch.measured ?? launch.seconds;
  const total = launches.reduce((sum, launch) => sum + timeOf(launch), 0);
  const measured = launches.some((launch) => launch.measured !== null);
  let selected = null;

  // --- making elements ------------------------------------------------------------------------------------------------

  function fill(element, properties, children) {
    for (const [name, value] of Object.entries(properties)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name.startsWith("--")) element.style.setProperty(name, value);
      else element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  }
  const make = (tag, properties = {}, ...children) => fill(document.createElement(tag), properties, children);
  const draw = (tag, properties = {}, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);

  // --- quantities -----------------------------------------------------------------------------------------------------

  const number = (value) => value.toLocaleString("en-US", {maximumFractionDigits: 6});
  function size(count) {
    for (const unit of ["B", "KiB", "MiB"]) {
      if (count < 1024) return unit === "B" ? `${Math.round(count)} B` : `${count.toFixed(1)} ${unit}`;
      count /= 1024;
    }
    return `${count.toFixed(2)} GiB`;
  }
  function duration(seconds) {
    for (const [unit, factor] of [["ns", 1e9], ["µs", 1e6], ["ms", 1e3]]) {
      if (seconds * factor < 999.5) return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
    }
    return `${Number(seconds.toPrecision(3))} s`;
  }
  const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;
  const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

  // --- what each launch is --------------------------------------------------------------------------------------------

  const writer = new Map();
  launches.forEach((launch, index) => {
    launch.index = index;
    launch.kernel = data.kernels[launch.kernel];
    [launch.kind, launch.module = ""] = launch.op.split(/:(.*)/s);
    launch.inputs = [];
    launch.readers = new Set();
    launch.args.forEach((arg, at) => {
      const [, writes] = launch.kernel.args[at] ?? ["", false];
      const key = Array.isArray(arg) && {arena: `a ${arg[1]}`, cache: `c ${arg[1]} ${arg[2]}`}[arg[0]];
      if (!key) return;
      if (!writes && writer.has(key)) {
        launch.inputs.push({key, from: writer.get(key)});
        launches[writer.get(key)].readers.add(index);
      }
    });
    launch.args.forEach((arg, at) => {
      if (launch.kernel.args[at]?.[1]) writer.set(arg[0] === "arena" ? `a ${arg[1]}` : `c ${arg[1]} ${arg[2]}`, index);
    });
  });
  data.parts.forEach((part) => {
    part.layerOf = new Map();
    part.launches.forEach((members, at) => {
      members.forEach((index, position) => {
        launches[index].place = {part, at, position};
        launches[index].layer = part.layers[at] ?? null;
      });
    });
  });

  const bare = (name) => name.replace(/\.(weight|bias)$/, "");
  const leaf = (name) => bare(name).split(".").at(-1);
  const inLayer = (module) => module.replace(/^.*?\.\d+(\.|$)/, "");
  const weightsOf = (launch) => launch.args.filter((arg) => arg[0] === "weight").map((arg) => weightOf.get(arg[1]));

  // What the launch is called: after its module, if the module's own weight or a matrix is what it reads.
  function title(launch) {
    const [weight] = weightsOf(launch);
    if (!weight || !launch.module) return launch.kind;
    if (!weight.sources.length) return weight.name;
    if (bare(weight.sources[0]) === launch.module) return [...new Set(weight.sources.map(leaf))].join(" + ");
    return weight.shape.length > 1 ? leaf(launch.module) : launch.kind;
  }
  function subtitle(launch) {
    const [weight] = weightsOf(launch);
    const what = weight ? `${weight.encoding} ${weight.shape.join(" × ")}` : launch.kernel.params;
    const fused = weight && launch.kernel.epilogue;
    return [launch.kind === title(launch) ? inLayer(launch.module) : launch.kind, fused, what].filter(Boolean).join(" · ");
  }
  const where = (launch) => (launch.layer === null ? launch.place.part.name : `layer ${launch.layer}`);
  function describe(launch) {
    const lines = [`${launch.index}  ${title(launch)}  (${where(launch)})`, subtitle(launch)];
    if (measured) {
      lines.push(`measured ${duration(launch.measured)}, ${percent(launch.measured / total)} of the step`);
      lines.push(`roofline ${duration(launch.seconds)}, ${percent(launch.seconds / launch.measured, 0)} of it reached`);
      lines.push(`threads at work ${percent(launch.occupancy, 0)}`);
    } else {
      lines.push(`roofline ${duration(launch.seconds)}, ${percent(launch.seconds / total)} of the step`);
    }
    return [...lines, `reads ${size(launch.bytes)}, ${number(launch.flops)} operations`].join("\n");
  }

  // --- graph ----------------------------------------------------------------------------------------------------------

  const ROW = 46, TOP = 6, DOT = 40, LANE = 9;

  function drawParts() {
    data.parts.forEach((part, number) => {
      const [members] = part.launches;
      const time = part.launches.flat().reduce((sum, index) => sum + timeOf(launches[index]), 0);
      const many = part.layers.length > 1 ? ` × ${part.layers.length}` : "";
      byId("parts").append(
        make("article", {class: "part", id: `part-${number}`},
          make("h3", {}, ...(part.layers.length ? [make("i", {"--tint": tint(number)})] : []), make("b", {}, part.name[0].toUpperCase() + part.name.slice(1)),
            make("span", {}, `${duration(time / part.launches.length)}${many} · ${percent(time / total)}`)),
          make("div", {class: "flow"}, drawEdges(members), ...members.map((index, position) => opButton(part, position)))));
    });
    drawStrip();
  }

  const tint = (number) => `${[90, 30, 60, 10, 75, 45][number % 6]}%`;

  function opButton(part, position) {
    const same = part.launches.map((members) => launches[members[position]]);
    const [launch] = same;
    const share = same.reduce((sum, each) => sum + timeOf(each), 0) / total;
    return make("button",
      {type: "button", class: `op c${launch.kernel.color}`, "data-launch": launch.index, "aria-pressed": "false", "--share": share,
        onclick: () => select(launch.index)},
      make("span", {}, make("b", {}, title(launch)), make("small", {title: subtitle(launch)}, subtitle(launch))),
      make("span", {class: "figures"}, duration(timeOf(launch)), make("small", {}, percent(share))));
  }

  function drawStrip() {
    const strip = byId("strip"), cells = [];
    data.parts.forEach((part, number) => part.layers.forEach((layer, at) => cells.push({layer, part, number, first: part.launches[at][0]})));
    cells.sort((one, other) => one.layer - other.layer);
    for (const {layer, part, number, first} of cells) {
      strip.append(make("i", {"--tint": tint(number), "data-layer": layer, "data-tip": `layer ${layer}: as ${part.name}`,
        onclick: () => select(first)}));
    }
  }

  // Straight lines between neighbors, bows on the left for what skips ops; from the top edge comes what an earlier
  // part made, to the bottom edge goes what a later one reads. Tables that many layers share have no line.
  function drawEdges(members) {
    const row = new Map(members.map((index, position) => [index, position]));
    const spans = new Map();
    members.forEach((index, position) => {
      for (const {from} of launches[index].inputs) {
        const outside = !row.has(from);
        if (outside && new Set([...launches[from].readers].map((reader) => launches[reader].layer)).size > 2) continue;
        const start = outside ? -1 : row.get(from);
        spans.set(`${start} ${position}`, [start, position]);
      }
      if ([...launches[index].readers].some((reader) => !row.has(reader))) {
        spans.set(`${position} ${members.length}`, [position, members.length]);
      }
    });
    const height = 2 * TOP + ROW * members.length;
    const y = (position) => (position < 0 ? 0 : position >= members.length ? height : TOP + ROW * (position + 0.5));
    const lanes = [];
    const paths = [...spans.values()].sort((one, other) => one[1] - one[0] - (other[1] - other[0])).map(([start, end]) => {
      if (end - start === 1) return `M${DOT} ${y(start)}V${y(end)}`;
      let lane = 0;
      while (lanes[lane]?.some(([from, to]) => from < end && start < to)) lane += 1;
      (lanes[lane] ??= []).push([start, end]);
      const x = Math.max(3, DOT - LANE * (lane + 1)), bend = ROW * 0.45;
      const out = start < 0 ? `M${x} 0` : `M${DOT} ${y(start)}Q${x} ${y(start)} ${x} ${y(start) + bend}`;
      return out + (end >= members.length ? `V${height}` : `V${y(end) - bend}Q${x} ${y(end)} ${DOT} ${y(end)}`);
    });
    return draw("svg", {"aria-hidden": "true"}, ...paths.map((d) => draw("path", {d})));
  }

  // --- pictures that can be zoomed ------------------------------------------------------------------------------------

  // A picture of `height` by `columns` with a part of its width in view. `axis` gives labels below it; `names` those
  // inside, [left, right, top, bottom, text] with shares of the width and of the height, shown where they have room;
  // `fit` says how much of the height the part between two shares of the width needs.
  function zoomable(id, {height, columns, content, axis, names, fit = () => height}) {
    const box = byId(id), inner = make("div"), ticks = make("div", {class: "axis", "aria-hidden": "true"});
    const tags = make("div", {class: "tags", "aria-hidden": "true"});
    const picture = draw("svg", {height, preserveAspectRatio: "none"}, ...content);
    inner.append(picture, tags, ticks);
    box.append(inner);
    let zoom = 1, tall = 0;
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
      const pixels = inner.clientWidth, needed = fit(box.scrollLeft / pixels, (box.scrollLeft + box.clientWidth) / pixels);
      if (needed === tall) return;
      tall = needed;
      picture.setAttribute("viewBox", `0 0 ${columns} ${tall}`);
      const scale = height / tall;
      tags.replaceChildren(...names
        .filter(([left, right, top, bottom, text]) =>
          (right - left) * pixels > 12 + 6.5 * text.length && (bottom - top) * scale >= 16 && top < tall)
        .map(([left, , top, bottom, text]) =>
          make("span", {style: `left:${100 * left}%;top:${(scale * (top + bottom)) / 2}px`}, text)));
    }
    const button = (text, label, action) => make("button", {type: "button", "aria-label": label, title: label, onclick: action}, text);
    document.querySelector(`.zoom[data-for=${id}]`).append(
      button("−", "Zoom out", () => apply(zoom / 2)),
      button("+", "Zoom in", () => apply(zoom * 2)),
      button("layer", "Zoom to the selected layer", () => {
        const {part, at} = launches[selected ?? 0].place;
        const [start, end] = spanOf(id, part.launches[at]);
        apply(0.9 / Math.max(1e-6, end - start), (start + end) / 2);
      }),
      button("all", "Show all", () => apply(1)));
    box.addEventListener("scroll", look);
    box.addEventListener("keydown", (event) => {
      const last = launches.length - 1, now = selected ?? -1;
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
    return wanted.filter(([share, text]) => {
      const left = share * pixels, right = left + 10 + 6.5 * text.length;
      return left >= free && right <= pixels && (free = right);
    }).map(([share, text]) => make("span", {style: `left:${100 * share}%`}, text));
  }

  // Where some launches lie on a picture, as shares of its width.
  function spanOf(id, members) {
    const first = members[0], last = members.at(-1);
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
      return draw("rect", {class: at % 2 ? "lane odd" : "lane", x: WIDE * start, width: WIDE * (end - start), y: 0, height: 10,
        "data-launch": members[0], "data-tip": name});
    });
    for (const launch of launches) {
      const width = x(timeOf(launch)), common = {x: x(starts[launch.index]), y: 14, height: 52, "data-launch": launch.index};
      if (measured) content.push(draw("rect", {...common, width, class: `gap c${launch.kernel.color}`}));
      content.push(draw("rect", {...common, width: Math.min(width, x(launch.seconds)), class: `fill c${launch.kernel.color}`}));
      if (launch.occupancy !== null) {
        const height = 28 * launch.occupancy;
        content.push(draw("rect", {...common, y: 98 - height, height, width, class: "busy"}));
      }
    }
    const mark = draw("rect", {class: "mark", y: 13, height: 54, width: 0});
    const view = zoomable("timeline", {
      height: measured ? 100 : 68, columns: WIDE, content: [...content, mark],
      axis: (pixels) => {
        const step = niceStep((total * 90) / pixels);
        return Array.from({length: Math.floor(total / step) + 1}, (_, at) => [(at * step) / total, duration(at * step)]);
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
      part.launches.map((members, at) => [part.layers.length ? `layer ${part.layers[at]}` : part.name, members]));
    return spans.sort((one, other) => one[1][0] - other[1][0]);
  }

  function drawArena() {
    const HIGH = 280, y = (bytes) => (HIGH * bytes) / Math.max(1, data.arena);
    const makers = new Map();
    for (const launch of launches) {
      launch.args.forEach((arg, at) => {
        if (arg[0] === "arena" && launch.kernel.args[at]?.[1] && !makers.has(arg[1])) makers.set(arg[1], launch);
      });
    }
    const shapes = new Map();
    const content = buffers.map((buffer) => {
      const maker = makers.get(buffer.value) ?? launches[buffer.first];
      const text = `${buffer.value}\n${size(buffer.bytes)} at ${number(buffer.offset)}\nlaunches ${buffer.first} to ${buffer.last}, ` +
        `made by ${maker.index} ${title(maker)} (${where(maker)})`;
      const shape = draw("rect", {class: `buffer c${maker.kernel.color}`, x: buffer.first, width: buffer.last + 1 - buffer.first,
        y: y(buffer.offset), height: y(buffer.bytes), "data-launch": maker.index, "data-tip": text});
      shapes.set(buffer.value, shape);
      return shape;
    });
    const cursor = draw("rect", {class: "cursor", y: 0, height: HIGH, width: 0});
    const line = data.live.flatMap((bytes, at) => [`${at},${y(bytes)}`, `${at + 1},${y(bytes)}`]).join(" ");
    content.push(cursor, draw("polyline", {class: "live", points: line}));
    const count = launches.length;
    const view = zoomable("arena", {
      height: HIGH, columns: count, content,
      axis: () => layerSpans().map(([name, members]) => [members[0] / count, name]),
      names: buffers.map(({value, offset, bytes, first, last}) => [first / count, (last + 1) / count, y(offset), y(offset + bytes), value]),
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

  // --- the selected launch --------------------------------------------------------------------------------------------

  const views = [];

  function select(index) {
    selected = index;
    const launch = index === null ? null : launches[index];
    for (const button of document.querySelectorAll(".op")) {
      const shown = launches[button.dataset.launch].place;
      const on = launch && shown.part === launch.place.part && shown.position === launch.place.position;
      button.setAttribute("aria-pressed", String(Boolean(on)));
    }
    for (const cell of byId("strip").children) cell.classList.toggle("on", launch?.layer === Number(cell.dataset.layer));
    views.forEach((show) => show(launch));
    byId("details").replaceChildren(...(launch ? details(launch) : []));
    history.replaceState(null, "", launch ? `#launch-${index}` : "#top");
  }

  function details(launch) {
    const {part, at, position} = launch.place;
    const go = (text, index, label) => {
      const button = make("button", {type: "button", "aria-label": label, title: label, onclick: () => select(index)}, text);
      button.disabled = index === undefined;
      return button;
    };
    const alike = part.launches;
    const steps = make("div", {class: "steps"},
      go("‹", launches[launch.index - 1]?.index, "Previous launch"), go("›", launches[launch.index + 1]?.index, "Next launch"));
    if (alike.length > 1) {
      steps.append(go("‹ layer", alike[at - 1]?.[position], "The same op in the layer before"),
        go("layer ›", alike[at + 1]?.[position], "The same op in the layer after"));
    }
    steps.append(make("button", {type: "button", class: "close", onclick: () => select(null)}, "Close"));
    const readers = [...launch.readers];
    return [
      make("h2", {}, title(launch)),
      make("p", {class: "where"}, `launch ${launch.index} of ${launches.length}, ${where(launch)}`,
        ...(launch.module ? [make("br"), make("code", {}, launch.module)] : [])),
      steps, figures(launch),
      make("h3", {}, `Kernel: ${launch.kernel.family}`), make("p", {class: "doc"}, launch.kernel.doc),
      ...(launch.kernel.params ? [make("p", {}, launch.kernel.params)] : []), make("code", {}, launch.kernel.name),
      make("h3", {}, "Arguments"), argTable(launch),
      ...links("Reads the results of", [...new Set(launch.inputs.map(({from}) => from))]),
      ...links("Read by", readers),
    ];
  }

  function figures(launch) {
    const intensity = launch.bytes ? launch.flops / launch.bytes : Infinity;
    const rows = [
      ["roofline", `${duration(launch.seconds)}, bound by ${launch.memoryBound ? "memory" : "arithmetic"}`],
      ...(measured ? [["measured", duration(launch.measured)], ["reached", `${percent(launch.seconds / launch.measured, 0)} of the roofline`],
        ["bandwidth", `${(launch.bytes / launch.measured / 1e9).toFixed(2)} GB/s`], ["rate", `${(launch.flops / launch.measured / 1e9).toFixed(1)} GOP/s`],
        ["threads", `${percent(launch.occupancy, 0)} of the time at work`]] : []),
      ["share", `${percent(timeOf(launch) / total, 2)} of the step`],
      ["reads", `${size(launch.bytes)} (${number(launch.bytes)})`],
      ["operations", `${number(launch.flops)}, ${Number(intensity.toPrecision(3))} a byte`],
      ["barrier", launch.barrier ? "all threads meet after it" : "the next launch may run beside it"],
    ];
    return make("dl", {}, ...rows.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {"data-figure": name}, text)]));
  }

  function argTable(launch) {
    const rows = launch.args.map((arg, at) => {
      const [name, writes] = launch.kernel.args[at] ?? [`${at}`, false];
      return make("tr", {}, make("th", {scope: "row"}, name), make("td", {}, ...argText(arg, writes)));
    });
    return make("table", {}, make("tbody", {}, ...rows));
  }

  function argText(arg, writes) {
    if (!Array.isArray(arg)) return [String(arg)];
    const [kind, ...rest] = arg;
    if (kind === "arena") return [`${writes ? "→ " : ""}${rest[0]}`, make("br"), `${size(rest[2])} at ${number(rest[1])} of the arena`];
    if (kind === "input") return [`step input ${rest[0]}`];
    if (kind === "dim") return [rest[1] === 1 ? rest[0] : `${rest[0]} × ${rest[1]}`];
    if (kind === "cache") {
      const cache = data.caches[rest[0]];
      return [`${writes ? "→ " : ""}K/V of layer ${cache.layers[rest[1]]}, ${cache.dtype}${cache.window ? `, window ${cache.window}` : ""}`];
    }
    const weight = weightOf.get(rest[0]);
    const from = weight.sources.length > 1 || weight.sources[0] !== weight.name ? weight.sources : [];
    return [make("code", {}, weight.name), make("br"), `${weight.encoding} in ${weight.layout}, ${weight.shape.join(" × ")}, ${size(weight.bytes)}`,
      ...from.flatMap((source) => [make("br"), "from ", make("code", {}, source)])];
  }

  function links(heading, indices) {
    if (!indices.length) return [];
    const buttons = indices.slice(0, 12).map((index) =>
      make("button", {type: "button", onclick: () => select(index)}, `${index} ${title(launches[index])}`));
    const rest = indices.length > 12 ? [make("span", {}, `and ${indices.length - 12} more`)] : [];
    return [make("h3", {}, heading), make("div", {class: "links"}, ...buttons, ...rest)];
  }

  // --- memory and weights ---------------------------------------------------------------------------------------------

  function drawCapacity() {
    const {fixed, kv, context, sequences} = data.capacity;
    if (!kv) return byId("capacity").remove();
    const slider = byId("tokens"), most = context * sequences;
    const tokensAt = (value) => Math.round(most ** (value / 1000));
    slider.value = most > 1 ? (1000 * Math.log(context)) / Math.log(most) : 1000;
    slider.addEventListener("input", update);
    function update() {
      const near = Math.abs(slider.value - (1000 * Math.log(context)) / Math.log(most)) < 1;
      const tokens = near ? context : tokensAt(slider.value);
      const parts = [...fixed, ["K/V cache", tokens * kv]];
      const sum = parts.reduce((bytes, part) => bytes + part[1], 0);
      const text = `${plural(tokens, "token")} (${(tokens / context).toFixed(tokens < context ? 2 : 1)} sequences of ${number(context)}): ${size(tokens * kv)}, ${size(sum)} in all`;
      byId("tokens-shown").textContent = text;
      slider.setAttribute("aria-valuetext", text);
      byId("capacity-bar").setAttribute("aria-label", parts.map(([name, bytes]) => `${name} ${size(bytes)}`).join(", "));
      byId("capacity-bar").replaceChildren(...parts.map(([name, bytes], at) =>
        make("span", {class: `c${[0, 1, 9, 2][at]}`, style: `flex:${bytes}`, title: `${name} ${size(bytes)}`})));
      byId("capacity-legend").replaceChildren(...parts.map(([name, bytes], at) =>
        make("li", {}, make("i", {class: `c${[0, 1, 9, 2][at]}`}), `${name} ${size(bytes)}`)));
    }
    update();
  }

  function listWeights() {
    const texts = weights.map((weight) =>
      [weight.name, weight.encoding, weight.layout, weight.shape.join("×"), ...weight.sources].join(" ").toLowerCase());
    let limit = 12;
    function update() {
      const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
      const found = weights.filter((_, at) => words.every((word) => texts[at].includes(word)));
      byId("found").textContent = `${plural(found.length, "tensor")}, ${size(found.reduce((sum, weight) => sum + weight.bytes, 0))}`;
      byId("tensors").tBodies[0].replaceChildren(...found.slice(0, limit).map((weight) => make("tr", {},
        make("th", {scope: "row"}, weight.name), ...[weight.encoding, weight.layout, weight.shape.join(" × "), size(weight.bytes),
          weight.sources.join(", ") || "computed"].map((text) => make("td", {}, text)))));
      byId("more").hidden = found.length <= limit;
    }
    byId("search").addEventListener("input", () => ((limit = 12), update()));
    byId("more").addEventListener("click", () => ((limit += 200), update()));
    update();
  }

  // --- hovering -------------------------------------------------------------------------------------------------------

  const tip = byId("tip");
  document.addEventListener("pointermove", (event) => {
    const {tip: text, launch} = event.target.dataset ?? {};
    const inPicture = event.target.closest?.(".scroll, #strip");
    tip.hidden = !inPicture || (text === undefined && launch === undefined);
    if (tip.hidden) return;
    tip.textContent = text ?? describe(launches[launch]);
    const {offsetWidth: width, offsetHeight: height} = tip;
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
    tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && selected !== null) select(null);
  });

  drawParts();
  views.push(drawTimeline(), drawArena());
  drawCapacity();
  listWeights();
  const linked = /^#launch-(\d+)$/.exec(location.hash);
  if (linked && launches[linked[1]]) select(Number(linked[1]));
})();
