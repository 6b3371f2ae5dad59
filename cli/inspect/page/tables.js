// What memory is needed, and the table of weights.

function drawCapacity() {
  const {fixed, kv, context, sequences} = data.capacity;
  if (!kv) return byId("capacity").remove();
  const slider = byId("tokens");
  const most = context * sequences;
  const tokensAt = (value) => Math.round(most ** (value / 1000));
  slider.value = most > 1 ? (1000 * Math.log(context)) / Math.log(most) : 1000;
  slider.addEventListener("input", update);
  function update() {
    const near = Math.abs(slider.value - (1000 * Math.log(context)) / Math.log(most)) < 1;
    const tokens = near ? context : tokensAt(slider.value);
    const parts = [...fixed, ["K/V cache", tokens * kv]];
    const sum = parts.reduce((bytes, part) => bytes + part[1], 0);
    const sequences = (tokens / context).toFixed(tokens < context ? 2 : 1);
    const whole = `${sequences} sequences of ${number(context)}`;
    const text = `${plural(tokens, "token")} (${whole}): ${size(tokens * kv)}, ${size(sum)} in all`;
    byId("tokens-shown").textContent = text;
    slider.setAttribute("aria-valuetext", text);
    byId("capacity-bar").setAttribute(
      "aria-label",
      parts.map(([name, bytes]) => `${name} ${size(bytes)}`).join(", "),
    );
    byId("capacity-bar").replaceChildren(
      ...parts.map(([name, bytes], at) =>
        make("span", {class: `c${[0, 1, 9, 2][at]}`, style: `flex:${bytes}`, title: `${name} ${size(bytes)}`}),
      ),
    );
    byId("capacity-legend").replaceChildren(
      ...parts.map(([name, bytes], at) =>
        make("li", {}, make("i", {class: `c${[0, 1, 9, 2][at]}`}), `${name} ${size(bytes)}`),
      ),
    );
  }
  update();
}

function listWeights() {
  const texts = weights.map((weight) =>
    [weight.name, weight.encoding, weight.layout, weight.shape.join("×"), ...weight.sources].join(" ").toLowerCase(),
  );
  let limit = 12;
  function update() {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = weights.filter((_, at) => words.every((word) => texts[at].includes(word)));
    byId("found").textContent =
      `${plural(found.length, "tensor")}, ${size(found.reduce((sum, weight) => sum + weight.bytes, 0))}`;
    byId("tensors").tBodies[0].replaceChildren(
      ...found
        .slice(0, limit)
        .map((weight) =>
          make(
            "tr",
            {},
            make("th", {scope: "row"}, weight.name),
            ...[
              weight.encoding,
              weight.layout,
              weight.shape.join(" × "),
              size(weight.bytes),
              weight.sources.join(", ") || "computed",
            ].map((text) => make("td", {}, text)),
          ),
        ),
    );
    byId("more").hidden = found.length <= limit;
  }
  byId("search").addEventListener("input", () => ((limit = 12), update()));
  byId("more").addEventListener("click", () => ((limit += 200), update()));
  update();
}
