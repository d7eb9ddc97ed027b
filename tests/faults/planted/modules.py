"""Faults of one small model in linen, nnx and Equinox, whose references return the outputs alone: in rules, and in PyTorch's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from faults.expected import IN, Fault
from faults.plants import InRule, InTarget, attribute, each
from support.named_modules import GROUPS, HEAD, HEADS

LINEN, NNX, EQUINOX = "linen-modules", "nnx-modules", "equinox-modules"


def rule(name: str, case: str, at: str, diagnosis: str, *edits: tuple[str, str]) -> Fault:
    return Fault(name, case, "torch", InRule(edits), "model", at, diagnosis)


def target(name: str, case: str, at: str, diagnosis: str, edit: Callable[[Any], None]) -> Fault:
    return Fault(name, case, "torch", InTarget(edit), "model", at, diagnosis)


def of_blocks(name: str, value: Any) -> Callable[[Any], None]:
    return each("Block", attribute(name, value))


def of_model(name: str, value: Any) -> Callable[[Any], None]:
    return each("Model", attribute(name, value))


def scales_exchanged(block: Any) -> None:
    block.scales = lambda: (block.scale_2, block.scale_1)


def unscaled(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.einsum("btnh,bsnh->bnts", q, k)


def in_turns(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(1, 1, HEADS // GROUPS, 1)


def reversed_stack(module: Any) -> None:
    blocks = list(module.blocks)
    module.stack = lambda: blocks[::-1]


def second_layer_first(module: Any) -> None:
    one, two, three = module.blocks
    module.stack = lambda: [two, one, three]


def token_last(module: Any) -> None:
    module.with_token = lambda x: torch.cat([x, module.token.expand(len(x), 1, -1)], dim=1)


def kept_token(x: torch.Tensor) -> torch.Tensor:
    """The last token is left out, not the first."""
    return x[:, :-1]


B, SECOND = "blocks.0.", "blocks.1."
MODULES: tuple[Fault, ...] = (
    rule("a square projection transposed", LINEN, f"{B}gate", "transposed", ("...D,DF->...F\n  from: blocks_{i}/gate", "...D,FD->...F\n  from: blocks_{i}/gate")),
    rule("a square projection transposed", NNX, f"{B}out", "transposed", ("...E,ED->...D", "...E,DE->...D")),
    rule("a square projection transposed", EQUINOX, "embed", "transposed", ("...D,WD->...W", "...D,DW->...W")),
    rule("1+scale on plain norms", LINEN, f"{B}attention_norm", "1+scale on a plain norm", ("multiplies_by: scale", "multiplies_by: 1+scale")),
    rule("1+scale on plain norms", NNX, f"{B}attention_norm", "1+scale on a plain norm", ("multiplies_by: scale", "multiplies_by: 1+scale")),
    rule("gate and up exchanged", NNX, "y", "modules exchanged", ("blocks/{i}/gate/", "blocks/{i}/_/"), ("blocks/{i}/up/", "blocks/{i}/gate/"), ("blocks/{i}/_/", "blocks/{i}/up/")),
    rule("keys and values exchanged", EQUINOX, "y", "modules exchanged", ("blocks/{i}/k/", "blocks/{i}/_/"), ("blocks/{i}/v/", "blocks/{i}/k/"), ("blocks/{i}/_/", "blocks/{i}/v/")),
    rule("LayerScales exchanged", LINEN, f"{B}mlp_norm{IN}", "of another tensor", ("parameter: blocks.{i}.{scale_1,scale_2}", "parameter: blocks.{i}.{scale_2,scale_1}")),
    rule("the norms of a block exchanged", EQUINOX, "y", "modules exchanged", ("blocks/{i}/attention_norm/", "blocks/{i}/_/"), ("blocks/{i}/mlp_norm/", "blocks/{i}/attention_norm/"), ("blocks/{i}/_/", "blocks/{i}/mlp_norm/")),
    *(
        fault
        for case in (LINEN, NNX, EQUINOX)
        for fault in (
            target("q and k exchanged in the scores", case, "y", "axes exchanged", of_blocks("scored", lambda q, k: torch.einsum("btnh,bsnh->bnts", k, q) / HEAD**0.5)),
            target("no 1/√H in the scores", case, "y", "operation missing", of_blocks("scored", unscaled)),
            target("key heads in turns, not in groups", case, "y", "heads repeated in another order", of_blocks("grouped", in_turns)),
            target("heads behind their features", case, f"{B}out{IN}", "values in another order", of_blocks("joined", lambda x: x.transpose(2, 3).flatten(2))),
            target("layers in the reverse order", case, "y", "layers in the reverse order", reversed_stack),
            target("the second layer in front of the first", case, "y", "layers in another order", second_layer_first),
            target("LayerScales exchanged", case, f"{B}mlp_norm{IN}", "of another tensor", each("Block", scales_exchanged)),
            target("the skip connection in front", case, f"merge{IN}", "values in another order", of_model("merged", lambda x, skip: torch.cat([skip, x], dim=-1))),
            target("the class token last", case, f"{B}attention_norm{IN}", "values in another order", each("Model", token_last)),
            target("the last token left out for the class token", case, "y", "another part", of_model("without_token", kept_token)),
            target("the activation on up, not on gate", case, "y", "modules exchanged", of_blocks("gated", lambda gate, up: gate * torch.nn.functional.silu(up))),
        )
    ),
)  # fmt: skip
