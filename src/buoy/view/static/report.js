"use strict";
// Hover shows the values under the pointer in every chart of a group; dragging zooms; a double click shows all again.
// By keyboard: arrows (with Shift faster), Home and End move the reading, + and - zoom around it, Escape shows all.
// Without this script the page is a still picture that says the same.
(() => {
  const groups = JSON.parse(document.getElementById("data").textContent);
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const bytes = (v) => { let u = 0; while (v >= 1024 && u < 4) { v /= 1024; u++; } return v.toFixed(u ? 1 : 0) + " " + units[u]; };
  const seconds = (v) => {
    if (v < 60) return (v < 10 ? +v.toPrecision(3) : Math.round(v)) + " s";
    const m = Math.floor(v / 60), h = Math.floor(m / 60);
    return h ? h + " h " + (m % 60) + " min" : m + " min " + Math.round(v % 60) + " s";
  };
  const words = { bytes, seconds };
  const make = (name, shape, parent) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in shape) e.setAttribute(key, shape[key]);
    parent.append(e);
    return e;
  };
  for (const [id, group] of Object.entries(groups)) {
    const root = document.getElementById(id);
    const wide = 1000, high = 150, all = [0, group.buckets];
    let view = all, from = null, read = null;
    const where = (bucket) => group.lives.find((l) => bucket >= l.first && bucket < l.first + l.count);
    const moment = (bucket) => {
      const life = where(bucket);
      return life ? "attempt " + life.number + ", " + seconds(life.begin + (bucket - life.first) / life.count * life.seconds) : "";
    };
    const panes = group.charts.map((chart) => {
      const svg = root.querySelector('[data-chart="' + chart.id + '"]');
      const cursor = make("line", { class: "cursor", y1: 0, y2: high, x1: -9, x2: -9 }, svg);
      const chosen = make("rect", { class: "chosen", y: 0, height: high, x: -9, width: 0 }, svg);
      const say = svg.closest("figure").querySelector("span");
      return { chart, svg, cursor, chosen, say, still: say.textContent };
    });
    const axis = root.querySelector(".lives div + div"), lives = [...axis.childNodes];
    const edge = (side, bucket) => {
      const label = document.createElement("b");
      label.style[side] = "0";
      label.textContent = moment(bucket);
      return label;
    };
    const place = (bucket) => (bucket - view[0]) / (view[1] - view[0]) * wide;
    const draw = () => {
      const share = wide / (view[1] - view[0]);
      for (const { svg, cursor, say, still } of panes) {
        // What was under the pointer is elsewhere now.
        cursor.setAttribute("x1", -9);
        cursor.setAttribute("x2", -9);
        say.textContent = still;
        read = null;
        // One transform stretches the still picture: strokes do not scale, so it stays sharp.
        svg.querySelector("g").setAttribute("transform", "translate(" + -view[0] * share + ",0) scale(" + group.buckets / (view[1] - view[0]) + ",1)");
      }
      axis.replaceChildren(...(view === all ? lives : [edge("left", view[0]), edge("right", view[1] - 1)]));
      root.classList.toggle("zoomed", view !== all);
    };
    const bucketAt = (event, svg) => {
      const box = svg.getBoundingClientRect();
      const share = Math.min(0.9999, Math.max(0, (event.clientX - box.left) / box.width));
      return Math.floor(view[0] + share * (view[1] - view[0]));
    };
    const show = (bucket) => {
      read = bucket;
      for (const { chart, cursor, say } of panes) {
        const x = place(bucket + 0.5);
        cursor.setAttribute("x1", x);
        cursor.setAttribute("x2", x);
        const low = chart.low[bucket], top = chart.high[bucket], tell = (v) => words[chart.unit](v * chart.scale);
        const value = top === null ? "not measured" : tell(low) === tell(top) ? tell(top) : tell(low) + " to " + tell(top);
        const mark = group.marks.filter((m) => Math.abs(m.x - bucket) <= (view[1] - view[0]) / 400).map((m) => m.text)[0];
        say.textContent = value + " · " + moment(bucket) + (mark ? " · " + mark : "");
      }
    };
    const zoom = (factor) => {
      const centre = read, wanted = Math.max(4, Math.round((view[1] - view[0]) * factor));
      const first = Math.max(0, Math.min(group.buckets - wanted, Math.round(centre - wanted / 2)));
      view = wanted >= group.buckets ? all : [first, first + wanted];
      draw();
      show(centre);
    };
    const typed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const stride = event.shiftKey ? Math.max(1, Math.round((view[1] - view[0]) / 20)) : 1;
      const at = read === null ? view[1] - 1 : read;
      const to = { ArrowLeft: at - (read === null ? 0 : stride), ArrowRight: at + stride, Home: view[0], End: view[1] - 1 }[event.key];
      if (to !== undefined) show(Math.min(view[1] - 1, Math.max(view[0], to)));
      else if ("+=-_".includes(event.key)) { if (read === null) show(at); zoom("+=".includes(event.key) ? 0.5 : 2); }
      else if (event.key === "Escape") { view = all; draw(); }
      else return;
      event.preventDefault();
    };
    for (const { svg, say, chosen } of panes) {
      svg.setAttribute("tabindex", "0");
      say.setAttribute("aria-live", "polite");
      svg.addEventListener("keydown", typed);
      svg.addEventListener("pointermove", (event) => {
        const bucket = bucketAt(event, svg);
        show(bucket);
        if (from !== null) {
          const [a, b] = [place(Math.min(from, bucket)), place(Math.max(from, bucket) + 1)];
          chosen.setAttribute("x", a);
          chosen.setAttribute("width", b - a);
        }
      });
      svg.addEventListener("pointerdown", (event) => { from = bucketAt(event, svg); svg.setPointerCapture(event.pointerId); });
      svg.addEventListener("pointerup", (event) => {
        const to = bucketAt(event, svg), ends = [Math.min(from, to), Math.max(from, to) + 1];
        chosen.setAttribute("width", 0);
        if (from !== null && ends[1] - ends[0] >= 4) { view = ends; draw(); }
        from = null;
      });
      svg.addEventListener("pointercancel", () => { from = null; chosen.setAttribute("width", 0); });
      svg.addEventListener("dblclick", () => { view = all; draw(); });
    }
  }
})();
