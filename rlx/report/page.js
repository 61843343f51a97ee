(() => {
  "use strict";
  const root = document.documentElement, button = document.getElementById("theme");
  const store = { get: () => { try { return localStorage.getItem("rlx-theme"); } catch { return null; } },
                  set: (v) => { try { localStorage.setItem("rlx-theme", v); } catch { /* a file may have no storage */ } } };
  if (["light", "dark"].includes(store.get())) root.dataset.theme = store.get();
  button.hidden = false;

  const DASHES = ["solid", "7px 3px", "2px 4px", "9px 3px 2px 3px", "4px 4px", "12px 4px", "2px 3px 6px 3px", "1px 3px"];
  // Plotly reads a little markup in texts; names of environments are untrusted.
  const plain = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function traces(line, look) {
    const known = line.colour >= 0 && line.colour < DASHES.length;
    const colour = look.getPropertyValue(known ? `--c${line.colour}` : "--grey").trim();
    const name = plain(line.label), cut = line.whole ?? line.x.length;
    const style = { color: colour, width: known ? 1.8 : 1, dash: known ? DASHES[line.colour] : "solid" };
    const common = { name, legendgroup: name + line.colour, type: "scatter" };
    const found = [];
    if (line.low && !line.marks) {
      const x = [], y = [];
      let part = [];
      const close = () => {
        if (part.length > 1) {
          x.push(...part.map((i) => line.x[i]), ...part.toReversed().map((i) => line.x[i]), null);
          y.push(...part.map((i) => line.high[i]), ...part.toReversed().map((i) => line.low[i]), null);
        }
        part = [];
      };
      line.x.forEach((_, i) => { if (line.low[i] === null || line.high[i] === null) close(); else part.push(i); });
      close();
      found.push({ ...common, x, y, fill: "toself", fillcolor: colour, opacity: 0.18, line: { width: 0 }, hoverinfo: "skip", showlegend: false });
    }
    const text = line.x.map((_, i) => (line.low && line.low[i] !== null ? ` [${line.low[i]}, ${line.high[i]}]` : "") + (line.runs ? `, ${line.runs[i]} runs` : ""));
    const hovertemplate = "%{y:.4g}%{text}";
    const last = line.y.findLast((v) => v !== null);
    const alone = line.y.filter((v) => v !== null).length === 1;
    const bars = line.marks && line.low ? { type: "data", symmetric: false, array: line.high.map((v, i) => (v === null ? 0 : v - line.y[i])), arrayminus: line.low.map((v, i) => (v === null ? 0 : line.y[i] - v)) } : undefined;
    found.push({ ...common, name: `${name} <b>${Number(last.toPrecision(4))}</b>`, x: line.x.slice(0, cut), y: line.y.slice(0, cut), text: text.slice(0, cut), hovertemplate,
                 mode: line.marks || alone ? "lines+markers" : "lines", line: style, error_y: bars, opacity: known ? 1 : 0.6 });
    if (cut < line.x.length) {
      const from = Math.max(cut - 1, 0);
      found.push({ ...common, x: line.x.slice(from), y: line.y.slice(from), text: text.slice(from), hovertemplate, mode: "lines", line: { ...style, width: 1.2 }, opacity: 0.4, showlegend: false });
    }
    return found;
  }

  function draw(figure) {
    const look = getComputedStyle(root), of = (name) => look.getPropertyValue(name).trim();
    const data = JSON.parse(figure.querySelector("script").textContent);
    const axis = { gridcolor: of("--line"), zerolinecolor: of("--line"), linecolor: of("--soft"), automargin: true, exponentformat: "power" };
    const layout = {
      height: 300, margin: { l: 50, r: 10, t: 24, b: 30 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: of("--soft"), size: 12, family: "system-ui, sans-serif" }, hovermode: "x unified", hoverlabel: { bgcolor: of("--card"), font: { color: of("--text") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: of("--soft"), activecolor: of("--text") },
      showlegend: true, legend: { orientation: "h", y: -0.16, yanchor: "top", font: { size: 11 } },
      xaxis: { ...axis, title: { text: plain(data.x_label), standoff: 4 } },
      yaxis: { ...axis, type: data.log ? "log" : "linear", rangemode: data.from_zero ? "tozero" : "normal" },
    };
    const options = { responsive: true, displaylogo: false, modeBarButtons: [["toImage", "resetScale2d"]], toImageButtonOptions: { format: "svg", filename: data.title } };
    Plotly.react(figure.querySelector(".plot"), data.lines.flatMap((line) => traces(line, look)), layout, options);
  }

  const seen = new Set();
  const watch = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting && !seen.has(entry.target)) { seen.add(entry.target); draw(entry.target); }
  }), { rootMargin: "400px" });
  document.querySelectorAll("figure.chart").forEach((figure) => watch.observe(figure));
  const repaint = () => seen.forEach(draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
  button.addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    store.set(root.dataset.theme);
    repaint();
  });
})();
