// Images to look at next: each lies between two clusters, and its answer says most about the others that do.
let asked = 0;
let effect = null; // of the last answer, shown below the next question
const isOpen = ({ image, other }) => {
  const [own, rival] = [modelClusterOf[image].id, other].map((id) => said[id].merge ?? id);
  return !moves.has(image) && own !== rival && !said[own].junk && !said[rival].junk;
};
const openQuestions = () => data.questions.filter(isOpen);

function makeQuestions() {
  if (!correctable || !openQuestions().length) return;
  $("questions").hidden = false;
  askNext();
  namingListeners.push(askNext);
}

// What an answer says about the images that lie between the same two clusters.
function effectOf(to, { image, like }) {
  const own = modelClusterOf[image].id;
  const rest = like.filter((each) => !moves.has(each));
  if (!rest.length) return null;
  const [is, it] = rest.length === 1 ? ["is", "it"] : ["are", "them"];
  const words = `${counted(rest.length, "image")} like the last one ${is} in ${nameOf(own)}`;
  if (to === own) return make("p", { class: "effect muted", "data-for": image }, `${words}, and ${rest.length === 1 ? "stays" : "stay"} there.`);
  return make("div", { class: "effect", "data-for": image }, make("span", { class: "tiles" }, ...rest.slice(0, 6).map(makePicture)),
    `${words}. `, make("button", { type: "button", click: () => {
      effect = null;
      moveImages(rest, to);
    } }, `Move ${it}, too`));
}

function decide(question, to) {
  effect = effectOf(to, question);
  moveImages([question.image], to);
}

function askNext() {
  const open = openQuestions();
  if (effect && !moves.has(Number(effect.dataset.for))) effect = null; // it was undone
  $("questions").hidden = !open.length && !effect;
  if (!open.length) return $("question").replaceChildren(...(effect ? [effect] : []));
  asked %= open.length;
  const question = open[asked];
  const { image, other, like } = question;
  const own = modelClusterOf[image].id;
  const picture = make("button", { type: "button", class: "tile large", "data-image": image, "aria-label": `Open ${images.path[image]}` });
  paint(picture, image);
  const side = (id) => make("button", { type: "button", class: "side", "data-cluster": id, click: () => decide(question, id) },
    make("span", {}, makeMark(byId.get(id)), make("b", {}, nameOf(id))),
    make("span", { class: "tiles" }, ...byId.get(id).own.slice(0, 4).map(makePicture)));
  const others = make("button", { type: "button", class: "plain", click: () => {
    [image, ...like].forEach((each) => selection.add(each));
    showSelection();
  } }, `Select all ${like.length + 1}`);
  return $("question").replaceChildren(picture, make("div", { class: "ask" },
    make("div", { class: "sides" }, side(own), side(other)),
    make("div", { class: "answers" },
      make("button", { type: "button", click: () => { clusterFor(WRONG); decide(question, WRONG); } }, "Neither"),
      make("button", { type: "button", click: () => { asked += 1; askNext(); } }, "Skip"),
      like.length ? make("span", { class: "muted" }, `${counted(like.length, "more image")} between these two`) : null,
      like.length ? others : null,
      make("span", { class: "muted count" }, counted(open.length, "open question"))),
    effect));
}
