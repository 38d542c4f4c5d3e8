// The map: a mark for each image on a canvas. Wheel and drag move it; a ring over it follows pointer and keyboard.
const map = { scale: 1, left: 0, top: 0, size: [1, 1], cluster: null, selected: null, drag: null, stamps: new Map() };
const REACH = 14; // px around a mark that count as on it
const EDGE = 18;

function makeMap() {
  if (!images.x) return;
  $("map-panel").hidden = false;
  document.body.classList.add("with-map");
  const kind = data.map === "tsne" ? "t-SNE of the embeddings" : "The embeddings' two principal axes";
  const grey = data.background[0].length ? " Grey: training images." : "";
  const how = matchMedia("(pointer: coarse)").matches ? "" : " Wheel zooms, drag moves, double click shows all.";
  $("map-kind").textContent = `${kind}.${grey}${how}`;
  makeLegend();
  new ResizeObserver(fitMap).observe($("map"));
  const canvas = $("map");
  canvas.addEventListener("pointermove", moveOnMap);
  canvas.addEventListener("pointerleave", () => point(null));
  canvas.addEventListener("pointerdown", (event) => {
    if (startsLasso(event)) return;
    map.drag = { x: event.offsetX, y: event.offsetY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", dropOnMap);
  canvas.addEventListener("pointercancel", () => { map.drag = null; });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(event.deltaY < 0 ? 1.25 : 0.8, event.offsetX, event.offsetY);
  }, { passive: false });
  canvas.addEventListener("dblclick", resetMap);
  canvas.addEventListener("keydown", mapKeys);
  filterListeners.push(drawMap);
  makeLasso();
}

function fitMap() {
  const canvas = $("map");
  const { width, height } = canvas.getBoundingClientRect();
  map.size = [width, height];
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  drawMap();
}

const place = (image) => placeOf(images.x[image], images.y[image]);

function placeOf(x, y) {
  const side = Math.min(...map.size) - 2 * EDGE;
  const [spanX, spanY] = [map.size[0] - side, map.size[1] - side].map((rest) => rest / 2);
  return [
    (x * side + spanX) * map.scale + map.left,
    ((1 - y) * side + spanY) * map.scale + map.top,
  ];
}

function drawMap() {
  if (!images.x) return;
  const context = $("map").getContext("2d");
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.clearRect(0, 0, ...map.size);
  drawBackground(context);
  const pale = (cluster, image) =>
    (map.cluster && map.cluster !== cluster) || (matchingImages && !matchingImages[image]);
  for (const dim of [true, false]) {
    context.globalAlpha = dim ? 0.14 : 0.9;
    for (const cluster of clusters) {
      const stamp = stampOf(cluster);
      for (const image of cluster.images) {
        if (Boolean(pale(cluster, image)) !== dim) continue;
        const [x, y] = place(image);
        context.drawImage(stamp, x - 6, y - 6, 12, 12);
      }
    }
  }
  if (map.selected !== null) ringAround($("ring"), map.selected);
  drawChosen(context);
}

function drawBackground(context) {
  context.globalAlpha = 0.3;
  context.fillStyle = getComputedStyle($("map-kind")).color;
  const [xs, ys] = data.background;
  xs.forEach((value, at) => {
    const [x, y] = placeOf(value, ys[at]);
    context.fillRect(x - 1.5, y - 1.5, 3, 3);
  });
}

// Each mark is drawn once; a thousand copies of a picture are cheap.
function stampOf(cluster) {
  const key = `${cluster.colour} ${cluster.shape} ${imageCount > 3000}`;
  if (!map.stamps.has(key)) {
    const stamp = make("canvas", { width: 12 * devicePixelRatio, height: 12 * devicePixelRatio });
    const context = stamp.getContext("2d");
    const size = devicePixelRatio * (imageCount > 3000 ? 0.62 : 0.85);
    context.setTransform(size, 0, 0, size, 6 * devicePixelRatio, 6 * devicePixelRatio);
    context.fillStyle = getComputedStyle($("legend").querySelector(`.c${cluster.colour}`)).color;
    context.strokeStyle = getComputedStyle($("map-box")).backgroundColor;
    context.stroke(new Path2D(cluster.shape));
    context.fill(new Path2D(cluster.shape));
    map.stamps.set(key, stamp);
  }
  return map.stamps.get(key);
}

function repaintMap() {
  map.stamps.clear();
  drawMap();
}

function nearestOnMap(x, y, reach = REACH) {
  let [best, least] = [null, reach * reach];
  for (let image = 0; image < imageCount; image++) {
    if (matchingImages && !matchingImages[image]) continue;
    const [px, py] = place(image);
    const distance = (px - x) ** 2 + (py - y) ** 2;
    if (distance < least) [best, least] = [image, distance];
  }
  return best;
}

function moveOnMap(event) {
  const { drag } = map;
  if (lasso.path) return growLasso(event);
  if (!drag) return point(nearestOnMap(event.offsetX, event.offsetY));
  const [dx, dy] = [event.offsetX - drag.x, event.offsetY - drag.y];
  if (!drag.moved && Math.hypot(dx, dy) < 4) return null;
  Object.assign(drag, { x: event.offsetX, y: event.offsetY, moved: true });
  map.left += dx;
  map.top += dy;
  point(null);
  return drawMap();
}

function dropOnMap(event) {
  if (lasso.path) {
    closeLasso();
    return;
  }
  const clicked = map.drag && !map.drag.moved;
  map.drag = null;
  const image = clicked ? nearestOnMap(event.offsetX, event.offsetY) : null;
  if (image !== null) openFromMap(image);
}

function openFromMap(image) {
  select(image);
  goTo(clusterOf[image], { focus: false });
}

function zoom(factor, x = map.size[0] / 2, y = map.size[1] / 2) {
  const scale = Math.min(60, Math.max(1, map.scale * factor));
  if (scale === 1) return resetMap();
  map.left = x - ((x - map.left) * scale) / map.scale;
  map.top = y - ((y - map.top) * scale) / map.scale;
  map.scale = scale;
  return drawMap();
}

function resetMap() {
  Object.assign(map, { scale: 1, left: 0, top: 0 });
  drawMap();
}

// The tip beside the pointer: thumbnail, path, cluster.
function point(image) {
  $("map").classList.toggle("on-mark", image !== null);
  $("tip").hidden = image === null;
  if (image === null) return;
  const [x, y] = place(image);
  const picture = make("span", { class: "tile" });
  paint(picture, image);
  $("tip").replaceChildren(picture, make("span", {}, make("b", {}, nameOf(clusterOf[image].id)),
    make("span", { class: "path" }, images.path[image])));
  const [width, height] = map.size;
  $("tip").style.left = `${Math.max(0, Math.min(x - 30, width - $("tip").offsetWidth))}px`;
  $("tip").style.top = `${y + 14 + $("tip").offsetHeight > height ? y - 14 - $("tip").offsetHeight : y + 14}px`;
}

function ringAround(ring, image) {
  const [x, y] = place(image);
  ring.hidden = x < 0 || y < 0 || x > map.size[0] || y > map.size[1];
  ring.style.transform = `translate(${x}px, ${y}px)`;
}

// The one image that is looked at now: ringed on the map, named below it, framed in its card.
function select(image) {
  map.selected = image;
  for (const tile of document.querySelectorAll(".tile.selected")) tile.classList.remove("selected");
  for (const tile of document.querySelectorAll(`.tile[data-image="${image}"]`)) tile.classList.add("selected");
  if (!images.x) return;
  ringAround($("ring"), image);
  const tile = makeTile(image);
  tile.tabIndex = 0;
  const words = [clusterLink(clusterOf[image].id), make("span", { class: "path" }, images.path[image])];
  $("map-selected").replaceChildren(tile, make("span", { class: "what" }, ...words));
}

function mapKeys(event) {
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  if (steps[event.key]) select(neighbour(...steps[event.key]));
  else if (event.key === "Enter" && map.selected !== null) openFromMap(map.selected);
  else if (event.key === " " && map.selected !== null) selectOnMap();
  else if (event.key === "+" || event.key === "=") zoom(1.25);
  else if (event.key === "-") zoom(0.8);
  else if (event.key === "0") resetMap();
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function selectOnMap() {
  if (!correctable) return;
  toggleChosen(map.selected);
  showSelection();
}

// The nearest image in a direction: what lies to the side counts as farther away.
function neighbour(dx, dy) {
  if (map.selected === null) return nearestOnMap(map.size[0] / 2, map.size[1] / 2, Infinity) ?? 0;
  const [x, y] = place(map.selected);
  let [best, least] = [map.selected, Infinity];
  for (let image = 0; image < imageCount; image++) {
    if (matchingImages && !matchingImages[image]) continue;
    const [px, py] = place(image);
    const ahead = (px - x) * dx + (py - y) * dy;
    const aside = Math.abs((px - x) * dy) + Math.abs((py - y) * dx);
    if (ahead > 0.5 && ahead + 2 * aside < least) [best, least] = [image, ahead + 2 * aside];
  }
  return best;
}

function makeLegend() {
  fillLegend();
  namingListeners.push((moved) => (moved ? fillLegend() : nameLegend()));
}

function fillLegend() {
  const mark = (cluster) => { map.cluster = cluster; drawMap(); };
  $("legend").replaceChildren(...clusters.map((cluster) => make("button", {
    type: "button", class: "legend-entry", pointerenter: () => mark(cluster), pointerleave: () => mark(null),
    focus: () => mark(cluster), blur: () => mark(null), click: () => goTo(cluster, { focus: false }),
  }, makeMark(cluster), make("span", { class: "label" }), make("span", { class: "muted" }, grouped(sizeOf(cluster))))));
  nameLegend();
}

function nameLegend() {
  clusters.forEach(({ id }, order) => {
    const entry = $("legend").children[order];
    entry.querySelector(".label").textContent = nameOf(id);
    entry.classList.toggle("set-aside", said[id].junk || said[id].merge !== null);
    entry.hidden = !clusters[order].images.length && !clusters[order].count;
  });
}
