// The selected launch.

let selected = null;
const views = []; // functions that show a launch, or that none is selected

function select(index) {
  selected = index;
  const launch = index === null ? null : launches[index];
  for (const button of document.querySelectorAll(".op")) {
    const shown = launches[button.dataset.launch].place;
    const on = launch && shown.part === launch.place.part && shown.position === launch.place.position;
    button.setAttribute("aria-pressed", String(Boolean(on)));
  }
  for (const cell of byId("strip").children)
    cell.classList.toggle("on", launch?.layer === Number(cell.dataset.layer));
  views.forEach((show) => show(launch));
  byId("details").replaceChildren(...(launch ? details(launch) : []));
  history.replaceState(null, "", launch ? `#launch-${index}` : "#top");
}

function details(launch) {
  const {part, at, position} = launch.place;
  const go = (text, index, label) => {
    const button = make(
      "button",
      {type: "button", "aria-label": label, title: label, onclick: () => select(index)},
      text,
    );
    button.disabled = index === undefined;
    return button;
  };
  const alike = part.launches;
  const steps = make(
    "div",
    {class: "steps"},
    go("‹", launches[launch.index - 1]?.index, "Previous launch"),
    go("›", launches[launch.index + 1]?.index, "Next launch"),
  );
  if (alike.length > 1) {
    steps.append(
      go("‹ layer", alike[at - 1]?.[position], "The same op in the layer before"),
      go("layer ›", alike[at + 1]?.[position], "The same op in the layer after"),
    );
  }
  steps.append(make("button", {type: "button", class: "close", onclick: () => select(null)}, "Close"));
  const readers = [...launch.readers];
  return [
    make("h2", {}, title(launch)),
    make(
      "p",
      {class: "where"},
      `launch ${launch.index} of ${launches.length}, ${where(launch)}`,
      ...(launch.module ? [make("br"), make("code", {}, launch.module)] : []),
    ),
    steps,
    figures(launch),
    make("h3", {}, `Kernel: ${launch.kernel.family}`),
    make("p", {class: "doc"}, launch.kernel.doc),
    ...(launch.kernel.params ? [make("p", {}, launch.kernel.params)] : []),
    make("code", {}, launch.kernel.name),
    make("h3", {}, "Arguments"),
    argTable(launch),
    ...links("Reads the results of", [...new Set(launch.inputs.map(({from}) => from))]),
    ...links("Read by", readers),
  ];
}

function figures(launch) {
  const intensity = launch.bytes ? launch.flops / launch.bytes : Infinity;
  const rows = [
    ["roofline", `${duration(launch.seconds)}, bound by ${launch.memoryBound ? "memory" : "arithmetic"}`],
    ...(measured
      ? [
          ["measured", duration(launch.measured)],
          ["reached", `${percent(launch.seconds / launch.measured, 0)} of the roofline`],
          ["bandwidth", `${(launch.bytes / launch.measured / 1e9).toFixed(2)} GB/s`],
          ["rate", `${(launch.flops / launch.measured / 1e9).toFixed(1)} GOP/s`],
          ["threads", `${percent(launch.occupancy, 0)} of the time at work`],
        ]
      : []),
    ["share", `${percent(timeOf(launch) / total, 2)} of the step`],
    ["reads", `${size(launch.bytes)} (${number(launch.bytes)})`],
    ["operations", `${number(launch.flops)}, ${Number(intensity.toPrecision(3))} a byte`],
    ["barrier", launch.barrier ? "all threads meet after it" : "the next launch may run beside it"],
  ];
  return make(
    "dl",
    {},
    ...rows.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {"data-figure": name}, text)]),
  );
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
  if (kind === "arena")
    return [`${writes ? "→ " : ""}${rest[0]}`, make("br"), `${size(rest[2])} at ${number(rest[1])} of the arena`];
  if (kind === "input") return [`step input ${rest[0]}`];
  if (kind === "dim") return [rest[1] === 1 ? rest[0] : `${rest[0]} × ${rest[1]}`];
  if (kind === "cache") {
    const cache = data.caches[rest[0]];
    return [
      `${writes ? "→ " : ""}K/V of layer ${cache.layers[rest[1]]}, ${cache.dtype}`,
      cache.window ? `, window ${cache.window}` : "",
    ];
  }
  const weight = weightOf.get(rest[0]);
  const from = weight.sources.length > 1 || weight.sources[0] !== weight.name ? weight.sources : [];
  return [
    make("code", {}, weight.name),
    make("br"),
    `${weight.encoding} in ${weight.layout}, ${weight.shape.join(" × ")}, ${size(weight.bytes)}`,
    ...from.flatMap((source) => [make("br"), "from ", make("code", {}, source)]),
  ];
}

function links(heading, indices) {
  if (!indices.length) return [];
  const buttons = indices
    .slice(0, 12)
    .map((index) =>
      make("button", {type: "button", onclick: () => select(index)}, `${index} ${title(launches[index])}`),
    );
  const rest = indices.length > 12 ? [make("span", {}, `and ${indices.length - 12} more`)] : [];
  return [make("h3", {}, heading), make("div", {class: "links"}, ...buttons, ...rest)];
}
