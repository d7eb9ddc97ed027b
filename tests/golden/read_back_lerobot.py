"""Loads what `convert openpi --to lerobot` writes with lerobot's `PI0Policy`, `PI05Policy` and `PI0FastPolicy`, and records in lerobot.npz what they compute, on a CPU.

    python3.11 -m venv env && env/bin/pip install torch==2.13.0 'transformers>=5.4,<5.6' 'draccus<0.12' einops gymnasium 'numpy<2.3' \\
        pillow requests ml_dtypes tensorstore msgpack typer rich xxhash rapidfuzz jinja2 zstandard PyYAML scipy
    env/bin/pip install --no-deps --ignore-requires-python lerobot==0.6.1 'opencv-python-headless<4.14' termcolor
    PYTHONPATH=src:tests env/bin/python tests/golden/read_back_lerobot.py

lerobot 0.6.1 asks for Python 3.12, for three generic declarations, and for torch below 2.12, of which PyPI has no build without CUDA.
These declarations are read as Python 3.11 writes them. lerobot has the published sizes in its code; they are replaced by those of the golden cases.
`from_pretrained` reads the directory and nothing else, strictly. `predict_action_chunk` gets images in [0, 1], and for the second
observation one camera less, as the goldens have it masked. π0-FAST is compared by its logits: its `forward` gets the tokens with mask 0 as the prompt, the others
as the tokens of the actions. The velocity is that of the golden's noise and time. Its two tokenizers, which it loads from the Hub by name and does not use here, are replaced.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
import types
from contextlib import nullcontext
from importlib.machinery import SourceFileLoader
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from support.goldens import relative_error
from support.lerobot import CASES, FILE, GOLD, checksum, converted, said, there
from support.stand_in import StandIn

STEPS = 4
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


def _velocity(policy: Any, noise: Any, time: Any) -> list[Any]:
    """Return the place of the velocity of π0 and π0.5 at a time: the next prediction fills it, besides those of its own steps."""
    seen: list[Any] = []
    step = policy.model.denoise_step

    def watched(*, x_t: Any, timestep: Any, **given: Any) -> Any:
        if not seen:
            seen.append(step(x_t=noise, timestep=time, **given))
        return step(x_t=x_t, timestep=timestep, **given)

    policy.model.denoise_step = watched
    return seen


def computed(case: str, out: Path, exact: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Load a converted case, and return what it computes, by the name of what openpi's JAX code gave; in float64 with casts removed."""
    import torch

    from convert.numerics.lift_torch import lifted

    dtype = torch.float64 if exact else torch.float32
    given = {name: torch.from_numpy(x) for name, x in GOLD.values(case, "in").items()}
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in given.items()}
    made: dict[str, list[Any]] = {}
    with lifted() if exact else nullcontext(), torch.no_grad():
        for k in range(2):
            policy = policy_of(case).from_pretrained(out).eval().to(dtype)
            policy.config.num_inference_steps = STEPS
            here = {name: x[k : k + 1] for name, x in given.items()}
            cameras = [
                name for name in here if name.startswith("images/") and here[name.replace("images", "image_masks")]
            ]
            batch = {f"observation.images.{name.partition('/')[2]}": (here[name].permute(0, 3, 1, 2) + 1) / 2 for name in cameras}  # fmt: skip
            batch["observation.state"] = here["state"]
            batch["observation.language.tokens"] = here["tokenized_prompt"].long()
            batch["observation.language.attention_mask"] = here["tokenized_prompt_mask"]
            if case == "pi0-fast":
                found = {"logits": _logits(policy, batch, here["token_ar_mask"])}
            else:
                seen = _velocity(policy, here["noise"], here["time"])
                found = {"actions": policy.predict_action_chunk(batch, noise=here["noise"]), "velocity": seen[0]}
            for name, x in found.items():
                made.setdefault(name, []).append(x.numpy())
    return {name: np.concatenate(x) for name, x in made.items()}


def record(case: str, folder: Path) -> dict[str, Any]:
    """Return what lerobot computes of a case, in float32 and in float64, and the checksum of the tensors that it loaded; print the errors."""
    folder.mkdir()
    _, out = converted(case, folder)
    found: dict[str, Any] = {f"{case}/sha256": checksum(out)}
    for kind, exact in (("out", False), ("out64", True)):
        wanted = said(case, kind)
        for name, x in computed(case, out, exact).items():
            x = x[there(case)] if name == "logits" else x
            found[f"{case}/{kind}/{name}"] = x
            if name in wanted:
                print(f"{case}: {CASES[case]}'s {name}: {relative_error(x, wanted[name]):.1e} ({kind})")
    return found


def main() -> None:
    _read_generics_as_in_python_3_11()
    importlib.import_module("transformers.models.auto.processing_auto")  # it finds that there is no torchvision
    StandIn("torchvision").__enter__()  # which changes the images of data sets; its build of PyPI needs CUDA's torch
    print(
        f"Python {sys.version.split()[0]}, {', '.join(f'{n} {version(n)}' for n in ('lerobot', 'torch', 'transformers'))}"
    )
    found: dict[str, Any] = dict(np.load(FILE)) if FILE.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for case in sys.argv[1:] or CASES:
            found |= record(case, Path(folder) / case)
    np.savez_compressed(FILE, **dict(sorted(found.items())))


if __name__ == "__main__":
    main()
