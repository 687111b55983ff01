// The first view of a comparison: models in a table, what is said about each, and the curves of runs.

function ComparisonView() {
  const { evals, comparison, name } = run.head;
  return html`
    <h1 tabindex="-1">${name}</h1>
    ${evals.length > 0 && html`<${EvalTable} />`}
    ${comparison.verdicts.length > 0 && html`<ul class="plain verdicts">
      ${comparison.verdicts.map((verdict) => html`<li><${Verdict} verdict=${verdict} /></li>`)}
    </ul>`}
    ${comparison.notes.map((note) => html`<p class="warn">${spell(note)}</p>`)}
    ${comparison.runs.length > 0 && html`<section aria-labelledby="curves">
      <h2 id="curves">Curves</h2>
      <p class="legend">${comparison.runs.map((each, n) => html`<span><${Swatch} number=${n} />${spell(`${each.letters}  ${each.name}`)}</span>`)}</p>
      <${Charts} />
    </section>`}
    <${Whereabouts} />
  `;
}

function Verdict({ verdict }) {
  const before = run.head.evals[0].key;
  const address = formatAddress(["evaluations"], { before, after: verdict.after });
  return html`<b>${spell(verdict.text)}</b> <a href=${address}>${before} and ${verdict.after}, task by task</a>`;
}
