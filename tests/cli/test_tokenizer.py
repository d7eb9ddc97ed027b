"""``--tokenizer DIR``: what a model needs beside its weights is copied with them, or nothing is written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

import convert
from convert.core.errors import OptionError
from convert.planning.tokenizer.files import MAX_BYTES, TokenizerFiles, merged_generation, read_tokenizer
from convert.planning.tokenizer.fits import misfits
from convert.planning.tokenizer.processors import PROCESSORS, missing_processor, reads_text
from convert.rules.library import available_rules
from convert.writing.written import MAX_JSON
from support import flax_families
from support.command_line import Run
from support.goldens import checkpoint
from support.paths import GOLDEN

GPT2 = checkpoint("gpt2")


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A directory as the Hub has it: some of its files belong to the tokenizer, the others do not."""
    folder = tmp_path / "published"
    folder.mkdir()
    for name in (
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "special_tokens_map.json",
        "LICENSE",
        "THIRD_PARTY_NOTICES.txt",
    ):
        (folder / name).write_text("{}" if name.endswith(".json") else name)
    for name in ("pytorch_model.bin", "config.json", "model.safetensors", "training_args.json", "licensed_users.csv"):
        (folder / name).write_text("not copied")
    (folder / "README.md").write_text("---\nlanguage: en\nlicense: mit\n---\nlicense: none of this\n")
    return folder


def test_tokenizer_and_licence_lie_beside_the_weights(beside: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _, said = run("gpt2", GPT2, out, "--tokenizer", beside)
    copied = [
        "LICENSE",
        "THIRD_PARTY_NOTICES.txt",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "vocab.json",
    ]
    assert f"copied {', '.join(copied)} from {beside}" in said
    written = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in out.iterdir()} == written | {*copied}
    assert all((out / name).read_bytes() == (beside / name).read_bytes() for name in copied)
    card = (out / "README.md").read_text()
    assert f"| Copied | {', '.join(copied)}; its model card states license: mit |" in card and str(beside) not in card
    printed, _ = run("verify", out)
    assert "intact" in printed
    (out / "merges.txt").write_text("other")
    printed, _ = run("verify", out, code=1)
    assert "merges.txt" in printed and "differs from the file that was written" in printed


def test_generation_settings_are_added_or_contradict(beside: Path, run: Run, tmp_path: Path) -> None:
    given = beside / "generation_config.json"
    given.write_text('{"transformers_version": "4", "do_sample": true, "eos_token_id": 60}')
    checkpoint_of = tmp_path / "ckpt"
    checkpoint_of.mkdir()
    for name in ("flax_model.msgpack", "config.json"):
        (checkpoint_of / name).write_bytes((GPT2 / name).read_bytes())
    run("gpt2", checkpoint_of, tmp_path / "first", "--tokenizer", beside)
    assert json.loads((tmp_path / "first" / given.name).read_text()) == {"do_sample": True, "eos_token_id": 60}
    (checkpoint_of / given.name).write_text('{"eos_token_id": [60], "top_k": 7}')
    run("gpt2", checkpoint_of, tmp_path / "second", "--tokenizer", beside)
    assert json.loads((tmp_path / "second" / given.name).read_text()) == {"do_sample": True, "eos_token_id": [60], "top_k": 7}  # fmt: skip
    (checkpoint_of / given.name).write_text('{"eos_token_id": 4}')
    _, said = run("gpt2", checkpoint_of, tmp_path / "third", "--tokenizer", beside, code=2)
    assert "error[config-conflict]" in said and "eos_token_id in the generation_config.json of --tokenizer" in said
    assert "expected 4, as the rules or the files next to the checkpoint state, got 60" in said
    assert not (tmp_path / "third").exists()


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("bart.BartForConditionalGeneration", "forced_eos_token_id"),
        pytest.param("t5.T5ForConditionalGeneration", "decoder_start_token_id", marks=pytest.mark.slow),
        pytest.param("whisper.untied", "eos_token_id", marks=pytest.mark.slow),
        pytest.param("encoder_decoder", "bos_token_id", marks=pytest.mark.slow),  # of its decoder
    ],
)
def test_ids_in_config_json_are_contradicted(case: str, key: str, beside: Path, run: Run, tmp_path: Path) -> None:
    source = flax_families.write(case, tmp_path / "source")
    stated = flax_families.config(case)
    value = {**stated.get("decoder", {}), **stated}[key]
    given = beside / "generation_config.json"
    given.write_text(json.dumps({key: value + 1}))
    _, said = run("flax-transformers", source, tmp_path / "out", "--tokenizer", beside, code=2)
    assert "error[config-conflict]" in said and f"{key} in the generation_config.json of --tokenizer" in said
    assert f"expected {value}, as the rules or the files next to the checkpoint state, got {value + 1}" in said
    assert not (tmp_path / "out").exists()
    given.write_text(json.dumps({key: [value, value + 1]}))  # a further end of the text is no contradiction
    run("flax-transformers", source, tmp_path / "out", "--tokenizer", beside)


def test_ids_of_the_source_count_where_the_output_has_none() -> None:
    given = TokenizerFiles("beside", {}, {"eos_token_id": 3}, "")
    assert merged_generation(None, given, {"eos_token_id": None}, {"bos_token_id": 1}) == {"eos_token_id": 3}
    with pytest.raises(OptionError, match="expected 2"):
        merged_generation(None, given, {}, {"eos_token_id": 2})
    with pytest.raises(OptionError, match=r"--set 'eos_token_id=\[1, 106\]'"):  # as a shell takes it
        merged_generation({"eos_token_id": 2}, replace(given, generation={"eos_token_id": [1, 106]}), {})
    assert merged_generation({"eos_token_id": 3}, given, {"eos_token_id": 2}) == {"eos_token_id": 3}


def test_what_cannot_be_copied_is_refused_before_anything_is_written(beside: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def refused(given: Path, *more: object, to: Path = out) -> str:
        _, said = run("gpt2", GPT2, to, "--tokenizer", given, *more, code=2)
        assert not to.exists()
        return said

    assert "there is no such directory; correct --tokenizer" in refused(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "LICENSE").write_text("")
    assert "it has no file of a tokenizer or a processor" in refused(tmp_path / "empty")
    assert "OUT is one file; give the name of a directory" in refused(beside, to=tmp_path / "out.safetensors")
    assert "--tokenizer is an option of a conversion to PyTorch" in refused(beside, "--to", "npz")
    assert "--tokenizer has no meaning with --adapter peft" in refused(beside, "--adapter", "peft")
    (tmp_path / "secret").write_text("secret")
    (beside / "tokenizer.model").symlink_to(tmp_path / "secret")
    assert "error[checkpoint-link-refused]" in refused(beside)
    run("gpt2", GPT2, out, "--tokenizer", beside, "--follow-links")
    assert (out / "tokenizer.model").read_text() == "secret"


def refused_vocabulary(model: str, source: Path, folder: Path, names: dict[str, str]) -> str:
    """Return what is said of a directory with these files; empty where it is taken."""
    folder.mkdir()
    for name, text in names.items():
        (folder / name).write_text(text)
    try:
        convert.plan_conversion(model, source, tokenizer=folder)
    except OptionError as error:
        assert error.code == "tokenizer-not-found" and error.findings[0].got == ", ".join(sorted(names))
        return str(error)
    return ""


def test_a_directory_without_a_vocabulary_is_refused(tmp_path: Path) -> None:
    """A tokenizer's settings are no tokenizer, nor is an image processor one for a model that reads text."""
    settings = {"tokenizer_config.json": '{"tokenizer_class": "GPT2Tokenizer"}', "special_tokens_map.json": "{}"}
    for k, names in enumerate((settings, {**settings, "merges.txt": "a b"}, {"chat_template.jinja": ""}, {"preprocessor_config.json": "{}"})):  # fmt: skip
        said = refused_vocabulary("gpt2", GPT2, tmp_path / str(k), names)
        assert "it has no vocabulary" in said and "tokenizer.json" in said and "spiece.model" in said, names
    for k, name in enumerate(
        ("tokenizer.json", "spiece.model", "vocab.json", "tekken.json", "target.spm", "a.tiktoken")
    ):
        assert not refused_vocabulary("gpt2", GPT2, tmp_path / f"with{k}", {**settings, name: "{}"}), name


def test_what_needs_no_vocabulary(tmp_path: Path) -> None:
    """Bytes are tokens of some tokenizers; a model of images reads no text."""
    for name in ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer"):
        settings = {"tokenizer_config.json": json.dumps({"tokenizer_class": name}), "added_tokens.json": "{}"}
        assert not refused_vocabulary("gpt2", GPT2, tmp_path / name, settings)
    images = {"preprocessor_config.json": "{}"}
    assert not refused_vocabulary("dinov2", checkpoint("dinov2"), tmp_path / "dinov2", images)
    assert "it has no vocabulary" in refused_vocabulary("whisper", checkpoint("whisper"), tmp_path / "whisper", images)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"model_type": "bert"}, True),
        ({"model_type": "siglip"}, True),
        ({"model_type": "siglip", "architectures": ["SiglipForImageClassification"]}, False),
        ({"model_type": "whisper", "architectures": ["WhisperForAudioClassification"]}, False),
        ({"model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit"}}, True),
        ({"model_type": "vision-text-dual-encoder"}, True),
        ({"model_type": "wav2vec2"}, False),
        ({"model_type": "vit"}, False),
        ({"architecture": "vit_base_patch16_224"}, False),  # of timm
        ({}, False),
    ],
)
def test_which_models_read_text(config: dict[str, object], text: bool) -> None:
    assert reads_text(config) is text


def test_a_snapshot_of_the_hub_is_links_into_its_blobs(beside: Path, run: Run, tmp_path: Path) -> None:
    home = tmp_path / "models--gpt2"
    (home / "snapshots" / "abc").mkdir(parents=True)
    (home / "blobs").mkdir()
    for name in ("tokenizer.json", "LICENSE"):
        (home / "blobs" / name).write_text('"tokens"')
        (home / "snapshots" / "abc" / name).symlink_to(Path("../../blobs") / name)
    run("gpt2", GPT2, tmp_path / "out", "--tokenizer", home / "snapshots" / "abc")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '"tokens"'
    assert not (tmp_path / "out" / "tokenizer.json").is_symlink()


@pytest.mark.slow
def test_resume_keeps_an_output_with_the_same_files_alone(beside: Path, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("gpt2", GPT2, out, "--tokenizer", beside)
    _, said = run("gpt2", GPT2, out, "--tokenizer", beside, "--resume")
    assert f"kept {out}" in said
    (beside / "vocab.json").write_text('"another"')
    _, said = run("gpt2", GPT2, out, "--tokenizer", beside, "--resume", code=2)
    assert "error[resume-mismatch]" in said and "other files of --tokenizer" in said
    run("gpt2", GPT2, out, "--tokenizer", beside, "--overwrite")
    assert (out / "vocab.json").read_text() == '"another"'
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text(f"jobs: [{{model: gpt2, checkpoint: {GPT2}, out: batch, tokenizer: published}}]")
    run("batch", jobs)
    assert (tmp_path / "batch" / "vocab.json").read_text() == '"another"'


def test_another_tokenizer_takes_the_place_of_the_old_one(beside: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    convert.convert("gpt2", GPT2, out, tokenizer=beside)
    (out / "notes.txt").write_text("mine")
    convert.convert("gpt2", GPT2, out, overwrite=True)
    assert (out / "vocab.json").exists()  # nothing takes its place
    other.mkdir()
    (other / "tokenizer.model").write_text("of another one")
    convert.convert("gpt2", GPT2, out, tokenizer=other, overwrite=True)
    left = {path.name for path in out.iterdir()}
    assert {"notes.txt", "tokenizer.model"} <= left
    assert not {"vocab.json", "merges.txt", "tokenizer.json", "special_tokens_map.json"} & left


def test_a_missing_processor_is_named(beside: Path, run: Run, tmp_path: Path) -> None:
    named = "note: inputs are made by transformers' WhisperProcessor, whose files are not in this directory: "
    _, said = run("whisper", checkpoint("whisper"), tmp_path / "a")
    assert f"{named}give their directory with --tokenizer" in said
    assert "WhisperProcessor" in (tmp_path / "a" / "README.md").read_text()
    _, said = run("whisper", checkpoint("whisper"), tmp_path / "b", "--tokenizer", beside)
    assert f"{named}--tokenizer has no processor_config.json or preprocessor_config.json" in said
    (beside / "preprocessor_config.json").write_text("{}")
    _, said = run("whisper", checkpoint("whisper"), tmp_path / "c", "--tokenizer", beside)
    assert "WhisperProcessor" not in said and (tmp_path / "c" / "preprocessor_config.json").exists()
    _, said = run("whisper", checkpoint("whisper"), tmp_path / "d.safetensors")
    assert "WhisperProcessor" not in said
    paligemma = convert.plan_conversion("gemma", GOLDEN / "paligemma1" / "ckpt.npz", settings={"vocab_size": 101})
    assert "PaliGemmaProcessor" in str(paligemma.config_notes)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "tokenizer"),
        ("vocab.json", '{"a": 0'),
        ("preprocessor_config.json", "{" * 10**5),
        ("special_tokens_map.json", ""),
    ],
)
def test_a_file_that_is_no_json_is_refused(name: str, content: str, beside: Path, run: Run, tmp_path: Path) -> None:
    (beside / name).write_text(content)
    _, said = run("gpt2", GPT2, tmp_path / "out", "--tokenizer", beside, code=2)
    assert f"{beside / name}: expected JSON, got other content; correct the file, or copy it again" in said
    assert not (tmp_path / "out").exists()


def unigram(count: int) -> dict[str, object]:
    return {"model": {"vocab": [["a", -1.0]] * count}}


@pytest.mark.parametrize(
    ("files", "last"),
    [
        ({"tokenizer.json": {"model": {"vocab": {"a": 0, "b": 90}}, "added_tokens": [{"id": 95, "content": "<x>"}]}}, 95),
        ({"tokenizer.json": unigram(98)}, 97),
        ({"tokenizer.json": {"model": {"vocab": {"a": 0}}}, "vocab.json": {"a": 99}}, 0),  # transformers reads the first
        ({"vocab.json": {"a": 0, "b": 94}, "added_tokens.json": {"<x>": 96}}, 96),
        ({"vocab.txt": "a\n" * 99}, 98),
        ({"tokenizer.json": []}, None),
        ({"tokenizer.json": {"model": {"vocab": {"a": "x"}}, "added_tokens": [3, {}]}}, None),
    ],
)  # fmt: skip
def test_ids_that_the_model_has_no_embedding_for_are_noted(
    files: dict[str, object], last: int | None, beside: Path
) -> None:
    """A note: Gemma 3's published tokenizer has one token more than its text models have embeddings."""
    for name in ("tokenizer.json", "vocab.json"):
        (beside / name).unlink()
    for name, content in files.items():
        (beside / name).write_text(content if isinstance(content, str) else json.dumps(content))
    given = read_tokenizer(beside)
    assert given.last_id == (None if last is None else (next(iter(files)), last))
    for rows, noted in ((None, False), (last, last is not None), (99 if last is None else last + 1, False)):
        assert any("--tokenizer has ids up to" in note for note in misfits({"vocab_size": rows}, given)) is noted


def test_another_vocabulary_and_another_size_of_images_are_noted(beside: Path, run: Run, tmp_path: Path) -> None:
    (beside / "tokenizer.json").write_text(json.dumps(unigram(5000)))
    _, said = run("gpt2", GPT2, tmp_path / "out", "--tokenizer", beside)
    assert re.search(r"note: tokenizer.json of --tokenizer has ids up to 4999, and the model has embeddings for the ids below \d+: it fails", said)  # fmt: skip
    assert "ids up to 4999" in (tmp_path / "out" / "README.md").read_text()
    size = flax_families.config("vit.ViTModel")["image_size"]
    source = flax_families.write("vit.ViTModel", tmp_path / "vit")
    for k, (settings, noted) in enumerate(
        (
            ({"size": {"height": size, "width": size}}, False),
            ({"size": {"height": 224, "width": 224}}, True),
            ({"size": 224, "crop_size": {"height": size, "width": size}}, False),
            ({"size": {"shortest_edge": 256}, "crop_size": 224}, True),
            ({"size": 224, "do_resize": False}, False),
            ({"size": {"height": [], "width": []}}, False),
            ({"size": {"height": 224, "width": 200}}, False),
        )
    ):
        folder = tmp_path / f"processor {k}"
        folder.mkdir()
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        notes = convert.plan_conversion("flax-transformers", source, tokenizer=folder).config_notes
        told = f"preprocessor_config.json of --tokenizer makes images of 224 x 224, and the model has the image_size {size}"
        assert (told in notes) is noted, settings


@pytest.mark.parametrize(("model", "made", "noted"), [("siglip_vision_model", 384, False), ("siglip_vision_model", 392, True), ("siglip_vision_model", 364, True), ("vit", 384, True)])  # fmt: skip
def test_images_of_the_same_patches_are_those_of_the_model(model: str, made: int, noted: bool, tmp_path: Path) -> None:
    """SigLIP so400m/14 at 384 has 27 x 27 patches, and its code takes any image with as many; ViT's class compares the side."""
    vision = {"model_type": model, "image_size": 378, "patch_size": 14}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"height": made, "width": made}}))
    given = read_tokenizer(tmp_path, text=False)
    for config in ({"vision_config": vision}, vision):
        assert bool(list(misfits(config, given))) is noted


def test_every_target_of_images_or_sound_has_its_processor() -> None:
    """transformers' own tables say for which of the shipped targets there is one."""
    spec = find_spec("transformers.models.auto.video_processing_auto")  # imports torchvision: read, not run
    assert spec is not None and spec.origin is not None
    videos = dict(re.findall(r'\("(\w+)", \{"torchvision": "(\w+)"\}\)', Path(spec.origin).read_text()))

    def image(model: str) -> str | None:
        return IMAGE_PROCESSOR_MAPPING_NAMES.get(model, {}).get("torchvision")

    def of(model: str) -> str | None:
        if model.endswith("_text"):  # its module also has the model with images
            return None
        video = videos.get(model_type_to_module_name(model))
        part = image(model.removesuffix("_vision_model")) if model.endswith("_vision_model") else None
        return PROCESSOR_MAPPING_NAMES.get(model.removesuffix("_thinker")) or image(model) or FEATURE_EXTRACTOR_MAPPING_NAMES.get(model) or part or video  # fmt: skip

    shipped = available_rules()
    stated = {t.config["model_type"] for rules in shipped for t in rules.targets.values() if "model_type" in t.config}
    stated |= {one for rules in shipped if rules.sidecar for one in rules.sidecar.supported.get("model_type", ())}
    assert {model: name for model in stated if (name := of(model))} == PROCESSORS
    assert MAX_BYTES <= MAX_JSON  # `convert verify` reads what was copied


@pytest.mark.parametrize(
    ("model", "head", "processor"),
    [
        ("siglip", "SiglipForImageClassification", "SiglipImageProcessor"),
        ("siglip", "SiglipModel", "SiglipProcessor"),
        ("vit", "ViTForImageClassification", "ViTImageProcessor"),
    ],
)
def test_a_class_without_texts_needs_the_images_alone(model: str, head: str, processor: str) -> None:
    said = str(missing_processor({"model_type": model, "architectures": [head]}, None))
    assert f"transformers' {processor}, " in said
    assert hasattr(transformers, processor)


def test_targets_of_other_packages_name_theirs() -> None:
    targets = [(name, rules.targets[name]) for rules in available_rules() for name in rules.supported_targets]
    for name, target in targets:
        if name == "lerobot":
            assert "make_pre_post_processors" in str(missing_processor(target.config, None))
        elif name == "timm":  # it makes its transform of what config.json states
            assert {"mean", "std", "input_size"} <= target.config["pretrained_cfg"].keys()
    assert {"lerobot", "timm"} <= {name for name, _ in targets}


@pytest.mark.parametrize(
    ("case", "processor"),
    [
        ("clip.vision", "CLIPImageProcessor"),
        ("vision_encoder_decoder", "ViTImageProcessor"),
        ("speech_encoder_decoder", "Wav2Vec2Processor"),
        ("encoder_decoder", None),
        ("clip.text", None),
    ],
)
def test_the_encoder_takes_the_inputs(case: str, processor: str | None, tmp_path: Path) -> None:
    plan = convert.plan_conversion("flax-transformers", flax_families.specs(case, tmp_path / "source"))
    named = [note for note in plan.config_notes if "inputs are made by" in note]
    assert [processor in note for note in named] == [True] if processor else named == []
