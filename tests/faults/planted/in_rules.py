"""Faults in the text of a rule: the file is what the rules make, and only the model shows that they are wrong."""

from __future__ import annotations

from faults.expected import BOTH, HUGGING, ONE, TWO, TWO_FIVE, UPSTREAM, Fault, layer
from faults.plants import InRule

L = "stacked_transformer_layer/x_layers_{i}"
POST, FFN1, FFN2 = f"{L}/self_attention/post", f"{L}/ff_layer/ffn_layer1", f"{L}/ff_layer/ffn_layer2"


def bias_apart(bias: str, upstream: str, hugging: str) -> tuple[tuple[str, str], ...]:
    """Takes a bias out of a linear rule, so that the weight's equation can be falsified alone."""
    parameter = (
        f"- from: {bias}\n  axes: D\n  parameter: {{timesfm: '{upstream}.bias', transformers: '{hugging}.bias'}}\n\n"
    )
    return (f"  bias: {bias}\n", ""), ("# ---- output:", f"{parameter}# ---- output:")


def swapped(one: str, two: str) -> tuple[tuple[str, str], ...]:
    """Two names in each other's place."""
    return (one, "@"), (two, one), ("@", two)


def renumbered(order: str, count: int) -> tuple[tuple[str, str], ...]:
    """Layers taken in another order; the rule of the per-dim scale keeps its index, so that the depth is known."""
    kept = f"{L}/self_attention/per_dim_scale/per_dim_scale"
    numbers = ",".join(map(str, range(count)))
    scaling = [f"{name}.layers.{{i}}.self_attn.scaling" for name in ("stacked_transformer", "decoder")]
    hidden = [(name, name.replace("{i}", f"@{k}@")) for k, name in enumerate([kept, *scaling])]
    moved = [
        ("x_layers_{i}", f"x_layers_{{{order}}}"),
        ("transformer.layers.{i}", f"transformer.layers.{{{numbers}}}"),
        ("decoder.layers.{i}", f"decoder.layers.{{{numbers}}}"),
    ]
    return (*hidden, *moved, *((there, name) for name, there in hidden))


def model(name: str, case: str, to: str, edits: tuple[tuple[str, str], ...], at: str, diagnosis: str) -> Fault:
    """A fault that the model level alone sees."""
    return Fault(name, case, to, InRule(edits), "model", at, diagnosis)


ATTENTION = [
    fault
    for to in BOTH
    for case in ((ONE, TWO) if to == UPSTREAM else (ONE,))
    for fault in (
        model(
            "output projection transposed (square)",
            case,
            to,
            (
                ("...NH,DNH->...D ", "...D,DNH->...NH "),
                *bias_apart(
                    f"{POST}/b",
                    "stacked_transformer.layers.{i}.self_attn.o_proj",
                    "decoder.layers.{i}.self_attn.o_proj",
                ),
            ),
            f"{layer(case, to)}self_attn.o_proj",
            "transposed",
        ),
        model(
            "q and k swapped",
            case,
            to,
            (("{query,key,value}", "{key,query,value}"),),
            f"{layer(case, to)}self_attn.{'qkv_proj' if to == UPSTREAM else 'q_proj'}",
            "fused parts in another order" if to == UPSTREAM else "of another tensor",
        ),
        Fault(
            "head and feature axes swapped in a projection with biases",
            case,
            to,
            InRule((("...D,DNH->...NH ", "...D,DNH->...HN "),)),
            "plan",
            "mdl_vars/params/stacked_transformer_layer/x_layers_0/self_attention/key/b",
            "refused",
        ),
        model(
            "head and feature axes swapped in the output projection",
            case,
            to,
            (("...NH,DNH->...D ", "...HN,DNH->...D "),),
            f"{layer(case, to)}self_attn.o_proj",
            "axes of a head swapped",
        ),
    )
] + [
    fault
    for to in BOTH
    for fault in (
        model(
            "output projection transposed (square)",
            TWO_FIVE,
            to,
            (("...NH,NHD->...D", "...D,NHD->...NH"),),
            f"{layer(TWO_FIVE, to)}{'attn.out' if to == UPSTREAM else 'self_attn.o_proj'}",
            "transposed",
        ),
        model(
            "q and k swapped",
            TWO_FIVE,
            to,
            (("{query,key,value}", "{key,query,value}"),),
            f"{layer(TWO_FIVE, to)}{'attn.qkv_proj' if to == UPSTREAM else 'self_attn.q_proj'}",
            "fused parts in another order" if to == UPSTREAM else "of another tensor",
        ),
        model(
            "head and feature axes swapped in a projection",
            TWO_FIVE,
            to,
            (("...D,DNH->...NH", "...D,DNH->...HN"),),
            f"{layer(TWO_FIVE, to)}{'attn.qkv_proj' if to == UPSTREAM else 'self_attn.q_proj'}",
            "axes of a head swapped",
        ),
        model(
            "head and feature axes swapped in the output projection",
            TWO_FIVE,
            to,
            (("...NH,NHD->...D", "...HN,NHD->...D"),),
            f"{layer(TWO_FIVE, to)}{'attn.out' if to == UPSTREAM else 'self_attn.o_proj'}",
            "axes of a head swapped",
        ),
    )
]

NORMS = [
    fault
    for to in BOTH
    for fault in (
        model(
            "1+scale missing",
            ONE,
            to,
            (("multiplies_by: 1+scale", "multiplies_by: scale"),),
            f"{layer(ONE, to)}mlp.layer_norm",
            "1+scale missing",
        ),
        model(
            "1+scale on a plain norm",
            ONE,
            to,
            (("multiplies_by: scale ", "multiplies_by: 1+scale "),),
            f"{layer(ONE, to)}input_layernorm",
            "1+scale on a plain norm",
        ),
        model(
            "1+scale on a plain norm",
            TWO_FIVE,
            to,
            (("multiplies_by: scale", "multiplies_by: 1+scale"),),
            f"{layer(TWO_FIVE, to)}{'pre_attn_ln' if to == UPSTREAM else 'input_layernorm'}",
            "1+scale on a plain norm",
        ),
        Fault(
            "the rules declare epsilon 1e-5 for 1e-6",
            TWO_FIVE,
            to,
            InRule((("epsilon: 1e-6 ", "epsilon: 1e-5 "),)),
            "layers",  # the published value
            "epsilon",
            "epsilon",
            *(  # upstream's code has an epsilon of its own; that of transformers takes the file's
                () if to == UPSTREAM else (("model.layers.0.input_layernorm", "epsilon 1e-05 for 1e-06"),)
            ),
        ),
        Fault(
            "the rules declare GeLU for SiLU",
            TWO_FIVE,
            to,
            InRule((("activation: silu\n  linear", "activation: gelu_tanh\n  linear"),)),
            "layers",
            "tokenizer.hidden_layer" if to == UPSTREAM else "model.input_ff_layer.input_layer",
            "activation",
        ),
        Fault(
            "the rules declare GeLU for ReLU",
            ONE,
            to,
            InRule((("activation: relu", "activation: gelu_erf"),)),
            "layers",
            f"{layer(ONE, to)}mlp.gate_proj",
            "activation",
        ),
    )
]

LAYERS = [
    fault
    for to in BOTH
    for fault in (
        model(
            "two layers swapped",
            ONE,
            to,
            renumbered("1,0,2", 3),
            f"{layer(ONE, to)}input_layernorm",
            "of another layer",
        ),
        model(
            "layer index shifted",
            ONE,
            to,
            renumbered("1,2,0", 3),
            f"{layer(ONE, to)}input_layernorm",
            "of another layer",
        ),
        model(
            "layers in lexical order (10 before 2)",
            TWO,
            to,
            renumbered("0,1,10,11,2,3,4,5,6,7,8,9", 12),
            f"{layer(TWO, to, 2)}input_layernorm",
            "of another layer",
        ),
    )
]

LINEAR = [
    fault
    for to in BOTH
    for fault in (
        model(
            "feed-forward projection transposed (square)",
            ONE,
            to,
            (
                (f"- einsum: ...F,FD->...D\n  from: {FFN2}", f"- einsum: ...D,FD->...F\n  from: {FFN2}"),
                *bias_apart(
                    f"{FFN2}/bias/b", "stacked_transformer.layers.{i}.mlp.down_proj", "decoder.layers.{i}.mlp.down_proj"
                ),
            ),
            f"{layer(ONE, to)}mlp.down_proj",
            "transposed",
        ),
        model(
            "feed-forward projection transposed (square)",
            TWO_FIVE,
            to,
            (("- einsum: ...F,FD->...D", "- einsum: ...D,FD->...F"),),
            f"{layer(TWO_FIVE, to)}{'ff1' if to == UPSTREAM else 'mlp.fc2'}",
            "transposed",
        ),
        model(
            "a bias added to another's layer",
            ONE,
            to,
            swapped(f"bias: {FFN1}/bias/b", f"bias: {FFN2}/bias/b"),
            f"{layer(ONE, to)}mlp.gate_proj",
            "of another tensor",
        ),
        model(
            "hidden and residual layer of a block swapped",
            ONE,
            to,
            (
                *swapped(": input_ff_layer/hidden_layer/linear", ": input_ff_layer/residual_layer/linear"),
                *swapped(": input_ff_layer/hidden_layer/bias", ": input_ff_layer/residual_layer/bias"),
            ),
            "input_ff_layer.hidden_layer.0" if to == UPSTREAM else "decoder.input_ff_layer.input_layer",
            "of another tensor",
        ),
        model(
            "hidden and residual layer of a block swapped",
            TWO_FIVE,
            to,
            (
                *swapped(": tokenizer/hidden_layer/kernel", ": tokenizer/residual_layer/kernel"),
                *swapped(": tokenizer/hidden_layer/bias", ": tokenizer/residual_layer/bias"),
            ),
            "tokenizer.hidden_layer" if to == UPSTREAM else "model.input_ff_layer.input_layer",
            "of another tensor",
        ),
    )
]

IN_RULES: tuple[Fault, ...] = (*ATTENTION, *NORMS, *LAYERS, *LINEAR)
assert HUGGING in BOTH
