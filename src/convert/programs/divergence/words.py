"""What operations do, in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.numerics.roots import factor_text
from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.limits import bounds, in_words, is_limit, joined
from convert.programs.divergence.shared_values import same_numbers
from convert.programs.program import Operation, Program, Value, producers_of

Array = np.ndarray[Any, np.dtype[Any]]
NEAR = 6  # operations behind a value, within which a finding calls it a choice of the largest ones
LISTED = 5  # operations that a sentence lists
ROWS = 32  # of a result, that are looked for among those of what it was picked from
PLAIN = {
    "negate": "changes the sign",
    "reciprocal": "takes the reciprocal",
    "sqrt": "takes the square root",
    "rsqrt": "takes the reciprocal of the square root",
    "abs": "takes the absolute value",
    "limit": "limits the values",
    "mask": "masks",
    "mean": "takes the mean",
    "sum": "sums",
    "largest": "takes the largest",
    "smallest": "takes the smallest",
    "running sum": "takes the running sum",
    "sort": "sorts",
    "pooling": "pools",
    "pick": "picks elements",
    "part": "takes a part",
    "join": "joins",
    "random": "draws random numbers",
    "attention": "computes attention",
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), "compares the values"),
}
APPLIED = ("exp", "log", "tanh", "sigmoid", "silu", "relu", "softplus", "elu", "erf", "sin", "cos")
# Above which torch's softplus is a line to 2e-9: its default, and the same in float64 (`lift_torch.exact_arguments`).
SOFTPLUS_LINES = (20.0, 40.0)
ARITHMETIC = {
    "multiply": ("multiplies by {}", "multiplies"),
    "divide": ("divides by {}", "divides"),
    "add": ("adds {}", "adds"),
    "subtract": ("subtracts {}", "subtracts"),
    "power": ("raises to the power {}", "takes the power"),
}
NOUNS = {
    "add": "the sum",
    "subtract": "the difference",
    "multiply": "the product",
    "divide": "the quotient",
    "product": "the matrix product",
    "mean": "the mean",
    "softmax": "the softmax",
    "join": "the joined value",
    "pick": "the picked elements",
    "mask": "the masked value",
    "limit": "the limited value",
    "pooling": "the pooled value",
    "resize": "the interpolated value",
    "sort": "the sorted values",
    "sqrt": "the square root",
    "rsqrt": "the reciprocal of the square root",
    "power": "the power",
    "abs": "the absolute value",
    "gelu": "the gelu",
    "largest": "the largest value",
    "smallest": "the smallest value",
    **{name: f"the {name}" for name in APPLIED},
}
INTERPOLATED = {
    "cubic": "by cubic curves",
    "linear": "linearly",
    "nearest": "to the nearest element",
    "grid": "linearly at given places",
}
POOLED = {"max": "the largest", "avg": "the mean", "sum": "the sum"}  # by a word in the operator's name
SOFTMAX = ("largest", "subtract", "exp", "sum", "divide")
INDICES = ("lt", "add", "select_n")  # what JAX does with indices, of which negative ones count from the end
JOINS = ("concatenate", "cat")  # the other ones pad with their number
REDUCED = ("axes", "dim", "axis", "dimension")  # names of the setting in JAX and in torch


class Words:
    """Words for operations of a program and for values of it."""

    def __init__(self, operations: Sequence[Operation], names: Mapping[Value, str]) -> None:
        self.operations = operations
        self.producer = producers_of(operations)
        self.names = names
        self.parameters = {name: value.array for value, name in names.items() if value.of_parameters}

    def chosen_behind(self, values: Sequence[Value]) -> tuple[int, str]:
        """How many of the largest or smallest values go into these, a few operations behind them, and which; 0 if none do, or not always as many."""
        found: set[tuple[int, str]] = set()
        waiting = [(value, 0) for value in values]
        while waiting:
            value, depth = waiting.pop()
            one = self.producer.get(value)
            if one is None or depth > NEAR:
                continue
            if one.name in ("top_k", "topk"):
                which = "largest" if one.settings.get("largest", True) else "smallest"
                found.add((one.results[0].array.shape[-1], which))
            elif ranked := self._ranked(one):
                found.add(ranked)
            else:
                waiting += [(v, depth + 1) for v in one.data]
        return found.pop() if len(found) == 1 else (0, "")

    def _ranked(self, operation: Operation) -> tuple[int, str] | None:
        """Return how many of which values a comparison of their ranks keeps: argsort(argsort(-x)) < 2 keeps the two largest."""
        number = scalar(operation)
        if operation.name != "lt" or number is None or operation.data[0].array.dtype.kind not in "iu":
            return None
        sorts, value = 0, operation.data[0]
        while (before := self.producer.get(root(value, self.producer))) is not None and kind_of(before) == "sort":
            sorts, value = sorts + 1, before.data[0]
        negative = before is not None and kind_of(before) == "negate"
        return (int(number), "largest" if negative else "smallest") if sorts > 1 else None

    def chain(self, operations: Sequence[Operation]) -> str:
        """Say what operations do, one after another."""
        if larger := not arithmetic(operations) and _repeats(operations):
            return larger
        return self.listed(self.verbs(arithmetic(operations)))

    def listed(self, verbs: Sequence[str]) -> str:
        """Say a few of these, one after another."""
        verbs = [verb for k, verb in enumerate(verbs) if k == 0 or verb != verbs[k - 1]]
        more = len(verbs) - LISTED
        said = list(verbs[:LISTED]) + ([f"does {more} more"] if more > 0 else [])
        return ", ".join(said) or "moves the elements"

    def verbs(self, operations: Sequence[Operation]) -> list[str]:
        """Say what each does; a softmax and limits that follow one another as one, and a choice that chooses nothing not at all."""
        steps = [one for one in operations if not _is_idle(one)]
        beside = self._sums_beside(steps)
        left = [one for one in steps if one.results[0] not in beside]
        return [self._together(several, beside) for several in _grouped(left)]

    def _sums_beside(self, operations: Sequence[Operation]) -> dict[Value, str]:
        """Return what operations sum of an input that others divide by, with its name: the number of tokens that are no padding."""
        divisors = {root(v, self.producer) for one in operations if kind_of(one) == "divide" for v in one.operands[1:]}
        found = {}
        for one in operations:
            if (
                kind_of(one) == "sum"
                and one.results[0] in divisors
                and (of := root(one.operands[0], self.producer)) in self.names
            ):
                found[one.results[0]] = f"the sum{_over(one)} of {self.names[of]}"
        return found

    def _together(self, operations: Sequence[Operation], beside: Mapping[Value, str]) -> str:
        """Say what operations do that are one step.

        Args:
            beside: names of sums that they may divide by.
        """
        if len(operations) == 1:
            (one,) = operations
            divisor = beside.get(root(one.operands[-1], self.producer)) if kind_of(one) == "divide" else None
            return f"divides by {divisor}" if divisor else self.verb(one)
        if is_limit(operations[0]):
            return f"limits the values {in_words(joined(operations))}"
        return f"takes the softmax{_over(operations[0])}"

    def kinds(self, operations: Sequence[Operation]) -> list[str]:
        """Return the word for each, of a softmax one, and of limits that follow one another."""
        steps = _grouped(arithmetic(operations))
        return ["softmax" if len(one) > 1 and not is_limit(one[0]) else kind_of(one[0]) for one in steps]

    def verb(self, operation: Operation) -> str:
        """Say what an operation does with the data that it is given."""
        kind = kind_of(operation)
        if kind in ARITHMETIC:
            number = scalar(operation)
            if kind == "power" and number == 2:
                return "squares"
            by, alone = ARITHMETIC[kind]
            other = factor_text(number) if number is not None else self.other(operation)
            return by.format(other) if other else alone
        if kind in APPLIED:
            lines = [x for x in operation.numbers if x not in SOFTPLUS_LINES] if kind == "softplus" else []
            return f"applies {kind}" + (f", which is a line above {lines[0]:g}" if lines else "")
        if is_limit(operation):
            return f"limits the values {in_words(bounds(operation))}"
        if kind == "gelu":
            return "applies gelu_tanh" if operation.settings.get("approximate") == "tanh" else "applies gelu_erf"
        if operation.name.strip("_") == "hardtanh":
            low, high = (float(v.array) for v in operation.operands[1:])
            return f"runs hardtanh ({low:.7g} to {high:.7g})"
        if kind in ("product", "convolution"):
            other = self.other(operation)
            verb = "takes the matrix product" if kind == "product" else "convolves"
            return f"{verb} with {other}" if other else verb
        if kind == "softmax":
            return f"takes the softmax{_over(operation)}"
        if kind == "pooling":
            by = next((f" by {by}" for word, by in POOLED.items() if word in operation.name), "")
            window = operation.settings.get("window_dimensions") or operation.settings.get("kernel_size") or ()
            sizes = [str(size) for size in window if size > 1] if isinstance(window, list | tuple) else []
            return PLAIN[kind] + by + (f" of {' x '.join(sizes)}" if by and sizes else "")
        if operation.name == "grid_sampler_2d":
            return "samples at given places"
        if kind == "resize":
            how = next(how for word, how in INTERPOLATED.items() if word in operation.name)
            corners = " with aligned corners" if operation.settings.get("align_corners") else ""
            return f"interpolates {how}{corners}"
        if kind == "join" and any(v.of_parameters for v in operation.operands):
            return f"joins {self.other(operation)} to it"
        if operation.name in JOINS and (number := scalar(operation)) is not None:
            given = " and ".join(dict.fromkeys(map(self.value, operation.data)))
            return f"joins {number:.7g} to {given}"
        if kind == "part":
            return _taken(operation) or PLAIN[kind]
        if takes_rows(operation):
            return "takes rows"
        if operation.name in ("top_k", "topk"):
            ends = "largest" if operation.settings.get("largest", True) else "smallest"
            return f"takes the {operation.results[0].array.shape[-1]} {ends}"
        if kind in ("sum", "mean", "largest", "smallest", "sort"):
            return PLAIN[kind] + _over(operation)
        return PLAIN.get(kind, f"runs {operation.name.strip('_')}")

    def of_two(self, operations: Sequence[Operation], given: Sequence[Array]) -> str:
        """Say what a single operation does with two values; empty for others.

        Args:
            given: the values of the target that the sentence begins with; a choice that chooses nothing may pass one on.
        """
        steps = [one for one in arithmetic(operations) if not _is_idle(one)]
        kind = kind_of(steps[0]) if len(steps) == 1 else ""
        if kind not in ("add", "subtract", "multiply", "divide") or len(set(steps[0].data)) != 2:
            return ""
        values = list(steps[0].data)
        if kind in ("add", "multiply"):
            values.sort(key=lambda v: not self._is_passed_on(v, given))
        if steps[0].name == "rsub":
            values.reverse()
        one, two = map(self.value, values)
        if self._is_passed_on(values[0], given):
            return ARITHMETIC[kind][0].format(two)
        verb, between = {
            "add": ("adds", "and"),
            "subtract": ("subtracts", "from"),
            "multiply": ("multiplies", "by"),
            "divide": ("divides", "by"),
        }[kind]
        return f"{verb} {two} {between} {one}" if kind == "subtract" else f"{verb} {one} {between} {two}"

    def of_two_in(self, operations: Sequence[Operation]) -> str:
        """The same, for a sentence that ends with the line of the operation."""
        own = next((one.where for one in arithmetic(operations) if one.where), "")
        said = self.of_two(operations, ())
        return re.sub(rf" at {re.escape(own)}(?![0-9])", " in the same line", said) if own else said

    def _is_passed_on(self, value: Value, given: Sequence[Array]) -> bool:
        """Whether a value is one of these; a choice that chooses nothing may give it."""
        return any(same_numbers(value.array, x) for x in given)

    def other(self, operation: Operation) -> str:
        """Name the operand that no input is in, if there is one."""
        other = next((v for v in operation.operands if not v.data and (v.leaves or v.array.size > 1)), None)
        if other is None:
            return ""
        if len(other.leaves) == 1:
            return next(iter(other.leaves))
        return "parameters" if other.leaves else f"a table of shape {list(other.array.shape)}"

    def value(self, value: Value) -> str:
        """Name a value: a parameter, an input, what a layer of weights gives, or the line that computes it."""
        value = root(value, self.producer)
        operation = self.producer.get(value)
        while operation is not None and kind_of(operation) == LAYOUT and len(operation.data) == 1:
            value = operation.data[0]  # repeated, such as an index for each feature
            operation = self.producer.get(value)
        if value in self.names:
            return self.names[value]
        if operation is None:
            return "a value"
        if kind_of(operation) == "part" and len(operation.data) == 1:
            whole = self.value(operation.data[0])
            return whole if whole.startswith("a part of") else f"a part of {whole}"
        weights = layer_of(operation, self.producer)
        if weights is not None:
            return f"what {weights} gives"
        noun = NOUNS.get(kind_of(operation), "the mask" if _is_mask(value.array) else "the value")
        noun = "the rows taken" if takes_rows(operation) else noun
        if operation.name in JOINS and len(operation.operands) > 1:
            noun = f"the {len(operation.operands)} values joined"
        return f"{noun} at {operation.where}" if operation.where else "a value"


def _is_mask(array: Array) -> bool:
    """Whether an array has nothing but zeros and ones, and both."""
    return bool(np.isin(array, (0, 1)).all() and array.any() and not array.all())


def user_of(value: Value, operations: Sequence[Operation], near: int = 0) -> list[Operation]:
    """Return the first operation that computes something of a value, in any layout, from a number on if one does; nothing where none does."""
    reached, found = {value}, list[Operation]()
    for number, one in enumerate(operations):
        if reached.intersection(one.operands):
            if kind_of(one) != LAYOUT:
                found = found or [one]
                if number >= near:
                    return [one]
            reached.update(one.results if kind_of(one) == LAYOUT else ())
    return found


def names_of(program: Program) -> dict[Value, str]:
    """Return the names of inputs and parameters."""
    inputs = {value: f"the input {name}" for name, value in program.inputs.items()}
    return {**inputs, **{value: name for name, value in program.parameters.items()}}


def layer_of(operation: Operation, producer: Mapping[Value, Operation]) -> str | None:
    """Return the layer whose weights gave an operation's result, with or without its bias."""
    product = product_of(operation, producer)
    if product is None:
        return None
    leaves = next((v.leaves for v in product.operands if v.leaves and not v.data), frozenset())
    return product.module or " and ".join(sorted(leaves)) or None


def product_of(operation: Operation, producer: Mapping[Value, Operation]) -> Operation | None:
    """Return the product with weights that gave an operation's result, with or without a bias behind it."""
    if kind_of(operation) == "add" and len(operation.data) == 1:
        before = producer.get(root(operation.data[0], producer))
        if before is None:
            return None
        operation = before
    return operation if kind_of(operation) in ("product", "convolution") else None


def _grouped(operations: Sequence[Operation]) -> Iterator[Sequence[Operation]]:
    """Yield the operations, those of a softmax together, and limits that follow one another."""
    kinds = [kind_of(one) for one in operations]
    k = 0
    while k < len(operations):
        parts = [j for j in range(k, len(kinds)) if kinds[j] not in ("limit", "mask")][: len(SOFTMAX)]
        end = parts[-1] + 1 if tuple(kinds[j] for j in parts) == SOFTMAX else k + 1
        if is_limit(operations[k]):
            while end < len(operations) and is_limit(operations[end]):
                end += 1
        yield operations[k:end]
        k = end


def arithmetic(operations: Sequence[Operation]) -> list[Operation]:
    """Return the operations without those that only lay out, and without JAX's with the indices by which it picks."""
    steps = [one for one in operations if kind_of(one) != LAYOUT]
    if not any(kind_of(one) == "pick" for one in steps):
        return steps
    return [one for one in steps if one.name not in INDICES or one.results[0].array.dtype.kind == "f"]


def _is_idle(operation: Operation) -> bool:
    """Whether a choice gives one of its values as it is: `softplus` looks for values that are no numbers."""
    made = operation.results[0].array
    values = [v.array for v in operation.operands if v.data and v.array.dtype == made.dtype]
    return kind_of(operation) == "mask" and any(x.shape == made.shape and np.array_equal(x, made) for x in values)


def _repeats(operations: Sequence[Operation]) -> str:
    """Say that operations that move elements have repeated them; empty if they have not."""
    sizes = [(one.operands[0].array.size, one.results[0].array.size) for one in operations]
    return "repeats the elements" if any(before < after for before, after in sizes) else ""


def scalar(operation: Operation) -> float | None:
    """Return the constant number that an operation is given; None if there is none."""
    for value in operation.operands:
        if value.number is not None:
            return value.number
    if operation.name == "square":
        return 2.0
    for key in ("exponent", "y"):  # integer_pow has its number as a setting
        if isinstance(operation.settings.get(key), int | float):
            return float(operation.settings[key])
    return None


def places(operations: Sequence[Operation]) -> str:
    """Return the lines of operations in brackets, with a blank in front; empty where none is known."""
    lines = list(dict.fromkeys(one.where for one in operations if one.where and kind_of(one) != LAYOUT))
    lines = lines or list(dict.fromkeys(one.where for one in operations if one.where))
    module = next((one.module for one in operations if one.module), "")
    said = [*lines[:3], *(["..."] if len(lines) > 3 else []), *([f"in {module}"] if module else [])]
    return f" ({', '.join(said)})" if said else ""


def _taken(operation: Operation) -> str:
    """Say which indices of an axis an operation takes; empty where it takes them of several axes, or gives several results."""
    settings, shape = operation.settings, operation.operands[0].array.shape
    if len(operation.results) > 1:
        return ""
    if operation.name in ("rev", "flip"):
        axes = settings.get("dimensions", settings.get("dims", ()))
        return f"reverses axis {axes[0] % len(shape)}" if len(axes) == 1 else ""
    if (at := of_one_axis(operation)) is None:
        return ""
    axis, which = at
    if len(which) == 1:
        return f"takes index {which[0]} of axis {axis}"
    step = f", every {which.step}," if which.step != 1 else ""
    return f"takes the indices {which[0]} to {which[-1]}{step} of axis {axis}"


def takes_rows(operation: Operation) -> bool:
    """Whether an operation picks whole rows by their indices, or columns of a parameter that is stored width first."""
    if kind_of(operation) != "pick":
        return False
    table, made = operation.operands[0].array, operation.results[0].array
    if table.ndim < 2 or not made.size or not made.ndim:
        return False
    if _are_rows(made, table):
        return True
    of_parameter = table.ndim == 2 and not operation.operands[0].data
    return of_parameter and any(_are_rows(x, table.T) for x in (made, np.moveaxis(made, 0, -1)))


def _are_rows(made: Array, table: Array) -> bool:
    """Whether rows of a value, of which a few are looked for, are rows of a table."""
    width = table.shape[-1]
    if width < 2 or made.shape[-1] != width:
        return False
    known, rows = table.reshape(-1, width), made.reshape(-1, width)
    return all((known == row).all(1).any() for row in rows[:: max(1, len(rows) // ROWS)])


def takes_one(operation: Operation) -> tuple[int, int] | None:
    """Return (axis, index) where an operation takes what stands at one index of an axis; None where it takes something else."""
    at = of_one_axis(operation) if len(operation.results) == 1 else None
    return (at[0], at[1][0]) if at is not None and len(at[1]) == 1 else None


def of_one_axis(operation: Operation) -> tuple[int, range] | None:
    """Return (axis, indices) that an operation takes; None where it takes them of several axes, or of none."""
    settings, shape = operation.settings, operation.operands[0].array.shape
    taken: list[tuple[int, range]] = []
    if "start_indices" in settings and settings.get("limit_indices"):
        steps = settings.get("strides") or (1,) * len(shape)
        every = zip(settings["start_indices"], settings["limit_indices"], steps, strict=True)
        taken = [(axis, range(*how)) for axis, how in enumerate(every)]
    elif operation.name == "select":
        axis, index = settings.get("dim", 0) % len(shape), settings.get("index", 0)
        taken = [(axis, range(shape[axis])[index:][:1])]
    elif operation.name == "slice":
        axis = settings.get("dim", 0) % len(shape)
        how = slice(settings.get("start"), settings.get("end"), settings.get("step"))
        taken = [(axis, range(shape[axis])[how])]
    taken = [(axis, which) for axis, which in taken if len(which) != shape[axis]]
    return taken[0] if len(taken) == 1 and len(taken[0][1]) else None


def _over(operation: Operation) -> str:
    given = next((operation.settings[key] for key in REDUCED if operation.settings.get(key) is not None), None)
    if given is None or not operation.data:
        return ""
    axes = list(given) if isinstance(given, list | tuple) else [given]
    rank = operation.data[0].array.ndim
    if [axis % rank for axis in axes] == [rank - 1]:
        return " over the last axis"
    return f" over {'axis' if len(axes) == 1 else 'axes'} {', '.join(str(axis % rank) for axis in axes)}"
