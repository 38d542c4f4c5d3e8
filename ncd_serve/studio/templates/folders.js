// A window that goes from folder to folder of this machine: nobody has to know a path.
const FOLDER_TITLES = { labelled: "Where are your known classes?", unlabelled: "Where are your unsorted images?" };
let browsedFor = null; // the field that gets the folder

function makeFolders() {
  for (const button of document.querySelectorAll("[data-browse]")) {
    button.addEventListener("click", () => openFolders(button.dataset.browse));
  }
  $("browse-take").addEventListener("click", () => {
    browsedFor.value = $("browse-path").textContent;
    $("browse").close();
  });
}

async function openFolders(name) {
  browsedFor = $("training-form").elements[name];
  $("browse-title").textContent = FOLDER_TITLES[name];
  if (await lookInto(browsedFor.value.trim() || data.live.folder)) $("browse").showModal();
}

async function lookInto(path) {
  const found = await ask(`/api/browse?path=${encodeURIComponent(path)}`).catch((error) => { tell(error.message, { alarm: true }); return null; });
  if (!found) return false;
  setText("browse-path", found.path);
  setText("browse-words", contentsInWords(found, found.all));
  const entry = (name, to, words) => make("button", { type: "button", click: async () => {
    await lookInto(to);
    $("browse-list").querySelector("button")?.focus();
  } }, make("span", { class: "path" }, name), make("span", { class: "muted" }, words));
  $("browse-list").replaceChildren(
    found.parent === found.path ? "" : entry("..", found.parent, "the folder around it"),
    ...found.folders.map((folder) => entry(folder.name, folder.path, contentsInWords(folder, found.all))));
  return true;
}

function contentsInWords({ inside, images: pictures }, most) {
  const more = inside + pictures >= most ? " or more" : "";
  const parts = [inside && counted(inside, "folder"), pictures && counted(pictures, "image")].filter(Boolean);
  return parts.length ? parts.join(", ") + more : "nothing to train on";
}
