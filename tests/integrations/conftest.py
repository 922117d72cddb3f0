"""Optional packages, which never ask a hub here, and what the tests of all of them need."""

import os

import pytest

from sage_ref import backend

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def _each_test_is_warned_anew():
    backend._said.clear()
    yield
    backend._said.clear()
