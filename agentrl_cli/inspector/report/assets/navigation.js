// Addresses: the part after # names a view, so that links, bookmarks and the back button work.

function readAddress() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const decode = (part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  };
  return { path: path.split("/").map(decode), query: new URLSearchParams(query) };
}

function formatAddress(path, query = {}) {
  const entries = Object.entries(query).filter(([, v]) => v !== null && v !== undefined && v !== "");
  const params = new URLSearchParams(entries.map(([k, v]) => [k, String(v)])).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${params ? `?${params}` : ""}`;
}

// The same view with other settings: no step for the back button.
function changeQuery(changes) {
  const { path, query } = readAddress();
  const address = formatAddress(path, { ...Object.fromEntries(query), ...changes });
  history.replaceState(null, "", address);
  dispatchEvent(new HashChangeEvent("hashchange"));
}

function openAddress(address) {
  location.hash = address;
}

const placeOf = (row) => {
  const source = sourceOf(row);
  return [source.key, row - source.start];
};
const trajectoryAddress = (row, query) => formatAddress(["trajectory", ...placeOf(row)], query);
const tokenAddress = (row, call) => formatAddress(["tokens", ...placeOf(row)], { call });
const groupAddress = (row) =>
  formatAddress(["group", sourceOf(row).key], { id: textOf("group", row) });

function useAddress() {
  const [address, set] = useState(readAddress);
  useEffect(() => {
    const listener = () => set(readAddress());
    addEventListener("hashchange", listener);
    return () => removeEventListener("hashchange", listener);
  }, []);
  return address;
}

// Colours: as the system has it, or as chosen.
const THEMES = ["auto", "light", "dark"];
const THEME_KEY = "agentrl-report-theme";

function readTheme() {
  try {
    const theme = localStorage.getItem(THEME_KEY);
    return THEMES.includes(theme) ? theme : "auto";
  } catch {
    return "auto";
  }
}

function applyTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(THEME_KEY, theme);
  } catch {
    // A browser that stores nothing forgets the choice.
  }
}

const colors = () => {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
};

// Changes whenever the colours do.
function useColors() {
  const [number, set] = useState(0);
  useEffect(() => {
    const listener = () => set((n) => n + 1);
    const system = matchMedia("(prefers-color-scheme: dark)");
    system.addEventListener("change", listener);
    addEventListener("themechange", listener);
    return () => {
      system.removeEventListener("change", listener);
      removeEventListener("themechange", listener);
    };
  }, []);
  return number;
}

// The width of an element, in pixels.
function useWidth(ref) {
  const [width, set] = useState(0);
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => set(Math.floor(entry.contentRect.width)));
    observer.observe(ref.current);
    set(Math.floor(ref.current.clientWidth));
    return () => observer.disconnect();
  }, []);
  return width;
}

// A list of which only what is visible exists. Rows are as high as `rowHeight`; arrows move, Enter
// opens.
function VirtualGrid({ label, count, rowHeight, header, renderRow, onOpen, height = 560, selected }) {
  const box = useRef(null);
  const [top, setTop] = useState(0);
  const [active, setActive] = useState(0);
  const first = Math.max(Math.floor(top / rowHeight) - 5, 0);
  const last = Math.min(first + Math.ceil(height / rowHeight) + 10, count);
  const current = Math.min(active, Math.max(count - 1, 0));
  const move = (to) => {
    const next = Math.max(0, Math.min(to, count - 1));
    setActive(next);
    const { scrollTop, clientHeight } = box.current;
    const head = box.current.querySelector(".grid-head")?.offsetHeight ?? 0;
    if (next * rowHeight < scrollTop) box.current.scrollTop = next * rowHeight;
    else if ((next + 1) * rowHeight > scrollTop + clientHeight - head)
      box.current.scrollTop = (next + 1) * rowHeight - clientHeight + head;
  };
  const onKeyDown = (event) => {
    if (event.target !== box.current) return;
    const page = Math.max(Math.floor(height / rowHeight) - 1, 1);
    const moves = {
      ArrowDown: current + 1, ArrowUp: current - 1, PageDown: current + page,
      PageUp: current - page, Home: 0, End: count - 1,
    };
    if (event.key in moves) move(moves[event.key]);
    else if (event.key === "Enter" && count) onOpen(current);
    else return;
    event.preventDefault();
  };
  const rows = [];
  for (let i = first; i < last; i++) {
    rows.push(html`<div
      key=${i} id="row-${i}" role="row" aria-rowindex=${i + 2} aria-selected=${i === selected}
      class="grid-row ${i === current ? "active" : ""} ${i === selected ? "selected" : ""}"
      style=${{ height: `${rowHeight}px`, transform: `translateY(${i * rowHeight}px)` }}
      onClick=${(event) => {
        if (event.target.closest("a")) return;
        setActive(i);
        onOpen(i);
      }}
    >${renderRow(i)}</div>`);
  }
  return html`<div
    class="grid" ref=${box} role="grid" tabindex="0" aria-label=${label} aria-rowcount=${count + 1}
    aria-activedescendant=${count ? `row-${current}` : undefined}
    style=${{ maxHeight: `${height}px` }}
    onScroll=${(event) => setTop(event.target.scrollTop)} onKeyDown=${onKeyDown}
  >
    <div class="grid-head" role="row" aria-rowindex="1">${header}</div>
    <div class="grid-body" role="presentation" style=${{ height: `${count * rowHeight}px` }}>${rows}</div>
  </div>`;
}
