// All trajectories: filters, search, order.

// Browsers cannot scroll through more pixels than these rows have.
const MAX_LISTED = 300000;

const SORTS = {
  reward: "reward", turns: "turns", tokens: "tokens", seconds: "seconds", mismatches: "mismatches",
  logprob_min: "least likely token", logprob_mean: "mean logprob",
  logprob_gap_max: "largest gap",
};

function parseSteps(text) {
  const ranges = [];
  for (const part of (text ?? "").split(",")) {
    const match = part.match(/^\s*(\d+)\s*(?:-\s*(\d+)\s*)?$/);
    if (match) ranges.push([Number(match[1]), Number(match[2] ?? match[1])]);
  }
  return ranges;
}

// The numbers of the trajectories that pass, in their order.
function findTrajectories(query) {
  const { columns, texts, head } = run;
  const get = (name) => query.get(name) ?? "";
  const checks = [];
  const from = get("from") || listedFirst();
  const steps = parseSteps(get("steps"));
  const key = get("source");
  const matching = (name, accepts) => {
    const verdicts = texts[name].map(accepts);
    const none = accepts(null);
    return (row) => (columns[name][row] < 0 ? none : verdicts[columns[name][row]]);
  };
  const is = (name, wanted) => {
    if (wanted === "any") return (row) => columns[name][row] >= 0;
    if (wanted === "none") return (row) => columns[name][row] < 0;
    return matching(name, (text) => text === wanted);
  };
  const number = (name) => (get(name) === "" ? null : Number(get(name)));
  const [low, high] = [number("min"), number("max")];
  if (low !== null && !Number.isNaN(low)) checks.push((row) => columns.reward[row] >= low - 1e-9);
  if (high !== null && !Number.isNaN(high)) checks.push((row) => columns.reward[row] <= high + 1e-9);
  if (get("task")) checks.push(is("task", get("task")));
  if (get("agent")) checks.push(is("agent", get("agent")));
  if (get("failure")) checks.push(is("boundary", get("failure")));
  if (get("cause")) checks.push(is("cause", get("cause")));
  const has = (name) => {
    if (get(name === "mismatches" ? "mismatch" : name) === "any") checks.push((row) => columns[name][row] > 0);
    if (get(name === "mismatches" ? "mismatch" : name) === "none") checks.push((row) => !columns[name][row]);
  };
  ["malformed", "cut", "mismatches"].forEach(has);
  const cause = get("mismatch");
  if (cause && cause !== "any" && cause !== "none") {
    checks.push(matching("mismatch", (text) => (text ?? "").split(" ").includes(cause)));
  }
  if (get("unscored") === "any") {
    checks.push((row) => Number.isNaN(columns.score[row]) && columns.boundary[row] < 0);
  }
  const wanted = get("text").toLowerCase();
  if (wanted) {
    const contains = (text) => text !== null && text.toLowerCase().includes(wanted);
    const finds = ["question", "expected", "answer", "failure", "task", "group"].map((name) => matching(name, contains));
    checks.push((row) => finds.some((find) => find(row)));
  }
  const rows = [];
  for (const source of head.sources) {
    if (key ? source.key !== key : from !== "all" && source.isEval !== (from === "evaluations")) continue;
    if (steps.length && !steps.some(([a, b]) => a <= source.step && source.step <= b)) continue;
    for (let row = source.start; row < source.start + source.count; row++) {
      if (checks.every((check) => check(row))) rows.push(row);
    }
  }
  const sort = get("sort");
  if (sort in SORTS) {
    const values = columns[sort];
    const sign = get("order") === "asc" ? 1 : -1;
    // What has no value comes last either way.
    rows.sort((a, b) => {
      const [one, other] = [values[a], values[b]];
      if (Number.isNaN(one) || Number.isNaN(other)) return Number.isNaN(one) - Number.isNaN(other) || a - b;
      return sign * (one - other) || a - b;
    });
  }
  return rows;
}

function TrajectoryList({ query }) {
  const rows = useMemo(() => findTrajectories(query), [query.toString(), run.columns]);
  const box = useRef(null);
  const width = useWidth(box);
  const isNarrow = width > 0 && width < 640;
  const listed = rows.length > MAX_LISTED ? rows.slice(0, MAX_LISTED) : rows;
  const scored = listed.filter((row) => numberOf("reward", row) !== null);
  const mean = scored.length ? scored.reduce((sum, row) => sum + run.columns.reward[row], 0) / scored.length : null;
  return html`<div ref=${box}>
    <h1 tabindex="-1">Trajectories</h1>
    <${Filters} query=${query} isNarrow=${isNarrow} />
    <p class="legend" role="status">
      ${formatCount(rows.length, "trajectory", "trajectories")}${mean === null ? "" : `, mean reward ${formatNumber(mean)}`}
      ${rows.length > MAX_LISTED ? ` (the first ${MAX_LISTED.toLocaleString("en")} are listed: filter to see others)` : ""}
    </p>
    ${rows.length > 0 && html`<${VirtualGrid}
      label="Trajectories: arrows move, Enter opens" count=${listed.length} rowHeight=${isNarrow ? 84 : 40} height=${600}
      header=${html`<${ListHead} query=${query} isNarrow=${isNarrow} />`}
      renderRow=${(i) => html`<${ListRow} row=${listed[i]} isNarrow=${isNarrow} />`}
      onOpen=${(i) => openAddress(trajectoryAddress(listed[i]))}
    />`}
  </div>`;
}

function Filters({ query, isNarrow }) {
  const get = (name) => query.get(name) ?? "";
  const change = (name) => (event) => changeQuery({ [name]: event.target.value });
  const choices = (name, texts) => ({ "": "all", any: "any", none: "none", ...Object.fromEntries(texts.map((t) => [t, t])) });
  const causes = [...new Set(run.texts.mismatch.flatMap((text) => text.split(" ")))];
  const few = ["from", "text", "steps"];
  const isFiltered = [...query.keys()].some((name) => !few.includes(name) && name !== "sort" && name !== "order");
  const more = html`<div class="filters">
    <label>Reward from <input type="number" step="any" class="short" value=${get("min")} onInput=${change("min")} /></label>
    <label>to <input type="number" step="any" class="short" value=${get("max")} onInput=${change("max")} /></label>
    <label>Task <input class="short" value=${get("task")} onInput=${change("task")} /></label>
    <${Choice} label="Failure" name="failure" value=${get("failure")} options=${choices("failure", run.texts.boundary)} />
    <${Choice} label="Caused by" name="cause" value=${get("cause")} options=${{ "": "all", policy: "policy", surroundings: "surroundings" }} />
    <${Choice} label="Mismatch" name="mismatch" value=${get("mismatch")} options=${choices("mismatch", causes)} />
    <${Choice} label="Malformed" name="malformed" value=${get("malformed")} options=${choices("malformed", [])} />
    <${Choice} label="Cut" name="cut" value=${get("cut")} options=${choices("cut", [])} />
    ${run.texts.agent.length > 0 && html`<${Choice} label="Agent" name="agent" value=${get("agent")} options=${{ "": "all", ...Object.fromEntries(run.texts.agent.map((t) => [t, spell(t)])) }} />`}
    ${isNarrow && html`<${Choice} label="Sort" name="sort" value=${get("sort")} options=${{ "": "as stored", ...SORTS }} />
      <${Choice} label="Direction" name="order" value=${get("order")} options=${{ "": "largest first", asc: "smallest first" }} />`}
  </div>`;
  return html`<form class="filter-form" onSubmit=${(event) => event.preventDefault()} role="search">
    <div class="filters">
      <${Choice} label="From" name="from" value=${get("from") || listedFirst()}
        options=${{ training: "training", evaluations: "evaluations", all: "both" }} />
      <label>Steps <input class="short" placeholder="3-7, 12" value=${get("steps")} onInput=${change("steps")} /></label>
      <label class="wide">Text <input type="search" placeholder="question, answer, failure, task" value=${get("text")} onInput=${change("text")} /></label>
      ${(isFiltered || get("text") || get("steps")) && html`<button type="button" onClick=${() => openAddress(formatAddress(["trajectories"], { from: get("from") }))}>Clear</button>`}
    </div>
    <details open=${isFiltered || !isNarrow}><summary>More filters</summary>${more}</details>
  </form>`;
}

const LIST_COLUMNS = [
  ["reward", "reward"], ["turns", "turns"], ["tokens", "tokens"], ["seconds", "seconds"], ["logprob_min", "least likely"],
];
const GAP_COLUMN = ["logprob_gap_max", "largest gap"];

function ListHead({ query, isNarrow }) {
  if (isNarrow) return html`<span role="columnheader">reward, end, question, answer</span>`;
  const [sort, order] = [query.get("sort"), query.get("order")];
  const next = (name) => (sort !== name ? { sort: name, order: "" } : order === "asc" ? { sort: "", order: "" } : { sort: name, order: "asc" });
  const sorted = (name) => (sort !== name ? "none" : order === "asc" ? "ascending" : "descending");
  return html`
    <span role="columnheader" class="from">from</span>
    ${[...LIST_COLUMNS, ...(run.head.hasGaps ? [GAP_COLUMN] : [])].map(([name, label]) => html`<span role="columnheader" class="number" aria-sort=${sorted(name)}>
      <button class="sort" onClick=${() => changeQuery(next(name))}>${label}${sort === name ? (order === "asc" ? " ↑" : " ↓") : ""}</button>
    </span>`)}
    <span role="columnheader" class="end">ended</span>
    <span role="columnheader" class="said">question</span>
    <span role="columnheader" class="said">answer</span>`;
}

function ListRow({ row, isNarrow }) {
  const end = describeEnd(row);
  const source = sourceOf(row);
  const answer = textOf("answer", row) ?? textOf("failure", row) ?? "";
  const link = html`<a tabindex="-1" href=${trajectoryAddress(row)}>${source.name}</a>`;
  if (isNarrow) {
    return html`<span role="gridcell" class="stacked">
      <span class="one-line"><b>${describeReward(row)}</b> ${link} <span class="end">${end}</span></span>
      <span class="one-line">${firstLine(textOf("question", row))}</span>
      <span class="one-line note">${firstLine(answer)}</span>
    </span>`;
  }
  const { columns } = run;
  return html`
    <span role="gridcell" class="from">${link}</span>
    <span role="gridcell" class="number">${describeReward(row)}</span>
    <span role="gridcell" class="number">${columns.turns[row]}</span>
    <span role="gridcell" class="number">${columns.tokens[row]}</span>
    <span role="gridcell" class="number">${formatNumber(columns.seconds[row], 1)}</span>
    <span role="gridcell" class="number">${formatNumber(numberOf("logprob_min", row), 2)}</span>
    ${run.head.hasGaps && html`<span role="gridcell" class="number">${formatNumber(numberOf("logprob_gap_max", row))}</span>`}
    <span role="gridcell" class="end one-line" title=${end}>${end}</span>
    <span role="gridcell" class="said one-line">${firstLine(textOf("question", row))}</span>
    <span role="gridcell" class="said one-line">${firstLine(answer)}</span>`;
}
