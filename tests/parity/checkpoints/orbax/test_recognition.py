"""What is no Orbax checkpoint; and that reading one needs neither JAX nor Orbax."""

import subprocess
import sys
from pathlib import Path

import pytest

from convert.checkpoints.orbax.reader import looks_like_orbax, open_orbax
from convert.core.errors import CheckpointError
from support.orbax_checkpoints import ORBAX_0_5
from support.paths import TESTS


def test_what_is_no_orbax_checkpoint(tmp_path: Path) -> None:
    assert not looks_like_orbax(tmp_path / "nothing")
    assert not looks_like_orbax(tmp_path)
    (tmp_path / "model.npz").write_bytes(b"PK")
    assert not looks_like_orbax(tmp_path / "model.npz")
    for name, code in {
        "nothing": "checkpoint-missing",
        "": "checkpoint-unknown-format",
        "model.npz": "checkpoint-unknown-format",
    }.items():
        with pytest.raises(CheckpointError) as caught:
            open_orbax(tmp_path / name)
        assert caught.value.code == code and caught.value.findings[0].path == str(tmp_path / name)


@pytest.mark.parametrize(
    "content",
    [
        b'model_checkpoint_path: "model.ckpt-100"\n',  # TensorFlow
        b"\x80\x04\x95",  # a pickle
        b"PK\x03\x04",  # torch.save
        b"\x82\xafflattened_state\x90\xb0str_pytree_state\xa0",  # paxml
    ],
)
def test_files_of_others_called_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "checkpoint").write_bytes(content)
    assert not looks_like_orbax(tmp_path)


@pytest.mark.slow
def test_looks_like_orbax(managed: Path, written: Path, processes: Path) -> None:
    for path in (managed, written, processes):
        assert all(looks_like_orbax(child) for child in path.iterdir())
    assert looks_like_orbax(managed / "plain" / "100" / "default")
    assert all(looks_like_orbax(path) for path in ORBAX_0_5.iterdir() if path.is_dir())
    assert not looks_like_orbax(TESTS)


@pytest.mark.slow
def test_neither_jax_nor_orbax_is_needed(written: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from convert.checkpoints.orbax.reader import open_orbax\n"
        "source = open_orbax(Path(sys.argv[1])); [source.read(name) for name in source.leaves]\n"
        "print(sorted({'jax', 'jaxlib', 'flax', 'orbax', 'torch', 'etils'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(written / "ocdbt")], capture_output=True, text=True)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr
