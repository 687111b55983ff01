// One trajectory as its conversations.

// Turns that are shown at first: agents may take thousands.
const MAX_TURNS = 100;

function TrajectoryView({ path, query }) {
  const row = findRow(path[1], path[2]);
  if (row === null) return html`<${NotThere} what="trajectory" />`;
  return html`<${LoadedTrajectory} key=${`${path[1]}/${path[2]}`} row=${row} query=${query} />`;
}

function NotThere({ what }) {
  return html`<h1 tabindex="-1">Not here</h1>
    <p>This run has no such ${what}. It may be of another run, or of a step that was made again.</p>
    <p><a href="#/trajectories">All trajectories</a></p>`;
}

function LoadedTrajectory({ row }) {
  const { value, error } = useLoaded(() => readDetails(row), row);
  const source = sourceOf(row);
  const rows = useMemo(() => groupRows(row), [row, run.columns]);
  const at = rows.indexOf(row);
  const neighbour = (to, text) => rows[to] !== undefined && html`<a href=${trajectoryAddress(rows[to])}>${text}</a>`;
  return html`
    <h1 tabindex="-1">${spell(nameOf(row))}</h1>
    <p class="crumbs">
      <a href=${formatAddress(["trajectories"], { from: source.isEval ? "evaluations" : "training", source: source.key })}>${source.name}</a>
      <a href=${groupAddress(row)}>group of ${rows.length}</a>
      ${neighbour(at - 1, "previous sibling")} ${neighbour(at + 1, "next sibling")}
    </p>
    <${Outcome} row=${row} trajectory=${value} />
    ${error && html`<${Problem} error=${error} />`}
    ${!value && !error && html`<${Loading} />`}
    ${value && html`<${Conversations} row=${row} trajectory=${value} />`}
  `;
}

function Outcome({ row, trajectory }) {
  const { columns, head } = run;
  const agent = textOf("agent", row);
  const facts = [
    ["reward", describeReward(row)],
    ...(agent ? [["agent", spell(agent)]] : []),
    ["task", html`<a href=${formatAddress(["trajectories"], { from: "all", task: textOf("task", row) })}>${spell(textOf("task", row))}</a>`],
    ["turns", columns.turns[row]], ["tool calls", columns.calls[row]], ["sampled tokens", columns.tokens[row]],
    ["seconds", formatNumber(columns.seconds[row], 1)],
  ];
  const parts = Object.entries(trajectory?.rewardParts ?? {});
  const stop = textOf("stop", row);
  const replaced = textOf("replaced_by", row);
  const mismatch = textOf("mismatch", row);
  return html`
    <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${parts.length > 0 && html`<p class="legend"><span>Parts of the reward:</span>${parts.map(([name, value]) => html`<span>${spell(name)} <b>${formatNumber(value)}</b></span>`)}</p>`}
    ${stop && html`<p class="warn">Stopped by its budget: ${stop}</p>`}
    ${!stop && columns.cut[row] > 0 && html`<p class="warn">The last reply was cut off at its length limit.</p>`}
    ${replaced && html`<p class="warn">Not trained on: its group scored alike, and ${spell(replaced)} replaced it.</p>`}
    ${mismatch && mismatch.split(" ").map((cause) => html`<p class="warn">Prefix mismatch, ${cause}: ${head.remedies[cause] ?? ""}</p>`)}
    ${textOf("boundary", row) && html`<${FailureNote} row=${row} trajectory=${trajectory} />`}
  `;
}

function FailureNote({ row, trajectory }) {
  const message = trajectory?.failure_message ?? textOf("failure", row) ?? "";
  return html`<section class="failure" aria-label="Failure">
    <h2>Failed in ${textOf("boundary", row)}, caused by the ${textOf("cause", row)}</h2>
    <${LongText} text=${`${textOf("kind", row)}: ${message}`} />
    ${trajectory?.failure_traceback && html`<details><summary>Traceback</summary><pre tabindex="0">${spell(trajectory.failure_traceback)}</pre></details>`}
  </section>`;
}

function Conversations({ row, trajectory }) {
  const [limit, setLimit] = useState(MAX_TURNS);
  const items = useMemo(() => listTurns(trajectory), [trajectory]);
  const others = trajectory.calls.filter((call) => call.status !== "completed");
  const task = Object.entries(trajectory.task).filter(([, value]) => value !== null);
  return html`
    ${task.length > 0 && html`<details class="task"><summary>The task's row</summary>
      <dl>${task.map(([name, value]) => html`<dt>${spell(name)}</dt><dd><${LongText} text=${typeof value === "string" ? value : toJson(value)} /></dd>`)}</dl>
    </details>`}
    <h2>What was said</h2>
    <div class="turns">
      ${items.slice(0, limit).map((item) => html`<div class=${`depth-${Math.min(item.depth, 5)}`}>
        ${item.heading && html`<h3 class="branch">${item.heading}</h3>`}
        ${item.call && html`<${Turn} row=${row} trajectory=${trajectory} call=${item.call} />`}
      </div>`)}
    </div>
    ${items.length > limit && html`<button onClick=${() => setLimit(limit + MAX_TURNS)}>
      Show more (${(items.length - limit).toLocaleString("en")} are left)</button>`}
    ${items.length === 0 && html`<p class="note">No model call was completed.</p>`}
    ${others.length > 0 && html`<h2>${formatCount(others.length, "call")} that did not complete</h2>
      ${others.map((call) => html`<${BrokenCall} trajectory=${trajectory} call=${call} />`)}`}
    ${trajectory.final_answer !== null && html`<h2>Final answer</h2><${LongText} text=${trajectory.final_answer} />`}
  `;
}

function Turn({ row, trajectory, call }) {
  const versions = [...new Set(call.versions)].sort((a, b) => a - b);
  const { value, why } = computeAdvantage(row, call);
  const facts = [
    formatCount(call.completion_ids.length || call.num_reported_tokens, "token"),
    versions.length ? `policy version ${versions.length > 1 ? `${versions[0]}–${versions.at(-1)}` : versions[0]}` : null,
    call.finish_reason ? `ended by ${spell(call.finish_reason)}` : "no finish reason",
    call.reward !== null ? `own reward ${formatNumber(call.reward)}` : null,
    call.turn_return !== null ? `return ${formatNumber(call.turn_return)}` : null,
    value !== undefined ? `advantage ${formatNumber(value)}` : null,
    call.logprob_gaps.length ? `largest gap ${formatNumber(largestGap(call))}` : null,
  ].filter(Boolean);
  return html`
    ${newMessages(trajectory, call).map((message) => html`<${Message} message=${message} />`)}
    <div class="reply">
      ${call.replyMessage ? html`<${Message} message=${call.replyMessage} />` : html`<p class="note">No reply is stored.</p>`}
      <p class="legend turn-facts">
        ${facts.map((text) => html`<span>${text}</span>`)}
        ${value === undefined && html`<span class="note">no advantage: ${why}</span>`}
        <a href=${tokenAddress(row, call.number)}>tokens</a>
      </p>
      ${call.has_malformed_call && html`<p class="warn">Malformed tool call: read as text.</p>`}
      ${call.mismatch_cause && html`<p class="warn">Prefix mismatch here: ${call.mismatch_cause}</p>`}
    </div>`;
}

function Message({ message }) {
  const role = String(message?.role ?? "?");
  const text = contentText(message?.content);
  const reasoning = contentText(message?.reasoning_content ?? message?.reasoning);
  const name = message?.name ?? message?.tool_call_id;
  const known = ["system", "developer", "user", "assistant", "tool"].includes(role);
  return html`<article class="message ${known ? role : ""}">
    <h4>${spell(role)} ${typeof name === "string" && html`<span class="note">${spell(name)}</span>`}</h4>
    ${reasoning && html`<details><summary>Reasoning</summary><${LongText} text=${reasoning} /></details>`}
    ${text && html`<${LongText} text=${text} />`}
    ${toolCalls(message).map((call) => html`<div class="call">
      <h5>calls ${spell(call.name)} ${typeof call.id === "string" && html`<span class="note">${spell(call.id)}</span>`}</h5>
      <${LongText} className="code" text=${call.text} />
    </div>`)}
  </article>`;
}

function BrokenCall({ trajectory, call }) {
  const last = call.messageNumbers.at(-1);
  return html`<section class="failure">
    <h3>${spell(call.status)}</h3>
    <${LongText} text=${call.error ?? "No error is stored."} />
    ${last !== undefined && html`
      <p class="note">${call.messageNumbers.length > 1 ? `After ${formatCount(call.messageNumbers.length - 1, "message")}, it was asked:` : "It was asked:"}</p>
      <${Message} message=${trajectory.messages[last]} />`}
  </section>`;
}
