// From data to a page that answers.
const dark = matchMedia("(prefers-color-scheme: dark)");

function toggleTheme() {
  const now = document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
  setTheme(now === "dark" ? "light" : "dark");
  remember("theme", document.documentElement.dataset.theme);
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  repaintMap();
  if (data.confusion) drawMatrix();
}

function summarise() {
  const shown = imageCount < data.total ? `, an even sample of ${grouped(imageCount)} shown` : "";
  const seen = clusters.filter((cluster) => cluster.id !== WRONG && (cluster.shown || cluster.images.length));
  const named = seen.filter(({ id }) => said[id].name).length;
  $("summary").textContent = !data.total ? "no run is open" :
    `${counted(data.total, "image")}${shown} · ${counted(seen.length, "cluster")}, ${named} named`;
  const unsaved = unsavedCount();
  $("unsaved").textContent = unsaved ? counted(unsaved, "unsaved change") : "";
  $("undo").disabled = !undoable.length;
  $("redo").disabled = !redoable.length;
  $("save").disabled = !isTouched();
}

function makeNotes() {
  const gone = data.missing.length;
  const empty = data.defaults.length - clusters.length;
  const is = (count) => (count === 1 ? "is" : "are");
  const notes = [
    gone && `${counted(gone, "image")} could not be read and ${is(gone)} grey. Were they moved? Give their folder: --images DIR`,
    empty && data.kind !== "rows" && `${counted(empty, "cluster")} without an image ${is(empty)} not shown.`,
  ];
  $("notes").replaceChildren(makeVerdict(), ...notes.filter(Boolean).map((note) => make("p", { class: "note" }, note)));
}

const MOST_PAIRS = 3; // of clusters that look like one, as in the words

// The verdict in words, and buttons that lead to what it is about.
function makeVerdict() {
  if (!data.verdict.length) return "";
  const ways = make("p", { class: "answers" });
  const fill = () => ways.replaceChildren(...data.alike.map(compareButton).filter(Boolean).slice(0, MOST_PAIRS), ...outlierButton());
  namingListeners.push(fill);
  fill();
  const [head, ...rest] = inWords(data.verdict).split(":");
  return make("div", { id: "verdict" }, make("p", {}, make("b", {}, head), `:${rest.join(":")}`), ways);
}

function compareButton(pair) {
  const sides = pair.map((id) => byId.get(id));
  if (!correctable || sides.some((side) => !side || said[side.id].merge !== null || said[side.id].junk)) return null;
  const [larger, smaller] = sides.toSorted((one, other) => sizeOf(other) - sizeOf(one));
  return make("button", { type: "button", class: "chip", click: () => { $("choose").showModal(); compareSides(smaller, larger); } },
    `Compare ${nameOf(smaller.id)} and ${nameOf(larger.id)}`);
}

function outlierButton() {
  const [farthest] = data.fits.slice(-1);
  const some = images.fit?.includes(data.fits.length - 1);
  return some ? [make("button", { type: "button", class: "chip", click: () => { $("fit").value = farthest; applyFilters(); } },
    "Show what fits nowhere")] : [];
}

function makeLeftOut() {
  const { length } = data.left_out;
  if (!length) return;
  $("left-out").hidden = false;
  $("left-out-title").textContent = `Left out: ${counted(length, "image")} in no cluster`;
  $("left-out").querySelector(".tiles").replaceChildren(...data.left_out.map((path, at) => {
    const picture = makePicture(imageCount + at);
    for (const [name, value] of [["role", "img"], ["aria-label", path], ["title", path]]) picture.setAttribute(name, value);
    return picture;
  }));
}

function makeOutliers() {
  if (data.kind !== "rows" || !images.fit) return;
  const last = data.fits.length - 1;
  const outliers = [...images.fit.keys()].filter((image) => images.fit[image] === last)
    .sort((one, other) => images.central[one] - images.central[other]);
  $("outliers").hidden = false;
  $("outliers-title").textContent =
    outliers.length ? `Fits nowhere: ${counted(outliers.length, "image")}` : "Every image fits a cluster";
  $("outliers").classList.toggle("none", !outliers.length);
  const [tiles, more] = $("outliers").querySelectorAll(".tiles, button");
  tiles.addEventListener("keydown", tileKeys);
  fillTiles(tiles, outliers.slice(0, 24));
  more.hidden = outliers.length <= 24;
  more.textContent = `Show all ${outliers.length}`;
  more.addEventListener("click", () => { fillTiles(tiles, outliers); more.hidden = true; });
}

function makeFailures() {
  if (!data.failed) return;
  $("failures").hidden = false;
  $("failures").querySelector("h2").textContent = `${counted(data.failed, "image")} without a cluster`;
  $("failures").querySelector("table").replaceChildren(...data.failures.map(([path, why]) =>
    make("tr", {}, make("td", { class: "path" }, path), make("td", { class: "muted" }, why))));
}

const save = () => (live.apply ?? saveNames)();

const imagesAround = (tile) =>
  tile.parentElement.list ?? [...tile.parentElement.querySelectorAll(":scope > .tile")].map(({ dataset }) => Number(dataset.image));

// How much of the window the header covers, which depends on how its tools wrap.
function measureTop() {
  const covers = getComputedStyle($("top")).position === "sticky";
  document.documentElement.style.setProperty("--top", covers ? `${$("top").offsetHeight}px` : "0px");
}

function listen() {
  $("undo").addEventListener("click", undo);
  $("redo").addEventListener("click", redo);
  $("save").addEventListener("click", () => save());
  $("theme").addEventListener("click", toggleTheme);
  $("help-open").addEventListener("click", () => $("help").showModal());
  $("detail").addEventListener("keydown", detailKeys);
  $("choose-search").addEventListener("input", filterChoices);
  dark.addEventListener("change", () => setTheme(null));
  document.addEventListener("click", (event) => {
    const tile = event.target.closest("button.tile[data-image]");
    const link = event.target.closest("a.cluster-link");
    if (tile) clickTile(event, tile);
    if (!link) return;
    event.preventDefault();
    document.querySelector("dialog[open]")?.close();
    if (clusterOfCard(link)) goTo(clusterOfCard(link));
  });
  $("cards").addEventListener("focusin", (event) => {
    const card = event.target.closest(".card");
    if (card) setCurrent(clusterOfCard(card));
  });
  new ResizeObserver(measureTop).observe($("top"));
  addEventListener("beforeprint", () => clusters.forEach(openCard));
}

makeCards();
recallNames();
arrangeImages();
for (const cluster of clusters) cluster.matching = cluster.images;
makeFilters();
sortCards();
makeMap();
makeMatrix();
makeSelection();
makeQuestions();
makeKeys();
makeNotes();
makeOutliers();
makeLeftOut();
makeFailures();
listen();
namingListeners.push((moved) => {
  if (moved) sortCards();
  if (moved) applyFilters();
  summarise();
  clusters.forEach(refreshCard);
});
summarise();
clusters.forEach(refreshCard);
clusters.forEach((cluster) => showMatching(cluster, cluster.images));
live.start?.();
setTheme(recall("theme"));
document.documentElement.dataset.ready = "true";
performance.mark("interactive");
