// The dialog of one image, with all that is known about it.
let detailList = [];

function openDetail(image, list) {
  detailList = list;
  showDetail(image);
  if (!$("detail").open) $("detail").showModal();
}

function showDetail(image) {
  const cluster = clusterOf[image];
  const picture = make("div", { class: "picture", role: "img", "aria-label": images.path[image] });
  if (data.studio) Object.assign(picture.style, { backgroundImage: `url("${fileAddress(image)}")`, backgroundSize: "contain", backgroundPosition: "center" });
  else paint(picture, image);
  const facts = [
    ["cluster", clusterLink(cluster.id)], ["the model says", cluster !== modelClusterOf[image] && clusterLink(modelClusterOf[image].id)],
    ["confidence", images.confidence[image].toFixed(3)], ["fit", fitOf(image)],
    [data.embedded ? "centrality" : null, images.central[image].toFixed(3)], ["true class", truthOf(image)],
  ].filter(([label, value]) => label && value);
  const step = (by) => {
    const target = detailList[detailList.indexOf(image) + by];
    return make("button", {
      type: "button", class: "round", disabled: target === undefined, "data-step": by,
      "aria-label": by < 0 ? "Previous image" : "Next image", autofocus: by > 0,
      click: () => { showDetail(target); $("detail").querySelector(`[data-step="${by}"]`).focus(); },
    }, by < 0 ? "‹" : "›");
  };
  $("detail").replaceChildren(
    picture,
    make("div", { class: "about" },
      make("p", { class: "path" }, images.path[image]),
      make("dl", {}, ...facts.flatMap(([label, value]) =>
        [make("dt", { class: "muted" }, label), make("dd", {}, value)])),
      make("p", { class: "muted" }, missing.has(image) ? "The file could not be read when this page was made." :
        (data.root || data.studio) && make("a", { href: fileAddress(image), target: "_blank", rel: "noreferrer" }, "Open the file")),
      correctable ? make("div", { class: "place" },
        make("button", { type: "button", click: () => moveFromDetail(image) }, "Move to…"),
        make("button", { type: "button", click: () => { placeImages([image], WRONG); showDetail(image); } }, "In no cluster")) : null,
      make("form", { method: "dialog", class: "steps" }, step(-1), step(1), make("button", {}, "Close"))));
  select(image);
}

const fileAddress = (image) => data.studio ? `${data.studio}/images/${image}` :
  `file://${`${data.root}/${images.path[image]}`.split("/").map(encodeURIComponent).join("/")}`;

function detailKeys(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (by) $("detail").querySelector(`[data-step="${by}"]`)?.click();
}

function moveFromDetail(image) {
  $("detail").close();
  chooseTarget([image]);
}
