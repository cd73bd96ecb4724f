"""The built wheel, installed into an empty environment, tells a story."""

import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(tmp_path):
    def run(*command):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT))
    (wheel,) = tmp_path.glob("specjax-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = str(tmp_path / "env" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", str(wheel))
    story = run(str(tmp_path / "env" / "bin" / "specjax"), "generate", "--max-new-tokens", "12")
    assert story.startswith("Once upon a time, there was a little girl")
    where = run(python, "-c", "import specjax; print(specjax.__file__)")
    assert str(tmp_path) in where
