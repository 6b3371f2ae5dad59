// Views, and what happens when.

const TABS = ["chat", "load", "plan"];
let known = false;

function open(name) {
  for (const each of TABS) {
    const chosen = each === name;
    byId(each).hidden = !chosen;
    byId(`tab-${each}`).setAttribute("aria-selected", chosen);
    byId(`tab-${each}`).tabIndex = chosen ? 0 : -1;
  }
  if (name === "load") PLOTS.forEach(redraw);
}

function startTabs() {
  for (const [index, each] of TABS.entries()) {
    const tab = byId(`tab-${each}`);
    tab.addEventListener("click", () => (location.hash = each));
    tab.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (!step) return;
      const next = TABS[(index + step + TABS.length) % TABS.length];
      location.hash = next;
      byId(`tab-${next}`).focus();
    });
  }
  const follow = () => open(TABS.find((each) => `#${each}` === location.hash) ?? "chat");
  addEventListener("hashchange", follow);
  follow();
}

function startTheme() {
  const root = document.documentElement;
  const set = (theme) => {
    if (theme) root.dataset.theme = theme;
  };
  set(store.get("theme"));
  byId("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    set(dark ? "light" : "dark");
    store.set("theme", root.dataset.theme);
  });
}

// What does not change while the server runs.
async function learn() {
  const info = await (await ask("server_info")).json();
  known = true;
  document.title = `${info.model} · toolkit`;
  byId("model").textContent = info.model;
  chat.template = info.chat_template;
  const defaults = info.default_sampling_params ?? {};
  for (const name of NUMBERS) byId(name).placeholder = defaults[name] ?? byId(name).placeholder;
  if (!chat.template) byId("greeting").textContent = "This model has no chat template: it continues what you write.";
  drawPlan(info);
}

async function beat() {
  if (document.visibilityState === "visible" && refused !== givenKey()) {
    await look();
    if (!known) await learn().catch(() => {});
  }
  setTimeout(beat, 1000);
}

byId("key").value = store.get("key");
byId("key").addEventListener("input", () => store.set("key", givenKey()));
if (matchMedia("(max-width: 60rem)").matches) byId("settings").open = false;
startTheme();
startTabs();
startChat();
startLoad();
beat();
