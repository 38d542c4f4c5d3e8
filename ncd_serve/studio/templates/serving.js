// The server: started, stopped, its requests, and lines to copy.
function makeServing() {
  $("serving-start").addEventListener("click", (event) =>
    actServing(event.target, data.exported ? "Starting…" : "Exporting, then starting…", "start"));
  $("serving-stop").addEventListener("click", (event) => actServing(event.target, "Stopping…", "stop"));
  const { address, token } = data.live;
  showLines($("predict-lines"), {
    curl: `curl -s ${address}/predict -H "Authorization: Bearer ${token}" --data-binary @bird.jpg`,
    Python: `from urllib.request import Request, urlopen; print(urlopen(Request("${address}/predict", ` +
      `open("bird.jpg", "rb").read(), {"Authorization": "Bearer ${token}"})).read().decode())`,
  });
}

async function actServing(button, words, action) {
  const state = await busy(button, words, () => ask(`/api/serving/${action}`, {}));
  if (!state) return;
  data.exported ||= state.running;
  showServing(state);
}

async function watchServing() {
  const state = await ask("/api/serving").catch(() => null);
  if (state) showServing(state);
}

function showServing({ running, obstacle, exported, model, repository, url, versions = [], activity, lines }) {
  setText("serving-words", running
    ? `Model ${model}, version ${versions.join(", ") || "loading"}, answers on ${url} (${repository}).`
    : obstacle ?? (exported ? `No server runs on ${repository}.` : `The model is exported to ${repository} first, which takes about a minute.`));
  $("serving-start").hidden = running || Boolean(obstacle);
  $("serving-stop").hidden = !running;
  const ms = (value) => (value === undefined ? "-" : `${value.toFixed(1)} ms`);
  const figures = activity ? {
    requests: grouped(activity.answered), failed: grouped(activity.failed), "median latency": ms(activity.p50), "99th percentile": ms(activity.p99),
  } : {};
  $("serving-figures").replaceChildren(...Object.entries(figures).flatMap(([name, value]) =>
    [make("dt", { class: "muted" }, name), make("dd", {}, value)]));
  if (JSON.stringify(lines ?? {}) !== $("serving-lines").dataset.shown) {
    $("serving-lines").dataset.shown = JSON.stringify(lines ?? {});
    showLines($("serving-lines"), lines ?? {});
  }
}

function showLines(place, lines) {
  place.replaceChildren(...Object.entries(lines).map(([name, line]) => {
    const copy = make("button", { type: "button", class: "plain", "aria-label": `Copy the line for ${name}`, click: async () => {
      try {
        await navigator.clipboard.writeText(line);
        tell("Copied");
      } catch { // not allowed, or not of this machine and without TLS
        getSelection().selectAllChildren(copy.previousSibling);
        tell("Selected: copy it with Ctrl and C");
      }
    } }, "Copy");
    return make("div", { class: "line" }, make("span", { class: "muted" }, name), make("pre", { tabindex: 0 }, line), copy);
  }));
}
