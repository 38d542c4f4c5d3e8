// Sheets of thumbnails follow this script as text, or come from the studio. Each becomes a picture when it is looked at.
const sheetAddresses = new Map();
const awaited = new Map();

function sheetAddress(sheet) {
  if (data.studio) return `${data.studio}/sheets/${sheet}.jpg`;
  if (!sheetAddresses.has(sheet)) {
    sheetAddresses.set(sheet, new Promise((found) => { awaited.set(sheet, found); }));
    openAwaited();
  }
  return sheetAddresses.get(sheet);
}

function openAwaited() {
  const parsed = document.readyState !== "loading";
  for (const [sheet, found] of awaited) {
    const node = $(`sheet-${sheet}`);
    if (!node || !(parsed || node.nextSibling)) continue; // not here yet, or only half of it
    awaited.delete(sheet);
    found(URL.createObjectURL(new Blob([bytesOf(node.textContent)], { type: "image/jpeg" })));
    node.remove();
  }
  if (awaited.size && !parsed) setTimeout(openAwaited, 100);
}

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// Show an image as the background of an element, whatever the element's size.
async function paint(element, image) {
  const sheet = sheetOf[image];
  const first = data.sheets[sheet];
  const rows = Math.ceil((data.sheets[sheet + 1] - first) / data.columns);
  const [column, row] = [(image - first) % data.columns, Math.floor((image - first) / data.columns)];
  element.dataset.painted = image;
  const address = await sheetAddress(sheet);
  if (Number(element.dataset.painted) !== image) return; // it shows another one by now
  element.style.backgroundImage = `url("${address}")`;
  element.style.backgroundSize = `${data.columns * 100}% ${rows * 100}%`;
  element.style.backgroundPosition =
    `${(100 * column) / (data.columns - 1)}% ${rows > 1 ? (100 * row) / (rows - 1) : 0}%`;
}
