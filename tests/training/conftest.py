"""Targets that several files of these tests let answer prompts."""

import pytest
from answering_by_hand import chatty_target

import specjax


@pytest.fixture(scope="module")
def stories():
    return specjax.load_target("stories260k")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    return chatty_target(tmp_path_factory.mktemp("chatty"))
