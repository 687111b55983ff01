// A stored row (store/trajectory_record.py) as a trajectory, and its calls as conversations.

const NO_NUMBER = -32768;

function unpack([lengths, text], type) {
  const bytes = decodeBase64(text);
  const all = new type(bytes.buffer, 0, bytes.byteLength / type.BYTES_PER_ELEMENT);
  let end = 0;
  return lengths.map((length) => all.subarray(end, (end += length)));
}

// Python writes NaN and infinities as no JSON has them.
const NOT_JSON = /(?<=[:,[]\s*)(-?Infinity|NaN)(?=\s*[,}\]])/g;

function parseJson(text, otherwise) {
  for (const attempt of [text, text.replace(NOT_JSON, '"$1"')]) {
    try {
      return JSON.parse(attempt) ?? otherwise;
    } catch {
      // The other spelling, or what is given for texts that are no JSON.
    }
  }
  return otherwise;
}

function parseTrajectory(row, tokens) {
  const { interactions, ...fields } = row;
  const lists = {
    new_prompt_ids: unpack(interactions.new_prompt_ids, Int32Array),
    completion_ids: unpack(interactions.completion_ids, Int32Array),
    versions: unpack(interactions.versions, Int32Array),
    rollout_logprobs: unpack(interactions.rollout_logprobs, Int16Array),
    logprob_gaps: unpack(interactions.logprob_gaps, Float32Array),
  };
  const columns = { ...interactions, ...lists };
  const messages = row.messages_json.map((text) => parseJson(text, { content: text }));
  const tools = row.tools_json.map((text) => parseJson(text, []));
  const byId = new Map();
  const calls = columns.id.map((id, number) => {
    const call = { number };
    for (const name of Object.keys(columns)) call[name] = columns[name][number];
    const parent = byId.get(call.parent_id) ?? null;
    call.shares = parent; // What its request repeats, whatever became of that call.
    const isBefore =
      parent?.status === "completed" &&
      (parent.started < call.started || (parent.started === call.started && parent.id < id));
    call.parent = isBefore ? parent : null;
    const before = parent ? parent.messageNumbers.slice(0, call.num_parent_messages) : [];
    call.messageNumbers = [...before, ...call.new_messages];
    call.toolList = call.tools === null ? [] : tools[call.tools];
    call.replyMessage = call.reply === null ? null : messages[call.reply];
    byId.set(id, call);
    return call;
  });
  return {
    ...fields,
    calls,
    messages,
    tokens: tokens ?? null,
    task: parseJson(row.task_json, {}),
    rewardParts: parseJson(row.reward_parts_json, {}),
  };
}

function promptIds(call) {
  const chain = [];
  for (let at = call; at; at = at.shares) chain.unshift(at);
  let ids = new Int32Array(0);
  let previous = null;
  for (const at of chain) {
    let before = new Int32Array(0);
    if (previous && at.num_parent_ids) {
      const whole = new Int32Array(ids.length + previous.completion_ids.length);
      whole.set(ids);
      whole.set(previous.completion_ids, ids.length);
      before = whole.subarray(0, at.num_parent_ids);
    }
    ids = new Int32Array(before.length + at.new_prompt_ids.length);
    ids.set(before);
    ids.set(at.new_prompt_ids, before.length);
    previous = at;
  }
  return ids;
}

const logprobAt = (call, index) => {
  const value = call.rollout_logprobs[index];
  return value === undefined || value === NO_NUMBER ? null : value / 1000;
};

// How far the trainer's logprob is above the engine's; null where the trainer has computed none.
const gapAt = (call, index) => {
  const value = call.logprob_gaps[index];
  return value === undefined || Number.isNaN(value) ? null : value;
};

const largestGap = (call) =>
  call.logprob_gaps.reduce((most, gap) => (Math.abs(gap) > most ? Math.abs(gap) : most), 0);

// The messages of a request that its parent's turn did not have; all, where history differs.
function newMessages(trajectory, call) {
  const numbers = call.messageNumbers;
  const known = call.parent?.messageNumbers ?? [];
  const isLonger = call.parent && numbers.length > known.length;
  const continues = isLonger && known.every((number, i) => numbers[i] === number);
  // The message after them is the parent's reply, however it is spelled now.
  const added = continues ? numbers.slice(known.length + 1) : numbers;
  return added.map((number) => trajectory.messages[number]);
}

// Turns in the order of reading, with a heading wherever conversations begin or part.
function listTurns(trajectory) {
  const children = new Map();
  const completed = trajectory.calls.filter((call) => call.status === "completed");
  for (const call of completed) {
    const siblings = children.get(call.parent) ?? [];
    children.set(call.parent, [...siblings, call]);
  }
  const roots = children.get(null) ?? [];
  const items = [];
  const pending = roots.map((call, i) => ({
    call,
    depth: 0,
    heading: roots.length > 1 ? `Conversation ${i + 1} of ${roots.length}` : null,
  }));
  while (pending.length) {
    const { call, depth, heading } = pending.shift();
    if (heading) items.push({ heading, depth });
    items.push({ call, depth });
    const following = children.get(call) ?? [];
    const forks = following.map((child, i) => ({
      call: child,
      depth: following.length > 1 ? depth + 1 : depth,
      heading: following.length > 1 ? `Branch ${i + 1} of ${following.length}` : null,
    }));
    pending.unshift(...forks);
  }
  return items;
}

const toJson = (value) => JSON.stringify(value, null, 2) ?? "";

function contentText(content) {
  if (content === null || content === undefined) return "";
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return toJson(content);
  return content.map((part) => (typeof part?.text === "string" ? part.text : toJson(part))).join("\n");
}

function toolCalls(message) {
  const calls = Array.isArray(message?.tool_calls) ? message.tool_calls : [];
  return calls.map((call) => {
    const { name, arguments: given } = call?.function ?? {};
    if (name === undefined) return { id: call?.id, name: "?", text: toJson(call) };
    const parsed = typeof given === "string" ? parseJson(given, given) : given;
    const text = typeof parsed === "string" ? parsed : toJson(parsed);
    return { id: call.id, name: String(name), text };
  });
}

// What was said, turn after turn, without ids that differ by chance: to be compared.
function listSaid(trajectory) {
  const said = [];
  const add = (message) => {
    if (!message) return;
    const calls = toolCalls(message).map(({ name, text }) => `→ ${name} ${text}`);
    const text = [contentText(message.content), ...calls].filter(Boolean).join("\n");
    said.push({ role: String(message.role ?? "?"), text });
  };
  for (const { call } of listTurns(trajectory)) {
    if (!call) continue;
    newMessages(trajectory, call).forEach(add);
    add(call.replyMessage);
  }
  return said;
}

// Where two conversations part: the number of the first item that differs, and the length of what
// both begin it with; null where nothing differs.
function findDivergence(said, reference) {
  for (let i = 0; i < Math.max(said.length, reference.length); i++) {
    const [one, other] = [said[i], reference[i]];
    if (one && other && one.role === other.role && one.text === other.text) continue;
    let length = 0;
    if (one && other && one.role === other.role) {
      while (length < one.text.length && one.text[length] === other.text[length]) length++;
    }
    return { item: i, length };
  }
  return null;
}

// Credit

function groupStatistics(rows) {
  const scores = rows.map((row) => numberOf("score", row)).filter((score) => score !== null);
  if (!scores.length) return { mean: 0, deviation: 0, count: 0 };
  const mean = scores.reduce((sum, s) => sum + s, 0) / scores.length;
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  const isFlat = high - low <= 1e-9 * Math.max(...scores.map(Math.abs));
  const squares = scores.reduce((sum, s) => sum + (s - mean) ** 2, 0);
  const deviation = isFlat ? 0 : Math.sqrt(squares / Math.max(scores.length - 1, 1));
  return { mean, deviation, count: scores.length };
}

const EPSILON = 1e-6; // As the trainer adds it to deviations.

// The advantage of a call's tokens as the algorithm computes it from what is stored, or why there is
// none.
function computeAdvantage(row, call) {
  const { training } = run.head;
  if (sourceOf(row).isEval) return { why: "it is of an evaluation" };
  if (!training) return { why: "the run's configuration cannot be read" };
  if (training.advantage === "gae") return { why: "the critic's values are not stored" };
  if (training.isPenalized) return { why: "the penalties on length or divergence are not stored" };
  if (textOf("replaced_by", row)) return { why: "its group was replaced" };
  const score = numberOf("score", row);
  if (score === null || call.turn_return === null) return { why: "it is unscored" };
  let rows = groupRows(row);
  if (training.baseline === "batch") rows = batchRows(row);
  const group = groupStatistics(rows);
  if (group.deviation === 0) return { value: 0 };
  const centered = call.turn_return - group.mean;
  switch (training.advantage) {
    case "dr_grpo":
      return { value: centered };
    case "rloo":
      return { value: call.turn_return - (group.mean * group.count - score) / (group.count - 1) };
    case "maxrl":
      return { value: centered / group.mean };
    case "reinforce_plus_plus":
      return { value: centered / (batchDeviation(row) + EPSILON) };
    default:
      return { value: centered / (group.deviation + EPSILON) };
  }
}

function batchRows(row) {
  const { start, count } = sourceOf(row);
  return Array.from({ length: count }, (_, i) => start + i).filter(
    (i) => run.columns.replaced_by[i] < 0,
  );
}

function batchDeviation(row) {
  const rows = batchRows(row).filter((i) => numberOf("score", i) !== null);
  const means = new Map();
  for (const i of rows) {
    const sums = means.get(run.columns.group[i]) ?? [0, 0];
    means.set(run.columns.group[i], [sums[0] + run.columns.score[i], sums[1] + 1]);
  }
  const isBatch = run.head.training.baseline === "batch";
  const overall = rows.reduce((sum, i) => sum + run.columns.score[i], 0) / rows.length;
  const centered = rows.map((i) => {
    const [sum, count] = means.get(run.columns.group[i]);
    return run.columns.score[i] - (isBatch ? overall : sum / count);
  });
  const mean = centered.reduce((sum, c) => sum + c, 0) / centered.length;
  const squares = centered.reduce((sum, c) => sum + (c - mean) ** 2, 0);
  return Math.sqrt(squares / Math.max(centered.length - 1, 1));
}

// Why none of a trajectory's tokens is trained on; null: those of completed, sampled calls are.
function untrainedReason(row) {
  const source = sourceOf(row);
  if (source.isEval) return "it is of an evaluation";
  if (textOf("replaced_by", row)) return `its group was replaced by ${textOf("replaced_by", row)}`;
  if (numberOf("score", row) === null) return "it has no reward";
  if (!run.head.metrics.step.includes(source.step)) return `step ${source.step} is not trained yet`;
  if (run.head.training?.needsSignal && groupStatistics(groupRows(row)).deviation === 0) {
    return "its group scored alike: the advantage is 0";
  }
  return null;
}

const isTrained = (call) =>
  call.status === "completed" && call.temperature > 0 && call.turn_return !== null;
