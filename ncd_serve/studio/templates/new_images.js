// New images: dropped or chosen files, answered one by one, grouped by their clusters; those that fit nowhere come first.
const IMAGE = /\.(jpe?g|png|webp|bmp|gif|tiff?|ppm)$/i;
const AT_ONCE = 4;
const answers = []; // { file, row, picture }
const chosenFiles = new Set();

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

async function askAbout(files) {
  const wanted = files.filter(({ name }) => IMAGE.test(name));
  const progress = $("new-progress");
  Object.assign(progress, { hidden: false, max: Math.max(1, wanted.length), value: 0 });
  const queue = [...wanted];
  const worker = async () => {
    for (let file = queue.shift(); file; file = queue.shift()) {
      try {
        const row = await ask(`/predict?name=${encodeURIComponent(file.name)}`, file, { raw: true });
        answers.push({ file, row, picture: URL.createObjectURL(file) });
      } catch (error) {
        tell(error.message, { alarm: true });
        queue.length = 0;
      }
      progress.value += 1;
      if (progress.value % 20 === 0) showAnswers();
    }
  };
  await Promise.all(Array.from({ length: AT_ONCE }, worker));
  progress.hidden = true;
  showAnswers();
  const skipped = files.length - wanted.length;
  if (skipped) tell(`${counted(skipped, "file")} skipped: not an image`);
}

function showAnswers() {
  const groups = new Map();
  for (const answer of answers) {
    const { row } = answer;
    const key = row.status === "error" ? "unreadable" : row.fit === "outlier" ? "nowhere" : row.cluster_id;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(answer);
  }
  const outliers = groups.get("nowhere")?.length ?? 0;
  $("new-summary").textContent = `${counted(answers.length, "image")} answered; ` +
    `${outliers ? `${outliers} like no image of training` : "all are like images of training"}`;
  const order = (key) => (key === "nowhere" ? -1 : key === "unreadable" ? Infinity : -groups.get(key).length / 1e9);
  $("new-groups").replaceChildren(...[...groups.keys()].sort((one, other) => order(one) - order(other))
    .map((key) => answerGroup(key, groups.get(key))));
}

function answerGroup(key, list) {
  const named = { nowhere: "Fits nowhere", unreadable: "Cannot be read" }[key] ?? list[0].row.cluster_name;
  const cluster = byId.get(key);
  const name = make("input", { type: "text", maxlength: 200, placeholder: "Name of a new category", "aria-label": "Name of a new category", autocomplete: "off" });
  const keep = make("form", { class: "answers", submit: (event) => {
    event.preventDefault();
    const picked = list.filter(({ file }) => chosenFiles.has(file));
    keepCategory(event.submitter, name.value, picked.length ? picked : list);
  } }, name, make("button", {}, "Make a category of these"));
  const offer = () => { keep.hidden = key === "unreadable" || (key !== "nowhere" && !list.some(({ file }) => chosenFiles.has(file))); };
  offer();
  return make("section", { class: `box group-${key}`, click: offer },
    make("h2", {}, cluster ? makeMark(cluster) : null, ` ${named} `, make("span", { class: "muted" }, counted(list.length, "image"))),
    make("div", { class: "answer-list" }, ...list.map(answerTile)), keep);
}

function answerTile({ file, row, picture }) {
  const button = make("button", { type: "button", class: "answer", "aria-pressed": chosenFiles.has(file) ? "true" : "false", click: () => {
    if (!chosenFiles.delete(file)) chosenFiles.add(file);
    button.setAttribute("aria-pressed", chosenFiles.has(file));
  } }, make("img", { src: picture, alt: "", loading: "lazy" }), make("span", { class: "path" }, file.name),
  make("span", { class: "muted" }, row.error ?? `${row.cluster_name} ${row.confidence.toFixed(2)}, ${row.fit ?? ""}`));
  return button;
}

async function keepCategory(button, name, list) {
  const query = (file) => `category=${encodeURIComponent(name)}&name=${encodeURIComponent(file.name)}`;
  const kept = await busy(button, "Keeping…", async () => {
    let last = null;
    for (const { file } of list) last = await ask(`/api/category?${query(file)}`, file, { raw: true });
    return last;
  });
  if (kept) tell(`${counted(list.length, "image")} kept for the next round, in ${kept.path.split("/").slice(0, -1).join("/")}`, { seconds: 15 });
}
