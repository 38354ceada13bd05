// The graph on a canvas. Only what is in sight is drawn, and text only where it can be read, so that thousands of
// operations stay fluid.
const FONT = '"Inter", system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace';
const KINDS = {
  product: ["linear", "matmul", "conv", "cdist", "pdist"],
  attention: ["sdpa", "cached_attention", "rope"],
  norm: ["layer_norm", "rms_norm", "group_norm", "batch_norm", "softmax", "log_softmax"],
  reduce: ["sum", "mean", "prod", "amax", "amin", "any", "all", "var", "argmax", "argmin", "cumsum", "cumprod", "argsort"],
  move: ["reshape", "permute", "expand", "slice", "select", "diagonal", "unfold", "as_strided", "cat", "cast", "flip", "pad", "full", "arange"],
  index: ["embedding", "index", "index_select", "gather", "scatter", "index_put", "index_add", "scatter_reduce", "embedding_bag"],
};
const KIND_OF = {};
for (const [kind, ops] of Object.entries(KINDS)) for (const op of ops) KIND_OF[op] = kind;
const kindOf = (op) => KIND_OF[op] || (op.endsWith("_scan") ? "attention" : op.includes("pool") ? "reduce" : "map");

class Canvas {
  constructor(element, tree, hooks) {
    Object.assign(this, { element, tree, hooks, model: tree.model, ctx: element.getContext("2d"), view: { x: 0, y: 0, k: 1 } });
    this.found = new Set();
    this.selected = null;
    this.colors();
    this.layout = new Layout(tree, (item) => this.measure(item));
    this.listen();
    new ResizeObserver(() => this.resize()).observe(element);
    this.resize();
    this.home();
  }

  colors() {
    const css = getComputedStyle(document.documentElement);
    this.c = new Proxy({}, { get: (memo, name) => (memo[name] ??= css.getPropertyValue("--" + name).trim()) });
  }

  // -- sizes of boxes, in the canvas' own units
  text(font, s) { this.ctx.font = font; return this.ctx.measureText(s).width; }

  measure(item) {
    if (!item.open || !item.children) item.label = Math.max(0, ...this.made(item).slice(0, 1).map((v) => this.text(`11px ${MONO}`, this.model.shape(v, false)))) + 6;
    const name = item.children || !item.node ? "" : this.model.values[item.node.outs[0]]?.name || "";
    const title = this.text(`600 13px ${FONT}`, this.title(item));
    if (item.kind === "input" || item.kind === "output" || item.kind === "state") return [Math.max(70, title + (item.written ? 136 : 56)), 34];
    if (item.kind === "region") return [Math.max(140, title + 120), 40];
    if (item.open) return [title + 150, 40];
    if (item.kind === "op") {
      const why = item.node.why ? Math.min(260, this.text(`11px ${FONT}`, item.node.why)) : 0;
      return [Math.max(96, Math.min(300, Math.max(title, this.text(`11px ${MONO}`, this.clip(name, 34)), why) + 34)), item.node.why ? 62 : 44];
    }
    return [Math.max(150, title + 60, Math.min(260, this.text(`11px ${FONT}`, this.summary(item)) + 30)), item.kind === "series" ? 64 : 58];
  }

  title(item) {
    if (item.kind === "region") return item.name ? `${item.name}:  ${item.title}` : item.title;
    if (item.kind === "delegate") return `${item.title} · ${item.node.engine}`;
    if (item.kind === "cond") return item.node.why ? item.title : "chosen by size";
    return item.kind === "state" && item.title.length > 24 ? "…" + item.title.slice(-22) : item.title;
  }

  clip(s, n) { return s.length > n ? s.slice(0, n - 1) + "…" : s; }

  summary(item) {
    if (item.words) return item.words;
    const count = {};
    for (const i of item.ids) { const n = this.model.nodes[i]; if (!n.view && !n.regions) count[n.op] = (count[n.op] || 0) + 1; }
    const top = Object.entries(count).sort((a, b) => b[1] - a[1]).slice(0, 3);
    return (item.words = top.map(([op, n]) => (n > 1 ? `${n} ${op}` : op)).join(", "));
  }

  // -- the view
  resize() {
    const { clientWidth: w, clientHeight: h } = this.element, k = window.devicePixelRatio || 1;
    if (!w || !h) return;
    this.element.width = w * k;
    this.element.height = h * k;
    this.draw();
  }

  home() {
    const { clientWidth: w, clientHeight: h } = this.element;
    const fit = Math.min(w / (this.layout.width + 40), h / (this.layout.height + 30));
    const across = w / (this.layout.width + 24); // text that can be read, and all of the width where that allows it
    const k = Math.min(1.15, Math.max(fit, Math.min(w < 600 ? 0.75 : 0.9, Math.max(across, w < 600 ? 0.5 : 0.75))));
    const first = this.layout.boxes[0], middle = this.layout.width * k > w && first ? first.x + first.w / 2 : this.layout.width / 2;
    this.view = { k, x: w / 2 - middle * k, y: Math.max(14, (h - this.layout.height * k) / 2) };
    this.draw();
  }

  fit() {
    const { clientWidth: w, clientHeight: h } = this.element;
    const k = Math.min(1.15, w / (this.layout.width + 20), h / (this.layout.height + 20));
    this.view = { k, x: (w - this.layout.width * k) / 2, y: (h - this.layout.height * k) / 2 };
    this.draw();
  }

  zoom(factor, px, py) {
    const { view: v } = this, k = Math.min(3, Math.max(0.02, v.k * factor));
    px ??= this.element.clientWidth / 2;
    py ??= this.element.clientHeight / 2;
    v.x = px - ((px - v.x) * k) / v.k;
    v.y = py - ((py - v.y) * k) / v.k;
    v.k = k;
    this.draw();
  }

  show(item) {
    this.tree.reveal(item);
    this.layout.update();
    const k = Math.max(0.8, this.view.k);
    this.view = { k, x: this.element.clientWidth / 2 - (item.x + item.w / 2) * k, y: this.element.clientHeight / 2 - (item.y + item.h / 2) * k };
    this.draw();
  }

  // Opens or closes a group; what was pressed stays where it was on the screen.
  toggle(item) {
    const { x, y } = item;
    item.open = !item.open;
    this.layout.update();
    this.view.x += (x - item.x) * this.view.k;
    this.view.y += (y - item.y) * this.view.k;
    this.draw();
  }

  at(px, py) {
    const x = (px - this.view.x) / this.view.k, y = (py - this.view.y) / this.view.k;
    for (let i = this.layout.boxes.length - 1; i >= 0; i--) {
      const b = this.layout.boxes[i];
      if (x >= b.x && x <= b.x + b.w && y >= b.y && y <= b.y + b.h) return { item: b, head: y <= b.y + GAP.bar };
    }
    return null;
  }

  press(px, py) {
    const hit = this.at(px, py);
    if (hit && hit.item.children && (hit.head || !hit.item.open)) this.toggle(hit.item);
    this.selected = hit ? hit.item : null;
    this.hooks.select(this.selected);
    this.draw();
  }

  listen() {
    const el = this.element, down = new Map();
    let moved = 0;
    const spot = (e) => { const r = el.getBoundingClientRect(); return [e.clientX - r.left, e.clientY - r.top]; };
    el.addEventListener("pointerdown", (e) => { el.setPointerCapture(e.pointerId); if (!down.size) moved = 0; down.set(e.pointerId, spot(e)); });
    el.addEventListener("pointermove", (e) => {
      const [x, y] = spot(e);
      if (!down.has(e.pointerId)) { el.style.cursor = this.at(x, y) ? "pointer" : "grab"; return; }
      const [ox, oy] = down.get(e.pointerId);
      const others = [...down].filter(([id]) => id !== e.pointerId);
      moved += Math.abs(x - ox) + Math.abs(y - oy);
      if (others.length) {
        const [, [qx, qy]] = others[0];
        this.zoom(Math.hypot(x - qx, y - qy) / Math.max(1, Math.hypot(ox - qx, oy - qy)), qx, qy);
      } else { this.view.x += x - ox; this.view.y += y - oy; this.draw(); }
      down.set(e.pointerId, [x, y]);
    });
    const up = (e) => {
      if (down.delete(e.pointerId) && e.type === "pointerup" && !down.size && moved < 6) this.press(...spot(e));
    };
    el.addEventListener("pointerup", up);
    el.addEventListener("pointercancel", up);
    el.addEventListener("wheel", (e) => {
      e.preventDefault();
      if (e.ctrlKey || e.metaKey || !e.shiftKey) this.zoom(Math.exp(-e.deltaY * (e.ctrlKey ? 0.01 : 0.0016)), ...spot(e));
      else { this.view.x -= e.deltaX || e.deltaY; this.draw(); }
    }, { passive: false });
  }

  // -- drawing
  draw() { if (!this.waiting) { this.waiting = true; requestAnimationFrame(() => { this.waiting = false; this.paint(); }); } }

  paint() {
    const { ctx, view: { x, y, k } } = this, ratio = window.devicePixelRatio || 1;
    const { clientWidth: w, clientHeight: h } = this.element;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, w, h);
    ctx.setTransform(ratio * k, 0, 0, ratio * k, ratio * x, ratio * y);
    const sight = { left: -x / k, top: -y / k, right: (w - x) / k, bottom: (h - y) / k };
    const inside = (b) => b.x < sight.right && b.x + b.w > sight.left && b.y < sight.bottom + 40 && b.y + b.h > sight.top - 40;
    const boxes = this.layout.boxes.filter(inside);
    const edges = this.layout.edges.filter((e) => e.top < sight.bottom && e.bottom > sight.top);
    this.sight = sight;
    boxes.filter((b) => b.open && b.children).forEach((b) => this.frame(b, k));
    if (k < 0.2) return this.far(boxes, edges);
    edges.forEach((e) => this.edge(e, k));
    for (const b of boxes) if (!b.open || !b.children) this.card(b, k);
    if (k > 0.45) for (const b of boxes) this.shapes(b);
  }

  // From far away: no text, no round corners, all edges in one stroke.
  far(boxes, edges) {
    const { ctx, c } = this;
    ctx.beginPath();
    for (const { points } of edges) { ctx.moveTo(...points[0]); for (const p of points.slice(1)) ctx.lineTo(...p); }
    ctx.strokeStyle = c.edge;
    ctx.lineWidth = 2;
    ctx.stroke();
    for (const b of boxes) {
      if (b.open && b.children) continue;
      ctx.globalAlpha = this.dark(b) ? 0.3 : 1;
      ctx.fillStyle = this.tone(b);
      ctx.fillRect(b.x, b.y, b.w, b.h);
      if (this.found.has(b) || this.selected === b) this.ring(b, 10);
    }
    ctx.globalAlpha = 1;
  }

  tone(b) {
    const { c } = this;
    if (b.value !== undefined) return c[b.kind];
    if (b.kind === "op") return b.node.why ? c.outside : c[kindOf(b.node.op)];
    return { delegate: c.delegate, cond: c.cond }[b.kind] || c.soft;
  }

  dark(item) { // not computed at these sizes
    for (let p = item; p; p = p.parent) if (p.branch && this.model.taken(p.branch.cond) >= 0 && this.model.taken(p.branch.cond) !== p.branch.k) return true;
    return false;
  }

  box(b, r) { this.ctx.beginPath(); this.ctx.roundRect(b.x, b.y, b.w, b.h, r); }

  frame(b, k) {
    const { ctx, c } = this, dim = this.dark(b);
    ctx.globalAlpha = dim ? 0.45 : 1;
    this.box(b, 14);
    const branch = b.kind === "region", taken = branch && this.model.taken(b.branch.cond) === b.branch.k;
    ctx.fillStyle = taken ? c["lit-soft"] : { delegate: c["delegate-soft"], cond: c["cond-soft"] }[b.kind] || c.group;
    ctx.fill();
    ctx.lineWidth = taken ? 2.5 : b.kind === "delegate" ? 2 : 1.2;
    ctx.strokeStyle = taken ? c.lit : { delegate: c.delegate, cond: c.cond }[b.kind] || c.line;
    if (branch && !taken) ctx.setLineDash([6, 5]);
    ctx.stroke();
    ctx.setLineDash([]);
    if (this.found.has(b) || this.selected === b) this.ring(b, 14);
    if (k > 0.25) {
      ctx.fillStyle = taken ? c.lit : { delegate: c.delegate, cond: c.cond }[b.kind] || c.soft;
      ctx.font = `600 13px ${FONT}`;
      ctx.textBaseline = "middle";
      ctx.textAlign = "left";
      const title = `−  ${this.title(b)}${taken ? "   ● taken" : ""}`;
      const most = b.x + b.w - 14 - ctx.measureText(title).width; // it stays in sight as long as its frame does
      ctx.fillText(title, Math.max(b.x + 14, Math.min(this.sight.left + 10, most)), b.y + 18);
    }
    ctx.globalAlpha = 1;
  }

  ring(b, r) {
    const { ctx, c } = this;
    ctx.beginPath();
    ctx.roundRect(b.x - 4, b.y - 4, b.w + 8, b.h + 8, r + 4);
    ctx.strokeStyle = c.found;
    ctx.lineWidth = 3;
    ctx.stroke();
  }

  card(b, k) {
    const { ctx, c } = this;
    const pill = b.kind === "input" || b.kind === "output" || b.kind === "state";
    const outside = b.kind === "op" && b.node.why;
    ctx.globalAlpha = this.dark(b) ? 0.32 : 1;
    if (b.kind === "series") for (const d of [8, 4]) { this.box({ x: b.x + d, y: b.y + d, w: b.w, h: b.h }, 10); ctx.fillStyle = c.card; ctx.fill(); ctx.strokeStyle = c.line; ctx.lineWidth = 1; ctx.stroke(); }
    const tone = this.tone(b);
    this.box(b, pill ? 17 : 10);
    ctx.fillStyle = pill ? c[b.kind + "-soft"] : outside ? c["outside-soft"] : c.card;
    ctx.fill();
    ctx.lineWidth = outside || pill ? 1.8 : 1.2;
    ctx.strokeStyle = outside || pill ? tone : c.line;
    if (outside) ctx.setLineDash([5, 4]);
    if (b.kind === "state") ctx.setLineDash([2, 3]);
    ctx.stroke();
    ctx.setLineDash([]);
    if (!pill) { ctx.save(); this.box(b, 10); ctx.clip(); ctx.fillStyle = tone; ctx.fillRect(b.x, b.y, 5, b.h); ctx.restore(); }
    if (this.heat) this.warm(b);
    if (this.found.has(b) || this.selected === b) this.ring(b, pill ? 17 : 10);
    if (k > 0.25) this.words(b, pill, outside);
    ctx.globalAlpha = 1;
  }

  warm(b) { // the share of the time that a profile found here
    const part = b.ids.reduce((n, i) => n + (this.heat.get(i) || 0), 0);
    if (part < 0.003) return;
    const { ctx, c } = this;
    ctx.save();
    this.box(b, 10);
    ctx.clip();
    ctx.fillStyle = c.hot;
    ctx.globalAlpha *= 0.12 + 0.3 * Math.min(1, part * 3);
    ctx.fillRect(b.x + 5, b.y, b.w, b.h);
    ctx.restore();
    const text = `${(100 * part).toFixed(part < 0.1 ? 1 : 0)}%`, w = this.text(`600 10px ${FONT}`, text) + 10;
    this.box({ x: b.x + b.w - w - 6, y: b.y - 8, w, h: 14 }, 7); // a badge on the edge, clear of the words
    ctx.fillStyle = c.hot;
    ctx.fill();
    ctx.fillStyle = c.card;
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.fillText(text, b.x + b.w - w / 2 - 6, b.y - 0.5);
  }

  words(b, pill, outside) {
    const { ctx, c } = this, x = b.x + (pill ? 16 : 17);
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    ctx.fillStyle = c.ink;
    ctx.font = `600 13px ${FONT}`;
    if (pill) {
      const sign = { input: "in", output: "out", state: b.written ? "kept for the next call" : "state" }[b.kind];
      ctx.fillText(this.title(b), x, b.y + 17.5);
      const w = ctx.measureText(this.title(b)).width;
      ctx.font = `10px ${FONT}`;
      ctx.fillStyle = c[b.kind];
      ctx.fillText(sign, x + w + 7, b.y + 18);
      return;
    }
    const more = b.children ? "+  " : "";
    ctx.fillText(more + this.title(b), x, b.y + 16);
    ctx.font = `11px ${b.kind === "op" ? MONO : FONT}`;
    ctx.fillStyle = c.soft;
    if (b.kind === "op") ctx.fillText(this.clip(this.model.values[b.node.outs[0]]?.name || "", 34), x, b.y + 32);
    if (outside) { ctx.font = `11px ${FONT}`; ctx.fillStyle = c.outside; ctx.fillText(this.clip(b.node.why, 44), x, b.y + 48); }
    if (b.children) {
      const n = b.ids.filter((i) => !this.model.nodes[i].regions).length;
      const times = b.kind === "series" ? `${b.children.length} alike, ` : "";
      ctx.fillText(`${times}${n} operation${n === 1 ? "" : "s"}`, x, b.y + 32);
      ctx.fillText(this.clip(this.summary(b), 42), x, b.y + 46);
    }
  }

  edge(e, k) {
    const { ctx, c } = this;
    const dim = this.dark(e.from) || this.dark(e.to), near = this.selected && (this.selected === e.from || this.selected === e.to);
    ctx.globalAlpha = dim ? 0.25 : e.far ? 0.35 : 1;
    ctx.strokeStyle = near ? c.found : c.edge;
    ctx.lineWidth = near ? 2.4 : 1.4;
    if (e.far) ctx.setLineDash([3, 4]);
    ctx.beginPath();
    ctx.moveTo(...e.points[0]);
    for (let i = 1; i < e.points.length; i++) {
      const [ax, ay] = e.points[i - 1], [bx, by] = e.points[i], mid = (ay + by) / 2;
      ctx.bezierCurveTo(ax, mid, bx, mid, bx, by);
    }
    ctx.stroke();
    ctx.setLineDash([]);
    if (k > 0.3) {
      const [x, y] = e.points[e.points.length - 1];
      ctx.beginPath();
      ctx.moveTo(x, y);
      ctx.lineTo(x - 4, y - 7);
      ctx.lineTo(x + 4, y - 7);
      ctx.fillStyle = ctx.strokeStyle;
      ctx.fill();
    }
    ctx.globalAlpha = 1;
  }

  // The shape of what a box makes, where its edges begin: as it is written, and what it is at these sizes.
  shapes(b) {
    const { ctx, c, model } = this;
    ctx.globalAlpha = this.dark(b) ? 0.3 : 1;
    ctx.textBaseline = "middle";
    if (b.stubs?.length && !(b.open && b.children)) {
      ctx.textAlign = "center";
      ctx.font = `10px ${MONO}`;
      ctx.fillStyle = c.faint;
      const names = b.stubs.map((v) => model.values[v].name);
      ctx.fillText("↓ " + this.clip(names.slice(0, 2).join(", ") + (names.length > 2 ? ` +${names.length - 2}` : ""), 40), b.x + b.w / 2, b.y - 9);
    }
    const made = b.open && b.children ? [] : this.made(b);
    let y = b.y + b.h + 11;
    for (const v of made.slice(0, 1)) {
      const text = model.shape(v, false), now = model.dynamic(v) ? model.shape(v, true).replace(/^\w+/, "") : "";
      ctx.font = `11px ${MONO}`;
      const w = Math.max(ctx.measureText(text).width, ctx.measureText(now).width) + 8;
      const x = b.x + b.w / 2;
      ctx.fillStyle = c.paper;
      ctx.globalAlpha *= 0.82;
      ctx.fillRect(x - w / 2, y - 7, w, now ? 28 : 14);
      ctx.globalAlpha = this.dark(b) ? 0.3 : 1;
      ctx.textAlign = "center";
      ctx.fillStyle = c.soft;
      ctx.fillText(text + (made.length > 1 ? `  +${made.length - 1}` : ""), x, y);
      if (now) { ctx.fillStyle = c.number; ctx.font = `600 11px ${MONO}`; ctx.fillText(now, x, y + 14); }
    }
    ctx.globalAlpha = 1;
  }

  made(b) { return b.kind === "output" || b.written ? [b.value] : b.children ? [...b.makes].filter((v) => this.leaves(b, v)) : [...b.makes]; }

  // Whether somebody outside the group reads a value that is made in it.
  leaves(b, v) {
    b.out ??= new Set([...b.makes].filter((u) => this.readers(u).some((r) => !within(r, b))));
    return b.out.has(v);
  }

  readers(v) {
    if (!this.readBy) {
      this.readBy = new Map();
      const add = (item) => {
        if (item.children) item.children.forEach(add);
        if (!item.children || item.kind === "region") item.reads.forEach((u) => { if (!this.readBy.has(u)) this.readBy.set(u, []); this.readBy.get(u).push(item); });
      };
      add(this.tree.root);
    }
    return this.readBy.get(v) || [];
  }
}

function within(item, group) { for (let p = item; p; p = p.parent) if (p === group) return true; return false; }
