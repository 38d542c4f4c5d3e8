// Requests to the studio, and what it says about them.
async function ask(path, body = null, { raw = false, method = body === null ? "GET" : "POST" } = {}) {
  const options = { method, body: raw || body === null ? body : JSON.stringify(body) };
  const answer = await fetch(path, options).catch(() => null);
  $("offline").hidden = Boolean(answer);
  document.body.classList.toggle("offline", !answer);
  if (!answer) throw new Error("the studio does not answer: was it stopped?");
  if (answer.status === 401) throw new Error("this page is of an earlier studio: open the address that ncd-serve studio printed");
  const content = await answer.json().catch(() => ({ error: `the studio answered with ${answer.status}` }));
  if (answer.ok) return content;
  throw new Error(content.hint ? `${content.error}. ${content.hint}` : content.error);
}

let toastTimer = null;
function tell(text, { alarm = false, seconds = 8 } = {}) {
  clearTimeout(toastTimer);
  $("toast").textContent = text;
  $("toast").classList.toggle("alarm", alarm);
  $("toast").hidden = false;
  toastTimer = setTimeout(() => { $("toast").hidden = true; }, seconds * 1000);
}

// Text that is looked at again and again: screen readers hear only what is new.
function setText(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

// Do something that takes a while: its button waits and counts, an error is told. The focus stays, or goes to the button
// that has taken its place.
async function busy(button, words, action) {
  if (button.classList.contains("busy")) return null; // a key was pressed twice
  const [label, began, focused] = [button.textContent, Date.now(), document.activeElement === button];
  const count = () => {
    const seconds = Math.round((Date.now() - began) / 1000);
    button.textContent = seconds < 3 ? words : `${words} ${seconds} s`;
  };
  const clock = setInterval(count, 1000);
  count();
  button.disabled = true;
  button.classList.add("busy");
  try {
    return await action();
  } catch (error) {
    tell(error.message, { alarm: true, seconds: 20 });
    return null;
  } finally {
    clearInterval(clock);
    button.textContent = label;
    button.disabled = false;
    button.classList.remove("busy");
    if (focused) requestAnimationFrame(() => refocus(button));
  }
}

function refocus(button) {
  if (document.activeElement !== document.body && document.activeElement !== button) return;
  [button, ...button.parentElement.querySelectorAll("button")].find((each) => !each.hidden && !each.disabled)?.focus();
}

// Load the page again, for what is open now.
function loadClusters() {
  scrollTo(0, 0); // or the browser goes on where this page was
  history.replaceState(null, "", "#clusters");
  location.reload();
}

const pause = (seconds) => new Promise((done) => { setTimeout(done, seconds * 1000); });

live.apply = async () => {
  if (!isTouched()) return true;
  const { clusters: entries, images: places = {} } = namesFile();
  const sent = { said: structuredClone(said), moves: [...moves] }; // people go on while it is applied
  const body = { checkpoint: data.checkpoint, clusters: entries, images: places };
  const words = data.exported ? "Applying…" : "Exporting, then applying…";
  const done = await busy($("save"), words, () => ask("/api/apply", body));
  summarise();
  if (!done) return false;
  data.exported = true;
  Object.assign(begun, sent.said);
  begunMoves.clear();
  for (const [image, to] of sent.moves) begunMoves.set(image, to);
  namingChanged();
  const where = `Applied: version ${done.version} of model ${done.model} in ${done.repository}`;
  tell(done.server ? `${where}. The server on ${done.server} is taking it…` : `${where}. No server runs: the tab Serve starts one.`);
  if (done.server) waitForServer(done, where);
  return true;
};

async function waitForServer({ version, server }, where) {
  for (let second = 0; second < 60; second++) {
    const { versions = [] } = await ask("/api/serving").catch(() => ({}));
    if (versions.includes(version)) return tell(`${where}. The server on ${server} answers with it.`);
    await pause(1);
  }
  return tell(`${where}. The server on ${server} has not loaded it: does it run with --no-watch?`, { alarm: true });
}
