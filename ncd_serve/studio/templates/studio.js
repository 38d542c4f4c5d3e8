// Tabs of the studio. What can change by itself is asked for while its tab is shown.
const TABS = { clusters: null, new: watchRound, training: watchTraining, serving: watchServing };
const WATCH_SECONDS = 1.5;
const scrolled = {}; // how far each tab was, to go on there
let tab = "clusters";

function showTab(name) {
  const changes = tab !== name;
  scrolled[tab] = scrollY;
  tab = name;
  for (const each of Object.keys(TABS)) {
    $(`${each}-panel`).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", each === name);
    $(`tab-${each}`).tabIndex = each === name ? 0 : -1;
  }
  document.body.dataset.tab = name;
  history.replaceState(null, "", `#${name}`);
  TABS[name]?.();
  if (name === "clusters" && images.x) fitMap();
  if (changes) scrollTo(0, scrolled[name] ?? 0);
}

function tabKeys(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!by) return;
  const names = Object.keys(TABS);
  showTab(names[(names.indexOf(tab) + by + names.length) % names.length]);
  $(`tab-${tab}`).focus();
}

// Where people land who have no run yet.
function sayEmpty() {
  document.body.classList.add("empty");
  $("notes").append(make("p", { class: "note" }, "No run is open yet. ", make("button", { type: "button", click: () => showTab("training") }, "Find categories in your own images")));
}

async function keepWatching() {
  for (;;) {
    await pause(WATCH_SECONDS);
    if (!document.hidden) await TABS[tab]?.();
  }
}

Object.keys(TABS).forEach((name, order) => {
  KEYS.push([String(order + 1), `open the tab ${$(`tab-${name}`).textContent}`, () => { showTab(name); $(`tab-${name}`).focus(); }]);
  EVERYWHERE.push(String(order + 1));
});

live.start = () => {
  for (const name of Object.keys(TABS)) $(`tab-${name}`).addEventListener("click", () => showTab(name));
  document.querySelector(".tabs").addEventListener("keydown", tabKeys);
  $("clusters-panel").setAttribute("role", "tabpanel");
  $("clusters-panel").setAttribute("aria-labelledby", "tab-clusters");
  if (!clusters.length) sayEmpty();
  makeNewImages();
  makeRound();
  makeTraining();
  makeServing();
  const tabOfAddress = () => Object.keys(TABS).find((name) => location.hash === `#${name}`);
  showTab(tabOfAddress() ?? (clusters.length ? "clusters" : "training"));
  addEventListener("hashchange", () => tabOfAddress() && showTab(tabOfAddress()));
  keepWatching();
};
