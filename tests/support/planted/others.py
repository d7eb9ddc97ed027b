"""A mixer, a convolutional net, a recurrent net, experts, a net of features, a scan with decay, and attention of learned queries."""

# fmt: off

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as f

from support.inferred import floats, layer_norm
from support.planted import SQUARE, D, Faulty, Pair

SIGMOID = torch.sigmoid


# ---- a mixer


def _mixer(w: Any, x: Any) -> Any:
    y = layer_norm(x, w["s"], w["t"]).swapaxes(1, 2)
    x = x + (jax.nn.gelu(y @ w["a"] + w["ab"], approximate=False) @ w["b"] + w["bb"]).swapaxes(1, 2) * w["l"]
    y = layer_norm(x, w["u"], w["v"])
    x = x + jax.nn.silu(y @ w["c"] + w["cb"]) @ w["d"] / 2
    return jnp.tanh(x.max(1) + x.mean(1)) @ w["h"] + w["hb"]


class Mixer(Faulty):
    """Layers over tokens and over channels, of equal sizes."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 5, norms=2)
        self.n[1].eps = 1e-3 if self.has("epsilon") else 1e-6
        self.m[3] = torch.nn.Linear(D, D, bias=False)
        self.l = torch.nn.Parameter(torch.randn(D))
        if self.has("bias"):
            self.m[1] = torch.nn.Linear(D, D, bias=False)

    def forward(self, x: Any) -> Any:
        y = x if self.has("no norm") else self.n[0](x)
        y = y if self.has("channels") else y.transpose(1, 2)
        y = self.m[0](y)  # shows: no norm, channels
        if self.has("activation"):
            y = f.gelu(y, approximate="tanh")  # shows: activation
        elif self.has("no activation"):
            y = y * 1.0  # shows: no activation
        else:
            y = f.gelu(y)
        y = self.m[1](y)  # shows: bias, no activation
        y = y if self.has("not back") else y.transpose(1, 2)
        y = y if self.has("no scale") else y * self.l  # shows: not back, bias
        if self.has("residual"):
            x = y  # shows: residual
        elif self.has("twice"):
            x = 2 * x + y  # shows: twice
        elif self.has("norm's output"):
            x = self.n[0](x) + y  # shows: norm's output
        else:
            x = x + y  # shows: no scale, bias
        y = self.n[1](x.flip(1) if self.has("flipped") else x)  # shows: residual, epsilon
        y = self.m[2](y)
        y = SIGMOID(y) if self.has("sigmoid") else f.relu(y) if self.has("relu") else f.silu(y)
        y = self.m[3](y)  # shows: sigmoid, relu
        x = x + y if self.has("not halved") else x + y / 2  # shows: flipped
        if self.has("mean"):
            x = x.mean(1)  # shows: mean
        elif self.has("maximum"):
            x = x.amax(1)  # shows: maximum
        elif self.has("over channels"):
            x = x.amax(2) + x.mean(2)  # shows: over channels
        elif self.has("minimum"):
            x = x.amin(1) + x.mean(1)  # shows: minimum
        elif self.has("sum"):
            x = x.amax(1) + x.sum(1)  # shows: sum
        else:
            x = x.amax(1) + x.mean(1)
        return self.m[4](x if self.has("no tanh") else x.tanh())  # shows: mean, maximum


MIXER: dict[str, tuple[int, ...]] = dict.fromkeys("abcdh", SQUARE) | dict.fromkeys(
    ("s", "t", "u", "v", "ab", "bb", "cb", "hb", "l"), (D,)
)
MIXER_FAULTS = (
    "epsilon", "bias", "no norm", "channels", "activation", "no activation", "not back", "no scale", "residual", "twice",
    "norm's output", "flipped", "sigmoid", "relu", "not halved", "mean", "maximum", "over channels", "minimum", "sum", "no tanh",
)


# ---- a convolutional net


def _conv(x: Any, kernel: Any, stride: int = 1, padding: Any = "SAME", groups: int = 1) -> Any:
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def _net(w: Any, x: Any) -> Any:
    x = x.transpose(0, 2, 3, 1)
    x = _conv(x, w["a"]) + w["ab"]
    x = (x - w["m"]) / jnp.sqrt(w["v"] + 1e-3) * w["s"] + w["t"]
    x = jnp.clip(x, 0, 6)
    y = _conv(x, w["b"], 2, ((0, 1), (0, 1))) + w["bb"]
    z = y.reshape(*y.shape[:3], 2, D // 2)
    z = (z - z.mean((1, 2, 4), keepdims=True)) / jnp.sqrt(z.var((1, 2, 4), keepdims=True) + 1e-5)
    y = jax.nn.elu(z.reshape(y.shape) * w["g"] + w["h"])
    y = y + _conv(y, w["c"], 1, "SAME", D) + w["cb"]
    y = jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "VALID")
    gate = jax.nn.sigmoid(y.mean((1, 2)) @ w["e"] + w["eb"])
    return (y * gate[:, None, None]).reshape(len(y), -1, D).sum(1) @ w["o"]


class Net(Faulty):
    """A convolutional net: BatchNorm, GroupNorm, a depthwise kernel, pooling and a gate over channels."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.a = torch.nn.Conv2d(D, D, 3, padding=1, padding_mode="circular" if self.has("circular") else "zeros")
        self.b = torch.nn.Conv2d(D, D, 3, 2)
        self.c = torch.nn.Conv2d(D, D, 3, padding=2 if self.has("dilated") else 1, dilation=2 if self.has("dilated") else 1, groups=D)
        self.bn = torch.nn.BatchNorm2d(D, eps=1e-5 if self.has("epsilon") else 1e-3)
        self.gn = torch.nn.GroupNorm(4 if self.has("groups") else 1 if self.has("one group") else 2, D, eps=1e-3 if self.has("group epsilon") else 1e-5)
        self.e, self.o = torch.nn.Linear(D, D), torch.nn.Linear(D, D, bias=False)

    def forward(self, x: Any) -> Any:
        x = self.a(x)  # shows: circular
        x = x if self.has("no norm") else self.bn(x)  # shows: epsilon
        x = x.relu() if self.has("relu") else f.silu(x) if self.has("silu") else x.clip(0, 6)
        sides = (1, 0, 1, 0) if self.has("other side") else (0, 1, 1, 0) if self.has("one other side") else (0, 1, 0, 1)
        y = f.pad(x, sides, value=1.0 if self.has("ones") else 0.0)
        y = self.b(y)  # shows: other side, one other side, ones, relu, silu, no norm
        y = self.gn(y)  # shows: groups, one group, group epsilon
        y = f.elu(y, 0.5 if self.has("alpha") else 1.0)
        if self.has("residual"):
            y = self.c(y)  # shows: residual
        elif self.has("activation behind"):
            y = f.elu(y + self.c(y))  # shows: activation behind
        else:
            y = y + self.c(y)  # shows: dilated, alpha
        if self.has("average"):
            y = f.avg_pool2d(y, 2, 1)  # shows: average, residual, dilated
        elif self.has("wide"):
            y = f.max_pool2d(y, 3, 1)  # shows: wide
        elif not self.has("no pool"):
            y = f.max_pool2d(y, 2, 1)  # shows: residual, dilated
        s = y.mean((2, 3)) if not self.has("gate of maximum") else y.amax((2, 3))  # shows: no pool
        g = self.e(s)  # shows: no pool, average, wide
        g = g.tanh() if self.has("tanh gate") else g.softmax(-1) if self.has("softmax gate") else g.sigmoid()
        y = y if self.has("no gate") else y + g[:, :, None, None] if self.has("added gate") else y * g[:, :, None, None]
        return self.o(y.mean((2, 3)) if self.has("mean") else y.sum((2, 3)))  # shows: no gate, added gate, tanh gate


NET: dict[str, tuple[int, ...]] = dict.fromkeys("ab", (3, 3, D, D)) | {"c": (3, 3, 1, D), "e": SQUARE, "o": SQUARE}
NET |= dict.fromkeys(("ab", "bb", "cb", "eb", "m", "v", "s", "t", "g", "h"), (D,))
NET_FAULTS = (
    "circular", "epsilon", "groups", "one group", "group epsilon", "dilated", "no norm", "relu", "silu", "other side",
    "one other side", "ones", "alpha", "residual", "activation behind", "average", "wide", "no pool", "gate of maximum", "tanh gate",
    "softmax gate", "no gate", "added gate", "mean",
)


# ---- a recurrent net


def _recurrent(w: Any, x: Any) -> Any:
    h = jnp.zeros((len(x), D))
    found = []
    for k in range(x.shape[1]):
        z = jax.nn.sigmoid(x[:, k] @ w["a"] + h @ w["b"] + w["ab"])
        r = jax.nn.sigmoid(x[:, k] @ w["c"] + h @ w["d"] + w["cb"])
        n = jnp.tanh(x[:, k] @ w["e"] + r * (h @ w["g"]) + w["eb"])
        h = (1 - z) * n + z * h
        found.append(h)
    y = jnp.stack(found, 1)
    return jnp.tanh(y[:, -1] + y.mean(1) / 2) @ w["o"] + w["ob"]


class Recurrent(Faulty):
    """A recurrent net, step by step."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.x = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(3))
        self.h = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(3))
        self.o = torch.nn.Linear(D, D)

    def forward(self, x: Any) -> Any:
        h = torch.ones(len(x), D) if self.has("ones") else torch.zeros(len(x), D)
        found = []
        steps = range(x.shape[1] - 1, -1, -1) if self.has("reversed") else range(x.shape[1])
        for k in steps:
            u = x[:, k]  # shows: reversed
            z = self.x[0](u) + self.h[0](h)  # shows: reversed, ones
            z = z.clip(0, 1) if self.has("hard") else z.tanh() if self.has("tanh") else z.sigmoid()
            r = self.x[1](u) + self.h[1](h)
            r = 1 - r.sigmoid() if self.has("other reset") else r.sigmoid()
            if self.has("reset before"):
                n = self.x[2](u) + self.h[2](r * h)  # shows: reset before
            elif self.has("no reset"):
                n = self.x[2](u) + self.h[2](h)  # shows: no reset
            elif self.has("reset all"):
                n = r * (self.x[2](u) + self.h[2](h))  # shows: reset all
            else:
                n = self.x[2](u) + r * self.h[2](h)  # shows: other reset
            n = n.sigmoid() if self.has("sigmoid") else n if self.has("linear") else n.relu() if self.has("relu") else n.tanh()
            if self.has("no forgetting"):
                h = n + z * h  # shows: no forgetting
            elif self.has("swapped"):
                h = z * n + (1 - z) * h  # shows: swapped
            elif self.has("only new"):
                h = (1 - z) * n  # shows: only new
            elif self.has("leak"):
                h = 0.9 * ((1 - z) * n + z * h)  # shows: leak
            else:
                h = (1 - z) * n + z * h  # shows: hard, tanh, sigmoid, linear, relu
            found.append(h)
        y = torch.stack(found, 1)
        last = y[:, 0] if self.has("first") else y[:, -1] if not self.has("last but one") else y[:, -2]
        mean = y.amax(1) / 2 if self.has("maximum") else y.mean(1) if self.has("whole") else y.sum(1) / 2 if self.has("sum") else y.mean(1) / 2
        y = last if self.has("last only") else mean if self.has("mean only") else last - mean if self.has("minus") else last + mean
        return self.o(y if self.has("no tanh") else y.tanh())  # shows: last only, mean only


RECURRENT: dict[str, tuple[int, ...]] = dict.fromkeys("abcdego", SQUARE) | dict.fromkeys(("ab", "cb", "eb", "ob"), (D,))
RECURRENT_FAULTS = (
    "ones", "reversed", "hard", "tanh",
)


# ---- experts


def _experts(w: Any, x: Any) -> Any:
    y = layer_norm(x, w["s"], w["t"])
    gates = jax.nn.softmax(y @ w["r"] / 2)
    order = jnp.argsort(-gates)
    kept = jnp.where(jnp.argsort(order) < 2, gates, 0)
    kept = kept / kept.sum(-1, keepdims=True)
    z = jnp.einsum("btef,efd->bted", jax.nn.silu(jnp.einsum("btd,edf->btef", y, w["a"])), w["b"])
    z = jnp.einsum("bted,bte->btd", z, kept) * 1.5
    shared = jax.nn.gelu(y @ w["c"], approximate=True) @ w["d"]
    return jnp.tanh(x + z + jax.nn.sigmoid(y @ w["e"]) * shared) @ w["o"]


class Experts(Faulty):
    """Two of four experts for each token, and one for all."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 4, bias=False, norms=1)
        self.r = torch.nn.Linear(D, 4, bias=False)
        self.a = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(4))
        self.b = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        y = self.n[0](x)
        logits = self.r(x if self.has("router of x") else y) / (1 if self.has("temperature") else 2)
        gates = logits.sigmoid() if self.has("sigmoid") else logits.softmax(1 if self.has("over tokens") else -1)
        top = gates.topk(1 if self.has("one") else 3 if self.has("three") else 2, -1, largest=not self.has("least")).indices  # shows: one, three
        kept = torch.zeros_like(gates).scatter(-1, top, gates.gather(-1, top))
        if self.has("all"):
            kept = gates  # shows: all
        if self.has("equal"):
            kept = (kept > 0).to(kept) / 2  # shows: equal
        elif not self.has("not normed"):
            kept = kept / kept.sum(-1, keepdim=True)  # shows: temperature, one, three, least, all
        z = 0  # shows: not normed
        for k in range(4):
            u = self.a[k](x if self.has("experts of x") else y)
            u = f.gelu(u) if self.has("gelu") else f.relu(u) if self.has("relu") else u if self.has("linear") else f.silu(u)
            u = self.b[k](u)  # shows: gelu, relu, linear
            z = z + (u.tanh() if self.has("bounded") else u) * kept[..., k : k + 1]  # shows: not normed, one, three, least, all, sigmoid, over tokens, temperature
        z = z if self.has("no factor") else z * 1.5
        s = self.m[0](z if self.has("shared of experts") else y)
        s = self.m[1](f.gelu(s) if self.has("erf") else f.gelu(s, approximate="tanh"))
        g = self.m[2](y)
        s = s if self.has("no gate") else g.tanh() * s if self.has("tanh gate") else g.sigmoid() * s
        if self.has("residual"):
            x = z + s  # shows: residual
        elif self.has("no shared"):
            x = x + z  # shows: no shared
        elif self.has("only shared"):
            x = x + s  # shows: only shared
        else:
            x = x + z + s  # shows: no factor, no gate
        return self.m[3](x if self.has("no tanh") else x.tanh())  # shows: residual


EXPERTS: dict[str, tuple[int, ...]] = dict.fromkeys("cdeo", SQUARE) | {"r": (D, 4), "s": (D,), "t": (D,)}
EXPERTS |= {"a": (4, D, D), "b": (4, D, D)}
EXPERTS_FAULTS = (
    "router of x", "temperature", "sigmoid", "over tokens", "one", "three", "least", "all", "equal", "not normed",
    "experts of x", "gelu", "no factor", "shared of experts", "erf",
)


# ---- a net of features

WAVES = 2.0 ** np.arange(D // 2)


def _features(w: Any, x: Any) -> Any:
    y = x @ w["a"]
    y = jnp.concatenate([jnp.sin(y[:, : D // 2] * WAVES), jnp.cos(y[:, D // 2 :] * WAVES)], -1)
    h = jax.nn.softplus(y @ w["b"] + w["bb"])
    z = jnp.concatenate([h, x], -1) @ w["c"] + w["cb"]
    z = z / jnp.maximum(jnp.sqrt((z * z).sum(-1, keepdims=True)), 1e-3) * 3
    h = h + jnp.where(z > 0, z, 0.1 * z) @ w["d"]
    q = jnp.exp(-jnp.square(h - w["k"]) / 2) @ w["o"]
    return jax.nn.log_softmax(q * jnp.exp(w["temperature"]))


class Features(Faulty):
    """Waves of the input, a layer that is normed to a length, and distances."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.a, self.d, self.o = (torch.nn.Linear(D, D, bias=False) for _ in range(3))
        self.b, self.c = torch.nn.Linear(D, D), torch.nn.Linear(2 * D, D)
        self.k, self.temperature = torch.nn.Parameter(torch.randn(D)), torch.nn.Parameter(torch.randn(D))

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        waves = torch.as_tensor(WAVES)
        waves = waves * 2 if self.has("octave") else waves.flip(0) if self.has("reversed") else waves + 1 if self.has("linear") else waves
        one, two = y[:, : D // 2] * waves, y[:, D // 2 :] * waves  # shows: octave, reversed, linear
        one = one.cos() if self.has("cos") else one.sin()  # shows: octave, reversed, linear
        two = two.sin() if self.has("sin") else two.cos()  # shows: octave, reversed, linear
        y = torch.cat([one, two], -1)
        h = self.b(y)  # shows: cos, sin
        h = f.softplus(h, beta=2.0 if self.has("beta") else 1.0) if not self.has("elu") else f.elu(h)
        z = self.c(torch.cat([h, y if self.has("of waves") else x], -1))  # shows: elu, beta
        length = z.abs().sum(-1, keepdim=True) if self.has("first norm") else z.norm(dim=0 if self.has("batch") else -1, keepdim=True)  # shows: not normed
        z = z if self.has("not normed") else z / length.clip(min=1e-3)  # shows: first norm, batch
        z = z if self.has("length") else z * (2 if self.has("other length") else 3)
        z = f.leaky_relu(z, 0.2 if self.has("slope") else 0.1) if not self.has("relu") else z.relu()
        z = self.d(z)  # shows: not normed, relu
        h = z if self.has("residual") else h + z
        d = h - self.k if not self.has("plus") else h + self.k  # shows: residual
        d = d.abs() if self.has("absolute") else d.pow(2)  # shows: absolute, plus, residual
        q = (-d if self.has("width") else d / 2 if self.has("sign") else -d / 2).exp()
        q = self.o(q)
        if self.has("divided"):
            q = q / self.temperature.exp()  # shows: divided
        else:
            q = q * (self.temperature if self.has("not exponential") else self.temperature.exp())
        return q.softmax(-1) if self.has("no logarithm") else q.log_softmax(0 if self.has("axis") else -1)


FEATURES: dict[str, tuple[int, ...]] = dict.fromkeys("abdo", SQUARE) | {"c": (2 * D, D)}
FEATURES |= dict.fromkeys(("bb", "cb", "k", "temperature"), (D,))
FEATURES_FAULTS = (
    "octave", "reversed", "linear", "cos", "sin", "beta", "elu", "of waves", "first norm", "batch", "not normed", "length",
    "other length", "slope", "relu", "residual", "absolute", "width", "sign", "no logarithm", "axis",
)

PAIRS = {
    "mixer": Pair(_mixer, MIXER, Mixer, floats(3, D, D), MIXER_FAULTS),
    "net": Pair(_net, NET, Net, floats(2, D, 6, 6), NET_FAULTS),
    "recurrent": Pair(_recurrent, RECURRENT, Recurrent, floats(6, 4, D), RECURRENT_FAULTS),
    "experts": Pair(_experts, EXPERTS, Experts, floats(3, 5, D), EXPERTS_FAULTS),
    "features": Pair(_features, FEATURES, Features, floats(24, D), FEATURES_FAULTS),
}
