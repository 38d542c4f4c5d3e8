// Tiles: thumbnails that can be focused and opened. One stop of the Tab key for a group, arrow keys inside it.
const tilesInView = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting) continue;
    tilesInView.unobserve(target);
    paint(target, Number(target.dataset.image));
  }
}, { rootMargin: "400px" });
const CHUNK = 120;

function makeTile(image) {
  const fit = fitOf(image);
  const doubt = missing.has(image) ? "missing" : fit === "typical" ? "" : fit ?? "";
  const words = [images.path[image], `confidence ${images.confidence[image].toFixed(2)}`, doubt];
  const label = words.filter(Boolean).join(", ");
  const tile = make("button", {
    type: "button", class: `tile ${doubt}`, "data-image": image, tabindex: -1, title: label, "aria-label": label,
  });
  tilesInView.observe(tile);
  return tile;
}

// Fill a group; a long one grows when its end comes near.
function fillTiles(group, list) {
  const shown = list.slice(0, CHUNK).map(makeTile);
  if (shown.length) shown[0].tabIndex = 0;
  group.replaceChildren(...shown);
  if (list.length > CHUNK) growTiles(group, list);
}

function growTiles(group, list) {
  const end = new IntersectionObserver(([{ isIntersecting }]) => {
    if (!isIntersecting) return;
    end.disconnect();
    const have = group.childElementCount;
    group.append(...list.slice(have, have + CHUNK).map(makeTile));
    if (list.length > have + CHUNK) growTiles(group, list);
  }, { rootMargin: "800px" });
  end.observe(group.lastElementChild);
}

function tileKeys(event) {
  const tile = event.target.closest(".tile");
  if (!tile) return;
  const tiles = [...tile.parentElement.children];
  const perRow = Math.max(1, tiles.filter((other) => other.offsetTop === tiles[0].offsetTop).length);
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -perRow, ArrowDown: perRow }[event.key];
  const target = step && tiles[tiles.indexOf(tile) + step];
  if (!target) return;
  event.preventDefault();
  tile.tabIndex = -1;
  target.tabIndex = 0;
  target.focus();
}
