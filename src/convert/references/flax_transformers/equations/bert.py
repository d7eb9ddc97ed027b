"""BERT in plain JAX: the equations of transformers' flax classes, which transformers 5 no longer has.

Source: transformers 4.46.3 ``models/bert/modeling_flax_bert.py``. tests/models/test_flax_transformers_check.py compares the values
with those that the real classes gave for the golden checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.layers.activations import activation_pair
from convert.references.flax_transformers.equations.layers import attend, layer_norm
from convert.references.protocol import INPUT


@dataclass(frozen=True)
class Bert:
    """Hyperparameters that no weight holds.

    Attributes:
        layers, heads: how many.
        epsilon: of the norms.
        activation: its name in rules.
        bare: whether tree and module are the encoder alone, with no key for it (FlaxBertModel).
    """

    layers: int
    heads: int
    epsilon: float
    activation: str
    bare: bool


def run(model: Bert, w: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the values at boundaries, by the names of transformers' submodules, and the outputs of the head that the tree has."""
    import jax.numpy as jnp

    values: OrderedDict[str, Any] = OrderedDict()
    act, _ = activation_pair(model.activation)
    tree, module = ("", "") if model.bare else ("bert/", "bert.")

    def dense(name: str, leaf: str, x: Any) -> Any:
        y = values[name] = x @ w[f"{leaf}/kernel"] + w[f"{leaf}/bias"]
        return y

    def norm(name: str, leaf: str, x: Any) -> Any:
        values[name + INPUT] = x
        y = values[name] = layer_norm(w, leaf, x, model.epsilon)
        return y

    ids, types = inputs["input_ids"], inputs["token_type_ids"]
    for part, chosen in (("word", ids), ("position", jnp.arange(ids.shape[1])), ("token_type", types)):
        table = w[f"{tree}embeddings/{part}_embeddings/embedding"]
        values[f"{module}embeddings.{part}_embeddings"] = table[chosen][None] if part == "position" else table[chosen]
    x = sum(values[f"{module}embeddings.{part}_embeddings"] for part in ("word", "position", "token_type"))
    x = norm(f"{module}embeddings.LayerNorm", f"{tree}embeddings/LayerNorm", x)
    visible = inputs["attention_mask"][:, None, None, :] > 0
    for i in range(model.layers):
        name, leaf = f"{module}encoder.layer.{i}", f"{tree}encoder/layer/{i}"
        q, k, v = (dense(f"{name}.attention.self.{p}", f"{leaf}/attention/self/{p}", x) for p in ("query", "key", "value"))  # fmt: skip
        y = values[f"{name}.attention.output.dense{INPUT}"] = attend(q, k, v, model.heads, visible)
        y = dense(f"{name}.attention.output.dense", f"{leaf}/attention/output/dense", y)
        x = norm(f"{name}.attention.output.LayerNorm", f"{leaf}/attention/output/LayerNorm", x + y)
        y = values[f"{name}.output.dense{INPUT}"] = act(
            dense(f"{name}.intermediate.dense", f"{leaf}/intermediate/dense", x)
        )
        y = dense(f"{name}.output.dense", f"{leaf}/output/dense", y)
        x = norm(f"{name}.output.LayerNorm", f"{leaf}/output/LayerNorm", x + y)
    if model.bare:
        values["last_hidden_state"] = x
    if f"{tree}pooler/dense/kernel" in w:
        pooled = jnp.tanh(dense(f"{module}pooler.dense", f"{tree}pooler/dense", x[:, 0]))
    if model.bare:
        values["pooler_output"] = pooled
    if "cls/predictions/bias" in w:
        y = act(dense("cls.predictions.transform.dense", "cls/predictions/transform/dense", x))
        y = norm("cls.predictions.transform.LayerNorm", "cls/predictions/transform/LayerNorm", y)
        y = y @ w[f"{tree}embeddings/word_embeddings/embedding"].T + w["cls/predictions/bias"]
        if "cls/seq_relationship/kernel" in w:
            values["prediction_logits"] = y
            values["seq_relationship_logits"] = dense("cls.seq_relationship", "cls/seq_relationship", pooled)
        else:
            values["logits"] = y
    if "classifier/kernel" in w:
        values["logits"] = dense("classifier", "classifier", pooled if f"{tree}pooler/dense/kernel" in w else x)
    if "qa_outputs/kernel" in w:
        y = dense("qa_outputs", "qa_outputs", x)
        values["start_logits"], values["end_logits"] = y[..., 0], y[..., 1]
    return values
