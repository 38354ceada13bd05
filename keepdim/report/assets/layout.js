// Places items: every open group is laid out by itself in layers, from top to bottom, and is then one box of its parent.
const GAP = { x: 28, y: 62, pad: 18, head: 48, bar: 34 };

class Layout {
  constructor(tree, measure) {
    this.tree = tree;
    this.measure = measure;
    this.update();
  }

  update() {
    this.boxes = []; // everything that is drawn, parents before children
    this.edges = [];
    const root = this.tree.root;
    this.size(root);
    this.place(root, 0, 0);
    this.width = root.w;
    this.height = root.h;
  }

  size(item) {
    if (!item.open || !item.children) {
      [item.w, item.h] = this.measure(item);
      return;
    }
    item.children.forEach((c) => this.size(c));
    item.plan = item.kind === "cond" ? this.beside(item) : this.layered(item);
    const head = item.kind === "root" ? 0 : GAP.head;
    const title = item.kind === "root" ? [0, 0] : this.measure(item);
    item.w = Math.max(item.plan.w + 2 * GAP.pad, title[0]);
    item.h = item.plan.h + head + GAP.pad + (item.kind === "root" ? GAP.pad : 0);
    item.head = head;
  }

  beside(item) {
    let x = 0, h = 0;
    const slots = item.children.map((c) => { const s = { item: c, x, y: 4 }; x += c.w + GAP.x; h = Math.max(h, c.h); return s; });
    return { slots, links: [], w: x - GAP.x, h: h + 4 };
  }

  layered(item) {
    const kids = item.children, owner = new Map();
    kids.forEach((c, i) => c.makes.forEach((v) => owner.set(v, i)));
    const slots = kids.map((c, i) => ({ item: c, i, w: Math.max(c.w, c.label || 0), h: c.h, layer: 0, up: [], down: [] }));
    const links = [];
    kids.forEach((c, i) => {
      const from = new Map();
      c.stubs = []; // values from outside the group
      for (const v of c.reads) {
        const j = owner.get(v);
        if (j !== undefined && j < i) from.set(j, v);
        else if (j === undefined && item.kind !== "root") c.stubs.push(v);
      }
      for (const [j, v] of from) {
        links.push({ from: slots[j], to: slots[i], value: v });
        slots[i].layer = Math.max(slots[i].layer, slots[j].layer + 1);
      }
    });
    // A source stands just above its first reader, a result at the end.
    const depth = Math.max(0, ...slots.map((s) => s.layer));
    for (const s of slots) {
      if (s.item.kind === "output") s.layer = Math.max(s.layer, depth);
      if (s.item.kind === "state" || s.item.kind === "input") {
        const readers = links.filter((l) => l.from === s);
        if (readers.length) s.layer = Math.max(0, Math.min(...readers.map((l) => l.to.layer)) - 1);
      }
    }
    return this.arrange(slots, links);
  }

  // Dummies hold the way of a link that passes layers; orders by the middle of neighbours; then moves towards them.
  arrange(slots, links) {
    const layers = [];
    const put = (s) => { (layers[s.layer] ||= []).push(s); };
    slots.forEach(put);
    for (let i = 0; i < layers.length; i++) layers[i] ||= [];
    for (const l of links) {
      l.bends = [];
      let last = l.from;
      if (l.to.layer - l.from.layer <= 12) {
        for (let y = l.from.layer + 1; y < l.to.layer; y++) {
          const d = { layer: y, w: 6, h: 0, up: [last], down: [], dummy: true };
          last.down.push(d);
          layers[y].push(d);
          l.bends.push(d);
          last = d;
        }
      } else l.far = true;
      last.down.push(l.to);
      l.to.up.push(last);
    }
    layers.forEach((row) => row.forEach((s, i) => { s.order = i; }));
    const middle = (list, s) => (list.length ? list.reduce((n, x) => n + x.order / 1, 0) / list.length : s.order);
    for (let sweep = 0; sweep < 6; sweep++) {
      const rows = sweep % 2 ? [...layers].reverse() : layers;
      for (const row of rows) {
        for (const s of row) s.mid = middle(sweep % 2 ? s.down : s.up, s);
        row.sort((a, b) => a.mid - b.mid || a.order - b.order).forEach((s, i) => { s.order = i; });
      }
    }
    let y = 0;
    for (const row of layers) {
      let x = 0;
      const h = Math.max(0, ...row.map((s) => s.h));
      row.forEach((s) => { s.x = x; s.y = y + (s.dummy ? h / 2 : 0); x += s.w + GAP.x; });
      const shift = x / 2;
      row.forEach((s) => { s.x -= shift; });
      y += h + GAP.y;
    }
    const center = (s) => s.x + s.w / 2;
    for (let sweep = 0; sweep < 8; sweep++) {
      for (const row of sweep % 2 ? [...layers].reverse() : layers) {
        const want = row.map((s) => {
          const near = sweep % 2 ? s.down : s.up;
          return near.length ? near.reduce((n, x) => n + center(x), 0) / near.length - s.w / 2 : s.x;
        });
        settle(row, want);
      }
    }
    const left = Math.min(0, ...slots.map((s) => s.x)), right = Math.max(0, ...slots.map((s) => s.x + s.w));
    const dummies = links.flatMap((l) => l.bends);
    const l2 = Math.min(left, ...dummies.map((d) => d.x));
    const r2 = Math.max(right, ...dummies.map((d) => d.x));
    [...slots, ...dummies].forEach((s) => { s.x -= l2; });
    return { slots, links, w: r2 - l2, h: y - GAP.y + 34 };
  }

  place(item, x, y) {
    Object.assign(item, { x, y });
    if (item.kind !== "root") this.boxes.push(item);
    if (!item.open || !item.children) return;
    const dx = x + (item.w - item.plan.w) / 2, dy = y + item.head + (item.kind === "root" ? GAP.pad : 0);
    for (const s of item.plan.slots) this.place(s.item, dx + s.x + ((s.w ?? s.item.w) - s.item.w) / 2, dy + s.y);
    for (const l of item.plan.links) {
      const a = l.from.item, b = l.to.item;
      const points = [[a.x + a.w / 2, a.y + a.h], ...l.bends.map((d) => [dx + d.x, dy + d.y]), [b.x + b.w / 2, b.y]];
      this.edges.push({ from: a, to: b, value: l.value, points, far: l.far, top: points[0][1], bottom: b.y });
    }
  }
}

// Puts a row where its items want to be, in their order and without overlap: neighbours that collide move together.
function settle(row, want) {
  const blocks = [];
  row.forEach((s, i) => {
    blocks.push({ at: want[i], n: 1, w: s.w + GAP.x, items: [[s, 0]] });
    while (blocks.length > 1) {
      const b = blocks[blocks.length - 1], a = blocks[blocks.length - 2];
      if (a.at + a.w <= b.at) break;
      const at = (a.at * a.n + (b.at - a.w) * b.n) / (a.n + b.n);
      a.items.push(...b.items.map(([x, o]) => [x, o + a.w]));
      Object.assign(a, { at, n: a.n + b.n, w: a.w + b.w });
      blocks.pop();
    }
  });
  for (const b of blocks) for (const [s, o] of b.items) s.x = b.at + o;
}
