// Dialogs that ask for a cluster: to merge into, after a look at both sides, or to move images to; and for a name.
const SIDE = 12; // images of each side of a merge

function openChooser(title, choices, near, then) {
  $("choose-title").textContent = title;
  $("choose-search").value = "";
  $("choose-search").hidden = false;
  $("choose-list").replaceChildren(...choices.map((choice) => clusterChoice(choice, near.has(choice.id), then)));
  if (!$("choose").open) $("choose").showModal();
  $("choose-search").focus();
}

function clusterChoice(cluster, isNear, then) {
  const { id } = cluster;
  const facts = `${id === WRONG ? "" : `#${id} · `}${counted(sizeOf(cluster), "image")}${isNear ? " · near" : ""}`;
  return make("button", { type: "button", class: "choice", "data-cluster": id, click: () => then(cluster) },
    makeMark(cluster), make("span", { class: "what" }, make("b", {}, nameOf(id)), make("span", { class: "muted" }, facts)),
    make("span", { class: "tiles" }, ...cluster.images.slice(0, 5).map(makePicture)));
}

// Clusters that others may be merged into or images moved to: the nearest ones first, then by size.
function choicesFor(near, except) {
  const order = (other) => near.get(other.id) ?? near.size;
  return clusters
    .filter((other) => other.id !== WRONG && !except(other) && said[other.id].merge === null && !said[other.id].junk)
    .filter((other) => sizeOf(other) > 0)
    .sort((one, other) => order(one) - order(other) || sizeOf(other) - sizeOf(one));
}

const nearOf = (cluster) => new Map(cluster.nearest.map(([id], order) => [id, order]));

function filterChoices() {
  const text = $("choose-search").value.trim().toLowerCase();
  for (const choice of $("choose-list").children) {
    choice.hidden = !choice.querySelector(".what").textContent.toLowerCase().includes(text);
  }
}

function chooseMerge(cluster) {
  const near = nearOf(cluster);
  const choices = choicesFor(near, (other) => other === cluster || isNew(other.id));
  openChooser(`Merge ${nameOf(cluster.id)} into…`, choices, near, (other) => compareSides(cluster, other));
}

function compareSides(cluster, other) {
  const side = (one) => make("section", {}, make("h3", {}, makeMark(one), nameOf(one.id)),
    make("span", { class: "tiles" }, ...one.images.slice(0, SIDE).map(makePicture)));
  $("choose-title").textContent = "Are these one category?";
  $("choose-search").hidden = true;
  const done = () => { $("choose").close(); mergeInto(cluster.id, other.id); cluster.card.focus(); };
  const yes = make("button", { type: "button", class: "primary", id: "merge-yes", click: done }, "Merge them");
  $("choose-list").replaceChildren(make("div", { class: "sides" }, side(cluster), side(other)),
    make("div", { class: "answers" }, yes, make("button", { type: "button", click: () => chooseMerge(cluster) }, "Back")));
  yes.focus();
}

function chooseTarget(list) {
  const homes = new Set(list.map((image) => clusterOf[image]));
  const near = nearOf([...homes][0]);
  const choices = choicesFor(near, (other) => homes.size === 1 && homes.has(other));
  openChooser(`Move ${counted(list.length, "image")} to…`, choices, near, ({ id }) => {
    $("choose").close();
    placeImages(list, id);
  });
}

// The name of a new category, with a look at its images.
function askCategory(list) {
  $("choose-title").textContent = `A new category of ${counted(list.length, "image")}`;
  $("choose-search").hidden = true;
  const name = make("input", {
    type: "text", id: "category-name", maxlength: 200, placeholder: "Its name, or leave it open", autocomplete: "off",
    "aria-label": "Name of the new category",
  });
  const form = make("form", { class: "answers", submit: (event) => {
    event.preventDefault();
    $("choose").close();
    clearSelection();
    goTo(clusterFor(newCategories([list], name.value)[0]));
  } }, name, make("button", { class: "primary" }, "Make it"));
  $("choose-list").replaceChildren(form, make("span", { class: "tiles" }, ...list.slice(0, 2 * SIDE).map(makePicture)));
  if (!$("choose").open) $("choose").showModal();
  name.focus();
}
