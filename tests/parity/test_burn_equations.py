"""`burn_modules` against numbers that Burn's own tests expect of Burn (its `assert_approx_eq`): our statement of its equations, and
which way round its weights lie, are those that Burn's builds pass with. Numbers: tracel-ai/burn 2c06be351006, crates/burn-nn/src."""

from __future__ import annotations

import numpy as np
import pytest

from support import burn_modules as burn

File = dict[str, np.ndarray]


def gate(name: str, *weights: object) -> File:
    """A GateController: its input's weight and bias, its state's weight and bias."""
    names = [f"{name}.{side}_transform.{what}" for side in ("input", "hidden") for what in ("weight", "bias")]
    return {key: np.array(value) for key, value in zip(names, weights, strict=True)}


# modules/rnn/gru.rs, test_bigru_against_pytorch
BI_GRU: File = {
    **gate("forward.update_gate", [[-0.2811, 0.5090, 0.5018], [0.3391, -0.4236, 0.1081]], [0.2932, -0.3519, -0.5715], [[-0.3471, 0.5214, 0.0961], [0.0545, -0.4904, -0.1875], [-0.5702, 0.4457, 0.3568]], [-0.0100, 0.4518, -0.4102]),
    **gate("forward.reset_gate", [[0.4414, -0.1353, -0.1265], [0.4792, 0.5304, 0.1165]], [-0.2524, 0.3333, 0.1033], [[-0.2695, -0.0677, -0.4557], [0.1472, -0.2345, -0.2662], [-0.2660, 0.3830, -0.1630]], [0.1663, 0.2391, 0.1826]),
    **gate("forward.new_gate", [[0.4266, 0.2784, 0.4451], [0.0782, -0.0815, 0.0853]], [-0.2231, -0.4428, 0.4737], [[0.0900, -0.1821, 0.2430], [0.4665, 0.1551, 0.5155], [0.0631, -0.1566, 0.3337]], [0.0364, -0.3941, 0.1780]),
    **gate("reverse.update_gate", [[-0.3444, 0.1924, -0.4765], [0.5193, 0.5556, -0.5727]], [0.1090, 0.1779, -0.5385], [[0.1221, 0.3925, 0.5287], [-0.1472, -0.4187, -0.1948], [0.3441, -0.3082, -0.2047]], [0.0016, -0.2148, -0.0400]),
    **gate("reverse.reset_gate", [[-0.1988, -0.1203, -0.3422], [0.1769, 0.4788, -0.3443]], [-0.5053, -0.3676, 0.5771], [[-0.3936, 0.3504, -0.4486], [0.3063, -0.1370, -0.2914], [-0.2334, 0.3303, 0.1760]], [-0.5080, -0.2488, -0.3456]),
    **gate("reverse.new_gate", [[-0.4517, 0.2339, 0.4797], [-0.3884, 0.2067, -0.2982]], [-0.3792, -0.1922, 0.0903], [[-0.5586, -0.0762, -0.3944], [-0.3306, -0.4191, -0.4898], [0.1442, 0.0135, -0.3179]], [-0.3912, -0.3963, -0.3368]),
}  # fmt: skip
X = np.array([[[0.949, -0.861]], [[0.892, 0.927]], [[-0.173, -0.301]], [[-0.081, 0.992]]])
WITH = np.array([[0.24537, 0.14018, 0.19449, -0.49777, -0.15647, 0.48392], [0.27468, -0.14514, 0.56205, -0.60381, -0.04986, 0.15683], [-0.04062, -0.33486, 0.52330, -0.42244, -0.12644, -0.12034], [-0.11743, -0.53873, 0.54429, -0.64943, 0.30127, -0.41943]])  # fmt: skip
WITHOUT = np.array([[0.07452, -0.08247, 0.46677, -0.46770, -0.18086, 0.47519], [0.15843, -0.27144, 0.65781, -0.50286, -0.12806, 0.14884], [-0.10704, -0.41573, 0.53954, -0.24794, -0.24003, -0.10294], [-0.16505, -0.57952, 0.53565, -0.23598, -0.07137, -0.28937]])  # fmt: skip


@pytest.mark.parametrize(
    ("forward", "reverse", "want"),
    [([[0.280, 0.360, -1.242]], [[-0.588, 0.729, -0.788]], WITH), (np.zeros((1, 3)), np.zeros((1, 3)), WITHOUT)],
)
def test_gru_in_both_directions(forward: object, reverse: object, want: np.ndarray) -> None:
    """Weights rounded to four places, and results that follow: to 3e-4. Each mistake is a hundred times that."""
    first, last = np.array(forward), np.array(reverse)
    assert np.abs(burn.bi_gru(BI_GRU, X, first, last)[:, 0] - want).max() < 3e-4
    turned = {key: x.T if x.shape == (3, 3) else x for key, x in BI_GRU.items()}
    swapped = {
        key.replace("update", "?").replace("reset", "update").replace("?", "reset"): x for key, x in BI_GRU.items()
    }
    for wrong in (turned, swapped):
        assert np.abs(burn.bi_gru(wrong, X, first, last)[:, 0] - want).max() > 3e-2
    before = burn.gru(burn.below(BI_GRU, "forward"), X, first, reset_after=False)
    assert np.abs(before[:, 0] - want[:, :3]).max() > 1e-2


def test_lstm() -> None:
    """modules/rnn/lstm/lstm_module.rs, test_forward_single_input_single_feature: what it expects of the cell and of the state."""
    weights = {"input_gate": 0.5, "forget_gate": 0.7, "cell_gate": 0.9, "output_gate": 1.1}
    file = {key: x for name, w in weights.items() for key, x in gate(name, [[w]], [0.0], [[w]], [0.0]).items()}
    h, c = burn.lstm(file, np.array([[[0.1]]]), np.zeros((1, 1)), np.zeros((1, 1)))[0, 0]
    assert abs(c - 0.046) < 5e-5 and abs(h - 0.0242) < 5e-5


def test_norms() -> None:
    """modules/norm/rms.rs rms_norm_forward; layer.rs layer_norm_forward, and with a large epsilon; group.rs, affine false."""
    ones, zeros = np.ones(10), np.zeros(10)
    got = burn.rms_norm({"n.gamma": ones[:3]}, "n", np.arange(9.0).reshape(3, 3), 1e-5)
    assert np.abs(got - [[0, 0.7746, 1.5492], [0.7348, 0.9798, 1.2247], [0.8514, 0.9933, 1.1352]]).max() < 1e-4
    x = np.array([-0.6897, -2.7106, 2.2222, -1.0330, -0.8933, 1.1765, 0.0601, 1.5252, -0.3630, 0.6728])
    small = [-0.4990, -1.9680, 1.6178, -0.7486, -0.6470, 0.8576, 0.0461, 1.1111, -0.2614, 0.4915]
    large = [-0.4863, -1.9180, 1.5766, -0.7295, -0.6305, 0.8358, 0.0449, 1.0828, -0.2548, 0.4790]
    for epsilon, want in ((1e-5, small), (1e-1, large)):
        assert np.abs(burn.layer_norm({"n.gamma": ones, "n.beta": zeros}, "n", x, epsilon) - want).max() < 1e-4
    x = np.array([[[-0.3034, 0.2726, -0.9659], [-1.1845, -1.3236, 0.0172], [1.9507, 1.2554, -0.8625], [1.0682, 0.3604, 0.3985], [-0.4957, -0.4461, -0.9721], [1.5157, -0.1546, -0.5596]]])  # fmt: skip
    want = [[-0.1653, 0.3748, -0.7866], [-0.9916, -1.1220, 0.1353], [1.9485, 1.2965, -0.6896], [1.2769, 0.3628, 0.4120], [-0.7427, -0.6786, -1.3578], [1.8547, -0.3022, -0.8252]]  # fmt: skip
    got = burn.group_norm({"n.gamma": ones[:6], "n.beta": zeros[:6]}, "n", x, 2)
    assert np.abs(got[0] - want).max() < 2e-4


def test_rotary_encoding() -> None:
    """modules/rope_encoding.rs, test_rotary_encoding_forward: the pairs are neighbours."""
    x = np.array([[[1.0, 2, 3, 4], [5, 6, 7, 8]], [[9, 10, 11, 12], [13, 14, 15, 16]]])
    want = [[[1, 2, 3, 4], [-2.3473, 7.4492, 6.9197, 8.0696]], [[9, 10, 11, 12], [-4.7567, 18.5034, 14.8393, 16.1492]]]
    assert np.abs(burn.rotary(x) - want).max() < 1e-4


def test_adapters() -> None:
    """burn-store adapter.rs, its own tests: a Linear's weight (10, 5) becomes (5, 10) either way; names of norms; nothing else."""
    types = {"fc": "Linear", "norm": "BatchNorm", "rms": "RmsNorm", "conv": "Conv2d", "inst": "InstanceNorm"}
    file = {"fc.weight": np.zeros((10, 5)), "fc.bias": np.zeros(10), "norm.weight": np.zeros(10), "norm.bias": np.zeros(10), "norm.running_mean": np.zeros(10), "rms.weight": np.zeros(10), "conv.weight": np.zeros((2, 3, 1, 1)), "inst.weight": np.zeros(3)}  # fmt: skip
    made = burn.adapted(file, types, burn.TO_BURN)
    shapes = {name: x.shape for name, x in made.items()}
    assert shapes == {"fc.weight": (5, 10), "fc.bias": (10,), "norm.gamma": (10,), "norm.beta": (10,), "norm.running_mean": (10,), "rms.gamma": (10,), "conv.weight": (2, 3, 1, 1), "inst.weight": (3,)}  # fmt: skip
    back = burn.adapted(made, types, burn.TO_PYTORCH)
    assert {name: x.shape for name, x in back.items()} == {name: x.shape for name, x in file.items()}
