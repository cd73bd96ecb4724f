"""The evidence in JSON lines as a table and a figure: tokens a round, and gains with intervals."""

import json
from collections import defaultdict

import numpy as np

RESAMPLES = 10_000


def read(file):
    """The rows of a file; none where it is missing."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def chosen(rows, settings):
    """The rows that were made with these settings."""
    return [row for row in rows if all(row[name] == value for name, value in settings.items())]


def counted(rows, data):
    """Rule -> arm -> tokens and rounds by prompt [prompts, 2], summed over the seeds of an arm."""
    counts = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["data"] in (data, "both"):
            counts[row["rule"]][row["arm"]].append(row["prompts"])
    return {
        rule: {arm: np.sum(each, axis=0, dtype=float) for arm, each in arms.items()}
        for rule, arms in counts.items()
    }


def tokens_per_round(counts):
    """The pooled acceptance length, bonus included, of counts [..., prompts, 2]."""
    tokens, rounds = np.moveaxis(counts.sum(axis=-2), -1, 0)
    return tokens / rounds


def gain(arm, base, seed=0):
    """Tokens a round of an arm over those of another, less one, with its 95% interval.

    The interval is from a bootstrap over prompts; both have the same ones.
    """
    drawn = np.random.default_rng(seed).integers(0, len(arm), (RESAMPLES, len(arm)))
    ratios = tokens_per_round(arm[drawn]) / tokens_per_round(base[drawn]) - 1
    whole = tokens_per_round(arm) / tokens_per_round(base) - 1
    return np.array([whole, *np.quantile(ratios, [0.025, 0.975])])


def ranked(rows, data="sampled"):
    """The arms that have every rule, from the best mean over the rules to the worst."""
    by_rule = counted(rows, data)
    arms = set.intersection(*map(set, by_rule.values())) if by_rule else set()
    return sorted(
        arms - {"base"},
        key=lambda arm: -sum(np.log(tokens_per_round(of[arm])) for of in by_rule.values()),
    )


def gains(rows, data, against):
    """Rule -> arm -> (tokens a round, gain with its interval or None without the other arm)."""
    return {
        rule: {
            arm: (
                tokens_per_round(counts),
                gain(counts, of[against]) if against in of and arm != against else None,
            )
            for arm, counts in of.items()
        }
        for rule, of in counted(rows, data).items()
    }


def text(rows, against):
    """A table in Markdown for every kind of text."""
    lines = []
    for data in sorted({row["data"] for row in rows} - {"both"}):
        found, order = gains(rows, data, against), [*ranked(rows, data), "base"]
        seeds = len({row["seed"] for row in rows if row["data"] == data})
        lines += [
            "",
            f"Trained on {data} text, {seeds} seed{'s'[: seeds > 1]}; tokens a round, and % over "
            f"{against} [95% interval over prompts]",
            "",
            "| arm | " + " | ".join(found) + " |",
            "|---|" + "---|" * len(found),
        ]
        for arm in order:
            cells = [cell(*found[rule][arm]) if arm in found[rule] else "" for rule in found]
            lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(tau, gained):
    if gained is None:
        return f"{tau:.3f}"
    whole, low, high = 100 * gained
    return f"{tau:.3f} {whole:+.1f} [{low:+.1f}, {high:+.1f}]"


def figure(rows, against, file):
    """Gains with their intervals, a panel for every kind of text, written to `file`."""
    from matplotlib.figure import Figure

    texts = sorted({row["data"] for row in rows} - {"both"})
    if not texts:
        return
    picture = Figure(figsize=(6.5 * len(texts), 7), layout="constrained")
    for axes, data in zip(picture.subplots(1, len(texts), squeeze=False)[0], texts, strict=True):
        found, order = gains(rows, data, against), ranked(rows, data)[::-1]
        for i, (rule, of) in enumerate(found.items()):
            shown = [n for n, arm in enumerate(order) if of[arm][1] is not None]
            if not shown:
                continue
            whole, low, high = 100 * np.array([of[order[n]][1] for n in shown]).T
            at = np.array(shown) + 0.15 * (i - (len(found) - 1) / 2)
            axes.errorbar(whole, at, xerr=(whole - low, high - whole), fmt="o", ms=3, label=rule)
        axes.axvline(0, color="grey", linewidth=0.8)
        axes.set_yticks(range(len(order)), order)
        axes.set(title=f"trained on {data} text", xlabel=f"tokens a round, % over {against}")
    picture.legend(
        *axes.get_legend_handles_labels(),
        loc="outside upper center",
        ncols=len(found),
        title="decoded by",
    )
    picture.savefig(file, dpi=110)
