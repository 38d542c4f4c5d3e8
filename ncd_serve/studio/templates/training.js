// Training: a form, its plan, and the run as it goes on.
function makeTraining() {
  const form = $("training-form");
  form.elements.unlabelled.value = data.live.folder;
  makeFolders();
  for (const name of ["labelled", "unlabelled"]) form.elements[name].addEventListener("input", suggestFolders);
  $("plan").addEventListener("click", () => form.reportValidity() && showPlan());
  form.addEventListener("submit", (event) => { event.preventDefault(); startTraining(); });
  $("training-stop").addEventListener("click", (event) => act(event.target, "Stopping…", "stop"));
  $("training-resume").addEventListener("click", (event) => act(event.target, "Resuming…", "resume", { run: shownRun }));
  $("training-open").addEventListener("click", (event) => openRun(event.target, shownRun));
  showRuns();
}

async function showRuns() {
  const runs = await ask("/api/runs").catch(() => []);
  $("runs").hidden = !runs.length;
  $("runs-list").replaceChildren(...runs.map(({ run, started, open }) => make("p", {},
    make("button", { type: "button", disabled: open, click: (event) => openRun(event.target, run) }, run),
    make("span", { class: "muted" }, open ? " is open" : ` of ${started}`))));
}

async function suggestFolders({ target: field }) {
  const found = await ask(`/api/folders?path=${encodeURIComponent(field.value)}`).catch(() => []);
  field.list.replaceChildren(...found.map((value) => make("option", { value })));
}

function formValues() {
  const { labelled, unlabelled, clusters: number, name, settings } = $("training-form").elements;
  return {
    labelled: labelled.value.trim(), unlabelled: unlabelled.value.trim(), clusters: number.value ? Number(number.value) : null,
    name: name.value.trim(), settings: settings.value.split("\n").map((line) => line.trim()).filter(Boolean),
  };
}

async function showPlan() {
  $("plan-busy").textContent = "Checking the images and trying two steps…";
  const found = await busy($("plan"), "Planning…", () => ask("/api/training/plan", formValues()));
  $("plan-busy").textContent = found ? planInWords(found.plan.trim().split("\n")) : "";
  $("plan-details").hidden = !found;
  $("plan-text").textContent = found?.plan ?? "";
}

// Which images, and how long it will take.
const planInWords = (lines) => [...lines.filter((line) => line.includes(" unlabelled images for ")), lines.at(-1)].join("; ");

const startTraining = () => act($("train"), "Starting…", "start", formValues());

async function act(button, words, action, body = {}) {
  const state = await busy(button, words, () => ask(`/api/training/${action}`, body));
  if (state) showTraining(state);
  return state;
}

async function openRun(button, run) {
  const done = await busy(button, "Opening…", () => ask("/api/open", { run }));
  if (done) loadClusters();
}

let shownRun = null;
async function watchTraining() {
  const state = await ask("/api/training").catch(() => null);
  if (state) showTraining(state);
}

const STATES = {
  running: "is being trained", finished: "is trained", stopped: "was stopped, and can be resumed", failed: "has failed",
  elsewhere: "is being trained by another process",
};

function showTraining({ state, run, resumable, lines, progress, epochs, forming, verdict = [], changes = [], error, hint }) {
  $("training-state").hidden = state === "none";
  if (state === "none") return;
  shownRun = run;
  const going = state === "running";
  setText("training-title", `${run} ${state === "stopped" && !resumable ? "was stopped before it began" : STATES[state]}`);
  setText("training-words", error ? [error, hint].filter(Boolean).join(". ")
    : verdict.length ? inWords(verdict)
    : going && !epochs.length ? "Preparing: images are read, features computed…" : epochs.length ? `epoch ${epochs.length}` : "");
  showStep(going, progress);
  $("training-stop").hidden = !going;
  $("training-resume").hidden = !resumable;
  $("training-open").hidden = state !== "finished";
  $("train").disabled = going;
  $("training-details").hidden = !lines.length;
  setText("training-log", lines.join("\n"));
  $("training-state").classList.toggle("going", going);
  drawCurves(epochs);
  showForming(forming);
  if (!changes.length !== !$("training-changes").firstChild) {
    $("training-changes").replaceChildren(...(changes.length ? [changesTable(changes), make("p", { class: "muted" },
      "With a look at its clusters, it takes the place of the generation before: in the model repository, and in a running server.")] : []));
  }
}

// What is done now: a bar that moves with every step, or that runs to and fro for a single one.
function showStep(going, progress) {
  const bar = $("training-progress");
  bar.hidden = $("training-step").hidden = !going;
  if (progress?.total) Object.assign(bar, { max: progress.total, value: progress.done });
  else bar.removeAttribute("value");
  const count = progress?.total ? `: ${grouped(progress.done)} of ${grouped(progress.total)}` : "…";
  setText("training-step", progress ? `${progress.what}${count}` : "");
}

// One line for each figure of the epochs, each scaled to its own range: what matters is whether it still changes.
function drawCurves(epochs) {
  const canvas = $("curves");
  canvas.hidden = epochs.length < 2;
  if (canvas.hidden) return;
  const [width, height] = [canvas.clientWidth || 600, 120];
  [canvas.width, canvas.height] = [width * devicePixelRatio, height * devicePixelRatio];
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  const names = Object.keys(epochs[0]).filter((name) => name !== "epoch" && typeof epochs[0][name] === "number").slice(0, COLOURS);
  names.forEach((name, order) => {
    const values = epochs.map((row) => row[name]).filter(Number.isFinite);
    const [least, most] = [Math.min(...values), Math.max(...values)];
    context.strokeStyle = colourOf(order);
    context.lineWidth = 2;
    context.beginPath();
    values.forEach((value, at) => context.lineTo(4 + (at / Math.max(1, values.length - 1)) * (width - 150),
      8 + (1 - (value - least) / (most - least || 1)) * (height - 16)));
    context.stroke();
    context.fillStyle = context.strokeStyle;
    context.font = "12px system-ui, sans-serif";
    context.fillText(`${name} ${values.at(-1)?.toPrecision(3)}`, width - 140, 14 + order * 15);
  });
}

function colourOf(order) {
  const probe = make("span", { class: `c${order}` });
  $("curves").after(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

let formingEpoch = null;
function showForming(forming) {
  if (!forming || forming.epoch === formingEpoch) return;
  formingEpoch = forming.epoch;
  const rows = forming.clusters.length;
  $("forming").replaceChildren(make("h3", {}, forming.epoch ? `Clusters after epoch ${forming.epoch}` : "Clusters before training"),
    ...forming.clusters.map(({ id, name = `cluster-${id}`, count, confidence, examples }, row) => {
      const strip = make("div", { class: "strip", role: "img", "aria-label": `Images of ${name}` });
      strip.style.backgroundImage = `url("/forming.jpg?${forming.epoch}")`;
      strip.style.backgroundSize = `100% ${rows * 100}%`;
      strip.style.backgroundPosition = `0 ${rows > 1 ? (100 * row) / (rows - 1) : 0}%`;
      strip.style.clipPath = `inset(0 ${100 - (100 * Math.min(examples.length, data.columns)) / data.columns}% 0 0 round 5px)`;
      return make("div", { class: "forming-row" }, make("span", {}, make("b", {}, name),
        make("span", { class: "muted" }, ` ${counted(count, "image")}, confidence ${confidence.toFixed(2)}`)), strip);
    }));
}
