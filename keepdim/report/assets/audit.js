// The page of an audit: the way of everything a model says about its sizes, from stage to stage, red where it broke.
const FINE = new Set(["kept", "renamed"]);
const WHERE = new Map([[true, "inside the contract"], [false, "outside the contract"], [null, "nothing says whether it is meant to run"]]);

function auditPage(audit) {
  const lost = audit.items.filter((i) => i.lost), bad = audit.trials.filter((t) => !t.ok);
  const parts = [];
  if (lost.length) parts.push(`${lost.length} of ${audit.items.length} things that the model says about its sizes are lost on the way`);
  if (bad.length) parts.push(`${bad.length} of ${audit.trials.length} trial calls went wrong`);
  const alone = !audit.stages.some((s) => s.kind === "export"); // no model to compare with
  const tried = audit.trials.length ? `all ${audit.trials.length} trial calls did what they should` : "no call was tried";
  const verdict = el("section", { class: `panel banner ${audit.clean ? "good" : "bad"}` },
    el("h2", {}, audit.clean ? "Nothing is lost" : audit.failure ? "It cannot be lowered" : "Something is lost"),
    el("p", {}, audit.clean ? `All ${audit.items.length} things that the ${alone ? "file" : "model"} says about its sizes ${alone ? "hold" : "arrive"}, and ${tried}.` : parts.length ? `${parts.join(", and ")}.` : "What it says about its sizes holds as far as it came."),
    audit.failure ? el("p", {}, audit.failure) : null,
    el("p", { class: "soft small" }, `${audit.model} · ${audit.partitioner}`));
  return el("div", { class: "audit" }, verdict,
    el("section", { class: "panel" }, el("h2", {}, "The way of every size"), auditLegend(), fitted((width) => auditMap(audit, width))),
    lost.length ? el("section", { class: "panel" }, el("h2", {}, "What broke, where, and by what"), lost.map((i) => auditCard(audit, i))) : null,
    audit.trials.length ? auditTrials(audit.trials) : null,
    audit.notes.length ? el("section", { class: "panel" }, el("h2", {}, "What could not be known"), el("ul", { class: "sentences" }, audit.notes.map((n) => el("li", {}, n)))) : null);
}

function auditLegend() {
  const mark = (cls, text) => el("span", { class: "key" }, el("i", { class: `dot ${cls}` }), text);
  return el("div", { class: "legend" }, mark("fine", "kept"), mark("renamed", "kept under another name"), mark("broken", "narrowed, widened, frozen or dropped"), mark("unseen", "this stage does not show it"));
}

// Made anew for every width of the window.
function fitted(make) {
  const place = el("div", { class: "map" });
  let last = 0;
  new ResizeObserver(() => { if (place.clientWidth !== last) place.replaceChildren(make((last = place.clientWidth))); }).observe(place);
  return place;
}

// Stages go from left to right, items from top to bottom. Where there is little room, an item's name is above its line.
function auditMap(audit, width) {
  const { stages, items } = audit, narrow = width < 700;
  const left = narrow ? 16 : 240, edge = narrow ? 30 : 130, row = narrow ? 86 : 54, top = 118, lead = narrow ? 64 : 22;
  const step = Math.max(narrow ? 14 : 40, Math.min(120, (width - left - edge) / Math.max(1, stages.length - 1)));
  const w = Math.max(narrow ? width : 0, left + (stages.length - 1) * step + edge), h = top + items.length * row + 10;
  const spot = (i, k) => [left + k * step, top + lead + i * row];
  const text = ([x, y], s, attrs) => { const t = svg("text", { x, y, ...attrs }); t.textContent = s; return t; };
  const slanted = ([x], s, attrs) => text([0, 0], s, { ...attrs, transform: `translate(${x - 2} ${top - 16}) rotate(${narrow ? -65 : -38})` });
  const title = (node, s) => { const t = svg("title"); t.textContent = s; node.append(t); return node; };
  const line = ([x1, y1], [x2, y2], cls) => svg("line", { x1, y1, x2, y2, class: cls });
  // A value is over its dot, but at the edges of the page inside of it.
  const anchor = (x) => (narrow && x < 50 ? "start" : narrow && x > w - 50 ? "end" : "middle");
  const out = stages.map((s, k) => {
    const label = slanted(spot(0, k), clipText(stageName(s.name), narrow ? 15 : 22), { class: `stage ${s.kind}` });
    return svg("g", {}, line(spot(0, k), spot(items.length - 1, k), "stage-line"), title(label, s.hook ? `${s.name}: ${s.hook.function}, ${s.hook.file}:${s.hook.line}` : s.name));
  });
  items.forEach((item, i) => {
    const group = svg("g", { class: "item" }), [, y] = spot(i, 0), over = narrow ? y - 42 : y - 2, most = narrow ? Math.floor(width / 8.5) : 26;
    group.append(text([8, over], clipMiddle(item.subject, most), { class: `subject ${item.lost ? "broken" : ""}` }), text([8, over + 16], clipText(item.where || item.kind, narrow ? most : 30), { class: "place" }));
    const seen = item.states.map((s, k) => ({ s, k })).filter(({ s }) => s);
    seen.slice(1).forEach(({ s, k }, n) => group.append(line(spot(i, seen[n].k), spot(i, k), `way ${tone(s)}${k > seen[n].k + 1 ? " unseen" : ""}`)));
    let before = null;
    item.states.forEach((s, k) => {
      const [cx, cy] = spot(i, k);
      if (!s) return void group.append(svg("circle", { cx, cy, r: 2.5, class: "dot unseen" }));
      const breaks = !FINE.has(s.verdict) && (!before || FINE.has(before.verdict) || before.text !== s.text);
      group.append(title(svg("circle", { cx, cy, r: breaks ? 9 : 6, class: `dot ${tone(s)}` }), `${stages[k].name}: ${s.text} (${s.verdict})`));
      if (breaks) group.append(text([cx, cy + 4], "×", { class: "cross" }));
      if ((!before || before.text !== s.text) && s.text !== item.subject) group.append(text([anchor(cx) === "start" ? cx - 8 : anchor(cx) === "end" ? cx + 8 : cx, cy - 13], clipText(s.text, 15), { class: `value ${tone(s)}`, style: `text-anchor: ${anchor(cx)}` }));
      before = s;
    });
    if (item.lost) group.addEventListener("click", () => document.getElementById(`item-${i}`).scrollIntoView({ behavior: "smooth", block: "center" }));
    out.push(group);
  });
  return svg("svg", { viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: "img", "aria-label": "each size from stage to stage" }, out);
}

// A hook or a delegate without its class, which the banner has.
function stageName(s) { return s.startsWith(".") ? s : s.split(".").pop(); }
function tone(s) { return s.verdict === "kept" ? "fine" : s.verdict === "renamed" ? "renamed" : "broken"; }
function clipText(s, n) { return s.length > n ? s.slice(0, n - 1) + "…" : s; }
// Names that begin alike are told apart by their ends.
function clipMiddle(s, n) { return s.length > n ? s.slice(0, n - 9) + "…" + s.slice(-8) : s; }

function auditCard(audit, item) {
  const at = item.lost_at;
  const changes = item.changes.map((c) => el("li", {}, el("code", {}, c.before), " → ", el("code", { class: "broken" }, c.after), ` ${c.verdict} in `, el("b", {}, c.stage),
    c.by && c.by.function ? [" by ", el("code", {}, c.by.function), el("span", { class: "soft small" }, ` ${c.by.file}:${c.by.line}`)] : ""));
  return el("article", { class: "lost", id: `item-${audit.items.indexOf(item)}` },
    el("h3", {}, item.subject, el("span", { class: "tag bad" }, item.verdict), item.where ? el("span", { class: "soft small" }, item.where) : null),
    el("p", {}, item.meaning), el("ul", {}, changes),
    at && at.code ? el("pre", {}, at.code) : null,
    at && at.user_line ? el("p", {}, "In the model: ", el("code", {}, at.user_line)) : null);
}

function auditTrials(trials) {
  return el("section", { class: "panel" }, el("h2", {}, "What the file does"),
    el("p", { class: "soft small" }, "Calls at the ends of every range, inside, and just outside, each in a process of its own."),
    el("div", { class: "trials" }, trials.map((t) => el("div", { class: `trial ${t.ok ? "good" : "bad"}` },
      el("b", {}, t.verdict), el("span", {}, t.point), el("code", {}, Object.entries(t.sizes).map(([k, v]) => `${k} = ${v}`).join(", ")),
      el("span", { class: "soft small" }, [WHERE.get(t.inside), t.detail].filter((s) => s).join("; "))))));
}
