// Elements, and the panel of sizes: sliders, what holds at them, memory and cost.
function el(tag, attrs = {}, ...children) {
  const e = document.createElement(tag);
  for (const [k, v] of Object.entries(attrs)) {
    if (k.startsWith("on")) e.addEventListener(k.slice(2), v);
    else if (k === "class") e.className = v;
    else if (v !== undefined && v !== null && v !== false) e.setAttribute(k, v);
  }
  e.append(...children.flat().filter((c) => c !== null && c !== undefined));
  return e;
}

function svg(tag, attrs = {}, ...children) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attrs)) e.setAttribute(k, v);
  e.append(...children.flat());
  return e;
}

// `words` with every name of the model's own in code.
function sentence(text, names) {
  const out = [];
  for (const part of text.split(/([A-Za-z_][\w.]*(?:\[[^\]]*\])?)/)) {
    const name = part.replace(/\[.*/, "");
    out.push(names.has(name) || part.includes("[") ? el("code", {}, part) : part);
  }
  return out;
}

class Sizes {
  constructor(model, changed) {
    Object.assign(this, { model, changed });
    this.rows = model.file.symbols.map((s, i) => this.row(s, i));
    this.verdict = el("p", { class: "verdict", "aria-live": "polite" });
    this.tiles = el("div", { class: "tiles" });
    this.chart = el("div", { class: "curve" });
    const none = el("p", { class: "soft" }, "No size of this model may change.");
    this.element = el("section", { class: "panel", id: "sizes" },
      el("h2", {}, "Try sizes"), this.rows.length ? this.rows.map((r) => r.element) : none, this.verdict, this.tiles, this.chart);
    this.update();
  }

  // A wide range is moved through by ratios, so that small sizes have room too.
  row(s, i) {
    const lo = s.lo ?? 0, hi = s.hi ?? Math.max(lo, 1 << 20), wide = hi - lo >= 200;
    const to = (v) => (wide ? Math.log((v - lo + 8) / 8) / Math.log((hi - lo + 8) / 8) : hi > lo ? (v - lo) / (hi - lo) : 0);
    const from = (t) => Math.round(wide ? 8 * ((hi - lo + 8) / 8) ** t - 8 + lo : lo + t * (hi - lo));
    const slider = el("input", { type: "range", min: 0, max: wide ? 1000 : hi - lo, step: 1, "aria-label": s.name });
    const steps = Number(slider.max) || 1;
    const number = el("input", { type: "number", min: lo, max: hi, step: 1, "aria-label": `${s.name} as a number` });
    const band = el("div", { class: "band", "aria-hidden": "true" });
    const show = () => { slider.value = Math.round(to(this.model.sizes[i]) * steps); number.value = this.model.sizes[i]; };
    const change = (v) => { this.model.set(s.name, v); this.changed(); };
    slider.addEventListener("input", () => change(from(slider.value / steps)));
    number.addEventListener("change", () => change(Number(number.value)));
    const range = el("span", { class: "soft" }, `${lo} … ${s.hi ?? "∞"}`);
    const data = s.kind === "data" ? el("span", { class: "tag" }, "decided by data") : null;
    const element = el("div", { class: "size" },
      el("div", { class: "size-head" }, el("strong", {}, s.name), range, data, el("span", { class: "soft place" }, s.place)),
      el("div", { class: "size-body" }, el("div", { class: "track" }, slider, band), number));
    return { element, show, band, from, i };
  }

  // Under each slider, where its branches are: the other sizes stay as they are.
  bands() {
    const conds = this.model.nodes.filter((n) => n.when !== undefined);
    if (!conds.length) return;
    const { file } = this.model, wanted = file.rows[conds[0].when];
    for (const r of this.rows) {
      const cuts = [];
      let last = null;
      for (let t = 0; t <= 120; t++) {
        const sizes = [...this.model.sizes];
        sizes[r.i] = r.from(t / 120);
        const side = Number(evalRows(file.dims.slice(0, wanted + 1), sizes)[wanted]) >= 0 ? 0 : 1;
        if (side !== last) cuts.push([t / 1.2, side]);
        last = side;
      }
      r.band.replaceChildren(...(cuts.length < 2 ? [] : cuts.map(([at, side], k) => {
        const width = (k + 1 < cuts.length ? cuts[k + 1][0] : 100) - at;
        const region = conds[0].regions[side], paths = region.nodes.map((j) => (this.model.nodes[j].path || "").split(":")[1]);
        const name = (paths.find((p) => p) || region.text).split(".")[0];
        return el("span", { class: side === this.model.taken(conds[0]) ? "on" : "", style: `width:${width}%`, title: region.text }, name);
      })));
    }
  }

  tile(title, value, note) {
    return el("div", { class: "tile" }, el("div", { class: "soft" }, title), el("div", { class: "big" }, value), note ? el("div", { class: "soft small" }, note) : null);
  }

  update() {
    const m = this.model;
    this.rows.forEach((r) => r.show());
    this.bands();
    this.verdict.className = m.refused.length ? "verdict bad" : "verdict good";
    this.verdict.replaceChildren(m.refused.length ? `Refused at these sizes: ${m.refused.join(" and ")} does not hold.` : "Allowed: a call of these sizes runs.");
    this.tiles.replaceChildren(
      this.tile("arithmetic", short(m.flops, "FLOP")),
      this.tile("bytes moved", bytesText(m.moved)),
      this.tile("weights", bytesText(m.weights)),
      this.tile("working memory", bytesText(m.peak), "at its peak, about"),
      this.tile("inputs and results", bytesText(m.io)),
      ...(m.state ? [this.tile("state", bytesText(m.state), "kept between calls")] : []));
    this.chart.replaceChildren(this.curve());
  }

  curve() {
    const { curve, peak } = this.model, w = 300, h = 46;
    if (!peak) return "";
    const step = Math.max(1, Math.floor(curve.length / 300));
    const points = curve.filter((_, i) => i % step === 0 || curve[i].bytes === peak).map((p, i, all) => `${(i / Math.max(1, all.length - 1)) * w},${h - (p.bytes / peak) * (h - 4)}`);
    return el("figure", {}, svg("svg", { viewBox: `0 0 ${w} ${h}`, preserveAspectRatio: "none", role: "img", "aria-label": "working memory" },
      svg("polygon", { points: `0,${h} ${points.join(" ")} ${w},${h}`, class: "area" })),
    el("figcaption", {}, "working memory, from the first operation to the last"));
  }
}
