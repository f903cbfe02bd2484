"""What holds for every test: settings of the user's own environment stay out, and a slow machine fails nothing."""

from __future__ import annotations

import os

import hypothesis
import pytest

from server.settings import SETTINGS

collect_ignore = ["clients"]
"""They run in an environment of their own: `make test-clients`."""

hypothesis.settings.register_profile("suite", deadline=None)
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def _no_settings_from_the_environment() -> None:
    for setting in SETTINGS:
        os.environ.pop(setting.variable, None)
    os.environ.pop("HEADRACE_CONFIG", None)
