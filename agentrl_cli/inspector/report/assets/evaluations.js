// Two evaluations compared task by task: what changed, and before and after side by side.

const FLIPS = {
  lost: ["newly failed", (task) => task.flip === "lost"],
  gained: ["newly passed", (task) => task.flip === "gained"],
  worse: ["got worse", (task) => task.change < -ROUNDING],
  better: ["improved", (task) => task.change > ROUNDING],
  all: ["all tasks", () => true],
};
const ROUNDING = 1e-9; // Means of the same rewards in another order differ by as much.

function attemptsByTask(evaluation) {
  const source = run.head.sources[evaluation.source];
  const tasks = new Map();
  for (let row = source.start; row < source.start + source.count; row++) {
    const task = run.columns.task[row];
    if (!tasks.has(task)) tasks.set(task, []);
    tasks.get(task).push(row);
  }
  return tasks;
}

// Mean reward, and whether more than half of the scored attempts passed; null: none was scored.
function judge(rows, threshold) {
  const rewards = rows.map((row) => numberOf("reward", row)).filter((reward) => reward !== null);
  if (!rewards.length) return null;
  const passed = rewards.filter((reward) => reward >= threshold - ROUNDING).length;
  return { mean: rewards.reduce((a, b) => a + b, 0) / rewards.length, passes: 2 * passed > rewards.length };
}

function compareEvals(before, after) {
  const [one, other] = [attemptsByTask(before), attemptsByTask(after)];
  const tasks = [];
  for (const [task, rows] of other) {
    if (!one.has(task)) continue;
    const [was, is] = [judge(one.get(task), before.threshold), judge(rows, after.threshold)];
    const change = was && is ? is.mean - was.mean : null;
    const flip = !was || !is ? null : was.passes && !is.passes ? "lost" : !was.passes && is.passes ? "gained" : null;
    tasks.push({ task, was, is, change, flip, before: one.get(task), after: rows });
  }
  const compare = (a, b) => run.texts.task[a.task].localeCompare(run.texts.task[b.task], "en", { numeric: true });
  return tasks.sort((a, b) => (a.change ?? Infinity) - (b.change ?? Infinity) || compare(a, b));
}

function EvaluationsView({ query }) {
  const { evals } = run.head;
  const made = evals.filter((e) => e.label === null);
  const known = made.length > 1 ? made : evals;
  const find = (name, otherwise) => evals.find((e) => e.key === query.get(name)) ?? otherwise;
  const before = find("before", known[0]);
  const after = find("after", known.at(-1));
  return html`
    <h1 tabindex="-1">Evaluations</h1>
    ${evals.length === 0 && html`<p class="note">No evaluation is stored yet. Training makes them with train.eval_every_steps; agentrl eval makes one.</p>`}
    ${evals.length > 0 && html`<${EvalTable} />`}
    ${evals.length > 1 && before !== after && html`<${Flips} before=${before} after=${after} query=${query} />`}
    ${evals.length > 1 && before === after && html`<${EvalChoices} before=${before} after=${after} /><p class="note">Choose two different evaluations.</p>`}
    ${evals.length === 1 && html`<p class="note">With a second evaluation, this page compares them task by task.</p>`}
  `;
}

// Means over the attempts.
const EVAL_MEANS = ["turns", "tokens", "seconds"];

function EvalTable() {
  const { evals } = run.head;
  const ks = [...new Set(evals.flatMap((e) => Object.keys(e.passAt)))].map(Number).sort((a, b) => a - b);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="All evaluations"><table>
    <thead><tr><th scope="col">evaluation</th><th scope="col" class="number">mean reward</th><th scope="col" class="number">95 % interval</th>
      ${ks.map((k) => html`<th scope="col" class="number">pass@${k}</th>`)}${EVAL_MEANS.map((name) => html`<th scope="col" class="number">${name}</th>`)}<th scope="col" class="number">tasks</th><th scope="col" class="number">failed</th></tr></thead>
    <tbody>${evals.map((e) => html`<tr>
      <th scope="row" class="wrap"><a href=${formatAddress(["trajectories"], { from: "evaluations", source: e.key })}>${spell(e.name)}</a></th>
      <td class="number">${formatNumber(e.mean)}</td>
      <td class="number">${e.interval ? `${formatNumber(e.interval[0])} to ${formatNumber(e.interval[1])}` : "–"}</td>
      ${ks.map((k) => html`<td class="number">${formatNumber(e.passAt[k])}</td>`)}
      ${EVAL_MEANS.map((name) => html`<td class="number">${formatNumber(e[name], 1)}</td>`)}
      <td class="number">${e.numTasks ?? "–"}</td>
      <td class="number">${(e.policyFailures ?? 0) + (e.surroundingsFailures ?? 0)}</td>
    </tr>`)}</tbody>
  </table></div>`;
}

function EvalChoices({ before, after }) {
  const options = Object.fromEntries(run.head.evals.map((e) => [e.key, spell(e.name)]));
  return html`<form class="filters" onSubmit=${(event) => event.preventDefault()}>
    <${Choice} label="Before" name="before" value=${before.key} options=${options} />
    <${Choice} label="After" name="after" value=${after.key} options=${options} />
  </form>`;
}

function Flips({ before, after, query }) {
  const tasks = useMemo(() => compareEvals(before, after), [before.key, after.key, run.columns]);
  const found = Object.fromEntries(Object.entries(FLIPS).map(([name, [, is]]) => [name, tasks.filter(is)]));
  const fallback = Object.keys(FLIPS).find((name) => found[name].length) ?? "all";
  const show = query.get("show") in FLIPS ? query.get("show") : fallback;
  const listed = ["gained", "better"].includes(show) ? [...found[show]].reverse() : found[show];
  // The models of a comparison have letters.
  const [was, is] = run.head.comparison ? [before.key, after.key] : ["before", "after"];
  const chosen = listed.findIndex((t) => run.texts.task[t.task] === query.get("task"));
  const box = useRef(null);
  const width = useWidth(box);
  const isNarrow = width > 0 && width < 560;
  const scored = tasks.filter((t) => t.was && t.is);
  const mean = (name) => (scored.length ? scored.reduce((sum, t) => sum + t[name].mean, 0) / scored.length : null);
  return html`<section ref=${box} aria-labelledby="flips">
    <h2 id="flips">Task by task</h2>
    <${EvalChoices} before=${before} after=${after} />
    <p>On the ${formatCount(scored.length, "task")} that both have a reward for, the mean reward went from <b>${formatNumber(mean("was"))}</b> to <b>${formatNumber(mean("is"))}</b>.
      <span class="note"> A task counts as passed if more than half of its scored attempts reach a reward of ${formatNumber(after.threshold)}.</span></p>
    <div class="tabs" role="group" aria-label="Which tasks">
      ${Object.entries(FLIPS).map(([name, [text]]) => html`<button aria-pressed=${name === show} onClick=${() => changeQuery({ show: name, task: "" })}>${text} <b>${found[name].length.toLocaleString("en")}</b></button>`)}
    </div>
    ${listed.length > 0 && html`<${VirtualGrid} label="Tasks: arrows move, Enter compares" count=${listed.length} rowHeight=${isNarrow ? 60 : 40} height=${320} selected=${chosen}
      header=${html`<span role="columnheader" class="from">task</span><span role="columnheader" class="number">${was}</span><span role="columnheader" class="number">${is}</span>${!isNarrow && html`<span role="columnheader" class="said">question</span>`}`}
      renderRow=${(i) => html`<${FlipRow} item=${listed[i]} isNarrow=${isNarrow} />`}
      onOpen=${(i) => changeQuery({ show, task: run.texts.task[listed[i].task] })} />`}
    ${listed.length === 0 && html`<p class="note">None.</p>`}
    ${chosen >= 0 && html`<${BeforeAfter} item=${listed[chosen]} before=${before} after=${after} was=${was} is=${is} />`}
  </section>`;
}

function FlipRow({ item, isNarrow }) {
  const value = (judged) => (judged ? formatNumber(judged.mean) : "unscored");
  const question = firstLine(textOf("question", item.after[0]) ?? textOf("question", item.before[0]));
  return html`
    <span role="gridcell" class="from one-line">${spell(run.texts.task[item.task])}${isNarrow && html`<br /><span class="note">${question}</span>`}</span>
    <span role="gridcell" class="number">${value(item.was)}</span>
    <span role="gridcell" class="number ${item.flip === "lost" ? "lost" : ""}">${value(item.is)}</span>
    ${!isNarrow && html`<span role="gridcell" class="said one-line">${question}</span>`}`;
}

function BeforeAfter({ item, before, after, was, is }) {
  const heading = useRef(null);
  useEffect(() => heading.current?.focus(), [item.task]);
  const rows = [item.before[0], item.after[0]];
  return html`<section aria-labelledby="pair">
    <h2 id="pair" tabindex="-1" ref=${heading}>Task ${spell(run.texts.task[item.task])}: ${was} and ${is}</h2>
    <p class="crumbs"><a href=${groupAddress(rows[0])}>all attempts, ${was} (${item.before.length})</a> <a href=${groupAddress(rows[1])}>all attempts, ${is} (${item.after.length})</a></p>
    <${SideBySide} key=${rows.join()} rows=${rows} query=${new URLSearchParams()} names=${[before.name, after.name]} />
  </section>`;
}
