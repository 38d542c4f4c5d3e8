// Dialogs: one image with all that is known about it, and the choice of a cluster to merge into.
let detailList = [];

function openDetail(image, list) {
  detailList = list;
  showDetail(image);
  if (!$("detail").open) $("detail").showModal();
}

function showDetail(image) {
  const cluster = clusterOf[image];
  const picture = make("div", { class: "picture", role: "img", "aria-label": images.path[image] });
  paint(picture, image);
  const facts = [
    ["cluster", clusterLink(cluster.id)], ["confidence", images.confidence[image].toFixed(3)], ["fit", fitOf(image)],
    [data.embedded ? "centrality" : null, images.central[image].toFixed(3)], ["true class", truthOf(image)],
  ].filter(([label, value]) => label && value);
  const step = (by) => {
    const target = detailList[detailList.indexOf(image) + by];
    return make("button", {
      type: "button", class: "round", disabled: target === undefined, "data-step": by,
      "aria-label": by < 0 ? "Previous image" : "Next image", autofocus: by > 0,
      click: () => { showDetail(target); $("detail").querySelector(`[data-step="${by}"]`).focus(); },
    }, by < 0 ? "‹" : "›");
  };
  $("detail").replaceChildren(
    picture,
    make("div", { class: "about" },
      make("p", { class: "path" }, images.path[image]),
      make("dl", {}, ...facts.flatMap(([label, value]) =>
        [make("dt", { class: "muted" }, label), make("dd", {}, value)])),
      make("p", { class: "muted" }, missing.has(image) ? "The file could not be read when this page was made." :
        data.root && make("a", { href: fileAddress(image), target: "_blank", rel: "noreferrer" }, "Open the file")),
      make("form", { method: "dialog", class: "steps" }, step(-1), step(1), make("button", {}, "Close"))));
  select(image);
}

const fileAddress = (image) =>
  `file://${`${data.root}/${images.path[image]}`.split("/").map(encodeURIComponent).join("/")}`;

function detailKeys(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) $("detail").querySelector(`[data-step="${by}"]`)?.click();
}

function chooseMerge(cluster) {
  $("merge-title").textContent = `Merge ${nameOf(cluster.id)} into…`;
  $("merge-search").value = "";
  const near = new Map(cluster.nearest.map(([id], order) => [id, order]));
  const order = (other) => near.get(other.id) ?? near.size;
  const choices = clusters
    .filter((other) => other !== cluster && said[other.id].merge === null && !said[other.id].junk)
    .sort((one, other) => order(one) - order(other) || other.count - one.count);
  $("merge-list").replaceChildren(...choices.map((target) => mergeChoice(cluster, target, near.has(target.id))));
  $("merge").showModal();
}

function mergeChoice(cluster, target, isNear) {
  const tiles = target.images.slice(0, 5).map((image) => {
    const tile = make("span", { class: "tile", "data-image": image });
    tilesInView.observe(tile);
    return tile;
  });
  return make("button", {
    type: "button", class: "merge-choice", "data-cluster": target.id,
    click: () => { $("merge").close(); mergeInto(cluster.id, target.id); cluster.card.focus(); },
  }, makeMark(target), make("span", { class: "what" }, make("b", {}, nameOf(target.id)),
    make("span", { class: "muted" }, `#${target.id} · ${counted(target.count, "image")}${isNear ? " · near" : ""}`)),
  make("span", { class: "tiles" }, ...tiles));
}

function filterMergeChoices() {
  const text = $("merge-search").value.trim().toLowerCase();
  for (const choice of $("merge-list").children) {
    choice.hidden = !choice.querySelector(".what").textContent.toLowerCase().includes(text);
  }
}
