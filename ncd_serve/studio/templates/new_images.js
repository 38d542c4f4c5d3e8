// New images: dropped or chosen files, answered one by one, grouped by their clusters. Groups that are probably new
// categories come first, then those that fit nowhere.
const IMAGE = /\.(jpe?g|png|webp|bmp|gif|tiff?|ppm)$/i;
const AT_ONCE = 4;
const ENOUGH = 20; // images to look for new categories in
const thisPage = Array.from(crypto.getRandomValues(new Uint32Array(4)), (part) => part.toString(36)).join("");
const answers = []; // { file, row, picture, number, kept: the category that it was kept in }
const chosenFiles = new Set();
let numbered = 0; // images that were asked about
let candidates = []; // { images: their numbers, nearest }
let lookedAt = 0; // answers when candidates were looked for
const typedNames = new Map(); // in the fields of groups, which are drawn again while more images are answered
const openGroups = new Set(); // that show all their images
const SHOWN = 120; // images of a group that is not opened
const REDRAW_SECONDS = 1;

function makeNewImages() {
  $("pick-files").addEventListener("click", () => $("files").click());
  $("pick-folder").addEventListener("click", () => $("folder").click());
  for (const id of ["files", "folder"]) {
    $(id).addEventListener("change", () => { askAbout([...$(id).files]); $(id).value = ""; });
  }
  addEventListener("dragover", (event) => { event.preventDefault(); $("drop").classList.add("over"); });
  addEventListener("dragleave", () => $("drop").classList.remove("over"));
  addEventListener("drop", async (event) => {
    event.preventDefault();
    $("drop").classList.remove("over");
    showTab("new");
    const entries = [...event.dataTransfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    askAbout(entries.length ? (await Promise.all(entries.map(filesIn))).flat() : [...event.dataTransfer.files]);
  });
}

async function filesIn(entry) {
  if (entry.isFile) return [await new Promise((found, failed) => { entry.file(found, failed); })];
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    const part = await new Promise((read, failed) => { reader.readEntries(read, failed); });
    if (!part.length) break;
    found.push(...part);
  }
  return (await Promise.all(found.map(filesIn))).flat();
}

// A run that was never exported has no model yet that answers. Images that are dropped meanwhile wait, too.
let exporting = null;
const makeReady = () => data.exported || (exporting ??= exportModel().finally(() => { exporting = null; }));

async function exportModel() {
  setText("new-summary", "The model is exported first, which takes about a minute");
  data.exported = Boolean(await busy($("pick-files"), "Exporting…", () => ask("/api/export", {})));
  setText("new-summary", "");
  return data.exported;
}

async function askAbout(files) {
  if (!await makeReady()) return;
  const wanted = files.filter(({ name }) => IMAGE.test(name));
  const progress = $("new-progress");
  Object.assign(progress, { hidden: false, max: Math.max(1, wanted.length), value: 0 });
  const queue = [...wanted];
  let drawn = Date.now();
  const worker = async () => {
    for (let file = queue.shift(); file; file = queue.shift()) {
      const number = numbered++;
      try {
        const row = await ask(`/predict?name=${encodeURIComponent(file.name)}&page=${thisPage}&number=${number}`, file, { raw: true });
        answers.push({ file, row, picture: URL.createObjectURL(file), number });
      } catch (error) {
        tell(error.message, { alarm: true });
        queue.length = 0;
      }
      progress.value += 1;
      if (Date.now() - drawn > 1000 * REDRAW_SECONDS) {
        showAnswers();
        drawn = Date.now();
      }
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  progress.hidden = true;
  showAnswers();
  await lookForCandidates();
  const skipped = files.length - wanted.length;
  if (skipped) tell(`${counted(skipped, "file")} skipped: not an image`);
}

const areEnough = () => answers.filter(({ row }) => row.status !== "error").length >= ENOUGH;

async function lookForCandidates() {
  if (!areEnough()) return;
  const seen = answers.length;
  candidates = await ask(`/api/candidates?page=${thisPage}`).catch((error) => { tell(error.message, { alarm: true }); return []; });
  lookedAt = seen;
  showAnswers();
}

function showAnswers() {
  const candidateOf = new Map(candidates.flatMap((candidate) => candidate.images.map((number) => [number, candidate])));
  const groups = new Map();
  const keyOf = ({ row, kept, number }) => (row.status === "error" ? "unreadable" : kept !== undefined ? `kept ${kept}`
    : candidateOf.get(number) ?? (row.fit === "outlier" ? "nowhere" : row.cluster_id));
  for (const answer of answers) {
    const key = keyOf(answer);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(answer);
  }
  setText("new-summary", answersInWords());
  const order = (key) => (typeof key === "object" ? -2 : key === "nowhere" ? -1 : key === "unreadable" ? Infinity
    : typeof key === "string" ? 1 : -groups.get(key).length / 1e9);
  const focused = document.activeElement?.dataset.slot;
  $("new-groups").replaceChildren(...[...groups.keys()].sort((one, other) => order(one) - order(other))
    .map((key) => answerGroup(key, groups.get(key))));
  if (focused) [...$("new-groups").querySelectorAll("[data-slot]")].find(({ dataset }) => dataset.slot === focused)?.focus();
}

function answersInWords() {
  const outliers = answers.filter(({ row }) => row.fit === "outlier").length;
  const fits = outliers ? `${grouped(outliers)} of them like no image of training; ` : "";
  const open = candidates.filter((candidate) => answers.some(({ number, kept }) => kept === undefined && candidate.images.includes(number)));
  const found = !areEnough() ? `new categories are looked for in ${ENOUGH} images or more`
    : lookedAt < answers.length ? "looking for new categories…"
    : open.length > 1 ? `${open.length} groups may be new categories`
    : open.length ? "one group may be a new category"
    : candidates.length ? "what was found is kept for the next round" : "no new category";
  return `${counted(answers.length, "image")} answered; ${fits}${found}`;
}

function groupTitle(key, list) {
  if (typeof key === "object") return "Perhaps a new category";
  if (list[0].kept !== undefined) return `${list[0].kept}, for the next round`;
  return { nowhere: "Fits nowhere", unreadable: "Cannot be read" }[key] ?? list[0].row.cluster_name;
}

function answerGroup(key, list) {
  const isCandidate = typeof key === "object";
  const cluster = byId.get(key);
  const slot = `${groupTitle(key, list)} ${isCandidate ? list[0].number : ""}`;
  const name = make("input", {
    type: "text", maxlength: 200, placeholder: "Name of a new category", "aria-label": "Name of a new category", autocomplete: "off",
    "data-slot": slot, value: typedNames.get(slot), input: () => typedNames.set(slot, name.value),
  });
  const keep = make("form", { class: "answers", submit: (event) => {
    event.preventDefault();
    const picked = list.filter(({ file }) => chosenFiles.has(file));
    keepCategory(event.submitter, slot, picked.length ? picked : list);
  } }, name, make("button", {}, "Make a category of these"));
  const always = isCandidate || key === "nowhere";
  const never = key === "unreadable" || list[0].kept !== undefined;
  const offer = () => { keep.hidden = never || (!always && !list.some(({ file }) => chosenFiles.has(file))); };
  offer();
  const about = counted(list.length, "image") + (isCandidate ? ` that are alike, nearest to ${key.nearest}` : "");
  return make("section", { class: `box${isCandidate ? " candidate" : key === "nowhere" ? " nowhere" : ""}`, click: offer },
    make("h2", {}, cluster ? makeMark(cluster) : null, ` ${groupTitle(key, list)} `, make("span", { class: "muted" }, about)),
    keep, answerTiles(slot, list));
}

function answerTiles(slot, list) {
  const shown = openGroups.has(slot) ? list : list.slice(0, SHOWN);
  const tiles = make("div", { class: "answer-list" }, ...shown.map(answerTile));
  if (shown.length < list.length) {
    tiles.append(make("button", { type: "button", class: "plain", click: () => { openGroups.add(slot); showAnswers(); } },
      `Show all ${grouped(list.length)}`));
  }
  return tiles;
}

function answerTile({ file, row, picture, number }) {
  const button = make("button", { type: "button", class: "answer", "data-slot": `image ${number}`, "aria-pressed": chosenFiles.has(file) ? "true" : "false", click: () => {
    if (!chosenFiles.delete(file)) chosenFiles.add(file);
    button.setAttribute("aria-pressed", chosenFiles.has(file));
  } }, make("img", { src: picture, alt: "", loading: "lazy" }), make("span", { class: "path" }, file.name),
  make("span", { class: "muted" }, row.error ?? `${row.cluster_name} ${row.confidence.toFixed(2)}, ${row.fit ?? ""}`));
  return button;
}

async function keepCategory(button, slot, list) {
  const name = typedNames.get(slot) ?? "";
  const query = (file) => `category=${encodeURIComponent(name)}&name=${encodeURIComponent(file.name)}`;
  const kept = await busy(button, "Keeping…", async () => {
    let last = null;
    for (const { file } of list) last = await ask(`/api/category?${query(file)}`, file, { raw: true });
    return last;
  });
  if (!kept) return;
  typedNames.delete(slot);
  for (const answer of list) {
    answer.kept = name.trim();
    chosenFiles.delete(answer.file);
  }
  showAnswers();
  watchRound();
  tell(`${counted(list.length, "image")} kept for the next round, in ${kept.path.split("/").slice(0, -1).join("/")}`, { seconds: 15 });
}
