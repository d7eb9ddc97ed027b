"""Loads what `convert openpi --to lerobot` writes with lerobot's `PI0Policy`, `PI05Policy` and `PI0FastPolicy`, and compares what they compute, on a CPU.

    python3.11 -m venv env && env/bin/pip install torch==2.13.0 'transformers>=5.4,<5.6' 'draccus<0.12' einops gymnasium 'numpy<2.3' \\
        pillow requests ml_dtypes tensorstore msgpack typer rich xxhash rapidfuzz jinja2 zstandard PyYAML scipy
    env/bin/pip install --no-deps --ignore-requires-python lerobot==0.6.1 'opencv-python-headless<4.14' termcolor
    PYTHONPATH=src:tests env/bin/python tests/golden/read_back_lerobot.py

lerobot 0.6.1 asks for Python 3.12, for three generic declarations, and for torch below 2.12, of which PyPI has no build without CUDA.
These declarations are read as Python 3.11 writes them. lerobot has the published sizes in its code; they are replaced by those of the golden cases.
`from_pretrained` reads the directory and nothing else, strictly. `predict_action_chunk` gets images in [0, 1], and for the second
observation one camera less, as the goldens have it masked. π0-FAST is compared by its logits: its `forward` gets the tokens with mask 0 as the prompt, the others
as the tokens of the actions. Its two tokenizers, which it loads from the Hub by name and does not use here, are replaced.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import types
from collections.abc import Mapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import convert
from support.drawn_cases import DrawnCases
from support.goldens import relative_error
from support.memory_source import MemorySource

GOLD = DrawnCases(Path(__file__).parent / "openpi")
CASES = {
    "pi0": "PI0Policy",
    "pi0-lora": "PI0Policy",
    "pi05": "PI05Policy",
    "pi05-lora": "PI05Policy",
    "pi0-fast": "PI0FastPolicy",
}
ALPHA, STEPS = 6, 4
SETTINGS = {"pi0-fast": {"action_horizon": 3, "action_dim": 5}}
_GENERIC = re.compile(r"^(def|class) (\w+)\[([\w, :]+)\]\(", re.MULTILINE)


def _read_generics_as_in_python_3_11() -> None:
    """Take ``def f[T: X](`` and ``class C[T](Base`` as a function of a TypeVar and as a class with the base Generic."""
    compiled = SourceFileLoader.source_to_code

    def older(found: re.Match[str]) -> str:
        names = re.findall(r"(\w+)(?:: \w+)?(?:, |$)", found[3])
        if found[1] == "class":  # their module declares the names, too
            return f"class {found[2]}(__import__('typing').Generic[{', '.join(names)}], "
        made = "".join(f"{name} = __import__('typing').TypeVar('{name}')\n" for name in names)
        return f"{made}def {found[2]}("

    def source_to_code(self: Any, data: Any, path: Any, **more: Any) -> Any:
        if "/lerobot/" in str(path) and isinstance(data, bytes):
            data = re.sub(r"^type (\w+) = ", r"\1 = ", _GENERIC.sub(older, data.decode()), flags=re.MULTILINE).encode()
        return compiled(self, data, path, **more)

    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign]


class _Empty(types.ModuleType):
    """A module in which every name is a class without contents."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _StandIn(MetaPathFinder, Loader):
    """torchvision, which changes the images of data sets; its build of PyPI needs CUDA's torch."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def policy_of(case: str) -> Any:
    """Return lerobot's class with the sizes of the golden in place of the published ones, which stand in its code."""
    name = case.removesuffix("-lora").replace("-", "_")
    module = importlib.import_module(f"lerobot.policies.{name}.modeling_{name}")
    sizes = GOLD.config(case)
    text, expert, vision = sizes["text"], sizes["expert"], sizes["vision"]
    module.get_gemma_config = lambda variant: module.GemmaConfig(**{"gemma_2b": text, "gemma_300m": expert}[variant])
    source = Path(str(module.__file__)).read_text()
    rows = next(x.shape[0] for leaf, x in GOLD.leaves(case).items() if leaf.endswith("input_embedding"))
    start = source.index("class PI0FastPaliGemma" if case == "pi0-fast" else "class PaliGemmaWithExpertModel")
    end = source.index("\nclass ", start + 1)
    changed = source[start:end].replace("257152", str(rows)).replace("4304", str(vision["mlp_dim"])).replace("2048", str(text["width"]))  # fmt: skip
    tower = {"hidden_size": vision["width"], "num_hidden_layers": vision["depth"], "num_attention_heads": vision["num_heads"], "patch_size": vision["patch"], "image_size": vision["side"], "vision_use_head": False}  # fmt: skip
    mapping = importlib.import_module("transformers.models.auto").CONFIG_MAPPING
    paligemma = lambda: mapping["paligemma"](vision_config={**tower, "model_type": "siglip_vision_model"}, text_config={"model_type": "gemma", "hidden_size": text["width"]}, projection_dim=text["width"])  # noqa: E731  # fmt: skip
    module.CONFIG_MAPPING = {"paligemma": paligemma, "gemma": mapping["gemma"]}
    exec(compile(changed, str(module.__file__), "exec"), module.__dict__)
    module.AutoProcessor = module.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda *_, **__: None)
    return getattr(module, CASES[case])


def _logits(policy: Any, batch: dict[str, Any], starts: Any) -> Any:
    """Return the logits of π0-FAST at all places: its loss is computed from those of the actions alone."""
    tokens, present = (batch.pop(f"observation.language.{name}") for name in ("tokens", "attention_mask"))
    (prompt,) = (starts[0] == 0).nonzero(as_tuple=True)
    assert prompt.tolist() == list(range(len(prompt))), "expected the prompt in front of the actions"
    for kind, x in (("tokens", tokens), ("attention_mask", present)):
        batch[f"observation.language.{kind}"] = x[:, : len(prompt)]
    batch |= {"action.tokens": tokens[:, len(prompt) :], "action.token_mask": present[:, len(prompt) :]}
    text, seen = policy.model.paligemma_with_expert.paligemma, []
    with text.model.language_model.norm.register_forward_hook(lambda *call: seen.append(call[-1][0])):
        policy(batch)
    (hidden,) = seen
    return text.lm_head(hidden)


def _present(given: Mapping[str, Any]) -> Any:
    """Return [batch, place], true at the tokens of images that are there and of the text."""
    masks = [x for name, x in given.items() if name.startswith("image_masks/")]
    text = given["tokenized_prompt_mask"]
    tokens = (GOLD.values("pi0-fast", "out")["logits"].shape[1] - text.shape[1]) // len(masks)
    return np.concatenate([*(np.repeat(x[:, None], tokens, 1) for x in masks), text], 1)


def error(case: str, folder: Path) -> float:
    """Convert a case, load it, and return the error of its actions or logits, relative to the largest of those that openpi's JAX code gave."""
    import torch

    leaves = MemorySource({f"params/{name}": x for name, x in GOLD.leaves(case).items()})
    lora = {"lora_alpha": ALPHA} if case.endswith("-lora") else {}
    given_settings = SETTINGS.get(case, {"action_horizon": 3})
    convert.convert("openpi", leaves, folder / case, to="lerobot", settings=given_settings | lora)
    policy = policy_of(case).from_pretrained(folder / case).eval()
    policy.config.num_inference_steps = STEPS
    given = GOLD.values(case, "in")
    made = []
    for k in range(2):
        here = {name: torch.from_numpy(x[k : k + 1]) for name, x in given.items()}
        cameras = [name for name in here if name.startswith("images/") and here[name.replace("images", "image_masks")]]
        batch = {f"observation.images.{name.partition('/')[2]}": (here[name].permute(0, 3, 1, 2) + 1) / 2 for name in cameras}  # fmt: skip
        batch["observation.state"] = here["state"]
        batch["observation.language.tokens"] = here["tokenized_prompt"].long()
        batch["observation.language.attention_mask"] = here["tokenized_prompt_mask"]
        with torch.no_grad():
            got = _logits(policy, batch, here["token_ar_mask"]) if case == "pi0-fast" else policy.predict_action_chunk(batch, noise=here["noise"])  # fmt: skip
        made.append(got.numpy())
    if case != "pi0-fast":
        return relative_error(np.concatenate(made), GOLD.values(case, "out")["actions"])
    there = _present(given)  # at absent images and padding, which nothing attends to, each code has numbers of its own
    return relative_error(np.concatenate(made)[there], GOLD.values(case, "out")["logits"][there])


def main() -> None:
    _read_generics_as_in_python_3_11()
    importlib.import_module("transformers.models.auto.processing_auto")  # it finds that there is no torchvision
    sys.meta_path.insert(0, _StandIn())
    print(
        f"Python {sys.version.split()[0]}, {', '.join(f'{n} {version(n)}' for n in ('lerobot', 'torch', 'transformers'))}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for case in sys.argv[1:] or CASES:
            print(
                f"{case}: {CASES[case]}'s {'logits' if case == 'pi0-fast' else 'actions'} {error(case, Path(folder)):.1e}"
            )


if __name__ == "__main__":
    main()
