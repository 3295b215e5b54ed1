"""The time of an attention layer over the number of tokens, and from where on it is faster than softmax."""

from __future__ import annotations

from linvit.metrics import seconds as in_seconds
from linvit.records import Record
from linvit.report import vega
from linvit.report.result import NOTHING, Cell, Section, Table
from linvit.report.summary import Summary, VariantResult, number

MODES = {"forward": "inference", "both": "training"}
SHAPE = ("heads", "head_dim", "prefix")


def section(summary: Summary) -> Section:
    without = not_timed(summary)
    return Section(
        "Time over the number of tokens",
        [chart(summary, mode) for mode in MODES],
        "One attention layer on this machine, as the number of tokens grows with the size of the images.",
        tables=_break_even(summary),
        notes=[f"Not timed: {label} ({why})." for label, why in without.items()],
    )


def chart(summary: Summary, mode: str) -> vega.Chart | None:
    rows = [row for v in summary.variants for row in _over_tokens(_timed(summary, mode, v), v.label)]
    if not rows:
        return None
    series, other = vega.Series([v.label for v in summary.variants]), reference(summary, mode)
    tokens = sorted({row["tokens"] for row in [*rows, *other]})
    x = vega.x_axis("tokens", "Tokens N (log)", log=True, values=tokens, labelOverlap=True, grid=False)
    ticks = vega.decades(row["seconds"] for row in [*rows, *other])
    y = vega.y_axis(
        "seconds", "Time per layer (log)", log=True, values=ticks, labelExpr="format(datum.value, '~s') + 's'"
    )
    tips = vega.tooltips("variant", ("tokens", "tokens", "d"), ("shown", "time"))
    layers, notes = [], []
    breaks = [
        {"variant": v.label, "tokens": r.value}
        for v in summary.variants
        for r in summary.evidence.of("break_even_tokens", variant=v.id, mode=mode)
        if r.value and tokens[0] <= r.value <= tokens[-1]
    ]
    if breaks:
        faster = vega.tooltips("variant", ("tokens", "faster than softmax from N =", ".0f"))
        rule = vega.data(breaks).mark_rule(strokeWidth=1.5, strokeOpacity=0.5, strokeDash=[2, 3])
        layers.append(rule.encode(x=x, tooltip=faster, **series("color")))
        notes.append("Vertical lines: the number of tokens from which a variant is faster than softmax.")
    if other:
        base, last = (vega.data(part).encode(x=x, y=y) for part in (other, other[-1:]))
        layers += [
            base.mark_line(strokeWidth=2, strokeDash=[6, 4], style="quiet"),
            base.mark_point(size=50, filled=True, style="quiet").encode(tooltip=tips),
            last.mark_text(align="right", dx=-8, dy=-8, style="quiet").encode(text="variant:N"),
        ]
    if any("+" in v.attention for v in summary.variants):
        notes.append("Where layers differ, the mean is shown.")
    notes += partly_timed(summary) if mode == "forward" else []
    layers += vega.lines(rows, x, y, series, tips)
    title = f"One attention layer, {MODES[mode]}"
    return vega.Chart(f"scaling-{mode}", title, 300, layers, " ".join(notes), series)


def _timed(summary: Summary, mode: str, variant: VariantResult) -> list[Record]:
    return summary.evidence.of("attention_time", mode=mode, variant=variant.id)


def _over_tokens(records: list[Record], label: str) -> vega.Rows:
    """The mean of a model's layers at each length."""
    rows: vega.Rows = []
    for r in records:
        if (seconds := number(r.value)) and (tokens := number(r.tags.get("tokens"))):
            seconds /= number(r.tags.get("layers")) or 1
            rows.append({"variant": label, "tokens": tokens, "seconds": seconds, "shown": in_seconds(seconds)})
    return sorted(rows, key=lambda row: row["tokens"])


def reference(summary: Summary, mode: str) -> vega.Rows:
    """The time over tokens of what all are compared with; no rows where a variant's curve shows it."""
    shown = [r for v in summary.variants if v.baseline for r in _timed(summary, mode, v)]
    shapes = [[r.tags.get(tag) for tag in SHAPE] for r in shown]
    timed = summary.evidence.of("attention_time", mode=mode)
    found = [r for r in timed if r.tags.get("baseline") and [r.tags.get(tag) for tag in SHAPE] not in shapes]
    return _over_tokens(found, f"{found[0].tags['baseline']} (for comparison)") if found else []


def _break_even(summary: Summary) -> list[Table]:
    """From how many tokens each variant is faster than softmax."""
    rows = []
    for v in summary.variants:
        found = {r.tags["mode"]: _from(r) for r in summary.evidence.of("break_even_tokens", variant=v.id)}
        if found and not v.baseline:
            texts = {f"Faster than softmax in {name}": found.get(mode, NOTHING) for mode, name in MODES.items()}
            rows.append({"Variant": Cell(v.label, symbol=v.index)} | texts)
    return [Table.of(rows, list(rows[0]))] if rows else []


def _from(record: Record) -> str:
    if record.value is None:
        return "at no length measured"
    if record.value == record.tags.get("from"):
        return "at every length measured"
    return f"from about {float(f'{record.value:.2g}'):,.0f} tokens"


def not_timed(summary: Summary) -> dict[str, str]:
    """Variants without a curve over tokens, where others have one, and why."""
    timed = {r.tags.get("variant") for r in summary.evidence.of("attention_time") if number(r.value)}
    without = [v for v in summary.variants if timed and v.id not in timed]
    return {v.label: ", ".join(dict.fromkeys(_refused(summary, v).values())) or "not measured" for v in without}


def partly_timed(summary: Summary) -> list[str]:
    """Of those with a curve, the lengths at which they could not be timed, and why."""
    without = not_timed(summary)
    return [
        f"{v.label} could not be timed at {tokens:,.0f} tokens: {why}."
        for v in summary.variants
        if v.label not in without
        for tokens, why in _refused(summary, v).items()
    ]


def _refused(summary: Summary, variant: VariantResult) -> dict[float, str]:
    """Numbers of tokens at which it cannot be timed, and why."""
    records = summary.evidence.of("attention_time", variant=variant.id)
    found = {number(r.tags.get("tokens")) or 0: str(r.tags["refused"]) for r in records if r.tags.get("refused")}
    return {tokens: why.rpartition("': ")[2] for tokens, why in sorted(found.items())}  # without "spec '…': "
