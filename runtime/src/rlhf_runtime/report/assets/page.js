"use strict";
// Texts of samples come from models and data: they enter the page as text nodes only, never as HTML.

const data = JSON.parse(document.getElementById("data").textContent);
const runs = data.runs;
const samples = runs.flatMap((run) => run.samples.samples);
const COLOURS = ["#2f6fd0", "#d9722e", "#2a9d6f", "#b04ac0", "#c23b4e", "#7a8a2e", "#3aa6b9", "#8a6d4f"];
const colour = (number) => COLOURS[number % COLOURS.length];
const number = (value, digits = 4) =>
  typeof value !== "number" ? (value ?? "") : Number.isInteger(value) && Math.abs(value) < 1e9
    ? value.toLocaleString("en") : String(parseFloat(value.toPrecision(digits)));
// Digits with which a number differs from the next ones of an axis.
const digits = (value, step) => Math.max(3, 1 + Math.ceil(Math.log10(Math.abs(value) / step)));
const many = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
for (const run of runs) run.label = runs.filter((other) => other.name === run.name).length > 1 ? run.path : run.name;

// make("td", {class: "number"}, "3"): an element. A property that begins with "on" is a listener.
function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

function section(id, title, ...children) {
  document.getElementById("nav").append(make("a", { href: `#${id}` }, title));
  const element = make("section", { id }, make("h2", {}, title), ...children);
  document.getElementById("main").append(element);
  return element;
}

function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return make("dl", { class: "facts" }, shown.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

function table(head, rows, properties) {
  return make("div", { class: "scroll", tabindex: 0, ...properties }, make("table", {},
    make("thead", {}, make("tr", {}, head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, rows)));
}

const choice = (name, options, change) => {
  const select = make("select", { onchange: () => change() }, options.map(([value, text]) => make("option", { value }, text)));
  return [select, make("label", {}, name, select)];
};

// ------------------------------------------------------------------------------------------ the runs

function showRuns() {
  const top = document.getElementById("top");
  top.append(make("h1", {}, runs.length === 1 ? runs[0].name : `${runs.length} runs`));
  const states = { finished: "good", failed: "bad" };
  top.append(make("div", { class: "runs" }, runs.map((run, n) => make("div", {},
    runs.length > 1 ? make("h3", {}, make("span", { class: "swatch", style: `background:${colour(n)}` }), run.label) : null,
    facts([
      ["state", make("span", { class: states[run.state] ?? "" }, run.state + (run.why ? `: ${run.why}` : ""))],
      ["steps", `${number(run.steps)} of ${run.total_steps === null ? "?" : number(run.total_steps)}`],
      ["algorithm", run.algorithm], ["model", run.model], ["data", run.data],
      ["best", run.best && `${run.best[0]} ${number(run.best[1])} (step ${run.best[2]})`],
      ["started", run.started.join(", ")], ["last change", run.changed], ["folder", run.path],
    ]),
    run.problems.map((text) => make("div", { class: "note" }, text)),
  ))));
  document.getElementById("foot").append(make("p", { class: "faint" },
    `Written at ${data.time} by rlhf ${data.version}. Charts: uPlot 1.6.32, MIT licence.`));
}

// -------------------------------------------------------------------------------------------- charts

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const charts = new Set();
// The ends of an axis: 8 % more than the values need, and around a constant something to see it in.
const bounds = (_, low, high) => {
  if (low === null) return [0, 1];
  const more = low === high ? Math.abs(low) || 1 : 0.08 * (high - low);
  return [low >= 0 && low - more < 0 ? 0 : low - more, high + more];
};
const fromZero = (_, low, high) => [0, 1.08 * high || 1];  // of layers, whose heights are compared
const STEPS_BETWEEN_TICKS = [...Array(12).keys()].flatMap((n) => [1, 2, 5].map((digit) => digit * 10 ** n));

// A chart of series {label, colour, steps, values, fill} with a line of the values under the cursor.
function chart(title, series, { log = false, height = 170, stacked = null } = {}) {
  const now = make("span", { class: "now" });
  const place = make("div", { tabindex: 0, role: "img", "aria-label": `chart of ${title}; arrow keys move the cursor` });
  const element = make("div", { class: "chart" }, make("div", {}, make("b", {}, title), now), place);
  const lines = series.filter((one) => one.steps.length);
  const table = lines.length ? uPlot.join(lines.map((one) => [one.steps, one.values])) : [[]];
  const shown = (values, at) => values[at] === undefined || values[at] === null ? "" : number(values[at]);
  const tell = (at) => {
    const last = at === null || at === undefined;
    const parts = lines.filter((one) => !one.quiet).map((one) => {
      const values = one.told ?? one.values;
      const place = last ? values.length - 1 : one.steps.indexOf(table[0][at]);
      const text = place < 0 ? "" : shown(values, place);
      return text === "" ? null : make("span", { style: `color:${lines.length > 1 ? one.colour : "inherit"}` },
        ` ${stacked ? one.label + " " : ""}${text}`);
    });
    now.replaceChildren(...[last ? "" : `step ${table[0][at]}:`, ...parts].filter((part) => part !== null));
  };
  let plot = null;
  const draw = () => {
    plot?.destroy();
    place.replaceChildren();
    if (!table[0].length) { place.append(make("p", { class: "faint" }, "no value that can be drawn")); return; }
    const axis = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false },
      font: "11px system-ui", gap: 5 };
    plot = new uPlot({
      width: Math.max(200, place.clientWidth), height, cursor: { sync: { key: "steps" }, y: false, points: { size: 6 } },
      scales: { x: { time: false }, y: log ? { distr: 3 } : { range: stacked ? fromZero : bounds } },
      axes: [{ ...axis, size: 24, incrs: STEPS_BETWEEN_TICKS }, { ...axis, size: 52,
        values: (_, ticks, axisNumber, space, step) => ticks.map((t) => t === null ? "" : number(t, log ? 3 : digits(t, step))) }],
      series: [{}, ...lines.map((one) => ({
        stroke: one.colour, width: one.quiet ? 1 : 1.6, fill: one.fill, spanGaps: true,
        points: { show: one.steps.length < 12 && !one.fill, size: 5 },
      }))],
      hooks: { setCursor: [(self) => tell(self.cursor.idx)] },
    }, table, place);
  };
  place.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !plot) return;
    event.preventDefault();
    const at = Math.min(table[0].length - 1, Math.max(0, (plot.cursor.idx ?? (move > 0 ? -1 : table[0].length)) + move));
    plot.setCursor({ left: plot.valToPos(table[0][at], "x"), top: 10 });
  });
  tell(null);
  charts.add({ element, place, draw, resize: () => plot?.setSize({ width: place.clientWidth, height }) });
  return element;
}

// Draws the charts that have come into the page, and forgets those that have left it.
function drawCharts() {
  for (const one of charts) {
    if (!one.element.isConnected) charts.delete(one);
    else if (!one.drawn) one.draw();
    one.drawn = true;
  }
}
addEventListener("resize", () => charts.forEach((one) => one.resize()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  charts.forEach((one) => one.draw());
  document.querySelectorAll("canvas.timeline").forEach((canvas) => canvas.redraw());
});

// The steps and values of a metric of a run, without the steps that lack it.
function curve(run, name) {
  const values = run.curves.metrics[name] ?? [];
  const places = values.map((_, at) => at).filter((at) => values[at] !== null);
  return { steps: places.map((at) => run.curves.steps[at]), values: places.map((at) => values[at]) };
}

// The exponential moving average, corrected for its start.
function smoothed(values, weight) {
  let mean = 0, share = 1;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    share *= weight;
    return mean / (1 - share);
  });
}

function showCurves() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves.metrics)))];
  if (!names.length) {
    section("curves", "Curves", make("p", {}, "No step is finished yet."));
    return;
  }
  const shown = new Set(runs);
  const search = make("input", { type: "search", placeholder: "metric", "aria-label": "show metrics with this text" });
  const smooth = make("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, "aria-label": "smoothing" });
  const log = make("input", { type: "checkbox" });
  const groups = make("div");
  const one = (name) => {
    const lost = runs.reduce((sum, run) => sum + (run.curves.not_finite[name] ?? 0), 0);
    const series = runs.flatMap((run, n) => {
      if (!shown.has(run)) return [];
      let { steps, values } = curve(run, name);
      if (log.checked) {
        const positive = values.map((value) => value > 0);
        [steps, values] = [steps, values].map((list) => list.filter((_, at) => positive[at]));
      }
      const weight = Number(smooth.value);
      const line = { label: run.label, colour: colour(n), steps, values };
      if (!weight) return [line];
      return [{ ...line, colour: colour(n) + "50", quiet: true }, { ...line, values: smoothed(values, weight) }];
    });
    const element = chart(name, series, { log: log.checked });
    if (lost) element.append(make("div", { class: "bad" }, `${many(lost, "value")} not finite (NaN or infinite)`));
    return element;
  };
  const fill = () => {
    const open = new Set([...groups.querySelectorAll("details[open]")].map((d) => d.dataset.name));
    const first = !groups.childElementCount;
    const text = search.value.toLowerCase();
    const headline = [...new Set(runs.flatMap((run) => run.headline))];
    const parts = new Map(text ? [] : [["overview", headline.filter((name) => names.includes(name))]]);
    for (const name of names.filter((name) => name.toLowerCase().includes(text))) {
      const prefix = name.includes("/") ? name.split("/")[0] : "run";
      parts.set(prefix, [...(parts.get(prefix) ?? []), name]);
    }
    groups.replaceChildren(...[...parts].filter(([, list]) => list.length).map(([prefix, list]) => {
      const grid = make("div", { class: "charts" });
      const details = make("details", { "data-name": prefix }, make("summary", {}, `${prefix} `,
        make("span", { class: "faint" }, list.length)), grid);
      const opened = () => {
        if (details.open && !grid.childElementCount) grid.append(...list.map(one));
        drawCharts();
      };
      details.addEventListener("toggle", opened);
      details.open = text !== "" || open.has(prefix) || (first && prefix === "overview");
      return details;
    }));
    if (!groups.childElementCount) groups.append(make("p", {}, "No metric has this text in its name."));
  };
  const every = Math.max(...runs.map((run) => run.curves.every));
  section("curves", "Curves",
    make("div", { class: "bar" },
      make("label", {}, "Metric", search), make("label", {}, "Smoothing", smooth), make("label", {}, log, "log axis"),
      runs.length > 1 ? runs.map((run, n) => make("label", {},
        make("input", { type: "checkbox", checked: true, onchange: (event) => {
          shown[event.target.checked ? "add" : "delete"](run);
          fill();
        } }), make("span", {}, make("span", { class: "swatch", style: `background:${colour(n)}` }), run.label))) : null),
    every > 1 ? make("p", { class: "faint" }, `A point is the mean of up to ${every} steps.`) : null,
    groups,
    make("p", { class: "faint" }, "Drag over a chart to enlarge a part, double-click to go back."));
  search.addEventListener("input", fill);
  smooth.addEventListener("change", fill);
  log.addEventListener("change", fill);
  fill();
}

// --------------------------------------------------------------------------------------- time of a step

function phaseTimes(run) {
  const { step, ...parts } = run.phases;
  const at = step.map((_, n) => n).filter((n) => step[n] !== null);
  const rows = Object.entries(parts).map(([phase, values]) => [phase, at.map((n) => values[n])]);
  const phases = new Map(rows.filter(([, list]) => list.some((value) => value > 0)));
  const inner = phases.get("annotate");
  if (inner && phases.has("learn")) phases.set("learn", phases.get("learn").map((value, n) => Math.max(0, value - inner[n])));
  const whole = at.map((n) => step[n]);
  phases.set("other", whole.map((value, n) => Math.max(0, value - [...phases.values()].reduce((sum, list) => sum + list[n], 0))));
  return { steps: at.map((n) => run.curves.steps[n]), phases, whole };
}

function showTimes() {
  const timed = runs.filter((run) => run.phases.step.some((value) => value !== null));
  if (!timed.length) return;
  section("time", "Time of a step", timed.map((run) => {
    const { steps, phases, whole } = phaseTimes(run);
    const mean = (list) => list.reduce((sum, value) => sum + value, 0) / list.length;
    const names = [...phases.keys()];
    let below = steps.map(() => 0);
    const layers = names.map((name, n) => {
      below = below.map((value, at) => value + phases.get(name)[at]);
      return { label: name, colour: COLOURS[n % COLOURS.length], fill: COLOURS[n % COLOURS.length], steps, values: below,
        told: phases.get(name) };
    });
    const rows = names.map((name, n) => make("tr", {}, make("td", {}, name),
      make("td", { class: "number" }, number(mean(phases.get(name)), 3)),
      make("td", { class: "number" }, `${(100 * mean(phases.get(name)) / mean(whole)).toFixed(1)} %`),
      make("td", {}, make("i", { style: `background:${COLOURS[n % COLOURS.length]};width:${100 * mean(phases.get(name)) / mean(whole)}%` }))));
    return make("div", { class: "two" },
      chart(`${runs.length > 1 ? run.label + ", s" : "S"}econds of a step`, layers.reverse(), { height: 230, stacked: true }),
      table(["phase", "mean [s]", "share", ""], rows, { class: "scroll bars" }));
  }));
  drawCharts();
}

// ---------------------------------------------------------------------------------------------- timeline

const GUTTER = 56; // pixels for the names of groups

function showTimelines() {
  runs.filter((run) => run.timeline).forEach((run, index) => {
    const { tracks, slices, total } = run.timeline;
    const end = Math.max(...slices.map((slice) => slice[1] + slice[2])) || 1;
    const height = Math.max(4, Math.min(16, Math.floor(600 / tracks.length)));
    const canvas = make("canvas", { class: "timeline", tabindex: 0, role: "img",
      "aria-label": "timeline; arrow keys move, plus and minus change the scale" });
    const readout = make("p", { class: "readout" });
    const view = { from: 0, span: end };
    const names = [...new Set(slices.map((slice) => slice[3].replace(/\d+/g, "")))];
    const draw = canvas.redraw = () => {
      const scale = devicePixelRatio || 1, width = canvas.clientWidth;
      canvas.width = width * scale;
      canvas.height = (tracks.length * height + 20) * scale;
      canvas.style.height = `${tracks.length * height + 20}px`;
      const context = canvas.getContext("2d");
      context.scale(scale, scale);
      context.font = "11px system-ui";
      const x = (time) => GUTTER + (time - view.from) / view.span * (width - GUTTER);
      for (const [track, begin, length, name] of slices) {
        const left = Math.max(GUTTER, x(begin)), right = x(begin + length);
        if (right < GUTTER || left > width) continue;
        context.fillStyle = COLOURS[names.indexOf(name.replace(/\d+/g, "")) % COLOURS.length];
        context.globalAlpha = name.startsWith("step ") ? 0.25 : 0.85;
        context.fillRect(left, track * height, Math.max(1, right - left), height - 1);
      }
      context.globalAlpha = 1;
      context.fillStyle = css("--faint");
      tracks.forEach(([group], at) => {
        if (at === 0 || tracks[at - 1][0] !== group) context.fillText(group, 2, at * height + 11, GUTTER - 6);
      });
      for (let part = 0; part <= 4; part += 1) {
        const text = `${number((view.from + view.span * part / 4) / 1e6, 4)} s`;
        context.textAlign = part === 0 ? "left" : part === 4 ? "right" : "center";
        context.fillText(text, GUTTER + (width - GUTTER) * part / 4, tracks.length * height + 15);
      }
      context.textAlign = "left";
    };
    const zoom = (factor, centre) => {
      const span = Math.min(end, Math.max(100, view.span * factor));
      view.from = Math.max(0, Math.min(end - span, centre - (centre - view.from) * span / view.span));
      view.span = span;
      draw();
    };
    const move = (share) => {
      view.from = Math.max(0, Math.min(end - view.span, view.from + share * view.span));
      draw();
    };
    const time = (event) => view.from + (event.offsetX - GUTTER) / (canvas.clientWidth - GUTTER) * view.span;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      zoom(event.deltaY > 0 ? 1.25 : 0.8, time(event));
    }, { passive: false });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons) move(-event.movementX / canvas.clientWidth);
      const track = Math.floor(event.offsetY / height), at = time(event);
      const under = slices.filter((s) => s[0] === track && s[1] <= at && at <= s[1] + Math.max(s[2], view.span / 300));
      const slice = under.sort((a, b) => a[2] - b[2])[0];
      readout.textContent = slice ? `${tracks[track].join(", ")}: ${slice[3]}, ${number(slice[2] / 1e3)} ms at `
        + `${number(slice[1] / 1e6)} s. ${slice[4]}` : "";
    });
    canvas.addEventListener("keydown", (event) => {
      const keys = { ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), "+": () => zoom(0.7, view.from + view.span / 2),
        "-": () => zoom(1.4, view.from + view.span / 2), 0: () => zoom(Infinity, 0) };
      if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
    });
    const buttons = [["+", 0.6], ["\u2212", 1.6], ["all", Infinity]].map(([text, factor]) =>
      make("button", { type: "button", onclick: () => zoom(factor, view.from + view.span / 2) }, text));
    section(`timeline${index || ""}`, runs.length > 1 ? `Timeline of ${run.label}` : "Timeline",
      make("p", { class: "faint" }, `${many(tracks.length, "track")}, ${many(total, "slice")} of the run's threads, samples and rewards`
        + `${slices.length < total ? `; the ${number(slices.length)} longest are shown` : ""}. Drag or use the arrow keys to move; `
        + "Ctrl and the wheel, or + and \u2212, change the scale."),
      make("div", { class: "bar" }, buttons), canvas, readout);
    draw();
    addEventListener("resize", draw);
  });
}

// ------------------------------------------------------------------------------------------------ samples

const promptText = (key) => data.prompts[key].text;
const pictures = (numbers) => numbers?.length
  ? make("div", { class: "pictures" }, numbers.map((n) => data.images[n] && make("img", { src: data.images[n], alt: "" }))) : null;
const answer = (sample) => sample.turns.map((turn) => turn.text).join("\n");
const oneLine = (text) => text.slice(0, 200).replace(/\s+/g, " ");
const wheres = (sample) => `${runs.length > 1 ? runs[sample.run].label + ", " : ""}`
  + `${sample.kind === "evaluation" ? "evaluation after " : ""}step ${sample.step}`;

// What the tokens of a sample can be coloured by: [name, values of its sampled tokens, whether 0 is the middle].
function tokenValues(sample) {
  const tokens = sample.turns.flatMap((turn) => turn.ids ?? []);
  const stored = Object.entries(sample.values ?? {}).map(([name, values]) =>
    [name.replace("/logprobs", ""), values.length === 1 ? tokens.map(() => values[0]) : values, !name.endsWith("/logprobs")]);
  const own = sample.turns.flatMap((turn) => turn.ids ? turn.logprobs ?? turn.ids.map(() => null) : []);
  const logprobs = [...(own.some((value) => value !== null) ? [["generator", own, false]] : []), ...stored.filter((v) => !v[2])];
  const differences = logprobs.flatMap(([first, a], n) => logprobs.slice(n + 1).map(([second, b]) =>
    [`${second} \u2212 ${first}`, a.map((value, at) => value === null || b[at] === null ? null : b[at] - value), true]));
  return [...stored.filter((v) => v[2] && v[0] === "advantages"), ...logprobs.map(([name, ...rest]) => [`log-prob: ${name}`, ...rest]),
    ...differences, ...stored.filter((v) => v[2] && v[0] !== "advantages")].filter((v) => v[1].length === tokens.length);
}

const ARITHMETIC = 0.01; // differences of log-probs below this stay pale: arithmetic alone makes them

function tokenView(sample) {
  const texts = runs[sample.run].samples.texts;
  const sources = tokenValues(sample);
  const difference = sources.findIndex(([name, values]) => name.includes("\u2212") && values.some((v) => Math.abs(v) > ARITHMETIC));
  const first = difference < 0 ? sources.findIndex(([name]) => name.startsWith("log-prob")) : difference;
  const box = make("div", { class: "tokens text-block", tabindex: 0, role: "group", "aria-label": "tokens; arrow keys move from token to token" });
  const readout = make("div", { class: "readout", "aria-live": "polite" }, "Point at a token, or use the arrow keys, to see its numbers.");
  const legend = make("span", { class: "faint" });
  const spans = [];
  for (const turn of sample.turns) {
    if (!turn.ids) { box.append(make("div", { class: "environment" }, pictures(turn.images), turn.text)); continue; }
    for (const id of turn.ids) {
      spans.push(make("span", {}, (texts[id] ?? `\u27e8${id}\u27e9`) || "\u27e8\u27e9"));
      spans.at(-1).id = id;
      box.append(spans.at(-1));
    }
  }
  const colourBy = (values, signed, floor) => {
    const sizes = values.filter((v) => v !== null).map(Math.abs).sort((a, b) => a - b);
    const most = signed ? Math.max(sizes[Math.floor(0.98 * (sizes.length - 1))] || sizes.at(-1) || 0, floor) || 1 : Math.min(5, sizes.at(-1)) || 1;
    spans.forEach((span, at) => {
      const share = values[at] === null ? 0 : Math.min(1, Math.abs(values[at]) / most);
      const name = !signed ? "--warm" : values[at] > 0 ? "--high" : "--low";
      span.style.background = share > 0.01 ? `rgba(var(${name}), ${(0.7 * share).toFixed(3)})` : "";
    });
    const ends = signed ? [`\u2212${number(most, 3)} `, ` +${number(most, 3)}`] : ["0 ", ` \u2212${number(most, 3)}`];
    const side = (name, share) => `rgba(var(${name}), ${share})`;
    legend.replaceChildren(ends[0], make("span", { class: "scale", style: "background:linear-gradient(to right, "
      + (signed ? `${side("--low", 0.7)}, transparent, ${side("--high", 0.7)})` : `transparent, ${side("--warm", 0.7)})`) }), ends[1]);
  };
  let current = -1;
  const tell = (at) => {
    spans[current]?.classList.remove("at");
    current = at;
    spans[at].classList.add("at");
    const numbers = sources.map(([name, values]) => `${name.replace("log-prob: ", "")} ${values[at] === null ? "none" : number(values[at])}`);
    readout.textContent = `token ${at + 1} of ${spans.length}, id ${spans[at].id}, ${JSON.stringify(spans[at].textContent)}: ${numbers.join(", ")}`;
  };
  box.addEventListener("pointerover", (event) => spans.includes(event.target) && tell(spans.indexOf(event.target)));
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10 }[event.key];
    if (!step) return;
    event.preventDefault();
    tell(Math.max(0, Math.min(spans.length - 1, current + step)));
  });
  const change = () => sources[select.value] && colourBy(sources[select.value][1], sources[select.value][2], sources[select.value][0].includes("\u2212") ? ARITHMETIC : 0);
  const [select, field] = choice("Colour", sources.map(([name], n) => [n, name]), change);
  select.value = Math.max(0, first);
  change();
  const note = runs[sample.run].samples.note && make("div", { class: "faint" }, runs[sample.run].samples.note);
  return sources.length ? [make("div", { class: "bar" }, field, legend), box, readout, note] : [box];
}

const promptView = (key) => make("div", { class: "text-block" }, pictures(data.prompts[key].images), promptText(key));

function sampleView(sample, withPrompt = true) {
  const rewards = Object.entries(sample.rewards).map(([name, value]) =>
    make("div", {}, `${name} ${value === null ? "does not apply" : number(value)}`, sample.findings?.[name] ? `: ${sample.findings[name]}` : ""));
  const turns = sample.turns.some((turn) => turn.ids) ? tokenView(sample) : sample.turns.map((turn) =>
    make("div", { class: `text-block ${turn.speaker}` }, pictures(turn.images), turn.text));
  const marks = sample.turns.filter((turn) => turn.speaker === "policy").map((turn, n) =>
    [`turn ${n + 1}`, Object.entries({ reward: turn.reward, score: turn.score }).filter(([, v]) => v !== undefined)])
    .filter(([, values]) => values.length).map(([name, values]) => `${name}: ${values.map(([k, v]) => `${k} ${number(v)}`).join(", ")}`);
  const info = Object.entries(sample.info ?? {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  return make("div", { class: "sample" },
    facts([
      ["sample", `${wheres(sample)}, group ${sample.group}, sample ${sample.sample}, row ${sample.row} of ${sample.source}`],
      ["agent", sample.agent ?? ""], ["reward", sample.reward === null ? "none" : number(sample.reward)], ["by source", rewards.length ? rewards : ""],
      ["advantage", sample.advantage === undefined ? "" : number(sample.advantage)],
      ["status", `${sample.status}, ${many(sample.length, "token")}${sample.from_data ? ", the answer is from the data" : ""}`], ["error", sample.error], ["turns", marks.join("; ")], ["numbers", info],
    ]),
    withPrompt ? [make("h3", {}, "prompt"), promptView(sample.prompt)] : null,
    make("h3", {}, sample.turns.length > 1 ? "turns" : "answer"), turns);
}

function showSamples() {
  if (!samples.length) {
    section("samples", "Samples", make("p", {}, "No samples are recorded: the algorithm learns from given rows, or "
      + "checkpoint.save_rollouts is false, or no step is finished."));
    return;
  }
  const rewardNames = [...new Set(samples.flatMap((sample) => Object.keys(sample.rewards)))].slice(0, 6);
  const columns = [
    ...(runs.length > 1 ? [["run", (s) => runs[s.run].label, "words"]] : []),
    ["step", (s) => s.step, "number"],
    ["row", (s) => s.row, "number"],
    [rewardNames.length > 1 ? "total reward" : "reward", (s) => s.reward, "number"],
    ...(rewardNames.length > 1 || samples.some((s) => s.reward !== s.rewards[rewardNames[0]])
      ? rewardNames.map((name) => [name, (s) => s.rewards[name], "number"]) : []),
    ...(samples.some((s) => s.advantage !== undefined) ? [["advantage", (s) => s.advantage, "number"]] : []),
    ["tokens", (s) => s.length, "number"],
    ["status", (s) => s.status, ""],
    ["answer", (s) => oneLine(answer(s)), "text"],
    ["prompt", (s) => oneLine(promptText(s.prompt)), "text"],
  ];
  const only = (name, values, text = String) => values.length > 1
    ? choice(name, [["", "all"], ...values.map((value) => [value, text(value)])], () => fill()) : [{ value: "" }, null];
  const values = (of) => [...new Set(samples.map(of))].sort((a, b) => a > b ? 1 : -1);
  const [kind, kindField] = only("From", values((s) => s.kind));
  const [run, runField] = only("Run", values((s) => s.run), (n) => runs[n].label);
  const [step, stepField] = only("Step", values((s) => s.step));
  const [source, sourceField] = only("Source", values((s) => s.source));
  const [status, statusField] = only("Status", values((s) => s.status));
  const search = make("input", { type: "search", placeholder: "text", "aria-label": "samples whose prompt or answer has this text" });
  const texts = new Map();
  const textOf = (s) => {
    if (!texts.has(s)) texts.set(s, `${promptText(s.prompt)}\n${answer(s)}\n${s.error ?? ""}`.toLowerCase());
    return texts.get(s);
  };
  const count = make("p", { class: "faint", "aria-live": "polite" });
  const body = make("tbody");
  const detail = make("div", { class: "detail" });
  const more = make("button", { type: "button", onclick: () => append() }, "Show more");
  const order = { by: -1, down: false };
  let selected = [], shown = 0;
  const heads = columns.map(([name, , kind], n) => make("th", { scope: "col", class: kind }, make("button", { type: "button", onclick: () => {
    order.down = order.by === n ? !order.down : kind === "number";
    order.by = n;
    fill();
  } }, name)));
  const append = () => {
    body.append(...selected.slice(shown, shown + 100).map((sample) => make("tr", { tabindex: -1, "aria-selected": "false" },
      columns.map(([, value, kind]) => make("td", { class: kind }, value(sample) === null ? "none" : number(value(sample)))))));
    [...body.children].slice(shown).forEach((row, n) => { row.sample = selected[shown + n]; });
    shown = body.childElementCount;
    more.hidden = shown >= selected.length;
  };
  const open = (row, focus) => {
    body.querySelectorAll('[aria-selected="true"]').forEach((other) => { other.setAttribute("aria-selected", "false"); other.tabIndex = -1; });
    row.setAttribute("aria-selected", "true");
    row.tabIndex = 0;
    if (focus) row.focus();
    detail.replaceChildren(sampleView(row.sample));
    detail.scrollTop = 0;
  };
  body.addEventListener("click", (event) => event.target.closest("tr") && open(event.target.closest("tr"), true));
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const rows = [...body.children], at = rows.indexOf(row);
    const target = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1, PageDown: at + 10, PageUp: at - 10 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    if (target >= rows.length && shown < selected.length) append();
    open(body.children[Math.max(0, Math.min(body.childElementCount - 1, target))], true);
  });
  const fill = () => {
    const text = search.value.toLowerCase();
    selected = samples.filter((s) => (kind.value === "" || s.kind === kind.value) && (run.value === "" || s.run === Number(run.value))
      && (step.value === "" || s.step === Number(step.value)) && (source.value === "" || s.source === source.value)
      && (status.value === "" || s.status === status.value) && (!text || textOf(s).includes(text)));
    if (order.by >= 0) {
      const value = columns[order.by][1], sign = order.down ? -1 : 1;
      const missing = (v) => v === null || v === undefined || v === "";
      selected = selected.map((s) => [value(s), s]).sort(([a], [b]) =>
        missing(a) || missing(b) ? missing(a) - missing(b) : a === b ? 0 : sign * (a > b ? 1 : -1)).map(([, s]) => s);
    }
    heads.forEach((head, n) => head.setAttribute("aria-sort", n !== order.by ? "none" : order.down ? "descending" : "ascending"));
    heads.forEach((head, n) => { head.firstChild.textContent = columns[n][0] + (n !== order.by ? "" : order.down ? " \u2193" : " \u2191"); });
    count.textContent = `${number(selected.length)} of ${many(samples.length, "sample")}`;
    body.replaceChildren();
    shown = 0;
    append();
    if (body.firstChild) open(body.firstChild, false);
    else detail.replaceChildren();
  };
  search.addEventListener("input", fill);
  section("samples", "Samples",
    runs.map((one) => sampled(one)),
    make("div", { class: "bar" }, kindField, runField, stepField, sourceField, statusField, make("label", {}, "Search", search)),
    count,
    make("div", { class: "two" },
      make("div", {}, make("div", { class: "scroll rows" }, make("table", {}, make("thead", {}, make("tr", {}, heads)), body)), more), detail));
  fill();
}

// What of a run's samples is on the page.
function sampled(run) {
  const { total, shown, with_tokens: tokens, samples: list, steps } = run.samples;
  const answers = list.length - shown;
  const parts = [];
  const some = steps[0] < steps[1] ? ` in ${number(steps[0])} of the ${number(steps[1])} steps` : "";
  if (some || shown < total) parts.push(`${number(shown)} of the ${number(total)} samples that were trained on${some} are on this page: whole groups `
    + "of the first and last step, of prompts that occurred more than once, and others chosen at random.");
  if (answers) parts.push(`${many(answers, "answer")} of evaluations are on this page: all answers to some prompts, at most about 100 of each of at most 8 evaluations.`);
  if (tokens < list.length) parts.push(`${number(tokens)} of all samples on this page have tokens with log-probs.`);
  return parts.length ? make("p", { class: "faint" }, runs.length > 1 ? `${run.label}: ` : "", parts.join(" ")) : null;
}

// ---------------------------------------------------------------------------- one prompt, evaluations

const place = (sample) => `${sample.run}|${sample.kind}|${sample.step}`;
let showPrompt = () => {};

function showComparison() {
  const prompts = new Map();
  for (const sample of samples) {
    if (!prompts.has(sample.prompt)) prompts.set(sample.prompt, new Map());
    const places = prompts.get(sample.prompt);
    places.set(place(sample), [...(places.get(place(sample)) ?? []), sample]);
  }
  const several = [...prompts].filter(([, places]) => places.size > 1);
  if (!several.length) {
    if (samples.length) section("compare", "One prompt at two steps", make("p", {}, "No prompt was answered at two steps that are on this page."));
    return;
  }
  const columns = make("div", { class: "two" });
  const side = (key, places) => {
    const list = [...places.get(key)].sort((a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity));
    const rewards = list.map((s) => s.reward).filter((v) => typeof v === "number");
    const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
    return make("div", { class: "detail", tabindex: 0 }, make("h3", {}, `${wheres(list[0])}: ${many(list.length, "answer")}`,
      rewards.length ? `, mean reward ${number(mean)}` : ""), list.map((s) => sampleView(s, false)));
  };
  const text = make("div");
  const draw = () => {
    const places = prompts.get(Number(prompt.value));
    columns.replaceChildren(side(before.value, places), side(after.value, places));
  };
  const pick = (kind) => {
    const places = [...prompts.get(Number(prompt.value))];
    text.replaceChildren(promptView(prompt.value));
    for (const select of [before, after]) {
      select.replaceChildren(...places.map(([key, [sample]]) => make("option", { value: key }, wheres(sample))));
    }
    const alike = places.filter(([, [sample]]) => sample.kind === (kind ?? places[0][1][0].kind));
    before.value = alike[0][0];
    after.value = (alike.length > 1 ? alike : places).at(-1)[0];
    draw();
  };
  const [prompt, promptField] = choice("Prompt", several.map(([key, places]) => {
    const [sample] = [...places.values()][0];
    return [key, `${sample.source} ${sample.row}: ${oneLine(promptText(key)).slice(0, 70)} (${places.size})`];
  }), pick);
  const [before, beforeField] = choice("Left", [], draw);
  const [after, afterField] = choice("Right", [], draw);
  section("compare", "One prompt at two steps",
    make("div", { class: "bar" }, promptField, beforeField, afterField), text, columns);
  showPrompt = (key) => {
    prompt.value = key;
    pick("evaluation");
    document.getElementById("compare").scrollIntoView();
  };
  pick();
}

function showEvaluations() {
  const answers = samples.filter((sample) => sample.kind === "evaluation");
  if (!answers.length) return;
  const keys = [...new Set(answers.map(place))];
  const rows = new Map();
  for (const sample of answers) {
    const row = rows.get(sample.prompt) ?? rows.set(sample.prompt, new Map()).get(sample.prompt);
    row.set(place(sample), [...(row.get(place(sample)) ?? []), sample]);
  }
  const numbers = answers.map((s) => s.reward).filter((v) => typeof v === "number");
  const low = Math.min(...numbers), high = Math.max(...numbers);
  const cell = (list) => {
    const rewards = (list ?? []).map((s) => s.reward).filter((v) => typeof v === "number");
    if (!rewards.length) return make("td", { class: "cell" }, list ? "none" : "");
    const mean = rewards.reduce((sum, value) => sum + value, 0) / rewards.length;
    const share = high > low ? (mean - low) / (high - low) : 0;
    return make("td", { class: "cell", style: `background:rgba(var(--high), ${(0.5 * share).toFixed(3)})` }, number(mean, 3));
  };
  const body = [...rows].map(([prompt, places]) => make("tr", {}, make("td", { class: "text" },
    make("button", { type: "button", onclick: () => showPrompt(prompt), title: "compare its answers" }, oneLine(promptText(prompt)).slice(0, 80))),
  keys.map((key) => cell(places.get(key)))));
  const head = keys.map((key) => {
    const [run, , step] = key.split("|");
    return runs.length > 1 ? `${runs[run].label}, step ${step}` : `step ${step}`;
  });
  section("evaluations", "Answers of evaluations",
    make("p", { class: "faint" }, "Mean reward of the answers to each held-out prompt. Choose a prompt to see its answers side by side; "
      + "the table of samples has them too. All answers are in evaluations/ of the run's folder."),
    table(["prompt", ...head], body, { class: "scroll cells" }));
}

// ------------------------------------------------------------------------------------ the other tables

function showLeftOut() {
  const rows = runs.flatMap((run) => run.left_out.map(([metric, count, what]) => make("tr", {},
    runs.length > 1 ? make("td", {}, run.label) : null, make("td", { class: "number" }, number(count)), make("td", { class: "words" }, what),
    make("td", {}, metric))));
  const notes = runs.filter((run) => run.notes.length);
  const first = runs.length > 1 ? ["run"] : [];
  section("left-out", "Left out, and why",
    rows.length ? table([...first, "count", "what", "metric"], rows) : make("p", {}, "Nothing was left out of training."),
    notes.length ? make("h3", {}, "Notes of the run") : null,
    notes.map((run) => [runs.length > 1 ? make("p", {}, run.label) : null, run.notes.map((text) => make("div", { class: "note" }, text))]));
}

function showOptions() {
  const all = make("input", { type: "checkbox" });
  const search = make("input", { type: "search", placeholder: "option", "aria-label": "options with this text" });
  const place = make("div");
  const unknown = runs.filter((run) => run.options_changed === null);
  const fill = () => {
    const of = (run) => all.checked || run.options_changed === null ? run.options : run.options_changed;
    const names = [...new Set(runs.flatMap((run) => Object.keys(of(run))))].filter((name) => name.includes(search.value));
    const value = (run, name) => of(run)[name] ?? run.options[name];
    place.replaceChildren(names.length ? table(["option", ...runs.map((run) => runs.length > 1 ? run.label : "value")], names.map((name) => {
      const values = runs.map((run) => value(run, name));
      return make("tr", { class: new Set(values).size > 1 ? "differs" : undefined }, make("td", { class: "words" }, name),
        values.map((text) => make("td", { class: "words" }, text ?? "\u2013")));
    })) : make("p", {}, "No option to show."));
  };
  all.addEventListener("change", fill);
  search.addEventListener("input", fill);
  section("options", "Options",
    make("p", { class: "faint" }, "Options that differ from their defaults.",
      runs.length > 1 ? " Rows in which the runs differ are marked." : ""),
    unknown.map((run) => make("div", { class: "note" }, `${run.label} does not record which options differ from their defaults: all are shown.`)),
    make("div", { class: "bar" }, make("label", {}, all, "all options"), make("label", {}, "Option", search)), place);
  fill();
}

function showPlugins() {
  const rows = runs.flatMap((run) => run.plugins.map((plugin) => make("tr", {}, runs.length > 1 ? make("td", {}, run.label) : null,
    plugin.map((text) => make("td", { class: "words" }, text)))));
  section("plugins", "Plugins and machine",
    rows.length ? table([...(runs.length > 1 ? ["run"] : []), "kind", "name", "distribution"], rows) : make("p", {}, "The run records no plugins."),
    runs.map((run) => [runs.length > 1 ? make("h3", {}, run.label) : null, facts(Object.entries(run.environment))]));
}

for (const show of [showRuns, showCurves, showTimes, showTimelines, showSamples, showComparison, showEvaluations, showLeftOut, showOptions, showPlugins]) show();
