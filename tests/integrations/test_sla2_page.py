"""The page "SLA2 in your model": its code is run as it stands, from top to bottom, with its own assertions."""

import re

import pytest
import torch
from rooms import REPOSITORY

PAGE = REPOSITORY / "notebooks/book/sla2_loop.md"


@pytest.mark.filterwarnings("ignore:sage_ref. backend='auto'")
def test_the_page_trains_saves_and_loads_sla2(tmp_path, monkeypatch):
    pytest.importorskip("diffusers", reason="needs the extra diffusers")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names = {}
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL):
        exec(snippet, names)  # the page's own words
    for losses in (names["router_losses"], names["wan_losses"]):
        assert losses[-1] < 0.98 * losses[0]
    assert names["sparse_loss"] < 1.1 * names["exact_loss"]
