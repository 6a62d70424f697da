"""Pictures of steps and of time to quality; and the documentation's pictures, from its records."""
from contextlib import contextmanager

from bagua_hvd.bench import predict
from bagua_hvd.bench.predict import bytes_per_s
from tests.laboratory import profiles, records, step_times
from tests.laboratory.tradeoff import predicted
from tests.laboratory.tradeoff.to_quality import sooner

DOCS = records.ROOT / "docs"
CURVE = "ddp", "gradient_allreduce", "bytegrad", "powersgd", "onebit_adam, gradients_untouched"
QUALITY_CURVE = ("gradient_allreduce", "bytegrad", "onebit_adam, gradients_untouched")
STYLE = records.ROOT / ".ci" / "matplotlibrc"
# The colour of the page's text; a standalone SVG follows the reader's dark mode.
DARK = "<style>@media (prefers-color-scheme: dark) {svg:root {color: #e6edf3}}</style>"
RATES = ("100mbit", "300mbit", "1gbit", "2gbit")


def row_of(record):
    """A row of draw_steps(): (configuration, ms, shortest, longest, bytes)."""
    return record.setting["way"], step_times.ms(record), *step_times.spread(record), step_times.nbytes(record)


def draw_steps(path, columns, ylabel="ms per step", title=""):
    """Bars with their spread. columns: {heading: [(configuration, ms, shortest, longest, bytes)]}."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(columns), figsize=(4.2 * len(columns) + 1, 4.6), squeeze=False)
    for (heading, rows), panel in zip(columns.items(), panels[0], strict=True):
        middles = [row[1] for row in rows]
        errors = [[max(0.0, row[1] - row[2]) for row in rows], [max(0.0, row[3] - row[1]) for row in rows]]
        panel.barh([row[0] for row in rows], middles, xerr=errors, color="#4f8fd0", ecolor="#76808a", height=0.7)
        panel.invert_yaxis()
        panel.tick_params(labelsize=7)
        panel.set(xlabel=ylabel)
        panel.set_title(heading, fontsize=9)
        panel.grid(axis="x", alpha=0.3)
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def themed(text: str) -> str:
    """An SVG whose grey parts use the colour of the surrounding text."""
    head, svg, rest = text[text.index("<svg"):].partition(">")
    rest = rest.replace("#76808a", "currentColor").replace("*{", "svg *{")
    return f'{head} fill="currentColor" role="img"{svg}{DARK}{rest}'


@contextmanager
def _over_bandwidth(path, mbits, ylabel, values, title):
    """Yields the panel of a figure for this SVG file; both axes are logarithmic.

    Args:
        mbits, values: ticks of the axes. values: {value: label}.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(fname=STYLE):    # equal records make equal files
        figure, panel = pyplot.subplots(figsize=(7, 3.6))
        yield panel
        panel.set(xscale="log", yscale="log", xlabel="Mbit/s", ylabel=ylabel)
        panel.set_title(title, fontsize=10, loc="left")
        panel.set_xticks(mbits, [f"{mbit:,}" for mbit in mbits])
        panel.set_yticks(list(values), list(values.values()))
        panel.minorticks_off()
        panel.margins(x=0.02)
        panel.legend(fontsize=9, loc="upper right")
        figure.savefig(path, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        pyplot.close(figure)
    path.write_text(themed(path.read_text()))


# The accent for the first choice's algorithm, the text's own colour for full gradients.
MARKED = {"gradient_allreduce": ("#76808a", "s", "-"), "bytegrad": ("#0f9b8e", "o", "-"),
          "onebit_adam, gradients_untouched": ("#0f9b8e", "^", "--"), "powersgd": ("#0f9b8e", "D", ":"),
          "ddp": ("#76808a", "x", ":")}


def _look(way):
    color, marker, line = MARKED[way]
    return {"color": color, "marker": marker, "linestyle": line, "markersize": 5}


def draw_curve(path, hosts=2, model="resnet18"):
    """ms per step over the bandwidth: measured points, predicted lines."""
    import numpy as np

    profile, rates = profiles.load(model), np.logspace(7.7, 10, 60)
    title = f"{model}, {profile.parameters / 1e6:.1f} M parameters, {hosts} hosts. Points measured, lines predicted"
    values = {value: f"{value:,}" for value in (250, 500, 1000, 2000, 4000, 8000)}
    with _over_bandwidth(path, [100, 300, 1000, 2000, 10000], "ms per step", values, title) as panel:
        for way in CURVE:
            look = _look(way)
            panel.plot(rates / 1e6, [1e3 * predicted.step_s(way, profile, predict.Network(hosts, rate / 8))
                                     for rate in rates], alpha=0.5, **{**look, "marker": ""})
            for rate in RATES:
                record = step_times.newest(rate=rate, hosts=hosts, delay_ms=0.0, slow=1.0, model=model,
                                           environment={}).get(way)
                if record and not step_times.why_not(record):
                    middle, (low, high) = step_times.ms(record), step_times.spread(record)
                    panel.errorbar(8e-6 * bytes_per_s(rate), middle, [[max(0, middle - low)], [max(0, high - middle)]],
                                   **{**look, "linestyle": ""})
            panel.plot([], [], label=way, **look)


def draw_time_to_quality(path, hosts=2, model="resnet18"):
    """sooner() over the bandwidth: measured points, connected. Configurations without a record are left out."""
    title = f"Time to the loss of full gradients: {model} on {hosts} hosts"
    values = {value: f"{value}x" for value in (1, 2, 4, 8, 16)}
    with _over_bandwidth(path, [100, 300, 1000, 2000], "times faster", values, title) as panel:
        for way in QUALITY_CURVE:
            points = [(8e-6 * bytes_per_s(rate), times) for rate in RATES
                      if (times := sooner(way, rate, hosts, model))]        # neither unknown nor never
            if points:
                panel.plot(*zip(*points, strict=True), label=way, **_look(way))


def draw_documentation():
    """Draws the documentation's pictures from its records."""
    draw_curve(DOCS / "tradeoff.svg")
    draw_time_to_quality(DOCS / "time-to-quality.svg")
    columns = {}
    for rate in ("1gbit", "100mbit"):
        found = step_times.newest(rate=rate, hosts=8, delay_ms=0.0, slow=1.0, model="resnet18", environment={})
        if rows := [row_of(found[way]) for way in step_times.WAYS
                    if way in found and not step_times.why_not(found[way])]:
            columns[f"8 hosts, {rate}"] = rows
    if columns:
        draw_steps(DOCS / "results" / "tradeoff-steps.png", columns, title="measured; lines: shortest to longest step")
