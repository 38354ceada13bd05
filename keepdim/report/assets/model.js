// What a page knows about a file, and what it works out at the sizes of the moment: shapes, branches, memory, cost.
class Model {
  constructor(file) {
    this.file = file;
    this.values = file.values;
    this.nodes = file.nodes;
    this.sizes = file.symbols.map((s) => clampSize(s, 16));
    this.owner = new Map(); // value → node that makes it
    file.nodes.forEach((n, i) => { n.id = i; if (n.op !== "delegate" || !n.regions) n.outs.forEach((v) => this.owner.set(v, i)); });
    this.update();
  }

  real(v) { while (this.values[v].same !== undefined) v = this.values[v].same; return v; }

  set(name, value) {
    const i = this.file.symbols.findIndex((s) => s.name === name);
    this.sizes[i] = clampSize(this.file.symbols[i], value);
    this.update();
  }

  at(dim) { return Number(this.all[this.file.rows[dim]]); }

  update() {
    this.all = evalRows(this.file.dims, this.sizes);
    this.bytes = this.values.map((v) => v.dims.reduce((n, d) => n * this.at(d), v.width) / v.block);
    this.refused = this.file.requires.filter(([l, cmp, r]) => !CMP[cmp](this.at(l), this.at(r))).map((r) => r[3]);
    this.run();
  }

  taken(n) { return n.when === undefined ? -1 : this.at(n.when) >= 0 ? 0 : 1; }

  // Walks what is computed at these sizes, in order.
  run() {
    this.lit = new Uint8Array(this.nodes.length);
    const order = [], flow = (list) => {
      for (const i of list) {
        const n = this.nodes[i], taken = this.taken(n);
        this.lit[i] = 1;
        if (!n.regions) order.push(n);
        else n.regions.forEach((r, k) => { if (taken < 0 || k === taken) flow(r.nodes); });
        if (n.regions && taken >= 0) order.push({ ...n, ins: n.regions[taken].results, view: true });
      }
    };
    flow(this.file.top);
    this.flops = this.moved = 0;
    for (const n of order) {
      if (n.flops === undefined) continue;
      this.flops += this.at(n.flops);
      this.moved += this.at(n.moved);
    }
    this.memory(order);
  }

  // Bytes of what is alive after each operation: a temp from where it is made to its last reader. A view is what it shows.
  memory(order) {
    const base = new Map(), last = new Map();
    const root = (v) => { v = this.real(v); while (base.has(v)) v = base.get(v); return v; };
    order.forEach((n, t) => {
      n.ins.forEach((v) => last.set(root(v), t));
      n.outs.forEach((v) => { if (n.view && n.ins.length) base.set(v, root(n.ins[0])); last.set(root(v), t); });
    });
    const results = new Set(this.file.results.map(root));
    let now = 0;
    this.peak = 0;
    this.curve = [];
    const dies = new Map();
    for (const [v, t] of last) dies.set(t, [...(dies.get(t) || []), v]);
    order.forEach((n, t) => {
      const mine = (v) => this.values[v].kind === "temp" && !results.has(v);
      if (!n.view) for (const v of n.outs) if (mine(v)) now += this.bytes[v];
      this.curve.push({ node: n.id, bytes: now });
      this.peak = Math.max(this.peak, now);
      for (const v of dies.get(t) || []) if (mine(v) && !base.has(v) && this.owner.has(v)) now -= this.bytes[v];
    });
    const sum = (kind) => {
      const seen = new Set();
      return this.values.reduce((n, v, i) => {
        if (v.kind !== kind || seen.has(v.key || v.name)) return n;
        seen.add(v.key || v.name);
        return n + this.bytes[i];
      }, 0);
    };
    this.weights = sum("const");
    this.state = sum("state");
    this.io = [...this.file.inputs, ...this.file.results].reduce((n, v) => n + this.bytes[v], 0);
  }

  shape(v, numbers) {
    const { dtype, dims } = this.values[v];
    if (dtype === "python") return "";
    if (dtype === "int") return numbers ? String(this.at(dims[0])) : this.file.texts[dims[0]];
    return `${dtype}[${dims.map((d) => (numbers ? this.at(d) : this.file.texts[d])).join(", ")}]`;
  }

  dynamic(v) { return this.values[v].dims.some((d) => !/^\d+$/.test(this.file.texts[d])); }
}

function clampSize(s, value) {
  const lo = s.lo ?? 0, hi = s.hi ?? Math.max(lo, 1 << 20);
  return Math.max(lo, Math.min(hi, Math.round(value) || lo));
}

const UNITS = ["", "k", "M", "G", "T", "P"];
function short(x, unit, base = 1000) {
  let i = 0;
  for (; Math.abs(x) >= base && i < UNITS.length - 1; i++) x /= base;
  const digits = i === 0 || x >= 100 ? Math.round(x) : x >= 10 ? x.toFixed(1) : x.toFixed(2);
  return `${digits} ${base === 1024 && i ? UNITS[i].toUpperCase() + "i" : UNITS[i]}${unit}`;
}
const bytesText = (n) => short(n, "B", 1024);
const timeText = (ns) => (ns >= 1e9 ? `${(ns / 1e9).toFixed(2)} s` : ns >= 1e6 ? `${(ns / 1e6).toFixed(2)} ms` : `${(ns / 1e3).toFixed(1)} µs`);

// The tree of what is drawn: operations, and groups of them (delegates, modules, branches, rows of equal modules).
class Item {
  constructor(kind, title, key) {
    Object.assign(this, { kind, title, key, children: null, node: null, open: false, parent: null });
    this.reads = new Set();
    this.makes = new Set();
    this.ids = [];
  }
}

class Tree {
  constructor(model) {
    this.model = model;
    this.items = new Map(); // node → its item
    const root = (this.root = new Item("root", "", "/"));
    root.open = true;
    const pills = (list, kind) => list.map((v, i) => this.pill(kind, v, kind === "output" ? model.file.outputs[i] : undefined));
    this.states = new Set();
    root.children = [
      ...pills(model.file.inputs.filter((v) => model.values[v].dtype !== "python"), "input"),
      ...this.list(model.file.top, "", []),
      ...pills(model.file.results, "output"),
      ...model.file.written.map(([v, name]) => this.pill("state", v, name, true)),
    ];
    this.finish(root);
    this.start();
  }

  pill(kind, v, name, written = false) {
    const item = new Item(kind, name || this.model.values[v].name, `${written ? "written" : kind}:${v}`);
    Object.assign(item, { value: v, written });
    (kind === "output" || written ? item.reads : item.makes).add(this.model.real(v));
    return item;
  }

  // Items of nodes in order. Neighbours of one module become a group, so that groups never hang on each other in a circle.
  list(ids, key, prefix) {
    const out = [];
    const parts = (i) => pathParts(this.model.nodes[i].path || "");
    for (let at = 0; at < ids.length; ) {
      const name = parts(ids[at])[prefix.length];
      let end = at + 1;
      while (name !== undefined && end < ids.length && sameModule(parts(ids[end]), [...prefix, name])) end++;
      if (name === undefined || end === at + 1) { out.push(...this.one(ids[at], key)); at++; continue; }
      const group = new Item("module", name, `${key}/${name}@${ids[at]}`);
      group.children = this.list(ids.slice(at, end), group.key, [...prefix, name]);
      out.push(group.children.length === 1 && group.children[0].kind === "module" ? joined(group, group.children[0]) : group);
      at = end;
    }
    return this.series(out, key);
  }

  one(i, key) {
    const n = this.model.nodes[i], made = [];
    for (const v of n.ins) {
      if (this.model.values[v].kind === "state" && !this.states.has(v)) { this.states.add(v); made.push(this.pill("state", v)); }
    }
    const item = new Item(n.op === "delegate" ? "delegate" : n.regions ? "cond" : "op", n.op, `n${i}`);
    item.node = n;
    if (n.op === "delegate") {
      item.title = `delegate ${n.delegate >= 0 ? n.delegate : ""}`;
      item.children = n.regions ? this.list(n.regions[0].nodes, item.key, []) : null;
    } else if (n.regions) {
      item.children = n.regions.map((r, k) => {
        const region = new Item("region", r.text || `body ${k}`, `n${i}.${k}`);
        region.children = this.list(r.nodes, region.key, pathParts(n.path || ""));
        region.branch = { cond: n, k };
        region.results = r.results;
        const name = r.nodes.map((j) => (this.model.nodes[j].path || "").split(":")[1]).find((x) => x);
        if (name) region.name = name.split(".")[0];
        const [only] = region.children; // the implementation, which the region is named by already
        if (name && region.children.length === 1 && only.kind === "module") region.children = only.children;
        return region;
      });
    }
    made.push(item);
    this.items.set(i, item);
    return made;
  }

  // Three or more neighbours that look alike become one card.
  series(list, key) {
    const out = [];
    const sig = (x) => x.sig ?? (x.sig = x.kind === "module" ? x.title.replace(/\d+/g, "#") + this.ops(x) : "");
    for (let at = 0; at < list.length; ) {
      let end = at + 1;
      while (sig(list[at]) && end < list.length && sig(list[end]) === sig(list[at])) end++;
      if (end - at < 3) { out.push(...list.slice(at, end)); at = end; continue; }
      const first = list[at].title, last = list[end - 1].title.match(/\d+/g);
      const item = new Item("series", `${first} … ${last ? last[last.length - 1] : ""}`, `${key}/series@${list[at].key}`);
      item.children = list.slice(at, end);
      out.push(item);
      at = end;
    }
    return out;
  }

  ops(item) { return item.children ? "(" + item.children.map((c) => this.ops(c)).join(",") + ")" : item.value === undefined ? item.title : item.kind; }

  finish(item) {
    const m = this.model;
    if (item.node && (!item.children || item.kind === "cond")) { // a choice reads what it is decided by
      for (const v of item.node.ins) if (m.values[v].kind !== "const") item.reads.add(m.real(v));
    }
    if (item.node && !item.children) {
      item.ids = [item.node.id];
      for (const v of item.node.outs) item.makes.add(m.real(v));
    }
    for (const c of item.children || []) {
      c.parent = item;
      this.finish(c);
      item.ids.push(...c.ids);
      c.reads.forEach((v) => item.reads.add(v));
      c.makes.forEach((v) => item.makes.add(v));
    }
    if (item.kind === "region") item.results.forEach((v) => item.reads.add(m.real(v)));
    if (item.kind === "cond") item.node.outs.forEach((v) => item.makes.add(m.real(v)));
    if (item.children) for (const v of item.makes) item.reads.delete(v);
    if (item.kind === "cond" && item.node) item.ids.push(item.node.id);
  }

  // Open what there is room for: the outermost first, the smallest of them before the large ones.
  start() {
    let seen = this.root.children.length;
    const open = (item) => { item.open = true; seen += item.children.length; };
    let edge = this.root.children.filter((c) => c.children);
    edge.filter((c) => c.kind === "delegate").forEach(open);
    while (edge.length) {
      const next = [];
      for (const item of edge.sort((a, b) => a.children.length - b.children.length)) {
        if (!item.open && item.kind !== "series" && seen + item.children.length <= 36) open(item);
        if (item.open) next.push(...item.children.filter((c) => c.children));
      }
      edge = next;
    }
  }

  reveal(item) { for (let p = item.parent; p; p = p.parent) p.open = true; }
}

const digits = /^\d+$/;
function pathParts(path) {
  const out = [];
  for (const p of path.split(".")) if (digits.test(p) && out.length) out[out.length - 1] += "." + p; else if (p) out.push(p);
  return out;
}
function sameModule(parts, prefix) { return prefix.every((p, i) => parts[i] === p); }
function joined(outer, inner) { inner.title = `${outer.title}.${inner.title}`; return inner; }
