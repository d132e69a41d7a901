"use strict";
// Shared by reports and the dashboard: the theme switch, and the reading line of charts.
(function () {
  const root = document.documentElement;
  const stored = () => { try { return localStorage.getItem("fedveil-theme"); } catch { return null; } };
  const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  if (stored() === "dark" || stored() === "light") root.dataset.theme = stored();
  const label = (button) => { button.textContent = dark() ? "Light" : "Dark"; button.setAttribute("aria-label", "Switch to " + (dark() ? "light" : "dark") + " colours"); };
  document.addEventListener("DOMContentLoaded", () => {
    for (const button of document.querySelectorAll("button.theme")) {
      label(button);
      button.addEventListener("click", () => {
        root.dataset.theme = dark() ? "light" : "dark";
        try { localStorage.setItem("fedveil-theme", root.dataset.theme); } catch { /* private mode: only this page changes */ }
        label(button);
      });
    }
  });

  const leave = (figure) => { figure.querySelector(".tip")?.remove(); figure.querySelector(".cursor")?.remove(); };
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest?.("figure[data-hover] > svg");
    for (const tip of document.querySelectorAll(".tip")) if (!svg || tip.parentElement !== svg.parentElement) leave(tip.parentElement);
    if (!svg) return;
    const figure = svg.parentElement, data = JSON.parse(figure.dataset.hover), [left, top, width, height] = data.box;
    const frame = svg.getBoundingClientRect(), scale = frame.width / svg.viewBox.baseVal.width;
    const share = ((event.clientX - frame.left) / scale - left) / width;
    if (share < -0.02 || share > 1.02) { leave(figure); return; }
    const [low, high] = data.x, wanted = low + share * (high - low);
    const rows = [];
    let at = null;
    for (const s of data.series) {
      let best = -1;
      s.x.forEach((x, i) => { if (s.y[i] !== null && (best < 0 || Math.abs(x - wanted) < Math.abs(s.x[best] - wanted))) best = i; });
      if (best >= 0) { if (at === null || Math.abs(s.x[best] - wanted) < Math.abs(at - wanted)) at = s.x[best]; rows.push([s.name, s.x[best], s.y[best]]); }
    }
    if (at === null) return;
    const x = left + width * (high === low ? 0.5 : (at - low) / (high - low));
    let line = svg.querySelector(".cursor"), tip = figure.querySelector(".tip");
    if (!line) { line = document.createElementNS("http://www.w3.org/2000/svg", "line"); line.setAttribute("class", "cursor"); svg.append(line); }
    if (!tip) { tip = document.createElement("div"); tip.className = "tip"; figure.append(tip); }
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", top], ["y2", top + height]]) line.setAttribute(name, value);
    tip.replaceChildren(...[[data.label, +at.toPrecision(4)], ...rows.map(([name, , y]) => [name, y])].map(([name, value]) => {
      const row = document.createElement("div"); row.textContent = name + ": " + value; return row;
    }));
    const box = figure.getBoundingClientRect();
    tip.style.left = Math.min(Math.max(frame.left - box.left + x * scale, 70), Math.max(box.width - 70, 70)) + "px";
    tip.style.top = frame.top - box.top + (top + 4) * scale + "px";
  }, { passive: true });
  document.addEventListener("pointerleave", () => document.querySelectorAll("figure[data-hover]").forEach(leave));
})();
