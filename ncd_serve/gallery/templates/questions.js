// Images to look at next: each lies between two clusters, and its answer says most about the others that do.
let asked = 0;
const openQuestions = () => data.questions.filter(({ image }) => !moves.has(image));

function makeQuestions() {
  if (!correctable || !openQuestions().length) return;
  $("questions").hidden = false;
  askNext();
  namingListeners.push(askNext);
}

function askNext() {
  const open = openQuestions();
  $("questions").hidden = !open.length;
  if (!open.length) return;
  asked %= open.length;
  const { image, other, like } = open[asked];
  const own = modelClusterOf[image].id;
  const picture = make("button", { type: "button", class: "tile large", "data-image": image, "aria-label": `Open ${images.path[image]}` });
  paint(picture, image);
  const side = (id) => make("button", { type: "button", class: "side", "data-cluster": id, click: () => moveImages([image], id) },
    make("span", {}, makeMark(byId.get(id)), make("b", {}, nameOf(id))),
    make("span", { class: "tiles" }, ...byId.get(id).own.slice(0, 4).map(makePicture)));
  const others = make("button", { type: "button", class: "plain", click: () => {
    [image, ...like].forEach((each) => selection.add(each));
    showSelection();
  } }, `Select all ${like.length + 1}`);
  $("question").replaceChildren(picture, make("div", { class: "ask" },
    make("div", { class: "sides" }, side(own), side(other)),
    make("div", { class: "answers" },
      make("button", { type: "button", click: () => { clusterFor(WRONG); moveImages([image], WRONG); } }, "Neither"),
      make("button", { type: "button", click: () => { asked += 1; askNext(); } }, "Skip"),
      like.length ? make("span", { class: "muted" }, `${counted(like.length, "more image")} between these two`) : null,
      like.length ? others : null,
      make("span", { class: "muted count" }, counted(open.length, "open question")))));
}
