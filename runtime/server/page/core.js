// Numbers, and the server.

const byId = (id) => document.getElementById(id);

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) [bytes, unit] = [bytes / 1024, unit + 1];
  return `${bytes >= 100 || unit === 0 ? Math.round(bytes) : bytes.toPrecision(3)} ${units[unit]}`;
}
function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  if (seconds >= 1) return `${seconds.toPrecision(3)} s`;
  return seconds >= 1e-3 ? `${Number((seconds * 1e3).toPrecision(3))} ms` : `${Math.round(seconds * 1e6)} µs`;
}
const short = (value) =>
  !Number.isFinite(value) ? "–" : value >= 1e4 ? `${(value / 1e3).toPrecision(3)}k` : `${Number(value.toPrecision(3))}`;

// A store that a browser may refuse.
const store = {
  get: (name) => {
    try {
      return sessionStorage.getItem(name) ?? "";
    } catch {
      return "";
    }
  },
  set: (name, value) => {
    try {
      sessionStorage.setItem(name, value);
    } catch {
      // it is forgotten with the page
    }
  },
};

function notice(text) {
  byId("notice").textContent = text;
  byId("notice").hidden = !text;
}

let refused; // the key that the server did not take

const givenKey = () => byId("key").value.trim();

// An answer of the server. Paths are relative: a proxy may show the server anywhere.
async function ask(path, options = {}) {
  const key = givenKey();
  const headers = {...(options.body ? {"content-type": "application/json"} : {}), ...(key ? {authorization: `Bearer ${key}`} : {})};
  const answer = await fetch(path, {...options, headers, cache: "no-store"});
  if (answer.status === 401) {
    refused = key;
    notice("This server wants an API key: enter it under Settings.");
    byId("settings").open = true;
    if (document.activeElement === document.body) byId("key").focus();
  } else if (key) notice("");
  if (answer.ok) return answer;
  let message = `${answer.status} ${answer.statusText}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // the status says it
  }
  throw Object.assign(new Error(message), {status: answer.status});
}
