// The first view: how the run went, what to look at first, and its curves.

function Overview() {
  const { head } = run;
  return html`
    <h1 tabindex="-1">${head.name}</h1>
    <p class="note wrap">${spell(head.run)}</p>
    <${Facts} />
    <section aria-labelledby="first">
      <h2 id="first">Look here first</h2>
      ${head.highlights.length
        ? html`<div class="cards">${head.highlights.map((h) => html`<${Highlight} key=${h.kind} highlight=${h} />`)}</div>`
        : html`<p class="note">${head.numRows ? "Nothing stands out: no failure, no malformed call, no cut reply, no alarm." : "No trajectory is stored yet."}</p>`}
    </section>
    <section aria-labelledby="curves">
      <h2 id="curves">Curves</h2>
      <${Charts} />
    </section>
    <${Whereabouts} />
  `;
}

function Facts() {
  const { metrics, evals, sources, numRows } = run.head;
  const known = (values) => (values ?? []).filter((value) => value !== null);
  const rewards = known(metrics.reward_mean);
  const measured = evals.filter((e) => e.label === null && e.mean !== null);
  const facts = [
    ["steps", sources.filter((s) => !s.isEval).length],
    ["evaluations", evals.length],
    ["trajectories", numRows.toLocaleString("en")],
  ];
  const change = (values) =>
    values.length > 1 ? `${formatNumber(values[0])} → ${formatNumber(values.at(-1))}` : formatNumber(values[0]);
  if (rewards.length) facts.push(["reward, first to last step", change(rewards)]);
  if (measured.length) facts.push(["evaluation, first to last", change(measured.map((e) => e.mean))]);
  return html`<dl class="facts">
    ${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

function Highlight({ highlight }) {
  const { title, why, count, total, items, link, kind } = highlight;
  const share = total ? `, ${formatNumber((100 * count) / total, 1)} % of all` : "";
  return html`<article class="card">
    <h3>${title}</h3>
    <p class="count">${["logprobs", "gaps"].includes(kind) ? "" : html`<b>${count.toLocaleString("en")}</b>${share}`}</p>
    <p class="note">${why}</p>
    <ul class="plain">
      ${items.map((item) => html`<li><${Example} item=${item} /></li>`)}
    </ul>
    ${link && html`<p><a href=${link}>${kind === "spread" ? "Map of all groups" : kind === "regressions" ? "Compare the evaluations" : "List them"}</a></p>`}
  </article>`;
}

function Example({ item }) {
  const text = spell(item.text);
  if (item.step !== undefined) {
    const address = formatAddress(["trajectories"], { from: "training", steps: item.step });
    return html`<a href=${address}>${text}</a>`;
  }
  const source = sourceOf(item.row);
  const address = item.group === undefined ? trajectoryAddress(item.row) : formatAddress(["group", source.key], { id: item.group });
  return html`<a href=${address}>${source.name}, ${spell(item.name)}</a>
    <span class="note"> ${text}</span>`;
}

// What is where: nothing is left out in silence.
function Whereabouts() {
  const { comparison, details, hasTokenizer, made, problems } = run.head;
  const place = {
    page: "Everything is inside this page.",
    files:
      `Curves, lists and maps are inside this page. What trajectories said is in ` +
      `${formatCount(details.numFiles ?? 0, "file")} (${formatSize(details.numBytes ?? 0)}) in the folder ` +
      `${details.folder}: keep it beside this page.`,
    server: "The run is read as it grows; this page updates itself.",
  }[details.where];
  return html`<footer class="note">
    ${problems.map((text) => html`<p class="problem">${spell(text)}</p>`)}
    <p>${place} Made ${made.replace("T", " ").replace("+00:00", " UTC")}.
      Logprobs are rounded to 0.001 nats; lists show and search the first 200 characters of texts.${" "}
      ${comparison ? "Tokens are shown as ids; agentrl report RUN has their texts. " : hasTokenizer ? "" : "No tokenizer was found: tokens are shown as ids. Name one with --tokenizer. "}
    </p>
  </footer>`;
}
