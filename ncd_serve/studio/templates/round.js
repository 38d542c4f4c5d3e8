// The next round: categories made of new or corrected images become clusters; ids and names before and after.
const KINDS = { new: "new", split: "gave images to a new one", grown: "has new images", kept: "as before", merged: "went into another one" };

function makeRound() {
  $("round-start").addEventListener("click", startRound);
  $("round-open").addEventListener("click", loadClusters);
}

async function watchRound() {
  const state = await ask("/api/round").catch(() => null);
  if (!state || !$("round-open").hidden) return;
  const ready = Object.entries(state.ready).map(([name, count]) => `${name || "a category without a name"} (${counted(count, "image")})`);
  setText("round-words", ready.length ? `Waiting to become clusters: ${ready.join(", ")}.`
    : `Categories that you make of new images, or by splitting a cluster and applying it, wait here${state.too_small.length ? ": two images are the least" : ""}.`);
  $("round-start").hidden = !ready.length;
}

async function startRound() {
  if (!(await live.apply())) return; // which says why
  const done = await busy($("round-start"), "Making clusters…", () => ask("/api/round", {}));
  if (!done) return;
  $("round-start").hidden = true;
  $("round-open").hidden = false;
  $("round-words").textContent = `Generation ${done.generation} is in ${done.bundle} and in the model repository, where a running server takes it. ` +
    `Old ids and names stay; ${counted(done.added, "cluster")} more.`;
  const head = make("tr", {}, ...["id", "name", "", "images before", "new images"].map((text) => make("th", { scope: "col" }, text)));
  const rows = done.changes.map(({ cluster_id: id, name, kind, images: before, added }) =>
    make("tr", { class: kind }, ...[id, name, KINDS[kind], before, added].map((text) => make("td", {}, String(text)))));
  $("round-changes").replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...rows)));
}
