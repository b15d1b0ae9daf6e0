// Shows the values of a chart under the cursor, the finger or, with the arrow keys, at the next step. Draws nothing
// that can not be seen without it.
"use strict";

// As numbers.py writes them.
function number(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (value !== 0 && (size < 1e-3 || size >= 1e15)) return value.toExponential(2).replace(/e([+-])(\d)$/, "e$10$2");
  return value === 0 || size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(Number(value.toPrecision(4)));
}

// The index of the entry of a sorted list that is nearest to a value.
function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
}

function watch(figure) {
  const script = figure.querySelector("script");
  if (!script) return;
  const { steps: [first, last], pixels: [left, right, top, bottom, width], curves } = JSON.parse(script.textContent);
  const at = figure.querySelector(".at");
  const values = [...figure.querySelectorAll("[data-curve]")].map((shown) => ({ shown, ...curves[shown.dataset.curve] }));
  const every = [...new Set(values.flatMap((curve) => curve.step))].sort((a, b) => a - b);
  const plots = [...figure.querySelectorAll("svg.plot")];
  const lines = plots.map((plot) => {
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "cursor");
    line.setAttribute("y1", top);
    line.setAttribute("y2", bottom);
    return plot.appendChild(line);
  });
  let index = every.length - 1;

  function show(chosen) {
    index = Math.max(0, Math.min(every.length - 1, chosen));
    const step = every[index];
    const x = left + (right - left) * (step - first) / Math.max(last - first, 1);
    for (const line of lines) {
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
      line.classList.add("shown");
    }
    for (const curve of values) {
      const there = nearest(curve.step, step);
      const other = curve.step[there] === step ? "" : ` (step ${curve.step[there].toLocaleString("en-US")})`;
      curve.shown.textContent = number(curve.value[there]) + other;
    }
    at.textContent = `at step ${step.toLocaleString("en-US")}`;
  }

  function rest() {
    index = every.length - 1;
    for (const line of lines) line.classList.remove("shown");
    for (const curve of values) curve.shown.textContent = number(curve.value[curve.value.length - 1]);
    at.textContent = "";
  }

  for (const plot of plots) {
    const follow = (event) => {
      const box = plot.getBoundingClientRect();
      const x = (event.clientX - box.left) * width / box.width;
      show(nearest(every, first + (last - first) * (x - left) / (right - left)));
    };
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerleave", rest);
    plot.addEventListener("blur", rest);
    plot.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move) return;
      event.preventDefault();
      show(index + move);
    });
  }
}

document.querySelectorAll("figure.chart").forEach(watch);
