// Curves over the steps of the run, on one axis: a cursor in one is a cursor in all.

// What has a curve: [title, explanation, series, options]; a series without its metric is left out.
// `drawn` explains what the picture of one run has beside the lines.
const CHARTS = [
  ["Reward", "Mean of each step.", [["reward_mean", "mean"]],
    { band: ["reward_mean", "reward_std", "reward_min", "reward_max"],
      drawn: "The band is one standard deviation, within the smallest and the largest." }],
  ["Evaluations", "Mean reward.", [["eval_mean", "mean reward"]],
    { isEval: true, drawn: "Bars are 95 % intervals." }],
  ["Failures", "Trajectories of a step.",
    [["policy_failures", "by the policy"], ["surroundings_failures", "by the surroundings"], ["num_unscored", "unscored"]]],
  ["Cut replies", "Share of trajectories with a reply that reached its length limit.", [["truncated_fraction", "share"]]],
  ["Entropy", "Nats per token.", [["entropy", "entropy"]]],
  ["Logprob gap", "|rollout − proximal| in nats.",
    [["logprob_gap_mean", "mean"], ["logprob_gap_max", "largest"]]],
  ["Token age", "Weight updates between sampling and training a token.",
    [["token_age_mean", "mean"], ["token_age_max", "largest"]]],
  ["Time of a step", "Seconds.",
    [["rollout_seconds", "rollout"], ["train_seconds", "train"], ["publish_seconds", "publish"],
      ["probe_seconds", "probe"], ["step_seconds", "whole step"]],
    { isStacked: true, drawn: "One part on top of the other; the rest up to the whole is not measured apart." }],
  ["Sampled tokens", "Mean of a trajectory.", [["completion_tokens_mean", "tokens"]]],
  ["Turns", "Mean of a trajectory.", [["turns_mean", "turns"]]],
];

const COLORS = ["accent", "second", "third", "fourth", "ink"];
// Of the first lines in these colours, of the next, and so on; `report.css` has the legend's.
const DASHES = [undefined, [8, 4], [2, 3], [14, 4], [8, 4, 2, 4], [2, 8]];
const HEIGHT = 180;

// What one run has of a chart.
function chartData(columns, [, , series, options = {}]) {
  if (options.isEval) {
    const evals = run.head.evals.filter((e) => e.label === null && e.mean !== null);
    if (!evals.length) return null;
    const steps = evals.map((e) => e.step);
    const low = evals.map((e) => e.interval?.[0] ?? e.mean);
    const high = evals.map((e) => e.interval?.[1] ?? e.mean);
    return { steps, names: ["mean reward"], values: [evals.map((e) => e.mean)], low, high, areBars: true, numStacked: 0 };
  }
  const known = series.filter(([name]) => columns[name]?.some((v) => v !== null));
  if (!known.length || !columns.step.length) return null;
  const data = {
    steps: columns.step,
    names: known.map(([, label]) => label),
    values: known.map(([name]) => columns[name]),
    numStacked: options.isStacked ? known.filter(([name]) => name !== "step_seconds").length : 0,
  };
  if (options.band) {
    const [mean, std, min, max] = options.band.map((name) => columns[name]);
    const at = (i, sign, end) => {
      if (mean[i] === null) return null;
      const edge = std?.[i] == null ? null : mean[i] + sign * std[i];
      const limit = end?.[i] ?? null;
      if (edge === null) return limit ?? mean[i];
      return limit === null ? edge : sign < 0 ? Math.max(edge, limit) : Math.min(edge, limit);
    };
    data.low = mean.map((_, i) => at(i, -1, min));
    data.high = mean.map((_, i) => at(i, 1, max));
  }
  return data;
}

// One chart for each series, with a line for each of several runs.
function sharedCharts(runs, [title, why, series, { isEval } = {}]) {
  return series.map(([metric, label]) => {
    const known = runs.map((each) => {
      const columns = isEval ? each.evals : each.metrics;
      return new Map(columns.step.map((step, i) => [step, columns[metric]?.[i] ?? null]));
    });
    const values = (steps) => known.map((at) => steps.map((step) => at.get(step) ?? null));
    const hasValue = (step) => known.some((at) => (at.get(step) ?? null) !== null);
    const steps = [...new Set(known.flatMap((at) => [...at.keys()]))].filter(hasValue).sort((a, b) => a - b);
    return {
      title: series.length > 1 ? `${title}: ${label}` : title, why,
      data: steps.length ? { steps, names: runs.map((each) => each.letters), values: values(steps), numStacked: 0 } : null,
    };
  });
}

function listCharts({ comparison, metrics }) {
  const charts = comparison
    ? CHARTS.flatMap((spec) => sharedCharts(comparison.runs, spec))
    : CHARTS.map((spec) => {
        const [title, why, , { drawn = "", isEval } = {}] = spec;
        const from = isEval ? "evaluations" : "training";
        const open = (steps) => openAddress(formatAddress(["trajectories"], { from, steps }));
        return { title, why: `${why} ${drawn}`, data: chartData(metrics, spec), open };
      });
  return charts.filter(({ data }) => data);
}

// From 0 where that is not far below, or where heights are read as sizes.
function chooseRange(low, high, fromZero) {
  const bottom = low >= 0 && (fromZero || low < 0.7 * high) ? 0 : low;
  if (!(high > bottom)) return [Math.min(bottom, 0), Math.max(high, 0) || 1];
  const [from, to] = uPlot.rangeNum(bottom, high, 0.1, true);
  return [bottom === 0 ? 0 : from, to];
}

// The interval of each evaluation as a bar.
function drawIntervals(plot, { steps, low, high }) {
  const pen = plot.ctx;
  pen.save();
  pen.strokeStyle = colors()("accent");
  pen.lineWidth = 1.5 * devicePixelRatio;
  pen.beginPath();
  steps.forEach((step, i) => {
    const x = plot.valToPos(step, "x", true);
    const [from, to] = [low[i], high[i]].map((value) => plot.valToPos(value, "y", true));
    pen.moveTo(x, from);
    pen.lineTo(x, to);
    for (const end of [from, to]) {
      pen.moveTo(x - 4 * devicePixelRatio, end);
      pen.lineTo(x + 4 * devicePixelRatio, end);
    }
  });
  pen.stroke();
  pen.restore();
}

function buildPlot(data, width, range, element) {
  const color = colors();
  const axis = {
    stroke: color("muted"), font: "12px system-ui, sans-serif",
    grid: { stroke: color("line"), width: 1 }, ticks: { stroke: color("line"), width: 1, size: 4 },
  };
  // Stacked parts are drawn from the top sum down, each over the one before.
  const shown = data.values.map((values, n) => {
    if (n >= data.numStacked) return values;
    return values.map((_, i) =>
      data.values.slice(0, n + 1).reduce((sum, part) => sum + (part[i] ?? 0), 0),
    );
  });
  const order = shown.map((_, n) => n);
  if (data.numStacked) order.sort((a, b) => (a < data.numStacked ? b < data.numStacked ? b - a : -1 : 1));
  const series = [{ label: "step" }];
  const columns = [data.steps];
  const bands = [];
  const isSparse = data.steps.length < 40;
  for (const n of order) {
    const stroke = color(COLORS[n % COLORS.length]);
    const isStacked = n < data.numStacked;
    series.push({
      label: data.names[n], stroke, width: 1.75, spanGaps: true,
      fill: isStacked ? stroke : undefined,
      dash: n === COLORS.length - 1 ? [4, 3] : DASHES[Math.floor(n / COLORS.length)],
      points: { show: isSparse && !isStacked, size: 5, fill: stroke },
    });
    columns.push(shown[n]);
  }
  if (data.low) {
    const hidden = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
    series.push({ ...hidden, label: "high" }, { ...hidden, label: "low" });
    columns.push(data.high, data.low);
    if (!data.areBars) bands.push({ series: [series.length - 2, series.length - 1], fill: color("band") });
  }
  const count = data.names.length;
  return new uPlot(
    {
      width, height: HEIGHT, series, bands,
      hooks: { draw: [(plot) => data.areBars && drawIntervals(plot, data)] },
      padding: [10, 12, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "step", scales: ["x", null] }, drag: { x: false, y: false }, y: false,
        points: { show: (_, i) => (i <= count && undefined) } },
      scales: {
        x: { time: false, range: () => range },
        y: { range: (_, low, high) => chooseRange(low, high, data.numStacked > 0) },
      },
      axes: [
        { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6] },
        { ...axis, size: 54, values: (_, ticks) => ticks.map((v) => formatNumber(v)) },
      ],
    },
    columns,
    element,
  );
}

function Chart({ title, why, data, range, open }) {
  const frame = useRef(null);
  const box = useRef(null);
  const plot = useRef(null);
  const width = useWidth(frame);
  const theme = useColors();
  const [at, setAt] = useState(null);
  useLayoutEffect(() => {
    if (!width) return undefined;
    plot.current = buildPlot(data, width, range, box.current);
    const show = () => setAt(plot.current.cursor.idx ?? null);
    plot.current.root.addEventListener("mousemove", show);
    plot.current.root.addEventListener("mouseleave", () => setAt(null));
    return () => plot.current.destroy();
  }, [width, theme, data, range]);
  const last = data.steps.length - 1;
  const index = Math.min(at ?? last, last);
  const move = (to) => {
    const next = Math.max(0, Math.min(to, last));
    setAt(next);
    plot.current.setCursor({ left: plot.current.valToPos(data.steps[next], "x"), top: 10 });
  };
  const onKeyDown = (event) => {
    const moves = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: last };
    if (event.key in moves) move(moves[event.key]);
    else if (event.key === "Enter" && open) open(data.steps[index]);
    else return;
    event.preventDefault();
  };
  const values = data.names.map((name, n) => `${name} ${formatNumber(data.values[n][index])}`);
  if (data.low && data.low[index] !== null) {
    values.push(`${formatNumber(data.low[index])} to ${formatNumber(data.high[index])}`);
  }
  const id = `chart-${title.replace(/\W+/g, "-").toLowerCase()}`;
  return html`<figure class="chart" ref=${frame}>
    <figcaption><h3>${title}</h3><p class="note">${why}</p></figcaption>
    <div
      class="plot" ref=${box} tabindex="0" role="application" aria-roledescription="chart"
      aria-label=${`${title}, ${formatCount(last + 1, "step")}. Left and right move${open ? ", Enter opens the step" : ""}.`}
      aria-describedby=${id} onKeyDown=${onKeyDown} onBlur=${() => setAt(null)}
      onClick=${() => at !== null && open?.(data.steps[index])}
    ></div>
    <p class="legend" id=${id} aria-live=${at === null ? "off" : "polite"}>
      <span class="note">step ${data.steps[index]}</span>
      ${values.map((text, n) => html`<span class=${n < data.names.length ? "" : "note"}>
        ${n < data.names.length && html`<${Swatch} number=${n} />`}${text}
      </span>`)}
    </p>
  </figure>`;
}

// The colour and dashes of a line.
const Swatch = ({ number }) =>
  html`<i class="swatch s${number % COLORS.length} d${Math.floor(number / COLORS.length)}"></i>`;

function Charts() {
  const shown = useMemo(() => listCharts(run.head), [run.head]);
  const range = useMemo(() => {
    const low = Math.min(...shown.map(({ data }) => data.steps[0]));
    const high = Math.max(...shown.map(({ data }) => data.steps.at(-1)));
    return low === high ? [low - 1, high + 1] : [low, high];
  }, [shown]);
  if (!shown.length) return html`<p class="note">No step has ended yet: there are no curves.</p>`;
  return html`<div class="charts">
    ${shown.map((chart) => html`<${Chart} key=${chart.title} ...${chart} range=${range} />`)}
  </div>`;
}
