// Keys that work anywhere but in a field; those of clusters and images where these are shown.
const EVERYWHERE = ["s", "t", "?"];
const KEYS = [
  ["/", "search", () => $("search").focus()],
  ["j", "next cluster", () => stepCluster(1)],
  ["k", "previous cluster", () => stepCluster(-1)],
  ["n", "name this cluster", () => withCurrent((cluster) => cluster.parts.name.focus())],
  ["m", "merge it into another, or unmerge it", () => withCurrent((cluster) => cluster.parts.merge.click())],
  ["x", "mark it as junk, or not", () => withCurrent((cluster) => cluster.parts.junk.click())],
  ["a", "show all its images, or fewer", () => withCurrent(toggleAll)],
  ["u", "undo (also Ctrl Z)", undo],
  ["r", "redo (also Ctrl Shift Z)", redo],
  ["s", `${data.studio ? "apply" : "save names.json"} (also Ctrl S)`, () => save()],
  ["v", "move the selected images to a cluster", () => withSelection(moveSelection)],
  ["c", "make a new category of them", () => withSelection(nameCategory)],
  ["w", "they belong to no cluster", () => withSelection(() => placeSelection(WRONG))],
  ["g", "go to the map: arrows, Enter, Space, + - 0", () => $("map").focus()],
  ["t", "light or dark", toggleTheme],
  ["?", "this help", () => $("help").showModal()],
];

function makeKeys() {
  const others = [
    ["arrow keys", "from image to image in a group"],
    ["Space", "select an image, or Ctrl click; with Shift all between"],
    ["Enter", "open an image, leave a name"],
    ["Esc", "leave a field, close a window"],
  ];
  $("keys").replaceChildren(...[...KEYS, ...others].map(([key, what]) =>
    make("tr", {}, make("th", { scope: "row" }, make("kbd", {}, key)), make("td", {}, what))));
  document.addEventListener("keydown", onKey);
}

function onKey(event) {
  const field = event.target.closest?.("input, select, textarea");
  if ((event.ctrlKey || event.metaKey) && event.key === "s") return answer(event, save);
  if (document.querySelector("dialog[open]")) return null;
  if (field) return fieldKey(event, field);
  const away = $("clusters-panel").hidden;
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z") return away ? null : answer(event, event.shiftKey ? redo : undo);
  if (event.ctrlKey || event.metaKey || event.altKey) return null;
  const found = KEYS.find(([key]) => key === event.key && (!away || EVERYWHERE.includes(key)));
  return found ? answer(event, found[2]) : null;
}

function fieldKey(event, field) {
  if (event.key === "Escape") field.blur();
  if (!field.matches(".name") || !["Enter", "Escape"].includes(event.key)) return null;
  return answer(event, () => field.closest(".card").focus());
}

function answer(event, action) {
  event.preventDefault();
  action();
}

const visibleClusters = () => [...$("cards").children].filter((card) => !card.hidden)
  .map(clusterOfCard);

function stepCluster(by) {
  const visible = visibleClusters();
  const target = visible[current ? visible.indexOf(current) + by : 0];
  if (target) goTo(target);
}

function withCurrent(action) {
  if (!current) stepCluster(1);
  if (!current) return;
  openCard(current);
  action(current);
}
