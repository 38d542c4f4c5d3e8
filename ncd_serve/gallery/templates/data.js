// What the page shows, and the few helpers that everything else uses. Text reaches the page as text nodes only.
const data = JSON.parse(document.getElementById("data").textContent);
const { images, clusters } = data; // clusters: the largest first; images: cluster by cluster
const imageCount = images.path.length;
const byId = new Map(clusters.map((cluster) => [cluster.id, cluster]));
const clusterOf = new Array(imageCount); // where an image is now, which a person may change
const modelClusterOf = new Array(imageCount);
const sheetOf = new Uint32Array(imageCount + data.left_out.length);
const missing = new Set(data.missing);
const live = {}; // what the studio's scripts add: apply, split, start

let next = 0;
for (const cluster of clusters) {
  cluster.first = next;
  cluster.own = Array.from({ length: cluster.shown }, () => next++); // as the model has it
  cluster.own.forEach((image) => { clusterOf[image] = modelClusterOf[image] = cluster; });
  cluster.images = cluster.own;
}
for (let sheet = 0; sheet + 1 < data.sheets.length; sheet++) {
  sheetOf.fill(sheet, data.sheets[sheet], data.sheets[sheet + 1]);
}

const $ = (id) => document.getElementById(id);

// An element with attributes, listeners (functions) and children (nodes or text).
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

const grouped = (count) => count.toLocaleString("en");
const inWords = ([first, ...others]) => `${first[0].toUpperCase()}${first.slice(1)}: ${others.join("; ")}.`; // of a verdict
const counted = (count, noun) => `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;
// Whole numbers, but neither 0 nor 100 % of what is not quite that.
function percent(share) {
  const whole = share === 0 || share === 1 || (share > 0.1 && share < 0.99);
  return `${(100 * share).toFixed(whole ? 0 : 1)} %`;
}
const truthOf = (image) => (images.truth ? images.classes[images.truth[image]] : null);
const fitOf = (image) => (images.fit ? data.fits[images.fit[image]] : null);

// Browsers may refuse to keep anything for files; the page works without.
function remember(key, value) {
  try { localStorage.setItem(`ncd-serve:${key}`, JSON.stringify(value)); } catch { /* kept in the page alone */ }
}

function recall(key) {
  try { return JSON.parse(localStorage.getItem(`ncd-serve:${key}`)); } catch { return null; }
}
