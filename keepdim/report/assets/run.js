// The section of a run: what its calls took, plans built and reused, memory over time, time by operation. Times are
// medians over the calls in which something ran, so that one slow call does not decide.
const median = (values) => {
  const sorted = [...values].sort((a, b) => a - b), m = sorted.length >> 1;
  return sorted.length % 2 ? sorted[m] : (sorted[m - 1] + sorted[m]) / 2;
};

// What was measured under one key, call by call.
class Measured {
  constructor() { Object.assign(this, { ns: new Map(), count: new Map() }); }

  add(call, ns) {
    this.ns.set(call, (this.ns.get(call) || 0) + ns);
    this.count.set(call, (this.count.get(call) || 0) + 1);
  }

  get time() { return median(this.ns.values()); }

  get times() { return median(this.count.values()); }
}

class RunView {
  constructor(run, model) {
    Object.assign(this, { run, model, by: "operation", call: -1 });
    this.nodeOf = new Map(); // "delegate:value" → node
    for (const n of model.nodes) if (n.inside) for (const v of n.outs) this.nodeOf.set(`${n.in}:${model.values[v].name}`, n.id);
    this.body = el("div");
    this.element = el("section", { id: "run", class: "run" }, this.body);
  }

  start(view) {
    this.view = view;
    this.update();
  }

  // What kernels ExecuTorch ran itself comes in the order of the graph's own nodes.
  node(e, outside) {
    if (e.delegate >= 0) return this.nodeOf.get(`${e.delegate}:${e.value}`);
    const name = e.op.replace(/^aten::/, "").split(".")[0];
    const at = outside.findIndex((n) => n.op.replace(/^aten[.:]+/, "").split(".")[0] === name);
    return at < 0 ? undefined : outside.splice(at, 1)[0].id;
  }

  update() {
    const calls = this.call < 0 ? this.run.calls : [this.run.calls[this.call]];
    const rows = new Map(), heat = new Map();
    const at = (map, key) => map.get(key) || map.set(key, new Measured()).get(key);
    for (const c of calls) {
      const outside = this.model.nodes.filter((n) => n.why);
      for (const e of c.events) {
        const id = this.node(e, outside), n = this.model.nodes[id];
        const key = this.by === "module" ? n?.path || "(the model itself)" : this.by === "value" ? `${e.op} ${e.value}` : e.op;
        const row = at(rows, key);
        row.add(c, e.ns);
        row.about ??= { key, id, outside: e.delegate < 0 };
        if (id !== undefined) at(heat, id).add(c, e.ns);
      }
    }
    const sum = (list) => list.reduce((a, b) => a + b, 0) || 1;
    const nodes = [...heat].map(([id, m]) => [id, m.time]), heated = sum(nodes.map(([, ns]) => ns));
    this.view.canvas.heat = new Map(nodes.map(([id, ns]) => [id, ns / heated]));
    this.view.canvas.draw();
    const found = [...rows.values()].map((m) => ({ ...m.about, ns: m.time, times: m.times })).sort((a, b) => b.ns - a.ns);
    this.body.replaceChildren(this.tiles(), this.calls(), this.memory(), this.operations(found, sum(found.map((r) => r.ns))));
  }

  tiles() {
    const { calls } = this.run, sum = (f) => calls.reduce((n, c) => n + f(c), 0);
    const tile = (title, value, note) => el("div", { class: "tile" }, el("div", { class: "soft" }, title), el("div", { class: "big" }, value), note ? el("div", { class: "soft small" }, note) : null);
    const built = sum((c) => c.built);
    return el("div", { class: "tiles" },
      tile("calls", String(calls.length)),
      tile("median call", timeText(median(calls.map((c) => c.ns))), `fastest ${timeText(Math.min(...calls.map((c) => c.ns)))}`),
      tile("plans built", String(built), built ? `${timeText(sum((c) => c.build_ns) / built)} each` : ""),
      tile("plans reused", String(sum((c) => c.reused))),
      tile("working memory", bytesText(Math.max(...calls.map((c) => c.memory.arena_bytes))), "at its peak"));
  }

  calls() {
    const { calls } = this.run, times = calls.map((c) => c.ns);
    const lo = Math.log(Math.min(...times) / 1.6), hi = Math.log(Math.max(...times));
    const width = (ns) => (hi > lo ? 100 * Math.max(0, Math.log(ns) - lo) / (hi - lo) : 100);
    const row = (c, i) => el("button", { type: "button", class: `call ${i === this.call ? "on" : ""}`, onclick: () => { this.call = this.call === i ? -1 : i; this.update(); } },
      el("span", { class: "call-name" }, Object.entries(c.sizes).map(([k, v]) => `${k} = ${v}`).join(", ") || `call ${i}`),
      el("span", { class: "call-bar" }, el("i", { class: c.built ? "built" : "reused", style: `width:${width(c.ns)}%` })),
      el("span", { class: "call-time" }, timeText(c.ns)),
      el("span", { class: `tag ${c.built ? "built" : "reused"}` }, c.built ? `plan built, ${timeText(c.build_ns)}` : "plan reused"));
    return el("div", { class: "panel" }, el("h2", {}, "Calls, in order"),
      el("p", { class: "soft small" }, "Bars grow by ratios. Press one to see that call alone."), el("div", { class: "calls" }, calls.map(row)));
  }

  memory() {
    const { calls } = this.run, w = 600, h = 90;
    const layers = [["arena_bytes", "working memory", "m-arena"], ["plan_bytes", "plans", "m-plans"]];
    const fixed = calls.map((c) => c.memory.packed_bytes + c.memory.state_bytes);
    const top = Math.max(1, ...calls.map((c) => c.memory.arena_bytes + c.memory.plan_bytes));
    const x = (i) => (i * w) / calls.length, y = (v) => h - (v / top) * (h - 4);
    let under = calls.map(() => 0);
    const areas = layers.map(([key, , cls]) => {
      const over = under.map((v, i) => v + calls[i].memory[key]);
      const up = over.flatMap((v, i) => [`${x(i)},${y(v)}`, `${x(i + 1)},${y(v)}`]);
      const down = under.flatMap((v, i) => [`${x(i)},${y(v)}`, `${x(i + 1)},${y(v)}`]).reverse();
      under = over;
      return svg("polygon", { points: [...up, ...down].join(" "), class: cls });
    });
    const resident = calls.map((c) => c.memory.resident);
    const weights = calls[0].memory.weight_bytes;
    return el("div", { class: "panel" }, el("h2", {}, "Memory over time"),
      el("figure", {}, svg("svg", { viewBox: `0 0 ${w} ${h}`, preserveAspectRatio: "none", role: "img", "aria-label": "memory after each call", class: "tall" }, areas)),
      el("div", { class: "legend" }, layers.map(([, text, cls]) => el("span", { class: "key" }, el("i", { class: cls }), text)), el("span", {}, `up to ${bytesText(top)}, call by call`)),
      el("p", { class: "soft small" }, `Besides: weights ${bytesText(weights)}, packed weights and state ${bytesText(fixed[0])}. The whole process, from ${bytesText(resident[0])} to ${bytesText(resident[resident.length - 1])}.`));
  }

  operations(rows, whole) {
    const choice = (by, text) => el("button", { type: "button", class: this.by === by ? "on" : "", onclick: () => { this.by = by; this.update(); } }, text);
    const most = rows[0]?.ns || 1;
    return el("div", { class: "panel" }, el("h2", {}, "Time by operation"), el("p", { class: "soft small" }, "Medians over the calls."),
      el("div", { class: "choice" }, choice("operation", "by kind"), choice("module", "by module"), choice("value", "each")),
      el("table", { class: "ops" }, el("tbody", {}, rows.slice(0, 60).map((r) => el("tr", {},
        el("td", {}, el("button", { type: "button", class: "plain", onclick: () => { if (r.id !== undefined) this.view.show(r.id); } }, r.key), r.outside ? el("span", { class: "tag out" }, "ExecuTorch") : null),
        el("td", { class: "num" }, `${r.times}×`), el("td", { class: "num" }, timeText(r.ns)),
        el("td", { class: "share" }, el("i", { style: `width:${(100 * r.ns) / most}%` })), el("td", { class: "num" }, `${((100 * r.ns) / whole).toFixed(1)} %`))))));
  }
}
