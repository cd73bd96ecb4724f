"""The command line, and what a bare import costs."""

import subprocess
import sys

import pytest
import tiny

from specjax import cli
from specjax.models import packaged


def test_generate_prints_a_story(capsys):
    assert cli.main(["generate", "--prompt", "Once upon a time", "--max-new-tokens", "16"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("Once upon a time, there was a little girl")
    assert "16 tokens (length)" in err


@pytest.mark.slow
@pytest.mark.skipif(not (packaged.cache_dir() / "smollm2-135m").is_dir(), reason="run make smollm2")
def test_generate_answers_a_message(capsys):
    asked = ["--prompt", "What is the capital of France?", "--max-new-tokens", "16"]
    assert cli.main(["generate", "--target", "smollm2-135m", "--chat", *asked]) == 0
    assert "\n\nThe capital of France is Paris." in capsys.readouterr().out


def test_info_describes_targets_and_drafters_and_their_fit(tmp_path, capsys):
    config, draft = tiny.target_config("qwen3"), tiny.drafter_config()
    tiny.write(tmp_path / "target", config, tiny.target_tensors(config), shards=2, dtype="bfloat16")
    tiny.write(tmp_path / "drafter", draft, tiny.drafter_tensors(draft))
    names = [str(tmp_path / "target"), str(tmp_path / "drafter"), "stories260k"]
    assert cli.main(["info", *names]) == 0
    out = capsys.readouterr().out
    for part in (
        "target, qwen3 family",
        "bfloat16 in 2 files",
        "drafter, DFlash backbone",
        "8 rows, 7 drafts; layout 'fill'",
        "outputs of target layers [0, 2]",
        "mask token   96",
        f"{names[1]} fits {names[0]}",
        f"{names[1]} does not fit stories260k: the drafter has hidden size 48",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["info", "nowhere"], "nowhere is no directory"),
        (["generate", "--prompt", "x" * 4000], "exceed the 512 positions"),
        (["generate", "--chat", "--prompt", "Hi"], "no chat template"),
        (["generate", "--prompt", "Hi", "--stop-below", "0.5"], "with a verification head"),
        (["convert", "a.gguf"], "convert needs a directory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(argv, message, capsys):
    assert cli.main(argv) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_import_leaves_the_heavy_packages_alone():
    heavy = ("transformers", "orbax", "huggingface_hub", "torch", "gguf", "tokenizers")
    code = f"import sys, specjax; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
