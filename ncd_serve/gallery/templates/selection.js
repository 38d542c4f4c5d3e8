// Images that are selected together, by clicks, keys or the lasso, and what can be done with them.
let lastChosen = null;
let selecting = false; // every click selects: for fingers

function clickTile(event, tile) {
  const image = Number(tile.dataset.image);
  if (!correctable || !(event.ctrlKey || event.metaKey || event.shiftKey || selecting || selection.size)) {
    return openDetail(image, imagesAround(tile));
  }
  return chooseTile(tile, event.shiftKey);
}

// Select an image or not; or with it all between it and the one before.
function chooseTile(tile, between) {
  const [image, around] = [Number(tile.dataset.image), imagesAround(tile)];
  const [from, to] = [around.indexOf(lastChosen), around.indexOf(image)].sort((one, other) => one - other);
  if (between && from >= 0) around.slice(from, to + 1).forEach((each) => selection.add(each));
  else toggleChosen(image);
  lastChosen = image;
  showSelection();
}

function toggleChosen(image) {
  if (!selection.delete(image)) selection.add(image);
}

function showSelection() {
  for (const tile of document.querySelectorAll("button.tile[data-image]")) {
    const chosen = selection.has(Number(tile.dataset.image));
    tile.classList.toggle("chosen", chosen);
    if (chosen) tile.setAttribute("aria-pressed", "true");
    else tile.removeAttribute("aria-pressed");
  }
  $("selection").hidden = !selection.size;
  $("selection-count").textContent = `${counted(selection.size, "image")} selected`;
  drawMap();
}

function clearSelection() {
  selection.clear();
  showSelection();
}

const withSelection = (action) => { if (correctable && selection.size) action(); };
const moveSelection = () => chooseTarget([...selection]);
const nameCategory = () => askCategory([...selection]);
const placeSelection = (id) => placeImages([...selection], id);

// Give images to a cluster. One that the model has there already is confirmed: it becomes a label, too.
function placeImages(list, id) {
  clusterFor(id);
  moveImages(list, id);
  clearSelection();
}

function makeSelection() {
  $("select").hidden = !correctable;
  $("select").addEventListener("click", () => {
    selecting = !selecting;
    $("select").setAttribute("aria-pressed", selecting);
    if (!selecting) clearSelection();
  });
  const actions = {
    move: moveSelection, category: nameCategory, none: () => placeSelection(WRONG), clear: clearSelection,
    back: () => { say([], null, [...selection].map((image) => [image, null])); clearSelection(); },
  };
  for (const [name, action] of Object.entries(actions)) $(`selection-${name}`).addEventListener("click", action);
  document.addEventListener("keydown", (event) => {
    const tile = event.target.closest?.("button.tile[data-image]");
    if (event.key === "Escape" && selection.size && !document.querySelector("dialog[open]")) clearSelection();
    if (event.key !== " " || !tile || !correctable) return;
    event.preventDefault();
    chooseTile(tile, event.shiftKey);
  });
}
