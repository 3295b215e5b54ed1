"""Specs, options and discovery; a kernel and an attention from a user's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linvit.registry import (
    Registry,
    Spec,
    check_options,
    choices,
    import_plugins,
    join_layers,
    parse,
    parse_layers,
    signature_options,
)


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("softmax", "softmax", {}),
        (" performer-exp : m = 128 ", "performer-exp", {"m": 128}),
        (
            "a:b=1,c=2.5,d=true,e=False,f=word,g=none,h=-3,i=1e-3",
            "a",
            {"b": 1, "c": 2.5, "d": True, "e": False, "f": "word", "g": "none", "h": -3, "i": 1e-3},
        ),
        ("a:path=x/y.z", "a", {"path": "x/y.z"}),
        ("a:f=__import__('os')", "a", {"f": "__import__('os')"}),
        ("a:f=[1]", "a", {"f": "[1]"}),
    ],
)
def test_parse(text, name, options):
    spec = parse(text)
    assert (spec.name, dict(spec.options)) == (name, options)
    assert parse(spec) is spec


@pytest.mark.parametrize(
    "text", ["", "  ", "a:", "a:b", "a:b=", "a:=1", "a:b=1,", "a:b=1,,c=2", "a:b=1,b=2", "a:b=1+2", "a:b=c@2"]
)
def test_bad_specs(text):
    with pytest.raises(ValueError, match="spec"):
        parse(text)


words = st.from_regex(r"[a-z][a-z0-9_\-]{0,8}", fullmatch=True).filter(lambda w: w not in ("true", "false", "none"))
floats = st.floats(allow_nan=False, allow_infinity=False)
values = st.one_of(st.booleans(), st.integers(-(10**12), 10**12), floats, words)


@settings(deadline=None, derandomize=True)
@given(name=words, options=st.dictionaries(words, values, max_size=5))
def test_text_and_spec_are_the_same_thing(name, options):
    spec = Spec(name, options)
    again = parse(str(spec))
    assert again == spec
    assert [type(v) for v in again.options.values()] == [type(v) for v in options.values()]
    assert parse_layers(f"{spec}@2+other", 3) == [spec, spec, Spec("other")]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.text(max_size=20) | st.text(alphabet="ab1.e-'\"_xn:=, ", max_size=20).map("a:b=".__add__))
def test_any_text_is_a_value_error_or_a_spec_that_survives(text):
    try:
        spec = parse(text)
    except ValueError:
        return
    assert parse(str(spec)) == spec


def test_hostile_numbers_are_words():
    for text in ("-" * 100003 + "1", "9" * 5003, "1e999", "[" * 1009, "'1'"):
        assert parse(f"a:b={text}").options["b"] == text


def test_layers():
    assert parse_layers("softmax", 3) == [Spec("softmax")] * 3
    layers = parse_layers("softmax@2+performer-relu:m=32,projection=none@3+linformer:k=5", 6)
    assert [str(layer) for layer in layers] == [
        "softmax",
        "softmax",
        *["performer-relu:m=32,projection=none"] * 3,
        "linformer:k=5",
    ]
    for text in ("a@2+b@3", "a@0+b", "a@x+b", "a@-1+b", "a@²", "a+", "+a", "a@2@3", "a@"):
        with pytest.raises(ValueError, match="spec"):
            parse_layers(text, 4)


def options_of(a: int = 0, *, m: int = 1, x: float | None = None, p: Literal["none", "all"] = "all", b: bool = False):
    """Only its signature matters."""


def test_options_are_the_keyword_only_arguments():
    allowed = signature_options(options_of)
    assert list(allowed) == ["m", "x", "p", "b"]
    assert check_options(parse("f:m=3,x=2,p=none,b=true"), allowed) == {"m": 3, "x": 2, "p": "none", "b": True}
    for text, part in (
        ("f:m=2.5", "m=2.5 must be an integer"),
        ("f:m=true", "m=true must be an integer"),
        ("f:x=true", "x=true must be a number"),
        ("f:p=some", "p=some must be one of none, all"),
        ("f:b=1", "b=1 must be true or false"),
        ("f:n=1", "no option 'n'; choose from: b, m, p, x"),
        ("f:m=none", "m=none must be an integer"),
    ):
        with pytest.raises(ValueError) as caught:
            check_options(parse(text), allowed)
        assert part in str(caught.value)


def test_none_is_a_word_or_nothing():
    """x=none is None where None is allowed; p=none is the word; both survive the way through text."""
    allowed = signature_options(options_of)
    assert check_options(parse("f:x=none"), allowed) == {"x": None}
    spec = Spec("f", {"x": None, "p": "none"})
    assert check_options(spec, allowed) == check_options(parse(str(spec)), allowed) == {"x": None, "p": "none"}


def test_choices():
    assert choices("relo", ["gelu", "relu"]) == "; did you mean 'relu'? choose from: gelu, relu"
    assert choices("zzz", ["gelu", "relu"]) == "; choose from: gelu, relu"


def test_names_are_unique():
    registry: Registry[type] = Registry("thing", "linvit.kernels")
    registry.register("a")(Path)
    registry.register("a")(Path)  # a module that is read again
    with pytest.raises(ValueError, match="thing 'a' is registered twice"):
        registry.register("a")(Registry)
    with pytest.raises(ValueError, match="unknown thing 'b'; choose from: a"):
        registry["b"]
    assert "a" in registry
    assert registry.items() == [("a", Path)]


KERNEL = '''
import torch
from linvit.kernels import register
from linvit.kernels.pointwise import Pointwise

@register("softplus")
class Softplus(Pointwise):
    """Smooth relu."""

    formula = "m^-½ (log(1 + e^{Ωx}) + ε)"
    estimates = "E f(ω·x) f(ω·y)"

    def f(self, u):
        return torch.nn.functional.softplus(u)
'''

ATTENTION = '''
import torch
from linvit.attention import Attention, register

@register("loud")
class Loud(Attention):
    """Everyone hears the keys by their sums, whoever asks."""

    formula = "Σ_j softmax_j(Σ k_j) v_j"
    estimates = "itself"
    can_be_causal = False
    why_not_causal = "its softmax sees later keys"

    def attend(self, q, k, v, mask):
        loudness = k.sum(-1, keepdim=True)
        if mask is not None:
            loudness = loudness.masked_fill(~mask[:, None, :, None], torch.finfo(k.dtype).min)
            v = v * mask[:, None, :, None]
        return (torch.softmax(loudness, 2) * v).sum(2, keepdim=True).expand_as(v)
'''


USES_THE_REGISTRY = """
from linvit.kernels import KERNELS, register
@register('relu-twice')
class Twice(KERNELS['relu']):  # does not import the plugins again
    formula = 'relu'
"""

PROCESS = """
import sys
import cases, linvit, pytest, torch
from linvit.attention import attention_names
from linvit.kernels import KERNELS

assert {"loud", "performer-softplus"} <= set(attention_names())
assert {"softplus", "relu-twice", "one", "two"} <= set(KERNELS.names())
attention = linvit.create_attention("performer-softplus:m=11,dwc=3", heads=3, head_dim=7, tokens=15, grid=(3, 5))
x = torch.randn(2, 3, 15, 7)
assert attention(x, x, x).shape == x.shape
try:
    linvit.create_attention("performer-softplas", heads=3, head_dim=7, tokens=13)
except ValueError as error:
    assert "did you mean 'performer-softplus'" in str(error)
cases.attention_names = lambda: ["loud", "performer-softplus"]  # the others are tested elsewhere
sys.exit(pytest.main([*sys.argv[1:], "-p", "no:cacheprovider", "-k", "softplus or loud"]))
"""


def test_plugins_are_known_by_name_and_pass_the_common_tests(tmp_path):
    """A kernel and an attention are one file each; plugins may be named twice, share a file name, or use the registry
    they add to."""
    for name in ("mine", "one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "mine" / "softplus.py").write_text(KERNEL)
    (tmp_path / "mine" / "twice.py").write_text(USES_THE_REGISTRY)
    (tmp_path / "loud.py").write_text(ATTENTION)
    for name in ("one", "two"):
        text = KERNEL.replace("softplus", name, 1).replace("class Softplus", f"class {name.title()}")
        (tmp_path / name / "kernel.py").write_text(text)
    places = ("mine", "mine", "mine/twice.py", "loud.py", "one", "two")
    here = Path(__file__).parent
    environment = os.environ | {
        "LINVIT_PLUGINS": os.pathsep.join(str(tmp_path / place) for place in places),
        "PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", PROCESS, str(here / "common"), str(here / "kernels" / "test_estimates.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 60


def test_missing_plugins_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"LINVIT_PLUGINS names '.*nowhere', which does not exist"):
        import_plugins(str(tmp_path / "nowhere"))


def test_a_broken_plugin_is_tried_again(tmp_path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            import_plugins(str(tmp_path))
    (tmp_path / "broken.py").write_text("READ = True\n")
    import_plugins(str(tmp_path))
    assert any(getattr(module, "READ", False) for name, module in sys.modules.items() if "broken" in name)


@pytest.mark.parametrize("text", ["softmax", "softmax@1+a:m=3@2", "a:m=3@2+a:m=5@1", "a@1+b@1+a@1"])
def test_joined_layers_are_parsed_back(text):
    specs = parse_layers(text, 3)
    assert join_layers(specs) == text
    assert parse_layers(join_layers(specs), 3) == specs
