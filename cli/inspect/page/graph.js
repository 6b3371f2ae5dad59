// The program by layer.

const ROW = 46;
const TOP = 6;
const DOT = 40;
const LANE = 9;

function drawParts() {
  data.parts.forEach((part, number) => {
    const [members] = part.launches;
    const time = part.launches.flat().reduce((sum, index) => sum + timeOf(launches[index]), 0);
    const many = part.layers.length > 1 ? ` × ${part.layers.length}` : "";
    byId("parts").append(
      make(
        "article",
        {class: "part", id: `part-${number}`},
        make(
          "h3",
          {},
          ...(part.layers.length ? [make("i", {"--tint": tint(number)})] : []),
          make("b", {}, part.name[0].toUpperCase() + part.name.slice(1)),
          make("span", {}, `${duration(time / part.launches.length)}${many} · ${percent(time / total)}`),
        ),
        make(
          "div",
          {class: "flow"},
          drawEdges(members),
          ...members.map((index, position) => opButton(part, position)),
        ),
      ),
    );
  });
  drawStrip();
}

const tint = (number) => `${[90, 30, 60, 10, 75, 45][number % 6]}%`;

function opButton(part, position) {
  const same = part.launches.map((members) => launches[members[position]]);
  const [launch] = same;
  const share = same.reduce((sum, each) => sum + timeOf(each), 0) / total;
  return make(
    "button",
    {
      type: "button",
      class: `op c${launch.kernel.color}`,
      "data-launch": launch.index,
      "aria-pressed": "false",
      "--share": share,
      onclick: () => select(launch.index),
    },
    make("span", {}, make("b", {}, title(launch)), make("small", {title: subtitle(launch)}, subtitle(launch))),
    make("span", {class: "figures"}, duration(timeOf(launch)), make("small", {}, percent(share))),
  );
}

function drawStrip() {
  const strip = byId("strip");
  const cells = [];
  data.parts.forEach((part, number) =>
    part.layers.forEach((layer, at) => cells.push({layer, part, number, first: part.launches[at][0]})),
  );
  cells.sort((one, other) => one.layer - other.layer);
  for (const {layer, part, number, first} of cells) {
    strip.append(
      make("i", {
        "--tint": tint(number),
        "data-layer": layer,
        "data-tip": `layer ${layer}: as ${part.name}`,
        onclick: () => select(first),
      }),
    );
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
  const paths = [...spans.values()]
    .sort((one, other) => one[1] - one[0] - (other[1] - other[0]))
    .map(([start, end]) => {
      if (end - start === 1) return `M${DOT} ${y(start)}V${y(end)}`;
      let lane = 0;
      while (lanes[lane]?.some(([from, to]) => from < end && start < to)) lane += 1;
      (lanes[lane] ??= []).push([start, end]);
      const x = Math.max(3, DOT - LANE * (lane + 1));
      const bend = ROW * 0.45;
      const out = start < 0 ? `M${x} 0` : `M${DOT} ${y(start)}Q${x} ${y(start)} ${x} ${y(start) + bend}`;
      return out + (end >= members.length ? `V${height}` : `V${y(end) - bend}Q${x} ${y(end)} ${DOT} ${y(end)}`);
    });
  return draw("svg", {"aria-hidden": "true"}, ...paths.map((d) => draw("path", {d})));
}
