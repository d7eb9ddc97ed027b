"""A converter by hand with the two mistakes of google-research/timesfm#138: by_hand.py CHECKPOINT RIGHT.safetensors OUT.safetensors

All other tensors are those of RIGHT. Everything loads with strict=True: the projection is square, and a norm is a norm.
"""

import sys

from safetensors.numpy import load_file, save_file

from convert.checkpoints import open_source


def main(checkpoint: str, right: str, out: str) -> None:
    source, state = open_source(checkpoint), load_file(right)
    for leaf in source.leaves:
        layer = leaf.partition("x_layers_")[2].partition("/")[0]
        if leaf.endswith("self_attention/post/w"):  # stored (model, heads, head), and used as '...NH,DNH->...D'
            weight = source.read(leaf).reshape(32, 32)
            state[f"decoder.layers.{layer}.self_attn.o_proj.weight"] = weight.T.copy()  # as one does with q, k and v
        if leaf.endswith("ff_layer/layer_norm/scale"):  # praxis' LayerNorm multiplies by 1 + scale
            state[f"decoder.layers.{layer}.mlp.layer_norm.weight"] = source.read(leaf)
    save_file(state, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
