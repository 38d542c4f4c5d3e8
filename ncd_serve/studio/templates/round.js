// The next round: categories made of new or corrected images become clusters; ids and names before and after.
const KINDS = { new: "new", split: "gave images to others", grown: "has new images", kept: "as before", merged: "went into another one" };

function makeRound() {
  $("round-start").addEventListener("click", startRound);
  $("round-again").addEventListener("click", trainAgain);
  $("round-open").addEventListener("click", loadClusters);
}

async function watchRound() {
  const state = await ask("/api/round").catch(() => null);
  if (!state || !$("round-open").hidden) return;
  const ready = Object.entries(state.ready).map(([name, count]) => `${name || "a category without a name"} (${counted(count, "image")})`);
  setText("round-words", ready.length ? `Waiting to become clusters: ${ready.join(", ")}.`
    : `Categories that you make of new images, or by splitting a cluster and applying it, wait here${state.too_small.length ? ": two images are the least" : ""}.`);
  $("round-start").hidden = !ready.length;
  $("round-again").hidden = $("round-again-words").hidden = !ready.length && !moves.size;
  showKept(state.kept);
}

// Categories of new images, as long as they wait: one that was a mistake is taken back.
function showKept(kept) {
  if (JSON.stringify(kept) === $("round-kept").dataset.shown) return;
  $("round-kept").dataset.shown = JSON.stringify(kept);
  $("round-kept").replaceChildren(...Object.entries(kept).map(([name, count]) => {
    const back = make("button", { type: "button", class: "plain", "aria-label": `Take ${name} back`, click: () => takeBack(back, name) }, "Take back");
    return make("p", {}, `${name}: ${counted(count, "new image")} `, back);
  }));
}

async function takeBack(button, name) {
  const done = await busy(button, "Taking back…", () => ask(`/api/category?category=${encodeURIComponent(name)}`, null, { method: "DELETE" }));
  if (!done) return;
  for (const answer of answers) if (answer.kept === name) delete answer.kept;
  if (answers.length) showAnswers();
  watchRound();
}

async function startRound() {
  if (!(await live.apply())) return; // which says why
  const done = await busy($("round-start"), "Making clusters…", () => ask("/api/round", {}));
  if (!done) return;
  for (const id of ["round-start", "round-again", "round-again-words"]) $(id).hidden = true;
  showKept({}); // they are clusters now
  $("round-open").hidden = false;
  $("round-words").textContent = `Generation ${done.generation} is in ${done.bundle} and in the model repository, where a running server takes it. ` +
    `Old ids and names stay; ${counted(done.added, "cluster")} more.`;
  $("round-changes").replaceChildren(changesTable(done.changes));
}

async function trainAgain() {
  if (!(await live.apply())) return; // which says why
  if (await act($("round-again"), "Starting…", "again")) showTab("training");
}

function changesTable(changes) {
  const head = make("tr", {}, ...["id", "name", "", "images before", "new images"].map((text) => make("th", { scope: "col" }, text)));
  const rows = changes.map(({ cluster_id: id, name, kind, images: before, added }) =>
    make("tr", { class: kind }, ...[id, name, KINDS[kind], before, added].map((text) => make("td", {}, String(text)))));
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows));
}
