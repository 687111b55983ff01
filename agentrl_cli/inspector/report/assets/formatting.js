// Numbers and texts as they are shown.

function formatNumber(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value !== 0 && Math.abs(value) < 0.5 * 10 ** -digits) return value.toExponential(1);
  const text = Math.abs(value) >= 1e5 ? Math.round(value).toLocaleString("en") : value.toFixed(digits);
  return text.replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "").replace(/^-/, "−");
}

const formatCount = (count, noun, plural = `${noun}s`) =>
  `${count.toLocaleString("en")} ${count === 1 ? noun : plural}`;

const formatSize = (bytes) =>
  bytes < 1e6 ? `${Math.max(Math.round(bytes / 1e3), 1)} kB` : `${(bytes / 1e6).toFixed(1)} MB`;

// Characters that change how the text around them reads, spelled out.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

const spell = (text) =>
  String(text).replace(
    HIDDEN,
    (c) => (c === "\r" ? "\\r" : `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`),
  );

const firstLine = (text, length = 160) => spell(text ?? "").replace(/\s+/g, " ").slice(0, length);

// How a trajectory ended, in a few words; "" for well.
function describeEnd(row) {
  const parts = [];
  const [boundary, stop] = [textOf("boundary", row), textOf("stop", row)];
  if (boundary) parts.push(`failed: ${boundary}`);
  if (stop) parts.push(`cut: ${stop}`);
  else if (run.columns.cut[row]) parts.push("cut: reply");
  if (run.columns.malformed[row]) parts.push("malformed call");
  if (run.columns.mismatches[row]) parts.push("mismatch");
  if (textOf("replaced_by", row)) parts.push("replaced");
  return parts.join(", ");
}

const describeReward = (row) => {
  const reward = numberOf("reward", row);
  return reward === null ? "unscored" : formatNumber(reward);
};

// Long texts begin short.
const MAX_SHOWN = 3000;

function LongText({ text, className = "" }) {
  const [isWhole, show] = useState(false);
  const all = spell(text);
  const isLong = all.length > MAX_SHOWN && !isWhole;
  return html`<div class="text ${className}">${isLong ? all.slice(0, MAX_SHOWN) : all}</div>
    ${isLong &&
    html`<button class="quiet" onClick=${() => show(true)}>
      Show all ${all.length.toLocaleString("en")} characters
    </button>`}`;
}

function Loading({ what = "Reading" }) {
  return html`<p class="note" role="status">${what}…</p>`;
}

function Problem({ error }) {
  return html`<p class="problem" role="alert">${String(error.message ?? error)}</p>`;
}
