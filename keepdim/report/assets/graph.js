// The section of the graph: canvas, search, legend, and what is known about the operation that was pressed.
class GraphView {
  constructor(model, changed) {
    this.model = model;
    this.tree = new Tree(model);
    this.canvasElement = el("canvas", { id: "graph", tabindex: 0, "aria-label": "the graph; what it shows is also in the search and the details" });
    this.details = el("aside", { id: "details", hidden: "" });
    this.search = el("input", { type: "search", id: "search", placeholder: "Search operations, modules, shapes …  ( / )", autocomplete: "off", spellcheck: "false" });
    this.hits = el("div", { id: "hits", hidden: "" });
    const button = (text, label, f) => el("button", { type: "button", title: label, "aria-label": label, onclick: f }, text);
    const tools = el("div", { class: "tools" },
      button("+", "nearer", () => this.canvas.zoom(1.3)), button("−", "farther", () => this.canvas.zoom(1 / 1.3)),
      button("⤢", "all of it", () => this.canvas.fit()), button("⌂", "the beginning", () => this.canvas.home()));
    this.element = el("section", { id: "graph-section" },
      el("div", { class: "bar" }, el("div", { class: "searchbox" }, this.search, this.hits), tools),
      el("div", { class: "stage" }, this.canvasElement, this.details), this.legend());
    this.search.addEventListener("input", () => this.find(this.search.value));
    this.search.addEventListener("keydown", (e) => {
      if (e.key === "Enter" && this.matches?.length) { this.next = ((this.next ?? -1) + 1) % this.matches.length; this.go(this.matches[this.next]); }
      if (e.key === "Escape") { this.search.value = ""; this.find(""); }
    });
    document.addEventListener("keydown", (e) => { if (e.key === "/" && !/INPUT|TEXTAREA/.test(document.activeElement.tagName)) { e.preventDefault(); this.search.focus(); } });
    document.addEventListener("pointerdown", (e) => { if (!this.element.querySelector(".searchbox").contains(e.target)) this.hits.hidden = true; });
  }

  start() { this.canvas = new Canvas(this.canvasElement, this.tree, { select: (item) => this.select(item) }); }

  legend() {
    const used = new Set(this.model.nodes.filter((n) => n.inside && !n.regions).map((n) => kindOf(n.op)));
    const words = { product: "products", attention: "attention, recurrence", norm: "norms", reduce: "reductions", move: "views, copies", index: "look-ups", map: "elementwise" };
    const mark = (cls, text) => el("span", { class: "key" }, el("i", { class: cls }), text);
    const has = (f) => this.model.nodes.some(f);
    return el("div", { class: "legend" },
      has((n) => n.op === "delegate") ? mark("k-delegate", "delegate") : null,
      has((n) => n.why) ? mark("k-outside", "ExecuTorch's kernels, not delegated") : null,
      has((n) => n.when !== undefined) ? mark("k-lit", "branch taken at these sizes") : null,
      this.model.values.some((v) => v.kind === "state") ? mark("k-state", "state") : null,
      Object.keys(words).filter((k) => used.has(k)).map((k) => mark(`k-bar ${k}`, words[k])));
  }

  // -- search
  text(i) {
    this.texts ??= [];
    return (this.texts[i] ??= (() => {
      const n = this.model.nodes[i];
      return [n.op, n.path, n.why, n.engine, ...n.outs.map((v) => `${this.model.values[v].name} ${this.model.shape(v)}`)].join(" ").toLowerCase();
    })());
  }

  find(query) {
    const words = query.toLowerCase().split(/\s+/).filter((w) => w);
    this.matches = words.length ? this.model.nodes.filter((n) => words.every((w) => this.text(n.id).includes(w))).map((n) => n.id) : [];
    this.next = undefined;
    this.canvas.found = new Set(this.matches.slice(0, 2000).map((i) => this.visible(this.tree.items.get(i))));
    this.hits.hidden = !words.length;
    const more = this.matches.length - 40;
    this.hits.replaceChildren(
      ...this.matches.slice(0, 40).map((i) => {
        const n = this.model.nodes[i], v = n.outs[0];
        return el("button", { type: "button", onclick: () => { this.go(i); this.hits.hidden = true; } },
          el("strong", {}, n.op), " ", el("code", {}, v === undefined ? "" : this.model.values[v].name), el("span", { class: "soft" }, n.path || ""));
      }),
      el("p", { class: "soft" }, this.matches.length ? (more > 0 ? `and ${more} more` : `${this.matches.length} found`) : "nothing found"));
    this.canvas.draw();
  }

  visible(item) { let top = item; for (let p = item.parent; p; p = p.parent) if (!p.open) top = p; return top; }

  go(i) {
    const item = this.tree.items.get(i);
    this.canvas.selected = item;
    this.canvas.show(item);
    this.select(item);
  }

  // -- details
  select(item) {
    this.details.hidden = !item || !(item.node || item.value !== undefined || item.children);
    if (this.details.hidden) return;
    this.chosen = item;
    const close = el("button", { type: "button", class: "close", "aria-label": "close", onclick: () => { this.details.hidden = true; this.canvas.selected = null; this.canvas.draw(); } }, "×");
    this.details.replaceChildren(close, ...(item.value !== undefined ? this.aboutValue(item) : item.children ? this.aboutGroup(item) : this.aboutNode(item.node)));
  }

  shapeRow(v, role) {
    const m = this.model, x = m.values[v];
    const now = m.dynamic(v) ? el("b", {}, m.shape(v, true)) : null;
    return el("li", {}, el("span", { class: `role ${x.kind}` }, role), el("code", {}, x.name), el("code", { class: "soft" }, m.shape(v, false)), now, el("span", { class: "soft small" }, bytesText(m.bytes[v])));
  }

  aboutNode(n) {
    const m = this.model, out = [el("h3", {}, n.op)];
    if (n.path) out.push(el("p", { class: "soft" }, n.path));
    if (n.why) out.push(el("p", { class: "why" }, el("b", {}, "Not delegated: "), n.why, ". ExecuTorch's own kernel runs it."));
    if (n.op === "delegate") out.push(el("p", {}, `Runs on ${n.engine}.`));
    if (n.text) out.push(el("p", {}, el("code", {}, n.text)));
    const roles = (v) => ({ const: "weight", state: "state", input: "input" })[m.values[v].kind] || "reads";
    out.push(el("ul", { class: "shapes" }, n.ins.map((v) => this.shapeRow(v, roles(v))), n.outs.map((v) => this.shapeRow(v, "makes"))));
    if (n.flops !== undefined) out.push(el("p", { class: "soft" }, n.view ? "A view: it costs nothing." : `${short(m.at(n.flops), "FLOP")} of arithmetic (${m.file.texts[n.flops]}), ${bytesText(m.at(n.moved))} moved`));
    const took = this.canvas.heat?.get(n.id);
    if (took) out.push(el("p", {}, `${(100 * took).toFixed(2)} % of the time that was measured.`));
    if (!m.lit[n.id]) out.push(el("p", { class: "why" }, "Not computed at these sizes: another branch is taken."));
    return out;
  }

  aboutValue(item) {
    const what = { input: "An input of the model.", output: "A result of the model.", state: "State: it stays between calls." }[item.kind];
    return [el("h3", {}, item.title), el("p", { class: "soft" }, what), el("ul", { class: "shapes" }, this.shapeRow(item.value, item.kind))];
  }

  aboutGroup(item) {
    const m = this.model, nodes = item.ids.map((i) => m.nodes[i]).filter((n) => m.lit[n.id]);
    const sum = (key) => nodes.reduce((s, n) => s + (n[key] === undefined ? 0 : m.at(n[key])), 0);
    const what = { module: "A module of the model.", series: "Modules that look alike, one behind the other.", delegate: item.node ? `A delegate: it runs on ${item.node.engine}.` : "", cond: "Branches: sizes decide which one is computed.", region: `Taken where ${item.title}.` }[item.kind];
    const out = [el("h3", {}, this.canvas.title(item)), el("p", { class: "soft" }, what || "")];
    out.push(el("p", {}, `${item.ids.length} operations, ${short(sum("flops"), "FLOP")}, ${bytesText(sum("moved"))} moved at these sizes`));
    const share = m.flops ? (100 * sum("flops")) / m.flops : 0;
    if (share) out.push(el("div", { class: "meter" }, el("i", { style: `width:${Math.min(100, share)}%` })), el("p", { class: "soft small" }, `${share.toFixed(share < 10 ? 1 : 0)} % of all arithmetic`));
    return out;
  }

  update() {
    this.canvas.draw();
    if (!this.details.hidden && this.chosen) this.select(this.chosen);
  }
}
