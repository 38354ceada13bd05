// Puts the page together. `window.keepdim` is for scripts and tests.
function filePage(file, run) {
  const main = document.getElementById("main");
  main.className = "file";
  const model = new Model(file), names = new Set([...file.symbols.map((s) => s.name), ...file.inputs.map((v) => model.values[v].name), ...file.outputs]);
  const view = new GraphView(model);
  const sizes = new Sizes(model, () => { sizes.update(); view.update(); });
  const contract = el("section", { class: "panel", id: "contract" }, el("h2", {}, "Which sizes are allowed"),
    el("ul", { class: "sentences" }, file.sentences.map((s) => el("li", {}, sentence(s, names)))),
    el("p", { class: "soft small" }, "Any other call is refused with a sentence, before anything runs."));
  const where = el("section", { class: "panel", id: "where" }, el("h2", {}, "What runs where"), el("p", {}, file.where.text),
    file.where.outside.length ? el("ul", { class: "outside" }, file.where.outside.map((i) => {
      const n = model.nodes[i];
      return el("li", {}, el("button", { type: "button", onclick: () => view.go(i) }, el("strong", {}, n.op), n.path ? el("span", { class: "soft" }, ` in ${n.path}`) : ""), el("p", {}, "stays with ExecuTorch: ", el("b", {}, n.why)));
    })) : null,
    file.tables.length ? el("div", {}, el("h3", {}, "Choices by size"), file.tables.map((t) => el("pre", {}, t))) : null);
  const about = el("section", { class: "panel small", id: "about" }, el("h2", {}, "The file"),
    el("p", { class: "soft" }, `${file.name}, ${bytesText(file.bytes)}${file.mapped ? `, weights mapped from ${file.mapped}` : ""}`),
    file.passes.map((p, k) => el("details", {}, el("summary", {}, `what was rewritten in delegate ${k}`), el("table", {},
      p.filter(([, a, b]) => a !== b).map(([name, a, b]) => el("tr", {}, el("td", {}, name), el("td", {}, `${a} → ${b} operations`)))))));
  const side = el("div", { class: "side" }, contract, where, sizes.element, about);
  const wide = el("div", { class: "wide" }, view.element);
  main.append(side, wide);
  const jump = (text, id) => el("a", { href: `#${id}`, onclick: () => document.getElementById(`tab-${id}`)?.click() }, text);
  document.getElementById("jump").append(jump("sizes", "sizes"), ...(run ? [jump("run", "run")] : []), jump("graph", "graph-section"));
  view.start();
  if (run) {
    const runs = new RunView(run, model);
    const tab = (text, section, other) => el("button", { type: "button", id: `tab-${section.id}`, onclick: (e) => {
      section.hidden = false; other.hidden = true;
      for (const b of e.target.parentElement.children) b.classList.toggle("on", b === e.target);
      view.canvas.resize();
    } }, text);
    const tabs = el("div", { class: "tabs choice", id: "tabs" }, tab("The run", runs.element, view.element), tab("The graph, by time", view.element, runs.element));
    wide.prepend(tabs, runs.element);
    view.show = (i) => { tabs.children[1].click(); view.go(i); };
    runs.start(view);
    tabs.children[0].click();
  }
  window.keepdim = { model, view, sizes, evalRows };
}

function theme(turn) {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = turn ? (now === "dark" ? "light" : "dark") : now;
  const view = window.keepdim?.view;
  if (view) { view.canvas.colors(); view.canvas.draw(); }
}

const PAGE = JSON.parse(document.getElementById("data").textContent);
document.title = `${PAGE.title} · keepdim`;
document.getElementById("title").textContent = PAGE.title;
document.getElementById("theme").addEventListener("click", () => theme(true));
theme(false);
if (PAGE.audit) document.getElementById("main").append(auditPage(PAGE.audit));
else filePage(PAGE.file, PAGE.run);
