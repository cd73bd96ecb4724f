"""Whole runs: from prompts to a drafter that decodes, and back after an interruption."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny

import specjax
from specjax.models import hub
from specjax.training import data, run
from specjax.training.checkpoint import Checkpoints
from specjax.training.config import from_json
from specjax.training.dryrun import estimate
from specjax.training.report import table

STORIES = {
    "name": "small",
    "target": "stories260k",
    "sources": [
        {"name": "stories", "limit": 24, "max_new_tokens": 48, "temperature": 0.8, "batch_size": 24}
    ],
    "drafter": {"layers": 1, "taps": [0, 2], "mask_token_id": 0},
    "steps": 10,
    "row_length": 64,
    "rows": 4,
    "anchors": 4,
    "checkpoint_every": 5,
}
PROMPTS = "experiments/prompts/stories-test.jsonl"
HELD = {
    "prompts": PROMPTS,
    "limit": 4,
    "max_new_tokens": 24,
    "batch_size": 4,
    "every": 4,
    "walked": 2,
    "decoded": 2,
    "temperatures": [0.0],
}


def config(**changes):
    return from_json(STORIES | changes)


def fit(folder, **changes):
    return run.fit(config(**changes), runs=folder, progress=False)


def metrics(folder, name="small"):
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        del row["tokens_per_s"]
    return rows


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("runs")
    return folder, fit(folder, heldout=HELD)


def test_everything_of_a_run_is_in_its_folder(whole):
    folder, report = whole
    made = {path.name for path in (folder / "small").iterdir()}
    assert made >= {"config.json", "answers", "heldout", "checkpoints", "metrics.jsonl", "drafter"}
    assert made >= {"walks.jsonl", "curves.png", "report.json"}
    assert json.loads((folder / "small" / "report.json").read_text()) == report
    assert report.keys() >= {"tau", "speedup", "identical", "violations", "stage_ms", "target"}
    assert [row["step"] for row in metrics(folder)] == list(range(1, 11))
    keys = {"loss", "accuracy", "tau", "grad_norm", "learning_rate", "labels"}
    assert metrics(folder)[0].keys() >= keys
    assert len(metrics(folder)[0]["accuracy"]) == 7
    text = table(report)
    assert "acceptance length" in text
    assert f"{report['walk']['tau']:.3f}" in text


def test_the_exported_drafter_decodes_losslessly(whole):
    folder, report = whole
    target = specjax.load_target("stories260k")
    drafter = specjax.load_drafter(folder / "small" / "drafter", target)
    assert report["violations"] == 0
    prompt = "Once upon a time"
    plain = specjax.generate(target, prompt, max_new_tokens=20)
    fast = specjax.generate(target, prompt, drafter=drafter, max_new_tokens=20)
    assert fast.tokens == plain.tokens
    card = (folder / "small" / "drafter" / "README.md").read_text()
    assert f"{report['walk']['tau']:.3f}" in card
    again = json.loads((folder / "small" / "drafter" / "training.json").read_text())
    assert from_json(again) == config(heldout=HELD)


def test_the_best_walked_checkpoint_is_kept(whole):
    folder, report = whole
    walks = [
        json.loads(line) for line in (folder / "small" / "walks.jsonl").read_text().split("\n")[:-1]
    ]
    assert [row["step"] for row in walks] == [4, 8, 10]
    best = max(walks, key=lambda row: row["tau"])["step"]
    assert report["best_walked_step"] == best
    assert best in Checkpoints(folder / "small" / "checkpoints").steps()


def test_the_walk_on_the_way_is_that_of_the_loop(whole):
    """H9: the acceptance told in training is the one that decoding finds."""
    folder, report = whole
    greedy = [r for r in report["runs"] if r["asked"]["temperature"] == 0]
    full = next(r for r in greedy if r["settings"]["num_draft"] == 7)
    target = specjax.load_target("stories260k")
    drafter = specjax.load_drafter(folder / "small" / "drafter", target)
    prompts = specjax.evaluation.read_prompts(PROMPTS, 4)
    decoded = specjax.evaluate(target, drafter, prompts, max_new_tokens=24, temperature=0.0)
    assert decoded["tau"] == pytest.approx(report["walk"]["tau"], rel=0.05)
    assert full["tau"] >= 1


class _Stopped(Exception):
    pass


def test_a_run_that_was_interrupted_goes_on_bit_for_bit(whole, tmp_path, monkeypatch):
    """H5: parameters, moments, schedule, step and position in the data continue."""
    folder, _ = whole
    save = Checkpoints.save

    def stop(self, step, *rest, **more):
        save(self, step, *rest, **more)
        raise _Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "save", stop)
        with pytest.raises(_Stopped):
            fit(tmp_path, heldout=HELD)
    assert Checkpoints(tmp_path / "small" / "checkpoints").latest() == 4  # behind a walk
    with (tmp_path / "small" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 0.0}\n{"step": 7, "lo')  # written, but not saved
    fit(tmp_path, heldout=HELD)
    assert metrics(tmp_path) == metrics(folder)
    setup = run.prepare(config(), tmp_path)
    optimizer = run.trainer.make_optimizer(setup.config.optimizer, 10)
    like = run.trainer.fresh_state(setup.plan, optimizer)
    one, two = (
        Checkpoints(where / "small" / "checkpoints").restore(10, like=like)
        for where in (folder, tmp_path)
    )
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_a_complete_run_only_reports(whole, monkeypatch):
    folder, report = whole
    monkeypatch.setattr(run.trainer, "make_step", None)
    again = fit(folder, heldout=HELD)
    assert again["walk"] == report["walk"]


def test_another_config_is_refused_with_the_difference(whole):
    folder, _ = whole
    with pytest.raises(ValueError, match=r"config\.anchors: saved 4, now 5"):
        fit(folder, anchors=5)
    with pytest.raises(ValueError, match=r"optimizer\.learning_rate: saved 0\.001, now 0\.01"):
        fit(folder, optimizer={"learning_rate": 0.01})


def test_another_target_is_refused(tmp_path):
    folder = tmp_path / "target"
    text = {"prompts": str(tmp_path / "prompts.jsonl"), "max_new_tokens": 16, "limit": 2}
    Path(text["prompts"]).write_text('{"messages": [3, 4]}\n{"messages": [5]}\n')
    made = tiny.target_config("qwen3", vocab_size=97, eos_token_id=...)
    changes = {
        "target": str(folder),
        "sources": [text | {"name": "ids"}],
        "steps": 1,
        "row_length": 24,
        "rows": 2,
        "anchors": 2,
        "checkpoint_every": 1,
    }
    tiny.write(folder, made, tiny.target_tensors(made, seed=0))
    fit(tmp_path, **changes)
    for file in folder.iterdir():
        file.unlink()
    tiny.write(folder, made, tiny.target_tensors(made, seed=1))
    with pytest.raises(ValueError, match="target: saved"):
        fit(tmp_path, **changes)


def test_states_from_a_cache_train_like_those_made_online(whole, tmp_path):
    folder, _ = whole
    answers = str(folder / "small" / "answers" / "stories")
    source = STORIES["sources"][0] | {"answers": answers}
    fit(tmp_path, sources=[source], features="cache")
    one, two = metrics(folder), metrics(tmp_path)
    losses = [[row["loss"] for row in rows] for rows in (one, two)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-2)  # bfloat16 states
    with pytest.raises(ValueError, match="limit"):
        fit(tmp_path, name="tight", sources=[source], features="cache", cache_gb=1e-6)
    assert not (tmp_path / "tight" / "features").exists()


def test_a_drafter_can_be_trained_further(whole, tmp_path):
    folder, _ = whole
    start = str(folder / "small" / "drafter")
    answers = str(folder / "small" / "answers" / "stories")
    source = STORIES["sources"][0] | {"answers": answers}
    report = fit(
        tmp_path, drafter=None, init_from=start, sources=[source], vocabulary="data", heldout=HELD
    )
    assert metrics(tmp_path)[0]["loss"] < metrics(folder)[0]["loss"]
    assert report["violations"] == 0
    made = hub.load_drafter(tmp_path / "small" / "drafter", hub.load_target("stories260k"))
    proposed = made.params["target_ids"]  # what occurs in the answers, and nothing else
    texts = data.load(answers)
    np.testing.assert_array_equal(proposed, texts.occurring(made.config.vocab_size))
    again = {"drafter": None, "init_from": str(made.directory), "sources": [source]}
    fit(tmp_path, name="again", **again)  # its weights alone are taken
    other = hub.load_drafter(tmp_path / "again" / "drafter", hub.load_target("stories260k"))
    assert "target_ids" not in other.params


def test_blocks_may_grow_and_runs_share_a_cache(whole, tmp_path):
    folder, _ = whole
    start = str(folder / "small" / "drafter")
    answers = str(folder / "small" / "answers" / "stories")
    shared = tmp_path / "shared"
    more = {
        "drafter": None,
        "init_from": start,
        "sources": [STORIES["sources"][0] | {"answers": answers}],
        "features": "cache",
        "cache_folder": str(shared),
        "objective": {"gamma": 3.0},
    }
    fit(tmp_path, name="longer", block_size=6, **more)
    made = {file: file.stat().st_mtime_ns for file in shared.iterdir()}
    drafter = hub.load_drafter(tmp_path / "longer" / "drafter", hub.load_target("stories260k"))
    assert drafter.config.block_size == 6
    fit(tmp_path, name="longest", block_size=7, **more)
    assert made == {file: file.stat().st_mtime_ns for file in shared.iterdir()}
    assert not (tmp_path / "longest" / "features").exists()
    with pytest.raises(ValueError, match="block_size 1 leaves no slot"):
        fit(tmp_path, name="none", block_size=1, **more)


def test_a_dry_run_tells_what_a_run_costs(tmp_path, monkeypatch):
    """H10: bytes are told before anything is written."""
    monkeypatch.chdir(tmp_path)
    told = estimate(config(features="cache"))
    assert "24 documents, at most 1,176 tokens" in told
    assert "256 bytes a token, at most 0.00 GB on disk (limit 20 GB)" in told
    assert "s a step" in told
    assert not list(tmp_path.iterdir())


def test_a_texts_file_cut_short_is_an_error_and_loses_nothing(whole, tmp_path):
    folder, _ = whole
    answers = tmp_path / "answers"
    answers.mkdir()
    for file in (folder / "small" / "answers" / "stories").iterdir():
        (answers / file.name).write_bytes(file.read_bytes())
    cut = answers / "answers.npz"
    cut.write_bytes(cut.read_bytes()[:-20])
    source = STORIES["sources"][0] | {"answers": str(answers)}
    with pytest.raises(ValueError, match=r"answers\.npz"):
        fit(tmp_path, sources=[source])


def test_overfit_drafter_accepts_whole_blocks(tmp_path):
    """The gate of evaluation.md 6.2: wrong taps, layout, positions or masks all break it."""
    V = 24
    successor = [(7 * i + 5) % V for i in range(V)]
    folder = tiny.successor_target(tmp_path / "target", successor, layers=3)
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"messages": [3 * i, successor[3 * i]]}) for i in range(8)]
    prompts.write_text("\n".join(lines) + "\n")
    changes = {
        "target": str(folder),
        "sources": [{"name": "count", "prompts": str(prompts), "max_new_tokens": 41}],
        "heldout": None,
        "steps": 300,
        "row_length": 43,
        "rows": 8,
        "anchors": 16,
        "optimizer": {"learning_rate": 1e-2},
        "checkpoint_every": 300,
    }
    for layout, drafts in (("fill", 7), ("next", 8)):
        drafter = {"layers": 2, "taps": [0, 1], "mask_token_id": 1, "layout": layout}
        fit(tmp_path, name=layout, drafter=drafter, **changes)
        assert metrics(tmp_path, layout)[-1]["loss"] < 0.01
        target = specjax.load_target(folder)
        made = specjax.load_drafter(tmp_path / layout / "drafter", target)
        ids = [json.loads(line)["messages"] for line in lines]
        rounds = 40 // (drafts + 1)  # within the positions that were trained
        for prompt in ids:
            out = specjax.generate(
                target, prompt, drafter=made, max_new_tokens=rounds * (drafts + 1) + 1
            )
            assert out.stats.tau >= drafts + 0.5
        told = metrics(tmp_path, layout)[-1]["tau"]
        longest = np.minimum(drafts, np.arange(1, 41)).mean() + 1  # of anchors near the end, less
        assert told == pytest.approx(longest, rel=0.05)  # H9: what training tells is what decodes
        wrong = specjax.load_drafter(
            tmp_path / layout / "drafter", target, layout={"fill": "next", "next": "fill"}[layout]
        )
        out = specjax.generate(target, ids[0], drafter=wrong, max_new_tokens=17)
        assert out.stats.tau < 1.5


SCRIPT = """
import json, sys
from specjax.training import run
from specjax.training.config import from_json
run.fit(from_json(json.loads(sys.argv[1])), runs=sys.argv[2], progress=False)
"""

STEPS = ("metrics.jsonl",) * 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:acceptance length")
def test_the_report_has_closed_forms_beside_what_was_decoded(tmp_path):
    report = fit(tmp_path, heldout=HELD | {"temperatures": [0.0, 1.0], "max_new_tokens": 48})
    (forms,) = report["expected"]
    assert (forms["temperature"], forms["answers"]) == (1.0, 2)
    decoded = report["runs"][1]
    assert decoded["settings"]["rule"] == "block"
    assert 1 <= forms["rules"]["match-independent"]["tau"] <= forms["rules"]["block"]["tau"] < 2
    assert abs(forms["rules"]["block"]["tau"] - decoded["tau"]) < 0.3
    lines = table(report).splitlines()
    assert any("temperature 1, in closed form over 2 answers: match 1." in line for line in lines)
    assert (tmp_path / "small" / "heldout-1" / "manifest.json").exists()


@pytest.mark.slow
def test_ten_kills_do_not_change_the_end(tmp_path):
    """Killed at ten random moments, in every stage of a run, then continued: the last checkpoint
    equals that of an undisturbed run."""
    long = STORIES | {"steps": 120, "checkpoint_every": 3, "features": "cache"}
    environment = os.environ | {"SPECJAX_CACHE": str(tmp_path / "cache")}

    def start(folder):
        arguments = [sys.executable, "-c", SCRIPT, json.dumps(long), str(folder)]
        return subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL)

    def size(file):
        return file.stat().st_size if file.exists() else 0

    assert start(tmp_path / "whole").wait() == 0
    rng = random.Random(0)
    for name in ("answers/stories/answers.partial.jsonl", "features/features.bin", *STEPS):
        file = tmp_path / "killed" / "small" / name
        enough = size(file) + (rng.randrange(1500) if name == STEPS[0] else 0)
        process = start(tmp_path / "killed")
        while size(file) <= enough:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert start(tmp_path / "killed").wait() == 0
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    found = [Checkpoints(tmp_path / name / "small" / "checkpoints") for name in ("whole", "killed")]
    setup = run.prepare(from_json(long), tmp_path)
    optimizer = run.trainer.make_optimizer(setup.config.optimizer, 120)
    like = run.trainer.fresh_state(setup.plan, optimizer)
    one, two = (checkpoints.restore(120, like=like) for checkpoints in found)
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_devices_that_are_not_there_are_refused(tmp_path):
    needed = jax.device_count() + 1
    with pytest.raises(ValueError, match=f"needs {needed} devices"):
        fit(tmp_path, data_parallel=needed, rows=needed)
