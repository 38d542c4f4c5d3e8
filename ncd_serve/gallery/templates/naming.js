// What people say about clusters: names, merges, junk. `begun` is what the bundle says, `said` what the page says now.
const storageKey = `names:${data.checkpoint ?? data.source}`;
const begun = data.defaults.map((_, id) => ({
  name: data.names[id] ?? "",
  merge: data.merged[id] ?? null,
  junk: data.junk.includes(id),
}));
const said = begun.map((words) => ({ ...words }));
const written = new Map(); // entries of the last names.json, as text
const undoable = [];
const namingListeners = [];

const nameOf = (id) => said[id].name || data.defaults[id];
const isFixed = (id) => id < data.fixed; // a known class, which keeps its name
const mergedInto = (id) => clusters.filter((cluster) => said[cluster.id].merge === id);

// One thing is said about a cluster; nothing restores its default name.
function entryOf({ name, merge, junk }) {
  if (merge !== null) return { merge_into: merge };
  if (junk) return { junk: true };
  return name ? { name } : {};
}

const entryText = (words) => JSON.stringify(entryOf(words));

// Clusters whose entry differs from the bundle's, or from an entry that was saved before.
function touchedIds() {
  return [...said.keys()].filter((id) => entryText(said[id]) !== entryText(begun[id]) || written.has(id));
}

function unsavedCount() {
  return [...said.keys()].filter((id) => entryText(said[id]) !== (written.get(id) ?? entryText(begun[id]))).length;
}

// Change several clusters as one step. Steps with the same `typing` id are undone together.
function say(changes, typing = null) {
  const before = changes.map(([id]) => [id, { ...said[id] }]);
  if (typing === null || undoable.at(-1)?.typing !== typing) undoable.push({ before, typing });
  for (const [id, words] of changes) Object.assign(said[id], words);
  namingChanged();
}

function undo() {
  const step = undoable.pop();
  if (!step) return;
  for (const [id, words] of step.before) said[id] = words;
  namingChanged();
}

function namingChanged() {
  const edits = touchedIds().map((id) => [id, { ...said[id], was: entryText(begun[id]), written: written.get(id) }]);
  remember(storageKey, Object.fromEntries(edits));
  for (const listener of namingListeners) listener();
}

const setName = (id, name, typing) => say([[id, { name: name.replace(/[\p{Cc}\p{Zl}\p{Zp}]/gu, " ").trim() }]], typing);
const setJunk = (id, junk) => say([[id, { junk, merge: null }], ...(junk ? freed(id) : [])]);
const unmerge = (id) => say([[id, { merge: null }]]);
const freed = (id) => mergedInto(id).map((cluster) => [cluster.id, { merge: null }]);

// Those that were merged into this one go along: a merge never leads to a cluster that is merged itself.
function mergeInto(id, target) {
  say([id, ...mergedInto(id).map((cluster) => cluster.id)].map((each) => [each, { merge: target, junk: false }]));
}

function namesFile() {
  const entries = touchedIds().map((id) => [id, entryOf(said[id])]);
  return { checkpoint: data.checkpoint, bundle: data.bundle, clusters: Object.fromEntries(entries) };
}

function saveNames() {
  if (!touchedIds().length) return;
  const file = namesFile();
  const blob = new Blob([`${JSON.stringify(file, null, 2)}\n`], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(blob), download: "names.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  for (const [id, entry] of Object.entries(file.clusters)) written.set(Number(id), JSON.stringify(entry));
  namingChanged();
}

// Changes of an earlier visit; those of clusters about which the bundle says something else by now are out of date.
function recallNames() {
  for (const [id, { name, merge, junk, was, written: entry }] of Object.entries(recall(storageKey) ?? {})) {
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
