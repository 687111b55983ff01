// Trajectories in columns: what siblings of a group did differently.

const MAX_COLUMNS = 8;

function GroupView({ path, query }) {
  const source = findSource(path[1]);
  const id = query.get("id");
  const rows = useMemo(() => {
    if (!source) return [];
    const code = run.texts.group.indexOf(id);
    const found = [];
    for (let row = source.start; row < source.start + source.count; row++) {
      if (run.columns.group[row] === code) found.push(row);
    }
    return found;
  }, [path[1], id, run.columns]);
  if (!rows.length) return html`<${NotThere} what="group" />`;
  const { mean, deviation, count } = groupStatistics(rows);
  const facts = [
    ["task", spell(textOf("task", rows[0]))], ["attempts", rows.length], ["scored", count],
    ["mean score", formatNumber(count ? mean : null)], ["deviation", formatNumber(count ? deviation : null)],
  ];
  return html`
    <h1 tabindex="-1">Group ${spell(id)}</h1>
    <p class="crumbs"><a href=${formatAddress(["trajectories"], { from: source.isEval ? "evaluations" : "training", source: source.key })}>${source.name}</a>
      <a href=${formatAddress(["trajectories"], { from: "all", task: textOf("task", rows[0]) })}>this task in all steps</a></p>
    <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${textOf("question", rows[0]) && html`<${LongText} text=${textOf("question", rows[0])} />`}
    ${textOf("expected", rows[0]) && html`<p class="note">expected: ${spell(textOf("expected", rows[0]))}</p>`}
    <${SideBySide} key=${`${path[1]} ${id}`} rows=${rows} query=${query} />
  `;
}

// The columns of `rows`, each with the place where it parts from the reference.
function SideBySide({ rows, query, names }) {
  const [limit, setLimit] = useState(MAX_COLUMNS);
  const best = rows.reduce((a, b) => ((numberOf("reward", b) ?? -Infinity) > (numberOf("reward", a) ?? -Infinity) ? b : a));
  const chosen = Number(query.get("with") ?? NaN);
  const reference = rows[chosen] ?? (names ? rows[0] : best);
  // The reference comes first, save where the order says what was before.
  const shown = names ? rows : [reference, ...rows.filter((row) => row !== reference).slice(0, limit - 1)];
  const { value, error } = useLoaded(() => Promise.all(shown.map(readDetails)), shown.join());
  const said = useMemo(() => value?.map(listSaid), [value]);
  if (error) return html`<${Problem} error=${error} />`;
  if (!said) return html`<${Loading} />`;
  const base = said[shown.indexOf(reference)];
  return html`
    <p class="note">Each column is compared with the one marked as reference: where it first differs is marked.
      ${rows.length > 2 && " Choose another to compare with."}</p>
    <div class="columns" tabindex="0" role="region" aria-label="Attempts side by side">
      ${shown.map((row, i) => html`<${Column} key=${row} row=${row} said=${said[i]}
        name=${names?.[i] ?? `attempt ${run.columns.sample[row]}`} isReference=${row === reference}
        divergence=${row === reference ? null : findDivergence(said[i], base)}
        onChoose=${names ? null : () => changeQuery({ with: rows.indexOf(row) })} />`)}
    </div>
    ${rows.length > limit && html`<button onClick=${() => setLimit(limit + MAX_COLUMNS)}>Show more (${rows.length - limit} are left)</button>`}
  `;
}

function Column({ row, said, name, isReference, divergence, onChoose }) {
  const end = describeEnd(row);
  return html`<section class="column ${isReference ? "reference" : ""}" aria-label=${name}>
    <header>
      <h3><a href=${trajectoryAddress(row)}>${spell(name)}</a></h3>
      <p class="legend"><b>${describeReward(row)}</b>
        <span>${formatCount(run.columns.turns[row], "turn")}</span><span>${formatCount(run.columns.tokens[row], "token")}</span>
        ${end && html`<span class="end">${end}</span>`}</p>
      ${isReference ? html`<p class="note">reference</p>` : onChoose && html`<button class="quiet" onClick=${onChoose}>compare with this</button>`}
    </header>
    ${said.map((item, i) => html`
      ${divergence?.item === i && html`<p class="divergence">first difference</p>`}
      <${SaidItem} item=${item} same=${divergence?.item === i ? divergence.length : null} />`)}
    ${divergence && divergence.item >= said.length && html`<p class="divergence">first difference: it ends here</p>`}
    ${!divergence && !isReference && html`<p class="note">No difference from the reference.</p>`}
    ${said.length === 0 && html`<p class="note">No model call was completed.</p>`}
  </section>`;
}

function SaidItem({ item, same }) {
  const known = ["system", "developer", "user", "assistant", "tool"].includes(item.role);
  // Of a long text, what surrounds the difference.
  const from = same !== null && same > MAX_SHOWN / 2 ? same - 300 : 0;
  const text = item.text;
  return html`<article class="message ${known ? item.role : ""}">
    <h4>${spell(item.role)}</h4>
    ${same === null
      ? html`<${LongText} text=${text} />`
      : html`<div class="text">${from > 0 && "…"}<span class="same">${spell(text.slice(from, same))}</span><mark>${spell(text.slice(same, same + MAX_SHOWN))}</mark>${text.length > same + MAX_SHOWN && "…"}</div>`}
  </article>`;
}
