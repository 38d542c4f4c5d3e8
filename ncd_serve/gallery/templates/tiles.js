// Tiles: thumbnails that can be focused, opened and selected. One stop of the Tab key for a group, arrow keys inside it.
const tilesInView = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target: tile } of entries) {
    if (!isIntersecting) continue;
    tilesInView.unobserve(tile);
    paint(tile, Number(tile.dataset.image));
  }
}, { rootMargin: "400px" });
const CHUNK = 120; // tiles of a list that is not long
const AHEAD = 900; // px above and below the window in which a long list has tiles
const longLists = new Set();
const selection = new Set();

function makeTile(image) {
  const fit = fitOf(image);
  const doubt = missing.has(image) ? "missing" : fit === "typical" ? "" : fit ?? "";
  const words = [images.path[image], `confidence ${images.confidence[image].toFixed(2)}`, doubt];
  const label = words.filter(Boolean).join(", ");
  const chosen = selection.has(image);
  const tile = make("button", {
    type: "button", class: `tile ${doubt}${moves.has(image) ? " corrected" : ""}${chosen ? " chosen" : ""}`,
    "data-image": image, tabindex: -1, title: label, "aria-label": label, "aria-pressed": chosen ? "true" : false,
  });
  tilesInView.observe(tile);
  return tile;
}

// A picture that cannot be opened: part of a button, or of words.
function makePicture(image) {
  const picture = make("span", { class: "tile", "data-image": image });
  tilesInView.observe(picture);
  return picture;
}

// Fill a group. A long one has tiles near the window alone; space stands for the others.
function fillTiles(group, list) {
  longLists.delete(group);
  group.list = null;
  group.style.padding = "";
  if (list.length > CHUNK) {
    group.list = list;
    group.range = null;
    longLists.add(group);
    requestAnimationFrame(() => windowOf(group));
  }
  const shown = list.slice(0, CHUNK).map(makeTile);
  if (shown.length) shown[0].tabIndex = 0;
  group.replaceChildren(...shown);
}

function windowOf(group) {
  const [first] = group.children;
  if (!group.isConnected || !first || !group.clientWidth) return;
  const step = first.offsetWidth + 4; // as wide and high as a tile with its gap
  const perRow = Math.max(1, Math.floor((group.clientWidth + 4) / step));
  const rows = Math.ceil(group.list.length / perRow);
  const top = group.getBoundingClientRect().top;
  const from = Math.min(rows - 1, Math.max(0, Math.floor((-top - AHEAD) / step)));
  const to = Math.min(rows, Math.max(from + 1, Math.ceil((innerHeight - top + AHEAD) / step)));
  if (group.range?.join() === [from, to, perRow].join()) return;
  group.range = [from, to, perRow];
  const wanted = group.list.slice(from * perRow, to * perRow);
  const have = new Map([...group.children].map((tile) => [Number(tile.dataset.image), tile]));
  const focused = document.activeElement?.closest?.(".tile");
  const tiles = wanted.map((image) => have.get(image) ?? makeTile(image));
  if (!tiles.includes(focused)) tiles[0].tabIndex = 0;
  group.style.paddingTop = `${from * step}px`;
  group.style.paddingBottom = `${(rows - to) * step}px`;
  group.replaceChildren(...tiles);
  if (tiles.includes(focused)) focused.focus({ preventScroll: true });
}

let windowsDue = false;
function updateWindows() {
  if (windowsDue || !longLists.size) return;
  windowsDue = true;
  requestAnimationFrame(() => {
    windowsDue = false;
    for (const group of longLists) {
      if (group.isConnected) windowOf(group);
      else longLists.delete(group);
    }
  });
}
addEventListener("scroll", updateWindows, { passive: true });
addEventListener("resize", updateWindows);

function tileKeys(event) {
  const tile = event.target.closest(".tile");
  if (!tile) return;
  const tiles = [...tile.parentElement.children];
  const perRow = Math.max(1, tiles.filter((other) => other.offsetTop === tiles[0].offsetTop).length);
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -perRow, ArrowDown: perRow }[event.key];
  const next = step && tiles[tiles.indexOf(tile) + step];
  if (!next) return;
  event.preventDefault();
  tile.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}
