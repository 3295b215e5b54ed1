"""What a user asks of a GPU that it cannot do: one line, exit code 2, and nothing is written."""

from __future__ import annotations

import pytest
import torch
from fakegpu import gpu

from linvit import cli


@pytest.mark.parametrize("verb", ["train", "compare"])
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--device", "cuda", "--set", "amp=bf16"], "amp=bf16: fake GPU has no bfloat16: choose amp=fp16"),
        (["--device", "cuda:1"], "device 'cuda:1' cannot be used here (the last one is cuda:0); choose auto or cpu"),
        (["--device", "cuda", "--set", "amp=fp8"], "fp8"),
    ],
)
def check_user_errors_are_one_line(capsys, monkeypatch, tmp_path, verb, words, says):
    with gpu():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        code = cli.main([verb, "synthetic:images=72,size=8", *words, "--out", str(tmp_path / "run")])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
