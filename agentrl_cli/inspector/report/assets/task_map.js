// Tasks by steps: a cell is what the attempts at a task in a step earned.

const CELL = 20;
const ROW_HEAD = 92;
const COLUMN_HEAD = 26;
const MAP_COLORS = { reward: "mean reward", spread: "deviation of the scores", failures: "share of failures" };
const MAP_ORDERS = {
  lowest: "lowest reward first", highest: "highest reward first", spread: "largest deviation first",
  often: "most attempts first", task: "task",
};

function buildCells(isEval) {
  const { columns, head } = run;
  const sources = head.sources.filter((s) => s.isEval === isEval && s.count);
  const cells = new Map(); // task * sources + column
  const tasks = new Map();
  sources.forEach((source, column) => {
    for (let row = source.start; row < source.start + source.count; row++) {
      const task = columns.task[row];
      const key = task * sources.length + column;
      let cell = cells.get(key);
      if (!cell) {
        cell = { row, count: 0, scored: 0, sum: 0, squares: 0, failed: 0 };
        cells.set(key, cell);
        if (!tasks.has(task)) tasks.set(task, []);
        tasks.get(task).push(cell);
      }
      const score = columns.score[row];
      cell.count++;
      cell.failed += columns.boundary[row] >= 0;
      if (!Number.isNaN(score)) {
        cell.scored++;
        cell.sum += score;
        cell.squares += score * score;
      }
    }
  });
  let [low, high] = [Infinity, -Infinity];
  for (const cell of cells.values()) {
    cell.mean = cell.scored ? cell.sum / cell.scored : null;
    const variance = cell.scored > 1 ? (cell.squares - cell.sum * cell.mean) / (cell.scored - 1) : 0;
    cell.spread = cell.scored ? Math.sqrt(Math.max(variance, 0)) : null;
    cell.failures = cell.failed / cell.count;
    if (cell.mean !== null) [low, high] = [Math.min(low, cell.mean), Math.max(high, cell.mean)];
  }
  return { sources, cells, tasks, low, high };
}

function orderTasks({ tasks }, order) {
  const average = (list, name) => {
    const known = list.map((cell) => cell[name]).filter((value) => value !== null);
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  };
  const name = (task) => run.texts.task[task] ?? "";
  const byName = (a, b) => name(a).localeCompare(name(b), "en", { numeric: true });
  if (order === "task") return [...tasks.keys()].sort(byName);
  const keys = new Map();
  for (const [task, list] of tasks) {
    const mean = order === "often" ? 0 : average(list, order === "spread" ? "spread" : "mean");
    const value = {
      lowest: mean ?? Infinity, highest: mean === null ? Infinity : -mean,
      spread: -(mean ?? -1), often: -list.reduce((sum, cell) => sum + cell.count, 0),
    }[order];
    keys.set(task, value);
  }
  return [...tasks.keys()].sort((a, b) => keys.get(a) - keys.get(b) || byName(a, b));
}

function TaskMap({ query }) {
  const isEval = (query.get("from") ?? listedFirst()) === "evaluations";
  const color = query.get("color") in MAP_COLORS ? query.get("color") : "reward";
  const order = query.get("order") in MAP_ORDERS ? query.get("order") : "lowest";
  const map = useMemo(() => buildCells(isEval), [run.columns, isEval]);
  const tasks = useMemo(() => orderTasks(map, order), [map, order]);
  return html`
    <h1 tabindex="-1">Tasks by ${isEval ? "evaluations" : "steps"}</h1>
    <p class="note">Each cell is a group: the attempts at one task in one ${isEval ? "evaluation" : "step"}. Open one to compare them.</p>
    <form class="filters" onSubmit=${(event) => event.preventDefault()}>
      <${Choice} label="Of" name="from" value=${isEval ? "evaluations" : "training"}
        options=${{ training: "training steps", evaluations: "evaluations" }} />
      <${Choice} label="Colour" name="color" value=${color} options=${MAP_COLORS} />
      <${Choice} label="Order" name="order" value=${order} options=${MAP_ORDERS} />
    </form>
    ${tasks.length
      ? html`<${MapCanvas} map=${map} tasks=${tasks} color=${color} />`
      : html`<p class="note">Nothing of this kind is stored yet.</p>`}
  `;
}

function Choice({ label, name, value, options }) {
  return html`<label>${label}
    <select value=${value} onChange=${(event) => changeQuery({ [name]: event.target.value })}>
      ${Object.entries(options).map(([key, text]) => html`<option value=${key} selected=${key === value}>${text}</option>`)}
    </select>
  </label>`;
}

const parseColor = (text) => {
  const [r, g, b] = text.match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  return [r, g, b];
};
const mixColor = (one, other, share) =>
  `rgb(${one.map((value, i) => Math.round(value + (other[i] - value) * share)).join(" ")})`;

function MapCanvas({ map, tasks, color }) {
  const box = useRef(null);
  const canvas = useRef(null);
  const width = useWidth(box);
  const theme = useColors();
  const { sources, cells } = map;
  const [at, setAt] = useState(() => [0, Math.max(sources.findIndex((_, n) => cells.has(tasks[0] * sources.length + n)), 0)]);
  const [scroll, setScroll] = useState([0, 0]);
  // Rewards from 0 to 1 have a scale from 0 to 1.
  const isUnit = map.low >= 0 && map.high <= 1;
  const [low, high] = isUnit ? [0, 1] : [map.low, map.high];
  const height = Math.min(tasks.length * CELL + COLUMN_HEAD + 16, 560);
  const cellAt = ([line, column]) => cells.get(tasks[line] * sources.length + column);
  const top = { reward: high, spread: Math.max((high - low) / 2, 1e-9), failures: 1 }[color];
  const bottom = color === "reward" ? low : 0;

  useLayoutEffect(() => {
    const pixels = devicePixelRatio || 1;
    const element = canvas.current;
    element.width = width * pixels;
    element.height = height * pixels;
    const pen = element.getContext("2d");
    pen.scale(pixels, pixels);
    pen.clearRect(0, 0, width, height);
    const get = colors();
    const [from, to] = [parseColor(get("map-low")), parseColor(get("map-high"))];
    const [left, up] = scroll;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const firstLine = Math.floor(up / CELL);
    const lastLine = Math.min(tasks.length, firstLine + Math.ceil(height / CELL) + 1);
    const firstColumn = Math.floor(left / CELL);
    const lastColumn = Math.min(sources.length, firstColumn + Math.ceil(width / CELL) + 1);
    pen.save();
    pen.beginPath();
    pen.rect(ROW_HEAD, COLUMN_HEAD, width, height);
    pen.clip();
    for (let line = firstLine; line < lastLine; line++) {
      for (let column = firstColumn; column < lastColumn; column++) {
        const cell = cellAt([line, column]);
        const [x, y] = [ROW_HEAD + column * CELL - left, COLUMN_HEAD + line * CELL - up];
        if (cell) {
          const value = { reward: cell.mean, spread: cell.spread, failures: cell.failures }[color];
          if (value === null) {
            pen.strokeStyle = get("alert");
            pen.strokeRect(x + 2.5, y + 2.5, CELL - 5, CELL - 5);
          } else {
            const share = top > bottom ? (value - bottom) / (top - bottom) : 1;
            pen.fillStyle = mixColor(from, to, Math.max(0, Math.min(share, 1)));
            pen.fillRect(x + 1, y + 1, CELL - 2, CELL - 2);
            pen.strokeStyle = get("line");
            pen.strokeRect(x + 1.5, y + 1.5, CELL - 3, CELL - 3);
            if (cell.failed && color !== "failures") {
              pen.fillStyle = get("alert");
              pen.fillRect(x + CELL - 7, y + 2, 5, 5);
            }
          }
        }
        if (line === at[0] && column === at[1]) {
          pen.strokeStyle = get("ink");
          pen.lineWidth = 2;
          pen.strokeRect(x + 1, y + 1, CELL - 2, CELL - 2);
          pen.lineWidth = 1;
        }
      }
    }
    pen.restore();
    pen.fillStyle = get("muted");
    pen.textAlign = "right";
    for (let line = firstLine; line < lastLine; line++) {
      const y = COLUMN_HEAD + line * CELL - up + CELL / 2;
      if (y > COLUMN_HEAD) pen.fillText(firstLineOf(run.texts.task[tasks[line]]), ROW_HEAD - 8, y);
    }
    pen.textAlign = "left";
    // A number needs the room of two cells or more.
    const marks = sources.map((s) => s.letter ?? String(s.step));
    const every = Math.min(Math.max(...marks.map((mark) => mark.length)), 3);
    for (let column = firstColumn; column < lastColumn; column++) {
      const x = ROW_HEAD + column * CELL - left + 2;
      if (column % every === 0 && x >= ROW_HEAD) pen.fillText(marks[column], x, COLUMN_HEAD / 2);
    }
  }, [width, height, theme, map, tasks, color, scroll, at]);

  const move = (line, column) => {
    const next = [Math.max(0, Math.min(line, tasks.length - 1)), Math.max(0, Math.min(column, sources.length - 1))];
    setAt(next);
    const element = box.current;
    const keep = (position, start, size) =>
      position < start ? position : position + CELL > start + size ? position + CELL - size : start;
    element.scrollTop = keep(next[0] * CELL, element.scrollTop, element.clientHeight - COLUMN_HEAD);
    element.scrollLeft = keep(next[1] * CELL, element.scrollLeft, element.clientWidth - ROW_HEAD);
  };
  const open = (place) => {
    const cell = cellAt(place);
    if (cell) openAddress(groupAddress(cell.row));
  };
  const onKeyDown = (event) => {
    const [line, column] = at;
    const moves = {
      ArrowDown: [line + 1, column], ArrowUp: [line - 1, column], ArrowRight: [line, column + 1],
      ArrowLeft: [line, column - 1], PageDown: [line + 20, column], PageUp: [line - 20, column],
      Home: [line, 0], End: [line, sources.length - 1],
    };
    if (event.key in moves) move(...moves[event.key]);
    else if (event.key === "Enter") open(at);
    else return;
    event.preventDefault();
  };
  const find = (event) => {
    const frame = canvas.current.getBoundingClientRect();
    const column = Math.floor((event.clientX - frame.left - ROW_HEAD + scroll[0]) / CELL);
    const line = Math.floor((event.clientY - frame.top - COLUMN_HEAD + scroll[1]) / CELL);
    const isInside = event.clientX - frame.left > ROW_HEAD && event.clientY - frame.top > COLUMN_HEAD;
    return isInside && line >= 0 && line < tasks.length && column >= 0 && column < sources.length ? [line, column] : null;
  };
  const cell = cellAt(at);
  const place = `task ${run.texts.task[tasks[at[0]]] ?? ""}, ${sources[at[1]]?.name ?? ""}`;
  const said = cell
    ? `${place}: mean reward ${formatNumber(cell.mean)}, deviation ${formatNumber(cell.spread)}, ` +
      `${formatCount(cell.count, "attempt")}${cell.failed ? `, ${cell.failed} failed` : ""}`
    : `${place}: no attempt`;
  return html`<div class="map">
    <p class="legend" id="map-cell" aria-live="polite">${spell(said)}</p>
    ${cell && textOf("question", cell.row) && html`<p class="note one-line">${firstLine(textOf("question", cell.row), 200)}</p>`}
    <div
      class="map-box" ref=${box} tabindex="0" role="application" aria-roledescription="map"
      aria-label="Tasks by steps. Arrows move, Enter opens the group." aria-describedby="map-cell"
      style=${{ height: `${height}px` }} onKeyDown=${onKeyDown}
      onScroll=${(event) => setScroll([event.target.scrollLeft, event.target.scrollTop])}
      onMouseMove=${(event) => { const place = find(event); if (place) setAt(place); }}
      onClick=${(event) => { const place = find(event); if (place) open(place); }}
    >
      <canvas ref=${canvas} style=${{ width: `${width}px`, height: `${height - 16}px` }}></canvas>
      <div style=${{ width: `${sources.length * CELL + ROW_HEAD}px`, height: `${tasks.length * CELL + COLUMN_HEAD}px`, marginTop: `-${height - 16}px` }}></div>
    </div>
    <p class="legend">
      <span>${formatNumber(bottom)}</span><i class="scale"></i><span>${formatNumber(top)} ${MAP_COLORS[color]}</span>
      <span><i class="swatch hollow"></i> unscored</span>
      ${color !== "failures" && html`<span><i class="swatch alert"></i> some failed</span>`}
    </p>
  </div>`;
}

const firstLineOf = (text) => {
  const line = firstLine(text, 40);
  return line.length > 12 ? `${line.slice(0, 11)}…` : line;
};
