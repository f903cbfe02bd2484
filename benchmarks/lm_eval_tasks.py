"""Three small tasks for EleutherAI's lm-eval, written to a folder as its YAML files with data beside them.

One for each way in which it asks for likelihoods: choices (40 questions), the last word of a text, and whole texts
through windows. All texts are ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

CHOICES, LAST_WORD, WHOLE_TEXT = "headrace_choices", "headrace_last_word", "headrace_whole_text"

_CAPITALS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Russia": "Moscow",
    "Greece": "Athens",
    "China": "Beijing",
    "Kenya": "Nairobi",
}
_SOUNDS = {
    "A dog": "barks",
    "A cat": "meows",
    "A cow": "moos",
    "A duck": "quacks",
    "A lion": "roars",
    "A wolf": "howls",
    "A snake": "hisses",
    "A bee": "buzzes",
    "A horse": "neighs",
    "A sheep": "bleats",
}
_COLOURS = {
    "snow": "white",
    "coal": "black",
    "grass": "green",
    "a ripe banana": "yellow",
    "a clear sky at noon": "blue",
    "blood": "red",
    "chocolate": "brown",
    "a carrot": "orange",
    "a flamingo": "pink",
    "an elephant": "grey",
}
_PLACES = {
    "read books": "a library",
    "buy bread": "a bakery",
    "see a play": "a theatre",
    "board a train": "a station",
    "visit a doctor": "a hospital",
    "watch lions and giraffes": "a zoo",
    "keep money": "a bank",
    "learn to read and write": "a school",
    "post a letter": "a post office",
    "swim in summer": "a pool",
}
_KINDS: Sequence[tuple[str, Mapping[str, str]]] = (
    ("The capital of {} is", _CAPITALS),
    ("{} is an animal that", _SOUNDS),
    ("The colour of {} is", _COLOURS),
    ("The place where people go to {} is", _PLACES),
)


def questions() -> list[dict[str, object]]:
    """Return 40 questions with four choices each, the right one at changing places."""
    found: list[dict[str, object]] = []
    for text, pairs in _KINDS:
        answers = list(pairs.values())
        for index, (subject, answer) in enumerate(pairs.items()):
            others = [answers[(index + step) % len(answers)] for step in (1, 4, 7)]
            right = index % 4
            choices = [*others[:right], answer, *others[right:]]
            found.append({"question": text.format(subject), "choices": choices, "right": right})
    return found


def write_tasks(directory: Path, texts: Sequence[str]) -> None:
    """Write the three tasks. `texts` have some words each."""
    questions_file = _write_lines(directory / "questions.json", questions())
    texts_file = _write_lines(directory / "texts.json", [{"text": text} for text in texts])
    _write_task(
        directory / f"{CHOICES}.yaml",
        questions_file,
        task=CHOICES,
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{choices}}",
        doc_to_target="{{right}}",
        metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )
    _write_task(
        directory / f"{LAST_WORD}.yaml",
        texts_file,
        task=LAST_WORD,
        output_type="loglikelihood",
        doc_to_text="{{text.split(' ')[:-1]|join(' ')}}",
        doc_to_target="{{' ' + text.split(' ')[-1]}}",
        metric_list=[{"metric": "perplexity"}, {"metric": "acc"}],
    )
    _write_task(
        directory / f"{WHOLE_TEXT}.yaml",
        texts_file,
        task=WHOLE_TEXT,
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    )


def _write_lines(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _write_task(path: Path, data: Path, **settings: object) -> None:
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    path.write_text(yaml.safe_dump({**settings, **source}))
