"use strict";
(() => {
  const root = document.documentElement, button = document.getElementById("theme");
  const store = { get: () => { try { return localStorage.getItem("rlx-theme"); } catch { return null; } },
                  set: (v) => { try { localStorage.setItem("rlx-theme", v); } catch { /* a file may have no storage */ } } };
  if (["light", "dark"].includes(store.get())) root.dataset.theme = store.get();
  button.hidden = false;
  button.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    store.set(root.dataset.theme);
  });

  const NS = "http://www.w3.org/2000/svg";
  const short = (v) => {
    if (v === null || v === undefined) return "–";
    if (Number.isInteger(v)) return v.toLocaleString("en");
    const text = v.toPrecision(4);
    return text.includes("e") ? Number(text).toExponential(2) : String(Number(text));
  };
  const nearest = (xs, x) => {
    let low = 0, high = xs.length - 1;
    while (low < high) { const mid = (low + high) >> 1; if (xs[mid] < x) low = mid + 1; else high = mid; }
    return low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low;
  };

  for (const figure of document.querySelectorAll("figure.chart")) {
    const source = figure.querySelector("script"), svg = figure.querySelector(":scope > svg");
    if (!source || !svg) continue;
    let data = null, steps = [], at = -1, marks = null, tip = null;
    const open = () => {
      if (data) return;
      data = JSON.parse(source.textContent);
      steps = [...new Set(data.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
      marks = svg.appendChild(document.createElementNS(NS, "g"));
      tip = figure.appendChild(document.createElement("div"));
      tip.className = "tip";
      tip.setAttribute("role", "status");
    };
    const px = (x) => data.box[0] + (x - data.x[0]) / (data.x[1] - data.x[0]) * data.box[2];
    const py = (y) => data.box[1] + (data.y[1] - (data.log ? Math.log10(Math.max(y, 10 ** data.y[0])) : y)) / (data.y[1] - data.y[0]) * data.box[3];
    const close = () => { if (data) { marks.replaceChildren(); tip.hidden = true; at = -1; } };
    const show = (index) => {
      at = Math.min(Math.max(index, 0), steps.length - 1);
      const x = steps[at];
      const rule = document.createElementNS(NS, "line");
      for (const [name, value] of Object.entries({ x1: px(x), x2: px(x), y1: data.box[1], y2: data.box[1] + data.box[3], class: "rule" })) rule.setAttribute(name, value);
      const parts = [rule], head = document.createElement("p");
      head.textContent = (figure.dataset.x || "step") + " " + short(x);
      const texts = [head], found = [];
      for (const line of data.lines) {
        const i = nearest(line.x, x);
        if (line.x[i] === undefined || line.y[i] === null || Math.abs(px(line.x[i]) - px(x)) > 6) continue;
        found.push([line, i]);
      }
      const many = found.length > 10;
      if (many) found.sort((a, b) => b[0].y[b[1]] - a[0].y[a[1]]);
      for (const [line, i] of found) {
        const dot = document.createElementNS(NS, "circle");
        for (const [name, value] of Object.entries({ cx: px(line.x[i]), cy: py(line.y[i]), r: 3.5, class: "dot " + line.colour })) dot.setAttribute(name, value);
        parts.push(dot);
        if (texts.length > 10) continue;
        const p = document.createElement("p"), b = document.createElement("b");
        p.className = line.colour;
        b.textContent = short(line.y[i]);
        p.append(line.label + " ", b);
        if (line.low && line.low[i] !== null) p.append(` [${short(line.low[i])}, ${short(line.high[i])}]`);
        if (line.runs) p.append(` (${line.runs[i]} run${line.runs[i] === 1 ? "" : "s"})`);
        texts.push(p);
      }
      if (many) { const p = document.createElement("p"); p.textContent = `and ${found.length - 10} more below`; texts.push(p); }
      marks.replaceChildren(...parts);
      tip.replaceChildren(...texts);
      tip.hidden = false;
      const box = svg.getBoundingClientRect(), frame = figure.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
      const middle = box.left - frame.left + px(x) * scale;
      const left = middle + 12 + tip.offsetWidth <= frame.width ? middle + 12 : Math.max(4, middle - 12 - tip.offsetWidth);
      tip.style.left = left + "px";
      tip.style.top = box.top - frame.top + 8 + "px";
    };
    const move = (event) => {
      open();
      const box = svg.getBoundingClientRect(), u = (event.clientX - box.left) / box.width * svg.viewBox.baseVal.width;
      show(nearest(steps, data.x[0] + (u - data.box[0]) / data.box[2] * (data.x[1] - data.x[0])));
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") close(); });
    figure.addEventListener("blur", close);
    figure.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key];
      if (event.key === "Escape") close();
      if (by === undefined || event.target !== figure) return;
      event.preventDefault();
      open();
      show(at < 0 ? (by < 0 ? 0 : steps.length - 1) : at + by);
    });
  }
})();
