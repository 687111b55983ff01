// The run's data: `head` is there at once, columns of all trajectories a moment later, and the
// details of a trajectory when they are asked for.

const { html, render, useEffect, useLayoutEffect, useMemo, useRef, useState, useErrorBoundary } =
  htmPreact;

const run = {
  head: JSON.parse(document.getElementById("head").textContent),
  columns: null, // {name: typed array}, when they are read
  texts: null, // {name: [text]} of those columns that hold numbers of texts
  problem: null,
  isLive: false,
};
run.isLive = run.head.details.where === "server";

const listeners = new Set();

function notify() {
  for (const listener of [...listeners]) listener();
}

const NUMBERS = {
  "|u1": Uint8Array, "<i4": Int32Array, "<f4": Float32Array, "<f8": Float64Array,
};

async function decompress(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function decodeBase64(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

const awaited = new Map(); // What scripts of details hand over, by name.

window.addBlock = (name, text) => awaited.get(name)?.(text);

function loadScript(name) {
  const { folder, tag } = run.head.details;
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = [folder, `${name}.${tag}.js`].map(encodeURIComponent).join("/");
    awaited.set(name, resolve);
    script.onload = () => {
      script.remove();
      reject(new Error(`${folder}/${name}.${tag}.js is of another page: make the page again`));
    };
    script.onerror = () => {
      script.remove();
      reject(
        new Error(
          `The file ${folder}/${name}.${tag}.js is missing. It holds the details of these ` +
            `trajectories: keep the folder ${folder} beside this page.`,
        ),
      );
    };
    document.head.append(script);
  }).finally(() => awaited.delete(name));
}

async function readBlock(name) {
  const element = document.getElementById(`block:${name}`);
  if (element) return decompress(decodeBase64(element.textContent));
  if (run.isLive) {
    const response = await fetch(`block/${encodeURIComponent(name)}`);
    if (!response.ok) throw new Error(await response.text());
    return decompress(new Uint8Array(await response.arrayBuffer()));
  }
  if (run.head.details.where === "page") {
    throw new Error("The details of these trajectories could not be read when the page was made.");
  }
  return decompress(decodeBase64(await loadScript(name)));
}

function parseColumns(bytes) {
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const columns = {};
  for (const [name, [type, start, count]] of Object.entries(header.columns)) {
    columns[name] = new NUMBERS[type](bytes.buffer, 4 + length + start, count);
  }
  return { columns, texts: header.texts, version: header.version };
}

// The columns that belong to `head`; false where the run has gone on meanwhile.
async function readColumns(head) {
  const found = (await Promise.all(["summary", "texts"].map(readBlock))).map(parseColumns);
  if (found.some(({ version }) => version !== head.version)) return false;
  const [one, other] = found;
  blocks.clear();
  lastSource = 0;
  Object.assign(run, {
    head, columns: { ...one.columns, ...other.columns }, texts: { ...one.texts, ...other.texts },
  });
  document.documentElement.dataset.columns = "read";
  return true;
}

async function begin() {
  try {
    await readColumns(run.head);
  } catch (error) {
    run.problem = String(error.message ?? error);
  }
  notify();
  if (run.isLive) setTimeout(poll, run.columns ? POLL_MS : 0);
}

// Trajectories are numbered through all sources.

let lastSource = 0;

function sourceNumber(row) {
  const { sources } = run.head;
  const has = (n) => row >= sources[n].start && row < sources[n].start + sources[n].count;
  if (sources[lastSource] && has(lastSource)) return lastSource;
  let [low, high] = [0, sources.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (sources[middle].start <= row) low = middle;
    else high = middle - 1;
  }
  // An empty source begins where the next one does.
  while (low > 0 && !has(low)) low--;
  return (lastSource = low);
}

const sourceOf = (row) => run.head.sources[sourceNumber(row)];

function findSource(key) {
  return run.head.sources.find((source) => source.key === key);
}

function findRow(key, place) {
  const source = findSource(key);
  const number = Number(place);
  const isThere = source && Number.isInteger(number) && number >= 0 && number < source.count;
  return isThere ? source.start + number : null;
}

function textOf(name, row) {
  const code = run.columns[name][row];
  return code < 0 ? null : run.texts[name][code];
}

function numberOf(name, row) {
  const value = run.columns[name][row];
  return Number.isNaN(value) ? null : value;
}

const nameOf = (row) =>
  textOf("id", row) ?? `${textOf("group", row)}/${run.columns.sample[row]}`;

function groupRows(row) {
  const { start, count } = sourceOf(row);
  const { group } = run.columns;
  const rows = [];
  for (let i = start; i < start + count; i++) if (group[i] === group[row]) rows.push(i);
  return rows;
}

// What lists begin with.
const listedFirst = () =>
  run.head.sources.length && run.head.sources.every((source) => source.isEval) ? "evaluations" : "training";

// Details

const MAX_BLOCKS = 24;
const blocks = new Map();

function readDetails(row) {
  const source = sourceOf(row);
  const place = row - source.start;
  const name = `${source.key}.${Math.floor(place / source.blockRows)}`;
  let block = blocks.get(name);
  if (block) {
    blocks.delete(name);
  } else {
    block = readBlock(name).then((bytes) => JSON.parse(new TextDecoder().decode(bytes)));
    block.catch(() => blocks.delete(name));
    if (blocks.size >= MAX_BLOCKS) blocks.delete(blocks.keys().next().value);
  }
  blocks.set(name, block);
  return block.then(({ start, rows, tokens }) => parseTrajectory(rows[place - start], tokens));
}

// A live run

const POLL_MS = 2000;

async function poll() {
  try {
    const response = await fetch("head");
    if (!response.ok) throw new Error(await response.text());
    const head = await response.json();
    const isNew = !run.columns || head.version !== run.head.version;
    const hasChanged = (isNew && (await readColumns(head))) || run.problem !== null;
    run.problem = null;
    if (hasChanged) notify();
  } catch (error) {
    run.problem = `The server does not answer (${error.message}). Is agentrl report --serve still running?`;
    notify();
  }
  setTimeout(poll, POLL_MS);
}

function useRun() {
  const [, set] = useState(0);
  useEffect(() => {
    const listener = () => set((n) => n + 1);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
}

// What `load` gives, for `key`: {value}, {error} or {}. Until it is there again, what was there.
function useLoaded(load, key) {
  const [state, set] = useState({});
  useEffect(() => {
    let isOver = false;
    load().then(
      (value) => isOver || set({ key, value }),
      (error) => isOver || set({ key, error }),
    );
    return () => {
      isOver = true;
    };
  }, [key, run.columns]);
  return state.key === key ? state : {};
}
