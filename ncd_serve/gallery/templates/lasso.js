// A line around images on the map: drawn with Shift, or with any pointer after a press on the button.
const lasso = { path: null, armed: false };

function makeLasso() {
  if (!correctable) return;
  $("lasso").hidden = false;
  $("lasso").addEventListener("click", () => armLasso(!lasso.armed));
}

function armLasso(armed) {
  lasso.armed = armed;
  $("lasso").setAttribute("aria-pressed", armed);
  $("map").classList.toggle("drawing", armed);
}

function startsLasso(event) {
  if (!correctable || !(lasso.armed || event.shiftKey)) return false;
  lasso.path = [[event.offsetX, event.offsetY]];
  $("map").setPointerCapture(event.pointerId);
  point(null);
  return true;
}

function growLasso(event) {
  lasso.path.push([event.offsetX, event.offsetY]);
  drawMap();
}

function closeLasso() {
  const { path } = lasso;
  lasso.path = null;
  armLasso(false);
  for (let image = 0; image < imageCount; image++) {
    if ((!matchingImages || matchingImages[image]) && isInside(place(image), path)) selection.add(image);
  }
  showSelection();
}

// A point is inside if a ray from it crosses the line an odd number of times.
function isInside([x, y], path) {
  let inside = false;
  path.forEach(([x1, y1], at) => {
    const [x2, y2] = path[(at + 1) % path.length];
    if ((y1 > y) !== (y2 > y) && x < x1 + ((y - y1) * (x2 - x1)) / (y2 - y1)) inside = !inside;
  });
  return inside;
}

function drawChosen(context) {
  context.globalAlpha = 1;
  context.strokeStyle = getComputedStyle($("map")).accentColor;
  context.lineWidth = 2;
  for (const image of selection) {
    const [x, y] = place(image);
    context.strokeRect(x - 6, y - 6, 12, 12);
  }
  if (!lasso.path) return;
  context.beginPath();
  lasso.path.forEach(([x, y], at) => (at ? context.lineTo(x, y) : context.moveTo(x, y)));
  context.closePath();
  context.stroke();
}
