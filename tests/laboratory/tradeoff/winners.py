"""The predicted winner: of the configurations from exact to relaxed, the first that is nearly the fastest; and the map.

The map is always a prediction: a winner for each bandwidth and latency.
"""
from bagua_hvd.bench import predict
from tests.laboratory.tradeoff import predicted

# From exact to relaxed.
RELAXED = ("gradient_allreduce", "bytegrad", "doublesqueeze", "decentralized, shift_one", "choco", "local_sgd",
           "diloco", "async")
NEAR = 1.1


def winner(profile, network, ways=RELAXED):
    """The first of `ways` within NEAR of the fastest, as predicted."""
    times = {way: predicted.step_s(way, profile, network) for way in ways}
    best = min(times.values())
    return next(way for way in ways if times[way] <= NEAR * best)


def draw_map(path, drawn, hosts=8, points=32):
    """Draws the winners by bandwidth and latency, one panel for each profile."""
    import matplotlib
    import numpy as np

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    rates, latencies = np.logspace(7, 11, points), np.logspace(-5, -1, points)
    colors = [f"C{index}" for index in range(len(RELAXED))]
    figure = pyplot.figure(figsize=(max(7.0, 3.1 * len(drawn) + 0.4), 3.9))
    panels = [figure.add_subplot(1, len(drawn), index + 1) for index in range(len(drawn))]
    for profile, panel in zip(drawn, panels, strict=True):
        grid = [[RELAXED.index(winner(profile, predict.Network(hosts, rate / 8, delay))) for rate in rates]
                for delay in latencies]
        panel.pcolormesh(rates, latencies * 1e3, grid, cmap=ListedColormap(colors), vmin=-0.5, vmax=len(RELAXED) - 0.5)
        panel.set(xscale="log", yscale="log", xlabel="bit/s",
                  title=f"{profile.model}: {profile.parameters / 1e6:.0f} M, {1e3 * profile.computing_s:.0f} ms")
        panel.title.set_fontsize(9)
    panels[0].set_ylabel("latency, ms one way")
    figure.legend(handles=[Patch(color=color, label=way) for color, way in zip(colors, RELAXED, strict=True)],
                  loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"predicted, {hosts} hosts: the least relaxed way within 10 % of the quickest step", fontsize=9)
    figure.tight_layout(rect=(0, 0.12, 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
