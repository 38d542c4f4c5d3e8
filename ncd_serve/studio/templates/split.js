KEYS.splice(KEYS.findIndex(([key]) => key === "x"), 0, ["d", "divide it into groups", () => withCurrent(({ parts }) => {
  if (!parts.split.hidden) parts.split.click();
})]);

// A cluster in parts: proposals by the studio, shown in thumbnails; any part can become a category of its own.
live.split = async (cluster) => {
  const { parts } = cluster;
  const proposals = await busy(parts.split, "Looking…", () => ask("/api/split", { images: cluster.images }));
  if (!proposals) return;
  $("choose-title").textContent = `Split ${nameOf(cluster.id)}?`;
  $("choose-search").hidden = true;
  $("choose-list").replaceChildren(...proposals.map((proposal) => splitProposal(cluster, proposal)));
  $("choose").showModal();
};

function splitProposal(cluster, { apart, groups }) {
  const chosen = new Set(groups.slice(1));
  const part = (group, order) => {
    const box = make("input", { type: "checkbox", checked: order > 0, change: (event) => {
      if (event.target.checked) chosen.add(group);
      else chosen.delete(group);
    } });
    return make("label", { class: "part" },
      make("span", {}, box, ` ${counted(group.length, "image")}, a category of its own`),
      make("span", { class: "tiles" }, ...group.slice(0, 16).map(makePicture)));
  };
  const accept = make("button", { type: "button", class: "primary split-yes", click: () => {
    $("choose").close();
    if (chosen.size) goTo(clusterFor(newCategories([...chosen])[0]));
  } }, "Split");
  return make("section", { class: "proposal" }, make("h3", {}, `${groups.length} groups, ${apart}`), ...groups.map(part),
    make("div", { class: "answers" }, accept));
}
