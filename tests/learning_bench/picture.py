"""The plot that people look at first, drawn from the figures that a benchmark has recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

PANELS = {
    "test": "searching the site's own documents",
    "pooled": "searching the documents of all sites",
}
CURVES = {
    "hanse": ("hanse", "#0072b2"),
    "each site alone": ("each site alone", "#d55e00"),
    "FedAvg": ("fedavg", "#009e73"),
}


def draw(folder: Path) -> Path:
    """Draw learning-curves.svg from learning.json of the same folder.

    A panel for each corpus that is searched. A curve begins at no pairs, which is the encoder
    as it comes; its bars reach from the lowest seed to the highest.
    """
    figures = json.loads((folder / "learning.json").read_text(encoding="utf-8"))["medquad"]
    most = max(len(row["sites"]) for row in figures)
    whole = [row for row in figures if row["held_out"] is None and len(row["sites"]) == most]
    pyplot = plots()
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(8.6, 3.9), sharey=True)
    for axis, (test, title) in zip(axes, PANELS.items(), strict=True):
        _panel(axis, whole, test)
        axis.set(title=title, xlabel="% of each site's training pairs", xticks=range(0, 101, 25))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("MRR@10, mean over questions")
    handles, labels = axes[0].get_legend_handles_labels()
    beside = {"loc": "lower center", "ncols": len(labels), "frameon": False}
    figure.legend([*handles[1:], handles[0]], [*labels[1:], labels[0]], **beside)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path = folder / "learning-curves.svg"
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot.close(figure)
    return path


def _panel(axis: Any, figures: list[dict[str, Any]], test: str) -> None:
    scores: dict[tuple[str, float], list[float]] = {}
    for row in figures:
        scores.setdefault((row["recipe"], row["share"]), []).append(row["means"][test]["mrr@10"])
    untrained = scores["vanilla encoder", 1.0]
    for name, (label, colour) in CURVES.items():
        shares = sorted(share for recipe, share in scores if recipe == name)
        seeds = [untrained, *(scores[name, share] for share in shares)]
        means = np.array([np.mean(values) for values in seeds])
        below = means - [min(values) for values in seeds]
        above = [max(values) for values in seeds] - means
        percent = [0.0, *(100 * share for share in shares)]
        axis.errorbar(
            percent,
            means,
            [below, above],
            label=label,
            color=colour,
            marker="o",
            markersize=4.5,
            linewidth=2,
            capsize=2.5,
        )
    axis.annotate(
        "the encoder as it comes",
        (0.0, untrained[0]),
        xytext=(8, -3),
        textcoords="offset points",
        color="#555555",
    )
    level = float(np.mean(scores["centralised", 1.0]))
    axis.plot([100], [level], "D", color="#555555", markersize=6, label="all data pooled")


def plots() -> Any:
    """Matplotlib's pyplot, set so that the same figures make the same file."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "hanse"
    from matplotlib import pyplot

    return pyplot
