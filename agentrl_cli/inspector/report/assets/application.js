// The frame around the views.

// Curves alone have no trajectories.
const hasTrajectories = !run.head.comparison || run.head.evals.length > 0;
const VIEWS = {
  "": run.head.comparison
    ? { title: "Comparison", view: ComparisonView, isEarly: true }
    : { title: "Overview", view: Overview, isEarly: true },
  map: { title: "Tasks", view: TaskMap },
  evaluations: { title: "Evaluations", view: EvaluationsView },
  trajectories: { title: "Trajectories", view: TrajectoryList },
  trajectory: { view: TrajectoryView },
  tokens: { view: TokenView },
  group: { view: GroupView },
};

function Application() {
  useRun();
  const { path, query } = useAddress();
  const main = useRef(null);
  const isFirst = useRef(true);
  const place = path.join("/") + (path[0] === "group" ? `?${query.get("id")}` : "");
  useEffect(() => {
    if (isFirst.current) {
      isFirst.current = false;
      return;
    }
    scrollTo(0, 0);
    main.current.querySelector("h1")?.focus();
  }, [place]);
  const chosen = VIEWS[path[0]] ?? { view: () => html`<${NotThere} what="view" />`, isEarly: true };
  const isReady = run.columns || chosen.isEarly;
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.querySelector("h1")?.focus(); }}>Skip to the content</a>
    <header class="top">
      <nav aria-label="Views">
        ${Object.entries(VIEWS).filter(([, v]) => v.title && (v.isEarly || hasTrajectories)).map(([name, { title }]) => html`<a
          href=${formatAddress(name ? [name] : [])} aria-current=${path[0] === name ? "page" : undefined}>${title}</a>`)}
      </nav>
      <${ThemeButton} />
    </header>
    ${run.problem && html`<p class="problem banner" role="alert">${spell(run.problem)}</p>`}
    <main ref=${main} id="main">
      ${isReady
        ? html`<${Guarded} key=${place} view=${chosen.view} path=${path} query=${query} />`
        : !run.problem && html`<${Loading} what="Reading the trajectories" />`}
    </main>`;
}

// What cannot be shown says so, and the rest of the page stays.
function Guarded({ view, ...props }) {
  const [error] = useErrorBoundary();
  if (error) return html`<h1 tabindex="-1">This cannot be shown</h1><${Problem} error=${error} />`;
  return html`<${view} ...${props} />`;
}

function ThemeButton() {
  const [theme, setTheme] = useState(readTheme);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  const onClick = () => {
    setTheme(next);
    applyTheme(next);
    dispatchEvent(new Event("themechange"));
  };
  return html`<button class="theme" onClick=${onClick} aria-label=${`Colours: ${theme}. Switch to ${next}`}>${{ auto: "Auto", light: "Light", dark: "Dark" }[theme]}</button>`;
}

applyTheme(readTheme());
document.querySelector("noscript")?.remove();
render(html`<${Application} />`, document.getElementById("app"));

// Columns come behind the scripts in the page: what is above is painted first.
if (document.readyState === "loading") addEventListener("DOMContentLoaded", begin);
else begin();
