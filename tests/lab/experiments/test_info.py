"""The command `info`: this machine, the versions, and the backend that "auto" would choose."""

import json
import re

import torch
from sage_lab.__main__ import main


def test_info_says_what_this_machine_runs(capsys, tmp_path):
    main(["info", "--json", str(tmp_path / "info.json")])
    printed = capsys.readouterr().out
    facts = json.loads((tmp_path / "info.json").read_text())
    assert facts["torch"] == torch.__version__
    assert re.match("triton|reference, because ", facts["backend chosen by auto"])
    for name, value in facts.items():
        assert f"| {name} | {value} |" in printed
