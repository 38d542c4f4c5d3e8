// Which images match, and in which order their clusters come.
const SORTS = {
  size: ["Largest first", (one, other) => sizeOf(other) - sizeOf(one)],
  confidence: ["Least confident first", (one, other) => one.confidence - other.confidence],
  purity: ["Least pure first", (one, other) => one.purity - other.purity],
  name: ["Name", (one, other) => nameOf(one.id).localeCompare(nameOf(other.id), undefined, { numeric: true })],
};
const filterListeners = [];
let matchingImages = null; // a flag for each image, or null: all

function makeFilters() {
  const sorts = Object.entries(SORTS).filter(([key]) => key !== "purity" || images.truth);
  $("sort").append(...sorts.map(([value, [label]]) => make("option", { value }, label)));
  $("fit").append(make("option", { value: "" }, "any"), ...data.fits.map((fit) => make("option", { value: fit }, fit)));
  $("fit-label").hidden = !images.fit;
  for (const id of ["search", "confidence"]) $(id).addEventListener("input", applyFilters);
  $("fit").addEventListener("change", applyFilters);
  $("sort").addEventListener("change", sortCards);
  for (const id of ["clear", "nothing-clear"]) $(id).addEventListener("click", clearFilters);
}

function sortCards() {
  const [, order] = SORTS[$("sort").value];
  const made = ({ id }) => (id === WRONG ? 1 : isNew(id) ? -1 : 0); // what people made first, what fits nowhere last
  clusters.toSorted((one, other) => made(one) - made(other) || order(one, other) || one.first - other.first)
    .forEach((cluster) => $("cards").append(cluster.card));
}

function clearFilters() {
  $("search").value = "";
  $("fit").value = "";
  $("confidence").value = 0;
  applyFilters();
}

function applyFilters() {
  const text = $("search").value.trim().toLowerCase();
  const fit = data.fits.indexOf($("fit").value);
  const least = Number($("confidence").value);
  $("confidence-value").textContent = least.toFixed(2);
  const active = text !== "" || fit >= 0 || least > 0;
  matchingImages = active ? new Uint8Array(imageCount) : null;
  let found = 0;
  for (const cluster of clusters) {
    const all = !active || clusterMatches(cluster, text);
    const list = active ? cluster.images.filter((image) =>
      (all || imageMatches(image, text)) && (fit < 0 || images.fit[image] === fit) && images.confidence[image] >= least)
      : cluster.images;
    if (active) list.forEach((image) => { matchingImages[image] = 1; });
    found += list.length > 0;
    showMatching(cluster, list);
  }
  $("nothing").hidden = found > 0;
  $("clear").hidden = !active;
  $("matches").textContent = active
    ? `${counted(matchingImages.reduce((sum, one) => sum + one, 0), "image")} in ${counted(found, "cluster")}` : "";
  for (const listener of filterListeners) listener();
}

function showMatching(cluster, list) {
  const same = cluster.matching.length === list.length && list.every((image, at) => image === cluster.matching[at]);
  cluster.matching = list;
  cluster.card.hidden = list.length === 0;
  if (!same && cluster.parts) fillBody(cluster);
}

function clusterMatches({ id, known }, text) {
  const number = text.replace(/^#/, "");
  return text === "" || String(id) === number || nameOf(id).toLowerCase().includes(text) ||
    defaultName(id) === text || (known?.[0].toLowerCase().includes(text) && !said[id].name);
}

function imageMatches(image, text) {
  return images.path[image].toLowerCase().includes(text) || (truthOf(image)?.toLowerCase().includes(text) ?? false);
}
