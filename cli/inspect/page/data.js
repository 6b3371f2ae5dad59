// The plan as the script is given it, what each launch is, and how quantities are written.

const data = JSON.parse(document.getElementById("data").textContent);
const table = ({columns, rows}) => rows.map((row) => Object.fromEntries(columns.map((name, at) => [name, row[at]])));
const launches = table(data.launches);
const weights = table(data.weights);
const buffers = table(data.buffers);
const weightOf = new Map(weights.map((weight) => [weight.name, weight]));
const byId = (id) => document.getElementById(id);
const timeOf = (launch) => launch.measured ?? launch.seconds;
const total = launches.reduce((sum, launch) => sum + timeOf(launch), 0);
const measured = launches.some((launch) => launch.measured !== null);

const number = (value) => value.toLocaleString("en-US", {maximumFractionDigits: 6});
function size(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (count < 1024) return unit === "B" ? `${Math.round(count)} B` : `${count.toFixed(1)} ${unit}`;
    count /= 1024;
  }
  return `${count.toFixed(2)} GiB`;
}
function duration(seconds) {
  for (const [unit, factor] of Object.entries({ns: 1e9, µs: 1e6, ms: 1e3})) {
    if (seconds * factor < 999.5) return `${Number((seconds * factor).toPrecision(3))} ${unit}`;
  }
  return `${Number(seconds.toPrecision(3))} s`;
}
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)}%`;
const plural = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

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
  return [launch.kind === title(launch) ? inLayer(launch.module) : launch.kind, fused, what]
    .filter(Boolean)
    .join(" · ");
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
