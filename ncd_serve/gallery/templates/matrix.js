// Clusters against true classes, matched one to one by training: drawn when it is opened, since it may have many cells.
const OVERHANG = 56; // px of the last slanted label
const matrix = { cell: 0, left: 0, top: 0, counts: new Map() };

function makeMatrix() {
  const { confusion } = data;
  if (!confusion) return;
  $("confusion").hidden = false;
  $("confusion-summary").textContent = confusion.accuracy === null
    ? "not matched: ncd-serve evaluate RUN matches them"
    : `${percent(confusion.accuracy)} of the images are in the cluster that matches their class`;
  for (const [row, column, count] of confusion.cells) matrix.counts.set(row * confusion.classes.length + column, count);
  $("confusion").addEventListener("toggle", drawMatrix);
  $("matrix").addEventListener("pointermove", (event) => readCell(event));
  $("matrix").addEventListener("click", (event) => openCell(event));
  namingListeners.push(drawMatrix);
}

const matchedCount = (row, column) => matrix.counts.get(row * data.confusion.classes.length + column) ?? 0;

function drawMatrix() {
  const { confusion } = data;
  if (!$("confusion").open) return;
  fillMatched();
  const [rows, columns] = [confusion.clusters.length, confusion.classes.length];
  const canvas = $("matrix");
  const context = canvas.getContext("2d");
  const room = $("matrix-box").clientWidth;
  const font = "12px system-ui, sans-serif";
  context.font = font;
  const longest = (names) => Math.min(150, Math.max(...names.map((name) => context.measureText(name).width)) + 10);
  const names = confusion.clusters.map(nameOf);
  matrix.cell = Math.max(3, Math.min(34, Math.floor((room - longest(names) - OVERHANG) / columns)));
  const labelled = matrix.cell >= 11;
  [matrix.left, matrix.top] = labelled ? [longest(names), longest(confusion.classes)] : [0, 0];
  const [width, height] = [matrix.left + columns * matrix.cell + OVERHANG, matrix.top + rows * matrix.cell + 1];
  [canvas.width, canvas.height] = [width * devicePixelRatio, height * devicePixelRatio];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  context.font = font;
  if (labelled) drawLabels(context, names);
  drawCells(context);
}

function drawLabels(context, names) {
  context.fillStyle = getComputedStyle($("matrix-box")).color;
  context.textBaseline = "middle";
  context.textAlign = "right";
  names.forEach((name, row) =>
    context.fillText(shortened(context, name), matrix.left - 6, matrix.top + (row + 0.5) * matrix.cell));
  context.textAlign = "left";
  data.confusion.classes.forEach((name, column) => {
    context.save();
    context.translate(matrix.left + (column + 0.5) * matrix.cell, matrix.top - 6);
    context.rotate(-Math.PI / 2.6);
    context.fillText(shortened(context, name), 0, 0);
    context.restore();
  });
}

function shortened(context, name) {
  let text = name;
  while (text.length > 1 && context.measureText(text).width > 140) text = `${text.slice(0, -2)}…`;
  return text;
}

function drawCells(context) {
  const { cell, left, top } = matrix;
  const style = getComputedStyle($("matrix"));
  const gap = cell > 8 ? 1 : 0;
  context.textAlign = "center";
  data.confusion.clusters.forEach((id, row) => data.confusion.classes.forEach((_, column) => {
    const count = matchedCount(row, column);
    const share = count / byId.get(id).shown;
    context.globalAlpha = count ? 0.12 + 0.88 * share : 0.05;
    context.fillStyle = count ? style.accentColor : style.color;
    context.fillRect(left + column * cell, top + row * cell, cell - gap, cell - gap);
    context.globalAlpha = 1;
    if (!count || cell < 22) return;
    context.fillStyle = share > 0.5 ? style.backgroundColor : style.color;
    context.fillText(count, left + (column + 0.5) * cell, top + (row + 0.5) * cell);
  }));
}

function cellAt(event) {
  const row = Math.floor((event.offsetY - matrix.top) / matrix.cell);
  const column = Math.floor((event.offsetX - matrix.left) / matrix.cell);
  const { clusters: rows, classes: columns } = data.confusion;
  return rows[row] !== undefined && columns[column] !== undefined ? [row, column] : null;
}

function readCell(event) {
  const cell = cellAt(event);
  if (!cell) return;
  const [row, column] = cell;
  const id = data.confusion.clusters[row];
  const count = matchedCount(row, column);
  $("matrix-readout").textContent = `${nameOf(id)} (#${id}) · ${data.confusion.classes[column]}: ` +
    `${counted(count, "image")}, ${percent(count / byId.get(id).shown)} of the cluster`;
}

function openCell(event) {
  const cell = cellAt(event);
  if (!cell || !matchedCount(...cell)) return;
  $("search").value = data.confusion.classes[cell[1]];
  applyFilters();
  goTo(byId.get(data.confusion.clusters[cell[0]]));
}

function fillMatched() {
  const { confusion } = data;
  if (confusion.accuracy === null) return;
  const sizes = new Map(); // of the classes
  for (const [, column, count] of confusion.cells) sizes.set(column, (sizes.get(column) ?? 0) + count);
  const head = ["cluster", "best matching class", "images", "purity", "of the class"];
  const rows = confusion.clusters.map((id, row) => {
    const both = matchedCount(row, row);
    const purity = percent(byId.get(id).purity);
    const match = row < confusion.matched
      ? [confusion.classes[row], both, purity, percent(both / sizes.get(row))] : ["none left", "", purity, ""];
    return make("tr", {}, make("td", {}, clusterLink(id)), ...match.map((cell) => make("td", {}, String(cell))));
  });
  const titles = head.map((title) => make("th", { scope: "col" }, title));
  $("matched").replaceChildren(make("thead", {}, make("tr", {}, ...titles)), make("tbody", {}, ...rows));
}
