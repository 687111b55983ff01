// The tokens of a model call, coloured by what is stored of them.

const TOKEN_VALUES = {
  logprob: "logprob", probability: "probability", gap: "gap |engine − trainer|", advantage: "advantage", version: "policy version", mask: "trained or not",
};
const MAX_TOKENS = 1500;
const PROMPT_SHOWN = 120;
// Nats between an engine and a trainer of one model: rounding to bfloat16 rarely makes so much.
const LARGE_GAP = 0.5;

function TokenView({ path, query }) {
  const row = findRow(path[1], path[2]);
  if (row === null) return html`<${NotThere} what="trajectory" />`;
  return html`<${LoadedTokens} key=${`${path[1]}/${path[2]}`} row=${row} query=${query} />`;
}

function LoadedTokens({ row, query }) {
  const { value, error } = useLoaded(() => readDetails(row), row);
  const number = Number(query.get("call") ?? 0);
  const call = value?.calls[number];
  const { gap, ...others } = TOKEN_VALUES;
  const options = value?.calls.some((c) => c.logprob_gaps.length) ? TOKEN_VALUES : others;
  const by = query.get("by") in options ? query.get("by") : "logprob";
  return html`
    <h1 tabindex="-1">Tokens of ${spell(nameOf(row))}</h1>
    <p class="crumbs"><a href=${trajectoryAddress(row)}>conversation</a> <a href=${groupAddress(row)}>group</a></p>
    ${error && html`<${Problem} error=${error} />`}
    ${!value && !error && html`<${Loading} />`}
    ${value && html`<form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <${Choice} label="Model call" name="call" value=${String(number)}
        options=${Object.fromEntries(value.calls.map((c, i) => [i, `${i + 1}: ${c.completion_ids.length} tokens, ${c.finish_reason ?? c.status}`]))} />
      <${Choice} label="Colour" name="by" value=${by} options=${options} />
    </form>`}
    ${value && (call ? html`<${Tokens} key=${`${number}`} row=${row} trajectory=${value} call=${call} by=${by} />` : html`<${NotThere} what="call" />`)}
  `;
}

function Tokens({ row, trajectory, call, by }) {
  const prompt = useMemo(() => promptIds(call), [call]);
  const [shownPrompt, showPrompt] = useState(PROMPT_SHOWN);
  const [limit, setLimit] = useState(MAX_TOKENS);
  const [at, setAt] = useState(null);
  const untrained = untrainedReason(row);
  const trains = isTrained(call);
  const advantage = computeAdvantage(row, call);
  const versions = useMemo(() => {
    let [low, high] = [Infinity, -Infinity];
    for (const v of call.versions) [low, high] = [Math.min(low, v), Math.max(high, v)];
    return [low, high];
  }, [call]);
  const text = (id) => trajectory.tokens?.[id] ?? null;
  const describe = (i) => {
    const [logprob, gap] = [logprobAt(call, i), gapAt(call, i)];
    const id = call.completion_ids[i];
    return [
      `token ${i + 1} of ${call.completion_ids.length}`, `id ${id}`,
      text(id) === null ? null : JSON.stringify(spell(text(id))),
      logprob === null ? "no logprob" : `logprob ${formatNumber(logprob)} (probability ${formatNumber(Math.exp(logprob))})`,
      gap === null ? null : `gap ${formatNumber(Math.abs(gap))} (the trainer's logprob ${formatNumber(logprob + gap)})`,
      call.versions[i] === undefined ? null : `policy version ${call.versions[i]}`,
      advantage.value === undefined ? null : `advantage ${formatNumber(advantage.value)}`,
      trains && !untrained ? "trained" : "not trained",
    ].filter((part) => part !== null).join(", ");
  };
  const first = Math.max(prompt.length - shownPrompt, 0);
  const count = Math.min(call.completion_ids.length, limit);
  const onKeyDown = (event) => {
    const moves = { ArrowRight: (at ?? -1) + 1, ArrowLeft: (at ?? 1) - 1, Home: 0, End: count - 1 };
    if (!(event.key in moves) || !count) return;
    const next = Math.max(0, Math.min(moves[event.key], count - 1));
    setAt(next);
    document.getElementById(`token-${next}`)?.scrollIntoView({ block: "nearest" });
    event.preventDefault();
  };
  const find = (event) => {
    const token = event.target.closest("[data-token]");
    if (token) setAt(Number(token.dataset.token));
  };
  const tokens = [];
  for (let i = 0; i < count; i++) {
    tokens.push(html`<span key=${i} id=${`token-${i}`} data-token=${i} class="token ${i === at ? "active" : ""} ${shade(by, call, i, { advantage, versions, trained: trains && !untrained }).name}"
      style=${{ "--heat": `${shade(by, call, i, { advantage, versions, trained: trains && !untrained }).percent}%` }}
      title=${describe(i)}>${showToken(text(call.completion_ids[i]), call.completion_ids[i])}</span>`);
  }
  const noGap = "The trainer has computed no logprobs for this call: it teaches nothing (an advantage of 0), or is not trained on.";
  const why = { gap: call.logprob_gaps.length ? null : noGap, advantage: advantage.why && `No advantage: ${advantage.why}.`, mask: untrained && `None of these tokens is trained on: ${untrained}.` }[by];
  return html`
    <${TokenLegend} by=${by} versions=${versions} />
    ${why && html`<p class="warn">${spell(why)}</p>`}
    ${call.completion_ids.length === 0 && html`<p class="note">No token ids are stored for this call.</p>`}
    ${trajectory.tokens === null && html`<p class="note">There is no tokenizer: these are token ids. Make the page again with --tokenizer MODEL_FOLDER to read them.</p>`}
    <p class="legend token-said" aria-live="polite">${at === null ? "Point at a token, or move with the arrow keys." : describe(at)}</p>
    <div class="tokens" tabindex="0" role="application" aria-roledescription="tokens"
      aria-label="Sampled tokens: left and right move" onKeyDown=${onKeyDown} onMouseOver=${find} onClick=${find}>
      ${prompt.length > 0 && html`<span class="prompt-tokens">
        ${first > 0 && html`<button class="quiet" onClick=${() => showPrompt(shownPrompt + 2000)}>${first.toLocaleString("en")} earlier prompt tokens</button> `}
        ${Array.from(prompt.subarray(first), (id, i) => html`<span key=${`p${first + i}`} title=${`prompt token ${first + i + 1}, id ${id}`}>${showToken(text(id), id)}</span>`)}
      </span>`}${tokens}
    </div>
    ${call.completion_ids.length > limit && html`<button onClick=${() => setLimit(limit + MAX_TOKENS)}>Show more (${(call.completion_ids.length - limit).toLocaleString("en")} are left)</button>`}
  `;
}

// A line break is shown and made.
const showToken = (text, id) => (text === null ? `${id} ` : spell(text).replace(/\n/g, "↵\n"));

// Which colour a token has, and how strong, in percent.
function shade(by, call, i, { advantage, versions, trained }) {
  const logprob = logprobAt(call, i);
  const clip = (share) => Math.round(70 * Math.max(0, Math.min(share, 1)));
  switch (by) {
    case "logprob":
      return { name: "low", percent: logprob === null ? 0 : clip(-logprob / 5) };
    case "probability":
      return { name: "low", percent: logprob === null ? 0 : clip(1 - Math.exp(logprob)) };
    case "gap":
      return { name: "low", percent: clip(Math.abs(gapAt(call, i) ?? 0) / LARGE_GAP) };
    case "advantage": {
      const value = advantage.value ?? 0;
      return { name: value < 0 ? "low" : "high", percent: clip(Math.abs(value) / 2) };
    }
    case "version": {
      const version = call.versions[i];
      const [low, high] = versions;
      if (version === undefined) return { name: "high", percent: 0 };
      return { name: "high", percent: high > low ? 10 + clip((version - low) / (high - low)) * 0.86 : 35 };
    }
    default:
      return { name: "high", percent: trained ? 40 : 0 };
  }
}

function TokenLegend({ by, versions }) {
  const texts = {
    logprob: ["low", "0 nats", "−5 nats and below"], probability: ["low", "probability 1", "0"],
    gap: ["low", "gap 0", `${LARGE_GAP} nats and above`], advantage: ["both", "−2 and below", "2 and above"],
    version: ["high", `version ${versions[0]}`, `${versions[1]}`], mask: ["high", "not trained", "trained"],
  };
  const [name, from, to] = texts[by];
  if (by === "version" && !Number.isFinite(versions[0])) return html`<p class="legend">No policy versions are stored for this call.</p>`;
  return html`<p class="legend"><span>${from}</span><i class="scale tokens-${name}"></i><span>${to}</span></p>`;
}
