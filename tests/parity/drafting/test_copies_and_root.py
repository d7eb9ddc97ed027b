"""Checkpoints of a training run: averages, target networks and optimizers next to the weights; a draft of one tree of several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert import ConvertError, PlanError, Source, draft_rules, open_source, parse_rules, plan_conversion
from support.command_line import Run
from support.drafts import answered
from support.memory_source import MemorySource, rule_file, run

NET = {"stem/kernel": (5, 7), "stem/bias": (7,), "head/kernel": (7, 3)}
ANSWERS = {"*": {"linear": 0}}


def trees(*names: str, **more: tuple[int, ...]) -> MemorySource:
    rng = np.random.default_rng(0)
    shapes = {f"{name}/{path}": shape for name in names for path, shape in NET.items()}
    shapes |= {name.replace("__", "/"): shape for name, shape in more.items()}
    return MemorySource({name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})


def kept(text: str, tree: str) -> str:
    assert text.count("\n- keep: ask ") == 1 and f"# keep: {tree} " in text, text
    return answered(text.replace("- keep: ask", f"- keep: {tree}"), ANSWERS)


COPIES = {
    "ema_params": "params",
    "params_ema": "params",
    "ema/params": "params",
    "target_network": "network",
    "avg": "weights",
    "paramsOld": "params",
    "teacher": "student",
    "anything": "params",
    "target": "online",
    "target_network_params": "params",
    "ema/ema_params": "params",
    "moving_average": "params",
    "state/ema": "params",
    "q_target_params": "q_params",
}


@pytest.mark.parametrize(("copy", "of"), COPIES.items())
def test_which_of_two_copies_is_one_question_and_the_other_is_dropped(copy: str, of: str) -> None:
    source = trees(copy, of)
    text = draft_rules(source)
    alone = draft_rules(trees(of))
    assert len(parse_rules(text).questions) == len(parse_rules(alone).questions) + 1
    assert len(parse_rules(text).rules) == len(parse_rules(alone).rules)
    with pytest.raises(PlanError, match="`keep` of"):
        plan_conversion(parse_rules(text), source)
    for tree, other in ((copy, of), (of, copy)):
        plan = plan_conversion(parse_rules(kept(text, tree)), source)
        made = run(plan)
        assert len(made) == 3
        np.testing.assert_array_equal(made[next(iter(n for n in made if n.endswith("head.weight")))], source.arrays[f"{tree}/head/kernel"].T)  # fmt: skip
        assert {(d.leaf, d.reason) for d in plan.dropped} == {(f"{other}/{n}", f"a copy: {tree} is kept") for n in NET}
        assert any("has the paths and shapes of" in note for note in plan.notes)


@pytest.mark.parametrize(
    "names", [("actor", "critic"), ("layers_0", "layers_1"), ("encoder", "target_encoder_norm"), ("left", "right")]
)
def test_networks_and_layers_of_one_shape_are_no_copies(names: tuple[str, str]) -> None:
    assert "copies:" not in draft_rules(trees(*names))


def test_layers_whose_names_have_such_words_are_no_copies() -> None:
    """Two layers of one module, and a copy of another shape."""
    rng = np.random.default_rng(0)
    shapes = {f"net/{n}/{x}": s for n in ("proj", "target_proj") for x, s in (("kernel", (5, 7)), ("bias", (7,)))}
    assert "copies:" not in draft_rules(MemorySource({n: rng.normal(size=s) for n, s in shapes.items()}))
    other = {**trees("params", "ema_params").arrays, "ema_params/head/kernel": np.zeros((7, 4), np.float32)}
    assert "copies:" not in draft_rules(MemorySource(other))


def test_three_copies_are_one_question() -> None:
    source = trees("params", "ema_params", "params_old")
    text = draft_rules(source)
    for tree in ("params", "ema_params", "params_old"):
        plan = plan_conversion(parse_rules(kept(text, tree)), source)
        assert len(plan.dropped) == 6 and all(not d.leaf.startswith(f"{tree}/") for d in plan.dropped)


@pytest.mark.parametrize(
    ("copy", "of", "place", "names"),
    [
        ("run/target_params", "run/online_params", "run", ("target_params", "online_params")),
        ("ema_state/params", "train_state/params", "", ("ema_state", "train_state")),
        ("a/b/ema/0.9999", "a/b/params", "a/b", ("ema/0.9999", "params")),
        ("net/extra/emaParams", "net/params", "net", ("extra/emaParams", "params")),
        ("learner/target_q_params", "learner/q_params", "learner", ("target_q_params", "q_params")),
        ("critic_target/params", "critic/params", "", ("critic_target", "critic")),
        ("params/target", "params/online", "params", ("target", "online")),
    ],
)
def test_copies_at_any_depth(copy: str, of: str, place: str, names: tuple[str, str]) -> None:
    source = trees(copy, of)
    text = draft_rules(source)
    assert f"of: [{names[1]}, {names[0]}]" in text and (f"in: [{place}]" in text or not place)
    for name, other in ((names[0], of), (names[1], copy)):
        plan = plan_conversion(parse_rules(kept(text, name)), source)
        assert {d.leaf for d in plan.dropped} == {f"{other}/{n}" for n in NET}


def test_copies_within_what_has_a_copy_are_a_question_of_their_own() -> None:
    text = draft_rules(trees("params/q", "params/target_q", "ema_params/q", "ema_params/target_q"))
    assert "of: [params, ema_params]" in text and "of: [q, target_q]" in text and text.count("\n- keep: ask ") == 2
    assert len(parse_rules(text).rules) == len(parse_rules(draft_rules(trees("params/q"))).rules)


MODELS_WITH_SUCH_NAMES = (
    ("attn/q", "attn/m", "attn/v"),
    ("vae/mu", "vae/logvar"),
    ("net/mu", "net/nu", "net/rho"),
    ("heads/momentum", "heads/velocity"),
    ("opt/decoder", "opt/embed"),
    ("optics/lens", "optics/mirror"),
    ("params/opt_a", "params/opt_b"),
    ("layer/key", "layer/value"),
    ("target_encoder", "source_encoder"),
)


@pytest.mark.parametrize("names", MODELS_WITH_SUCH_NAMES)
def test_networks_with_the_names_of_moments_are_drafted(names: tuple[str, ...]) -> None:
    text = draft_rules(trees(*names))
    assert "drop:" not in text and "copies:" not in text


def under_orbax_names(tree: Any) -> MemorySource:
    """Name the leaves as Orbax does: by keys, fields and positions."""
    import jax

    def name(path: Any) -> str:
        return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path)

    return MemorySource({name(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]})


OPTIMIZERS = ("adam", "chain", "accumulated", "injected", "sgd", "adafactor", "lion", "rmsprop", "by group", "masked", "averaged", "amsgrad", "adadelta", "if finite")  # fmt: skip
PLACES: dict[str, Any] = {
    "named": lambda net, state: {"params": net, "opt_state": state},
    "tuple": lambda net, state: (net, state),
    "deep": lambda net, state: {"run": {"learner": {"policy_optimizer_state": state, "policy_params": net}}},
    "short": lambda net, state: {"net": net, "opt": state},
    "by its method": lambda net, state: {"model": {"params": net}, "adam": state},
    "in a list": lambda net, state: {"state": [net, state]},
    "object": lambda net, state: {"optimizer": {"model": net, "opt_state": state, "step": np.int32(3)}},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_is_dropped_at_any_place(name: str) -> None:
    optax = pytest.importorskip("optax")
    groups = ({"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)}, {"Dense_0": "a", "Dense_1": "b"})
    made = {
        "adam": lambda: optax.adam(1e-3),
        "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
        "accumulated": lambda: optax.MultiSteps(optax.adam(1e-3), 4),
        "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=1e-3),
        "sgd": lambda: optax.sgd(0.1, momentum=0.9),
        "adafactor": lambda: optax.adafactor(1e-3),
        "lion": lambda: optax.lion(1e-3),
        "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
        "by group": lambda: optax.multi_transform(*groups),
        "masked": lambda: optax.masked(optax.adam(1e-3), {"Dense_0": True, "Dense_1": False}),
        "averaged": lambda: optax.chain(optax.adam(1e-3), optax.ema(0.99)),
        "amsgrad": lambda: optax.amsgrad(1e-3),
        "adadelta": lambda: optax.adadelta(1e-3),
        "if finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    }
    net = {
        f"Dense_{k}": {"kernel": np.zeros(shape, np.float32), "bias": np.zeros(shape[1], np.float32)}
        for k, shape in enumerate(((5, 7), (7, 3)))
    }
    state = made[name]().init(net)
    for where, place in PLACES.items():
        text = draft_rules(under_orbax_names(place(net, state)))
        rules = parse_rules(text).rules
        kernels = {str(rule.path) for rule in rules if rule.kind_name != "drop"}
        assert len(kernels) == 2 and "copies:" not in text, (where, kernels)
        assert all(path.endswith(("Dense_0/kernel", "Dense_1/kernel")) for path in kernels), where
        assert len({rule.path for rule in rules if rule.kind_name == "drop"}) <= 4, where


def test_a_train_state_of_brax_and_acme_is_one_question() -> None:
    """The fields of brax's and Acme's TrainingState for SAC, with its random key."""
    optax = pytest.importorskip("optax")
    arrays = {name: np.zeros(shape, np.float32) for name, shape in NET.items()}
    net = {"params": {"stem": {"kernel": arrays["stem/kernel"], "bias": arrays["stem/bias"]}, "head": {"kernel": arrays["head/kernel"]}}}  # fmt: skip
    alpha, adam = {"log_alpha": np.zeros((), np.float32)}, optax.adam(1e-3)
    state = {
        "policy_optimizer_state": adam.init(net),
        "policy_params": {"params": {"head": net["params"]["head"] | {"bias": np.zeros(3, np.float32)}}},
        "q_optimizer_state": adam.init(net),
        "q_params": net,
        "target_q_params": net,
        "key": np.zeros(2, np.uint32),
        "gradient_steps": np.int32(0),
        "alpha_optimizer_state": adam.init(alpha),
        "alpha_params": alpha,
    }
    for place in (state, {"learner": [state, {"steps": np.int32(1)}]}):
        text = draft_rules(under_orbax_names(place))
        assert text.count("\n- keep: ask ") == 1 and "of: [q_params, target_q_params]" in text
        paths = {str(rule.path).rpartition("learner/0/")[2] for rule in parse_rules(text).rules if rule.kind_name != "drop"}  # fmt: skip
        assert paths == {"policy_params/params/head/kernel", "q_params/params/stem/kernel", "q_params/params/head/kernel", "alpha_params/log_alpha"}  # fmt: skip


def optax_agent() -> dict[str, Any]:
    """An actor, two critics with target networks, and a temperature, each with its own optimizer, as flax and optax make them."""
    import flax.linen as nn
    import jax
    import optax
    from flax.training.train_state import TrainState

    class Net(nn.Module):
        out: int

        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(self.out)(nn.relu(nn.Dense(7)(x)))

    def state(key: int, out: int, tx: Any) -> Any:
        net = Net(out)
        params = net.init(jax.random.key(key), np.zeros((1, 5)))["params"]
        return TrainState.create(apply_fn=net.apply, params=params, tx=tx)

    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    masked = optax.multi_transform(
        {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)}, {"Dense_0": "a", "Dense_1": "b"}
    )
    other = Net(1).init(jax.random.key(9), np.zeros((1, 5)))["params"]
    temperature = {"log_alpha": np.zeros(())}
    return {
        "agent": {
            "actor": state(0, 4, chain),
            "critic": {"online": state(1, 1, masked), "target_params": other},
            "temperature": {"params": temperature, "opt_state": optax.adam(1e-3).init(temperature)},
        },
        "step": 3,
    }


@pytest.mark.slow
def test_an_agent_saved_by_orbax_is_drafted_without_a_moment(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    pytest.importorskip("optax")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ckpt", optax_agent())
    source = open_source(tmp_path / "ckpt")
    assert sum("opt_state" in name for name in source.leaves) > 15
    text = draft_rules(source)
    draft = parse_rules(text)
    assert "of: [online/params, target_params]" in text and "in: [agent/critic]" in text
    drops = {str(rule.path) for rule in draft.rules if rule.kind_name == "drop"}
    assert {path for path in drops if "opt_state" in path} == {
        "agent/actor/opt_state/**",
        "agent/critic/online/opt_state/**",
        "agent/temperature/opt_state/**",
    }
    weights = {str(rule.path) for rule in draft.rules if rule.kind_name != "drop"}
    assert len(weights) == 5 and not any("opt" in path for path in weights), weights


def test_copies_of_several_networks_are_one_question() -> None:
    source = trees(
        "agent/actor/params", "agent/actor/target_params", "agent/critic/params", "agent/critic/target_params"
    )
    text = draft_rules(source)
    assert "in: [agent/actor, agent/critic]" in text
    plan = plan_conversion(parse_rules(kept(text, "target_params")), source)
    made = run(plan)
    for net in ("actor", "critic"):
        name = next(n for n in made if net in n and n.endswith("stem.weight"))
        np.testing.assert_array_equal(made[name], source.arrays[f"agent/{net}/target_params/stem/kernel"].T)
    assert {d.leaf for d in plan.dropped} == {n for n in source.leaves if "/params/" in n}


RULES = """
- einsum: ...D,DF->...F
  from: {}net_{{i}}/params/w
  bias: {}net_{{i}}/params/b
  linear: net.{{i}}
- drop: {}net_{{i}}/params/unused
  because: r
"""


@pytest.mark.parametrize(("root", "prefix"), [("", ""), ("", "/"), ("net_0", "/")])
def test_copies_are_chosen_under_indices_and_absolute_paths(root: str, prefix: str) -> None:
    shapes = {"w": (2, 3), "b": (3,), "unused": ()}
    arrays = {
        f"net_{k}/{tree}/{x}": np.full(s, k + 10 * (tree == "ema"), np.float32)
        for k in (0, 1)
        for tree in ("params", "ema")
        for x, s in shapes.items()
    }
    head = f"model: m\ntitle: M\nroot: '{root}'\ntargets: {{torch: {{loads: T}}}}\ncopies:\n- {{of: [params, ema], keep: ema, in: [net_0, net_1]}}\n"
    plan = plan_conversion(rule_file(RULES.format(prefix, prefix, prefix), head), MemorySource(arrays))
    assert {name: float(x.flat[0]) for name, x in run(plan).items() if name.endswith("weight")} == {
        "net.0.weight": 10,
        "net.1.weight": 11,
    }


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("{of: [params], keep: params}", "at least two different trees"),
        ("{of: [params, params], keep: params}", "at least two different trees"),
        ("{of: [params, ema], keep: emma}", "did you mean 'ema'"),
        ("{of: [params, ema]}", "keep"),
    ],
)
def test_wrong_copies(entry: str, problem: str) -> None:
    head = f"model: m\ntitle: M\ntargets: {{torch: {{loads: T}}}}\ncopies:\n- {entry}\n"
    with pytest.raises(ConvertError, match=problem):
        rule_file("- {drop: x, because: y}", head)


# ---- --root


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


def saved(folder: Path, arrays: Mapping[str, np.ndarray]) -> Path:
    np.savez(folder / "ckpt.npz", **arrays)
    return folder / "ckpt.npz"


def drafted(source: Source, root: str) -> set[tuple[str, str]]:
    rules = parse_rules(draft_rules(source, root=root))
    assert rules.root == (root,)
    return {(rule.kind_name, str(rule.path)) for rule in rules.rules}


def test_root_drafts_one_tree_and_drops_what_lies_elsewhere() -> None:
    source = trees(
        "agent/actor/params", "agent/critic/params", agent__actor__opt_state__0__mu__w=(7,), agent__log_std=(2,)
    )
    whole = {("linear", "stem/kernel"), ("linear", "head/kernel")}
    assert drafted(source, "agent/critic/params") == whole | {("drop", "/agent/actor/**"), ("drop", "/agent/log_std")}
    assert drafted(source, "agent/actor") == {
        ("linear", "params/stem/kernel"),
        ("linear", "params/head/kernel"),
        ("drop", "/agent/actor/opt_state/**"),
        ("drop", "/agent/critic/**"),
        ("drop", "/agent/log_std"),
    }
    made = run(plan_conversion(parse_rules(answered(draft_rules(source, root="agent/critic/params"), ANSWERS)), source))
    np.testing.assert_array_equal(made["head.weight"], source.arrays["agent/critic/params/head/kernel"].T)


def test_root_that_names_a_copy_asks_nothing_about_copies() -> None:
    source = trees("params", "ema_params")
    assert "copies:" not in draft_rules(source, root="ema_params")


def test_root_on_the_command_line(tmp_path: Path, convert: Run) -> None:
    ckpt = saved(tmp_path, trees("agent/actor/params", "agent/critic/params").arrays)
    out, _ = convert("rules", "new", str(ckpt), "--root", "/agent/critic/params/")
    assert "\nroot: agent/critic/params\n" in out and "- drop: /agent/actor/**" in out
    _, err = convert("rules", "new", str(ckpt), "--root", "agent/critic/parms", code=2)
    assert "tree-empty" in err and "did you mean 'agent/critic/params'?" in err
    _, err = convert("rules", "new", str(ckpt), "--root", "zzzzz", code=2)
    assert "give one of agent" in err
