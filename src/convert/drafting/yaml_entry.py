"""The rules of a draft as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

from convert.layers.draft import Entry, Line


def written(entries: Sequence[Entry]) -> Iterator[str]:
    """The text of the rules. What several ask alike is asked by the first, whose value has a name (``&epsilon``) that the
    others refer to (``*epsilon``)."""

    def question(line: Line) -> Hashable:
        return None if line.same is None else (line.key, line.below, line.same)

    counts = Counter(key for entry in entries for line in entry.lines if (key := question(line)) is not None)
    names: dict[Hashable, str] = {}
    offered: set[Hashable] = set()
    for entry in entries:
        lines: list[str] = []
        for line in entry.lines:
            key, anchor, value, remark, below = question(line), "", line.value, line.remark, line.below
            remark = f"question: {remark}" if line.asks else remark
            if key in names:
                value, remark, below = f"*{names[key]}", f"what the question at &{names[key]} is answered with", ()
            elif key is not None and counts[key] > 1:
                of_key = sum(name.rsplit("_", 1)[0] == line.key or name == line.key for name in names.values())
                names[key] = line.key if not of_key else f"{line.key}_{of_key + 1}"
                anchor = f"&{names[key]} "
                remark = f"question, for {counts[key]} rules: {line.remark}"
            if line.once:
                below = () if below in offered else below
                offered.add(below)
            if line.key:
                lines.append(f"{line.key}: {anchor}{value}" + (f"    # {remark}" if remark else ""))
            for text, said in below:
                head, *more = (text.replace(": ", f": {anchor}", 1) if anchor else text).split("\n")
                lines.append(f"# {head}" + (f"    # {_with_more(said, len(more))}" if said or more else ""))
                lines += [f"# {added}" for added in more]
        first, *rest = lines
        yield "\n".join([f"- {first}", *(f"  {line}" for line in rest)])


def _with_more(said: str, more: int) -> str:
    below = "" if not more else "with the line below" if more == 1 else f"with the {more} lines below"
    return "; ".join(filter(None, (said, below)))
