"""Makes copying.jsonl and copying-train.jsonl: work whose answer stands in the prompt.

    python experiments/prompts/make_copying.py
    python experiments/prompts/make_copying.py --check smollm2-135m   # how much a target copies

For targets that chat. Six kinds of prompts, ten each for tests and 40 each for training: repeating,
correcting, quoting, extracting, breaking into lines and joining lines. The texts are the statements
of GSM8K questions (the question itself would be answered, not copied), for tests of the test split
and by turns with openings of stories, two at a time; for training of the train split. Each prompt
has one worked example as an earlier turn, which a small model needs. Behind a wrong draft the rest
of such an answer is still determined by the prompt. Run from the repository root.
"""

import argparse
import difflib
import json
import re
from pathlib import Path

import specjax
from specjax.evaluation import read_prompts

FOLDER = Path("experiments/prompts")
FILE = FOLDER / "copying.jsonl"
TRAIN = FOLDER / "copying-train.jsonl"
EACH, EACH_TRAIN = 10, 40


def sentences(text):
    """The sentences of a text, in order."""
    return re.findall(r"[^\s.!?][^.!?]*[.!?]+\"?(?=\s|$)", " ".join(text.split()))


def spoiled(text):
    """The text with two letters swapped inside every third long word."""
    words = text.split()
    for i, word in enumerate(words):
        if i % 3 == 0 and len(word) > 4 and word.isalpha():
            k = len(word) // 2
            words[i] = word[: k - 1] + word[k] + word[k - 1] + word[k + 1 :]
    return " ".join(words)


def plain(text):
    """The text itself."""
    return text


# What is asked, what of the text is shown, and the right answer.
KINDS = {
    "repeat": ("Repeat the following text word for word", plain, plain),
    "correct": ("Correct the spelling in the following text", spoiled, plain),
    "quote": ("Put the following text in quotation marks", plain, '"{}"'.format),
    "extract": (
        "Write down the following text without its first sentence",
        plain,
        lambda text: " ".join(sentences(text)[1:]),
    ),
    "lines": (
        "Write each sentence of the following text on a line of its own",
        plain,
        lambda text: "\n".join(sentences(text)),
    ),
    "join": (
        "Join the following lines to one paragraph",
        lambda text: "\n".join(sentences(text)),
        lambda text: " ".join(sentences(text)),
    ),
}


def fitting(texts):
    """Those of 30 to 60 words in three sentences or more."""
    return [text for text in texts if 30 <= len(text.split()) <= 60 and len(sentences(text)) > 2]


def statements(file):
    """What GSM8K questions tell before they ask."""
    questions = [turns[0] for turns in read_prompts(FOLDER / file)]
    return fitting(" ".join(sentences(question)[:-1]) for question in questions)


def test_texts():
    """Statements and openings by turns, never one twice."""
    openings = [turns[0] for turns in read_prompts(FOLDER / "stories-test.jsonl")]
    stories = fitting(f"{a} {b}" for a, b in zip(openings[::2], openings[1::2], strict=True))
    return [text for pair in zip(statements("gsm8k-test.jsonl"), stories) for text in pair]  # noqa: B905


def asked(kind, text, example):
    """The messages of one prompt."""
    question, shown, answer = KINDS[kind]
    say = lambda role, content: {"role": role, "content": content}  # noqa: E731
    return [
        say("user", f"{question}:\n\n{shown(example)}"),
        say("assistant", answer(example)),
        say("user", f"{question}:\n\n{shown(text)}"),
    ]


def check(name):
    """Lets a target answer and says which share of its words it copied, in order, by kind."""
    target = specjax.load_target(name)
    prompts = [turns[0] for turns in read_prompts(FILE)]
    out = specjax.generate(target, prompts, max_new_tokens=128, temperature=0.0, batch_size=20)
    for start, kind in zip(range(0, len(prompts), EACH), KINDS, strict=True):
        words = copied = 0
        for prompt, text in zip(prompts[start : start + EACH], out.text[start:], strict=False):
            source, said = prompt[-1]["content"].split(), text.split()
            same = difflib.SequenceMatcher(None, source, said, autojunk=False)
            words += len(said)
            copied += sum(block.size for block in same.get_matching_blocks())
        print(f"{kind:<8} {words / EACH:5.1f} words an answer, {copied / words:.0%} of them copied")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", metavar="TARGET")
    args = parser.parse_args()
    if args.check:
        return check(args.check)
    write(FILE, test_texts(), EACH)
    write(TRAIN, statements("gsm8k-train-more.jsonl"), EACH_TRAIN)


def write(file, texts, each):
    """Prompts of every kind; the first text is the example in all of them."""
    example, *rest = texts
    kinds = [kind for kind in KINDS for _ in range(each)]
    rows = [asked(kind, text, example) for kind, text in zip(kinds, rest, strict=False)]
    assert len(rows) == len(kinds)
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), "utf-8")


if __name__ == "__main__":
    main()
