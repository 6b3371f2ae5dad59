// What is under the pointer, and the start of it all.

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
