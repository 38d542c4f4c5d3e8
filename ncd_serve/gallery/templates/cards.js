// A card for each cluster. Only those near the window have content; the others keep their place.
const SHAPES = [
  "M4 0A4 4 0 1 1-4 0A4 4 0 1 1 4 0Z",
  "M-3.5-3.5H3.5V3.5H-3.5Z",
  "M0-4.8L4.6 3.4H-4.6Z",
  "M0-5L5 0L0 5L-5 0Z",
  "M0 4.8L4.6-3.4H-4.6Z",
  "M-1.6-4.6H1.6V-1.6H4.6V1.6H1.6V4.6H-1.6V1.6H-4.6V-1.6H-1.6Z",
];
const COLOURS = 7;
const FEW = 22; // images of a cluster that is not opened
clusters.forEach(dress);

function dress(cluster, order) {
  cluster.colour = order % COLOURS;
  cluster.shape = SHAPES[Math.floor(order / COLOURS) % SHAPES.length];
  cluster.matching = cluster.images;
}

// A cluster by its id; one that a person has made, or that of images in no cluster, is added when it is asked for.
function clusterFor(id) {
  if (byId.has(id)) return byId.get(id);
  const cluster = {
    id, count: 0, shown: 0, introduced: [0, 0], confidence: null, nearest: [], known: null, truths: [], purity: null,
    fits: null, first: id === WRONG ? imageCount : -1, own: [], images: [],
  };
  dress(cluster, clusters.length);
  clusters.push(cluster);
  byId.set(id, cluster);
  makeCard(cluster);
  return cluster;
}

const sizeOf = ({ count, own, images: now }) => count - own.length + now.length;

// Give every image to the cluster that a person, or else the model, says.
function arrangeImages() {
  for (const at of moves.values()) clusterFor(at);
  for (const cluster of clusters) {
    cluster.images = cluster.own.filter((image) => (moves.get(image) ?? cluster.id) === cluster.id);
    cluster.own.forEach((image) => { clusterOf[image] = cluster; });
  }
  for (const [image, at] of moves) {
    clusterOf[image] = byId.get(at);
    if (modelClusterOf[image].id !== at) clusterOf[image].images.push(image);
  }
}

function makeMark(cluster) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "-6 -6 12 12");
  svg.setAttribute("class", `mark c${cluster.colour}`);
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", cluster.shape);
  svg.append(path);
  return svg;
}

const cardsInView = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    const cluster = clusterOfCard(target);
    if (isIntersecting) openCard(cluster);
    else if (!target.contains(document.activeElement)) closeCard(cluster);
  }
}, { rootMargin: "900px" });

function makeCards() {
  clusters.forEach(makeCard);
}

function makeCard(cluster) {
  if (cluster.card) return;
  cluster.card = make("article", {
    id: `cluster-${cluster.id}`, class: "card", "data-cluster": cluster.id, tabindex: -1,
  });
  cardsInView.observe(cluster.card);
}

const clusterOfCard = ({ dataset }) => byId.get(dataset.cluster === WRONG ? WRONG : Number(dataset.cluster));

function openCard(cluster) {
  if (cluster.parts) return;
  cluster.parts = {};
  cluster.card.replaceChildren(cardHead(cluster), cardFacts(cluster), cardBody(cluster));
  cluster.card.style.minHeight = "";
  refreshCard(cluster);
}

function closeCard(cluster) {
  if (!cluster.parts || cluster.all) return; // a long list would jump when it grows again
  if (!cluster.card.hidden) cluster.card.style.minHeight = `${cluster.card.offsetHeight}px`;
  cluster.parts = null;
  cluster.card.replaceChildren();
}

function cardHead(cluster) {
  const { id, parts } = cluster;
  let typing = 0;
  parts.name = make("input", {
    class: "name", placeholder: defaultName(id), readonly: isFixed(id),
    maxlength: 200, spellcheck: "false", autocomplete: "off",
    "aria-label": `Name of cluster ${id}`,
    focus: () => { typing = Date.now(); },
    input: () => setName(id, parts.name.value, `${id}:${typing}`),
  });
  parts.state = make("span", { class: "state" });
  parts.all = make("button", { type: "button", class: "plain all", click: () => toggleAll(cluster) });
  parts.merge = make("button", {
    type: "button", class: "plain merge", click: () => (said[id].merge === null ? chooseMerge(cluster) : unmerge(id)),
  });
  parts.split = make("button", { type: "button", class: "plain split", click: () => live.split(cluster) }, "Split…");
  parts.junk = make("button", {
    type: "button", class: "plain junk", title: "Set aside as junk (x)", click: () => setJunk(id, !said[id].junk),
  }, "Junk");
  return make("header", {},
    makeMark(cluster), parts.name, make("span", { class: "number muted" }, id === WRONG ? "" : `#${id}`), parts.state,
    make("span", { class: "choices" }, parts.all, parts.split, parts.merge, parts.junk));
}

function refreshCard(cluster) {
  const { id, parts, card } = cluster;
  const { name, merge, junk } = said[id];
  card.setAttribute("aria-label", `Cluster ${id}: ${nameOf(id)}, ${counted(sizeOf(cluster), "image")}`);
  card.classList.toggle("merged", merge !== null);
  card.classList.toggle("set-aside", junk);
  card.classList.toggle("changed", entryText(said[id]) !== entryText(begun[id]));
  card.classList.toggle("made", isNew(id) || id === WRONG);
  if (!parts) return;
  if (parts.name !== document.activeElement || parts.name.value.trim() !== name) parts.name.value = name;
  parts.name.disabled = merge !== null;
  parts.merge.textContent = merge === null ? "Merge into…" : "Unmerge";
  parts.merge.hidden = junk || isFixed(id);
  parts.junk.hidden = merge !== null || isFixed(id) || isNew(id);
  parts.split.hidden = !live.split || !correctable || merge !== null || junk || cluster.images.length < 4;
  parts.size.textContent = counted(sizeOf(cluster), "image");
  parts.share.textContent = ` ${percent(sizeOf(cluster) / data.total)}`;
  parts.junk.setAttribute("aria-pressed", junk);
  parts.state.replaceChildren(...stateWords(cluster));
  const guests = mergedInto(id);
  const links = guests.map((guest) => clusterLink(guest.id, guest.count));
  parts.guests.replaceChildren(...(guests.length ? ["with ", ...links] : []));
  if (parts.guestIds !== guests.map((guest) => guest.id).join()) fillBody(cluster);
}

// Beside the name: what became of the cluster.
function stateWords(cluster) {
  const { id } = cluster;
  const { merge, junk } = said[id];
  if (merge !== null) return ["merged into ", clusterLink(merge)];
  if (junk) return ["set aside as junk"];
  const twin = namesake(id);
  if (twin) {
    const join = make("button", { type: "button", class: "chip", click: () => mergeInto(id, twin.id) }, "merge them?");
    return [`also the name of #${twin.id}`, join];
  }
  if (id === WRONG) return ["these images belong to none of the clusters"];
  if (isNew(id)) return ["new: the next round of training learns it"];
  if (isFixed(id)) return ["a known class"];
  return [];
}

function clusterLink(id, count = null) {
  const cluster = byId.get(id);
  const size = count === null ? null : make("span", { class: "muted" }, ` ${grouped(count)}`);
  return make("a", { href: `#cluster-${id}`, class: "cluster-link", "data-cluster": id },
    cluster ? makeMark(cluster) : null, nameOf(id), size);
}

function cardFacts(cluster) {
  const { id, confidence, purity, truths, fits, nearest, known, own, parts } = cluster;
  const muted = (text) => make("span", { class: "muted" }, text);
  const fact = (label, ...words) => make("span", { class: "fact" }, muted(`${label} `), ...words);
  parts.guests = make("span", { class: "fact guests" });
  [parts.size, parts.share] = [make("b"), muted("")];
  const classes = truths.slice(0, 3).map(([name, number]) => `${name} ${number}`).join(", ");
  const near = nearest.map(([id, closeness]) => {
    const link = clusterLink(id);
    link.title = data.embedded ? `cosine ${closeness.toFixed(2)}` : `second choice of ${percent(closeness)}`;
    return link;
  });
  return make("div", { class: "facts" },
    make("span", { class: "fact" }, parts.size, parts.share),
    confidence === null ? null : fact("confidence", confidence.toFixed(2)),
    purity === null ? null : fact("purity", percent(purity), muted(` ${classes}`)),
    fits ? fact("fit", ...fitWords(fits)) : null,
    data.tight && own.length ? tightness(data.tight.includes(id)) : null,
    near.length ? fact("near", ...near) : null,
    known && !isFixed(id) ? fact("resembles", known[0], muted(` ${percent(known[1])}`)) : null,
    parts.guests);
}

const tightness = (tight) => make("span", {
  class: `fact tightness count ${tight ? "" : "unusual"}`, title: "by the silhouette of its images: does it stand apart from the other clusters?",
}, tight ? "tight" : "not tight");

function fitWords(fits) {
  const doubts = data.fits.map((fit, at) => [fit, fits[at]]).filter(([fit, number]) => fit !== "typical" && number);
  if (!doubts.length) return ["all typical"];
  return doubts.flatMap(([fit, number], at) => [at ? ", " : "", make("span", { class: `count ${fit}` },
    fit === "outlier" ? counted(number, fit) : `${number} ${fit}`)]);
}

function cardBody(cluster) {
  const body = make("div", { class: "body" });
  cluster.parts.body = body;
  fillBody(cluster);
  return body;
}

// The introduction (central and doubtful images), the images that match the filters, or all of them.
function fillBody(cluster) {
  const { id, parts, matching, own } = cluster;
  const shown = cluster.images.length;
  const [central, doubtful] = cluster.introduced;
  const stays = (image) => clusterOf[image] === cluster;
  const introduced = own.slice(0, central + doubtful).filter(stays).length;
  const moved = cluster.images.filter((image) => modelClusterOf[image] !== cluster);
  const guests = mergedInto(id);
  parts.guestIds = guests.map((guest) => guest.id).join();
  const first = data.embedded ? "most central" : "most confident";
  const some = matching.length < shown;
  const list = some || cluster.all
    ? [...matching].sort((one, other) => images.central[other] - images.central[one]) : null;
  const caption = some ? `${grouped(matching.length)} of ${counted(shown, "image")} match` : `All, the ${first} first`;
  const groups = list
    ? [tileGroup(caption, cluster.all ? list : list.slice(0, FEW), "matching")]
    : [tileGroup("Given by hand", moved.slice(0, FEW), "matching"),
      tileGroup(`M${first.slice(1)}`, own.slice(0, central).filter(stays), "central"),
      tileGroup("Least certain", own.slice(central, central + doubtful).filter(stays), "doubtful"),
      ...guests.map((guest) => tileGroup(`From ${defaultName(guest.id)}`, guest.images.slice(0, FEW), "matching"))];
  parts.body.replaceChildren(...groups.filter(Boolean));
  parts.all.textContent = cluster.all ? "Show fewer" : `Show all ${grouped(matching.length)}`;
  parts.all.hidden = !cluster.all && matching.length <= (list ? FEW : introduced + Math.min(moved.length, FEW));
  cluster.card.classList.toggle("open", Boolean(cluster.all));
  parts.all.setAttribute("aria-expanded", Boolean(cluster.all));
}

function tileGroup(caption, list, kind) {
  if (!list.length) return null;
  const tiles = make("div", { class: "tiles", role: "group", "aria-label": caption, keydown: tileKeys });
  fillTiles(tiles, list);
  return make("div", { class: `group ${kind}` }, make("p", { class: "caption muted" }, caption), tiles);
}

function toggleAll(cluster) {
  cluster.all = !cluster.all;
  openCard(cluster);
  fillBody(cluster);
}

// Bring a cluster's card into view, even if a filter hides it.
function goTo(cluster, { focus = true } = {}) {
  if (cluster.card.hidden) clearFilters();
  setCurrent(cluster);
  openCard(cluster);
  cluster.card.scrollIntoView({ block: "start" });
  if (focus) cluster.card.focus({ preventScroll: true });
}

let current = null;
function setCurrent(cluster) {
  current?.card.classList.remove("current");
  current = cluster;
  cluster?.card.classList.add("current");
}
