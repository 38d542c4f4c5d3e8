// What people say: names, merges and junk of clusters, and where single images belong. `begun` is what the bundle says,
// `said` what the page says now. Corrections of images are kept by image: a cluster's id, or "wrong" for none.
const WRONG = "wrong";
const storageKey = `names:${data.checkpoint ?? data.source}`;
const begun = {};
const said = {};
const begunMoves = new Map(data.corrected);
const moves = new Map(begunMoves);
const written = new Map(); // entries of the last names.json, as text
const writtenMoves = new Map();
const undoable = [];
const redoable = [];
const namingListeners = [];
const correctable = data.kind !== "rows";

data.defaults.forEach((_, id) => begin(id));
for (const id of Object.keys(data.new_names)) begin(Number(id), data.new_names[id]);
begin(WRONG);

function begin(id, name = data.names[id] ?? "") {
  begun[id] = { name, merge: data.merged[id] ?? null, junk: data.junk.includes(id) };
  said[id] = { ...begun[id] };
}

const defaultName = (id) => (id === WRONG ? "In no cluster" : data.defaults[id] ?? `cluster-${id}`);
const nameOf = (id) => said[id].name || defaultName(id);
const isFixed = (id) => id === WRONG || id < data.fixed; // a known class, which keeps its name
const isNew = (id) => id !== WRONG && id >= data.defaults.length; // it has images, but the model does not know it yet
const mergedInto = (id) => clusters.filter((cluster) => said[cluster.id].merge === id);
const clusterIds = () => Object.keys(said).filter((id) => id !== WRONG).map(Number);
const newId = () => Math.max(data.defaults.length - 1, ...clusterIds()) + 1;

// One thing is said about a cluster; nothing restores its default name.
function entryOf({ name, merge, junk }) {
  if (merge !== null) return { merge_into: merge };
  if (junk) return { junk: true };
  return name ? { name } : {};
}

const entryText = (words) => JSON.stringify(entryOf(words));
const target = (image) => moves.get(image) ?? null;

// Clusters whose entry differs from the bundle's, or from an entry that was saved before.
function touchedIds() {
  return clusterIds().filter((id) => entryText(said[id]) !== entryText(begun[id]) || written.has(id))
    .filter((id) => !isNew(id) || byId.get(id)?.images.length);
}

function touchedImages() {
  return [...new Set([...moves.keys(), ...begunMoves.keys(), ...writtenMoves.keys()])]
    .filter((image) => target(image) !== (begunMoves.get(image) ?? null) || writtenMoves.has(image));
}

function unsavedCount() {
  const texts = touchedIds().filter((id) => entryText(said[id]) !== (written.get(id) ?? entryText(begun[id])));
  const moved = touchedImages().filter((image) => target(image) !==
    (writtenMoves.has(image) ? writtenMoves.get(image) : begunMoves.get(image) ?? null));
  return texts.length + moved.length;
}

// Change clusters and images as one step. Steps with the same `typing` id are undone together.
function say(changes, typing = null, moved = []) {
  const step = { typing, before: snapshot(changes, moved) };
  for (const [id, words] of changes) Object.assign(said[id], words);
  for (const [image, to] of moved) setTarget(image, to);
  step.after = snapshot(changes, moved);
  const last = undoable.at(-1);
  if (typing !== null && last?.typing === typing) last.after = step.after;
  else undoable.push(step);
  redoable.length = 0;
  namingChanged(moved.length > 0);
}

const snapshot = (changes, moved) => ({
  clusters: changes.map(([id]) => [id, { ...said[id] }]),
  images: moved.map(([image]) => [image, target(image)]),
});

function setTarget(image, to) {
  if (to === null) moves.delete(image);
  else moves.set(image, to);
}

function travel(from, to, side) {
  const step = from.pop();
  if (!step) return;
  to.push(step);
  for (const [id, words] of step[side].clusters) said[id] = { ...words };
  for (const [image, at] of step[side].images) setTarget(image, at);
  namingChanged(step.before.images.length > 0);
}

const undo = () => travel(undoable, redoable, "before");
const redo = () => travel(redoable, undoable, "after");

function namingChanged(moved = false) {
  if (moved) arrangeImages();
  const edits = touchedIds().map((id) =>
    [id, { ...said[id], was: entryText(begun[id] ?? { name: "", merge: null, junk: false }), written: written.get(id) }]);
  const places = touchedImages().map((image) => [images.path[image], { to: target(image), was: begunMoves.get(image) ?? null }]);
  remember(storageKey, { ...Object.fromEntries(edits), images: Object.fromEntries(places) });
  for (const listener of namingListeners) listener(moved);
}

const setName = (id, name, typing) => say([[id, { name: name.replace(/[\p{Cc}\p{Zl}\p{Zp}]/gu, " ").trim() }]], typing);
const setJunk = (id, junk) => say([[id, { junk, merge: null }], ...(junk ? freed(id) : [])]);
const unmerge = (id) => say([[id, { merge: null }]]);
const freed = (id) => mergedInto(id).map((cluster) => [cluster.id, { merge: null }]);
const moveImages = (list, id) => say([], null, list.map((image) => [image, id]));

// Those that were merged into this one go along: a merge never leads to a cluster that is merged itself. A cluster that
// the model does not know is its images, so they move.
function mergeInto(id, into) {
  if (isNew(id)) return moveImages(byId.get(id).images, into);
  return say([id, ...mergedInto(id).map((cluster) => cluster.id)].map((each) => [each, { merge: into, junk: false }]));
}

// Make a category of each list of images, all in one step; return their ids.
function newCategories(lists, name = "") {
  const ids = lists.map(() => {
    const id = newId();
    begin(id, "");
    return clusterFor(id).id;
  });
  say(ids.map((id) => [id, { name: name.trim() }]), null, lists.flatMap((list, at) => list.map((image) => [image, ids[at]])));
  return ids;
}

function namesFile() {
  const entries = touchedIds().map((id) => [id, entryOf(said[id])]);
  const places = touchedImages().map((image) => [images.path[image], target(image)]);
  return {
    checkpoint: data.checkpoint, bundle: data.bundle, clusters: Object.fromEntries(entries),
    ...(places.length ? { images: Object.fromEntries(places) } : {}),
  };
}

const isTouched = () => touchedIds().length + touchedImages().length > 0;

function saveNames() {
  if (!isTouched()) return;
  const file = namesFile();
  const blob = new Blob([`${JSON.stringify(file, null, 2)}\n`], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(blob), download: "names.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  for (const [id, entry] of Object.entries(file.clusters)) written.set(Number(id), JSON.stringify(entry));
  for (const image of touchedImages()) writtenMoves.set(image, target(image));
  namingChanged();
}

// Changes of an earlier visit; those of clusters about which the bundle says something else by now are out of date.
function recallNames() {
  const { images: places = {}, ...edits } = recall(storageKey) ?? {};
  const numbers = new Map(Object.keys(places).length ? images.path.map((path, image) => [path, image]) : []);
  for (const [path, { to, was }] of Object.entries(places)) {
    const image = numbers.get(path);
    if (image === undefined || was !== (begunMoves.get(image) ?? null)) continue;
    if (to !== null && !said[to]) begin(to);
    setTarget(image, to);
  }
  for (const [id, { name, merge, junk, was, written: entry }] of Object.entries(edits)) {
    if (!said[id] || was !== entryText(begun[id])) continue;
    said[id] = { name: String(name ?? ""), merge: byId.has(merge) ? merge : null, junk: junk === true };
    if (entry) written.set(Number(id), entry);
  }
}

// Two clusters of one name are probably one: the other one, if there is any.
function namesake(id) {
  const { name, merge } = said[id];
  if (!name || merge !== null) return null;
  return clusters.find((other) => other.id !== id && said[other.id].merge === null && said[other.id].name === name);
}
