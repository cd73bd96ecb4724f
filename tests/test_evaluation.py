"""Evaluation: its figures on scripted drafters, its verdict on outputs, its files and tables."""

import json

import pytest
import tiny
from scripted import Scripted, script

import specjax
from specjax import cli, evaluation
from specjax.models import hub, params
from specjax.models.drafter import table
from specjax.models.drafter_hf import config_from_hf


@pytest.fixture(scope="module")
def stories():
    return specjax.load_target("stories260k")


def ids(stories, *texts):
    return [stories.tokenizer(text).input_ids for text in texts]


def test_a_scripted_drafter_has_the_figures_of_its_script(stories):
    (prompt,) = ids(stories, "The dog")
    answer = specjax.generate(stories, prompt, max_new_tokens=41).tokens
    drafter = (Scripted(7), script([prompt], [answer], 3, 512))
    report = evaluation.evaluate(stories, drafter, [prompt], max_new_tokens=41)
    assert (report["tau"], report["tau_macro"], report["rounds"]) == (4.0, 4.0, 10)
    assert report["acceptance_per_position"] == [1, 1, 1, 0, 0, 0, 0]
    assert report["conditional_acceptance"][:4] == [1, 1, 1, 0]
    assert report["conditional_acceptance"][4] is None
    assert sum(report["acceptance_per_position"]) == report["tau_untruncated"] - 1
    assert (report["identical"], report["near_ties"], report["violations"]) == (1, 0, 0)
    assert report["speedup"] == pytest.approx(
        report["tokens_per_s"] / report["plain_tokens_per_s"], rel=1e-2
    )
    assert set(report["stage_ms"]) == {"draft", "verify", "other"}
    json.dumps(report)


def test_a_report_says_with_which_settings_a_method_ran(stories):
    drafter = specjax.load_drafter("stories260k-dflash", stories)
    method = specjax.ReAnchor((1,), trust=0.25)
    asked = {"max_new_tokens": 8, "reuse": method}
    report = evaluation.evaluate(stories, drafter, ids(stories, "The dog"), **asked)
    said = json.loads(json.dumps(report))["asked"]["reuse"]
    assert said == {"method": "reanchor", "shifts": [1], "threshold": 0.5, "trust": 0.25}


def test_a_wrong_output_is_a_violation(stories, monkeypatch):
    """Inject it: the speculative arm gets another text for one prompt of two."""
    prompts = ids(stories, "The dog", "Lily")
    real = evaluation.generate
    swapped = prompts[1]

    def lying(target, prompt, **arguments):
        if prompt == swapped and arguments.get("drafter") is not None:
            prompt = prompts[0]
        return real(target, prompt, **arguments)

    monkeypatch.setattr(evaluation, "generate", lying)
    report = evaluation.evaluate(stories, specjax.NGram(3), prompts, max_new_tokens=20)
    assert (report["identical"], report["near_ties"], report["violations"]) == (1, 0, 1)
    assert report["violating_prompts"] == [1]


def test_a_rule_that_keeps_the_law_only_is_not_compared(stories):
    report = evaluation.evaluate(
        stories,
        specjax.NGram(3),
        ids(stories, "The dog"),
        max_new_tokens=20,
        temperature=1.0,
        verify="token",
    )
    assert (report["identical"], report["near_ties"], report["violations"]) == (None, None, None)
    assert " - " in evaluation.as_table([report])


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ([], {}, "at least one prompt"),
        ("The dog", {}, "a list"),
        ([[1]], {"repeats": 0}, "repeats"),
    ],
)
def test_nothing_to_measure_is_refused(stories, prompts, arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluation.evaluate(stories, specjax.NGram(3), prompts, **arguments)


def test_one_token_answers_have_no_speed(stories):
    report = evaluation.evaluate(
        stories, specjax.NGram(3), ids(stories, "The dog"), max_new_tokens=1
    )
    assert (report["tau"], report["speedup"], report["identical"]) == (None, None, 1)
    evaluation.as_table([report])


def test_a_difference_at_a_tie_is_a_near_tie(stories):
    (prompt,) = ids(stories, "The dog")
    answer = specjax.generate(stories, prompt, max_new_tokens=20).tokens
    other = [*answer[:10], (answer[10] + 1) % 512, *answer[11:]]
    assert not evaluation._near_tie(stories, prompt, answer, other, {})
    assert not evaluation._near_tie(stories, prompt, answer, answer[:10], {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "NEAR_TIE", 1e9)
        assert evaluation._near_tie(stories, prompt, answer, other, {})
        assert not evaluation._near_tie(stories, prompt, answer, answer[:10], {})


def test_plain_decoding_alone(stories):
    report = evaluation.evaluate(stories, None, ids(stories, "The dog"), max_new_tokens=10)
    assert (report["tau"], report["rounds"], report["drafter"]) == (1.0, 9, None)
    assert "speedup" not in report


def test_turns_share_the_history_of_plain_decoding(tmp_path):
    config = tiny.target_config("qwen3", vocab_size=320, eos_token_id=...)
    files = tiny.tokenizer_files()
    model = hub.load_target(
        tiny.write(tmp_path, config, tiny.target_tensors(config), tokenizer=files)
    )
    seen = list(evaluation._dialogues(model, [["ha", "ok"], ["ha"]], 4, {"temperature": 0.0}))
    assert [index for index, _ in seen] == [0, 0, 1]
    first, second = (model.tokenizer.decode(row) for _, row in seen[:2])
    assert seen[2][1] == seen[0][1]
    assert second.startswith(first.split("<|im_start|>assistant")[0])
    assert second.count("<|im_start|>user") == 2


@pytest.mark.parametrize(
    ("lines", "message"),
    [(['{"question": "x"}'], r":1 has none of prompt"), ([], "holds no prompts")],
)
def test_prompt_files_that_hold_none_are_refused(tmp_path, lines, message):
    file = tmp_path / "p.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        evaluation.read_prompts(file)


def test_a_prompt_may_hold_any_character(tmp_path):
    """JSON leaves the rarer line separators as they are; GSM8K has one."""
    prompts = ["one\u2028line", "a\x85b", "c\u2029d"]
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in prompts]
    file.write_text("\r\n".join(lines) + "\r\n", encoding="utf-8", newline="")
    assert evaluation.read_prompts(file) == [[text] for text in prompts]


def test_the_command_prints_a_table_and_writes_the_report(tmp_path, capsys):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "The dog"}\n{"turns": ["Lily"]}\n{"prompt": "unused"}\n')
    argv = ["eval", "--drafter", "ngram", "--num-draft", "4", "--limit", "2"]
    argv += [
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "12",
        "--json",
        str(tmp_path / "r.json"),
    ]
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "speedup" in out
    assert "2/2" in out
    report = json.loads((tmp_path / "r.json").read_text())
    keys = "tau tau_macro acceptance_per_position tokens_per_s plain_tokens_per_s speedup"
    keys += " identical near_ties violations rounds stage_ms target drafter settings"
    assert set(keys.split()) <= set(report)
    assert (report["identical"], report["violations"], report["answers"]) == (2, 0, 2)


@pytest.mark.slow
def test_the_command_sweeps_draft_lengths(tmp_path, capsys):
    config = tiny.target_config("qwen3", vocab_size=320, eos_token_id=...)
    files = tiny.tokenizer_files()
    tiny.write(tmp_path / "t", config, tiny.target_tensors(config), tokenizer=files)
    model = hub.load_target(tmp_path / "t")
    draft = config_from_hf(tiny.drafter_config(vocab_size=320))
    import jax

    weights = params.init(table(draft), jax.random.key(0))
    hub.save_drafter(tmp_path / "d", hub.Drafter("d", tmp_path, draft, weights))
    (tmp_path / "p.jsonl").write_text('{"prompt": "ha ha"}\n')
    argv = ["eval", "--target", str(tmp_path / "t"), "--drafter", str(tmp_path / "d"), "--sweep"]
    argv += ["--prompts", str(tmp_path / "p.jsonl"), "--max-new-tokens", "8"]
    assert cli.main([*argv, "--json", str(tmp_path / "r.json")]) == 0
    report = json.loads((tmp_path / "r.json").read_text())
    tried = [row["settings"]["num_draft"] for row in report["sweep"]]
    assert tried == evaluation.draft_lengths(7) == [1, 2, 3, 4, 5, 7]
    assert all(row["violations"] == 0 for row in report["sweep"])
    assert model.has_tokenizer
