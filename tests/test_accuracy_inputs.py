"""Accuracy: built-in sets are what they say; captures are made, read, and refused in one line."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from flash_csa.accuracy import Capture, Shape, capture_hf, inputs
from flash_csa.accuracy.activations import layer_modes
from flash_csa.accuracy.planted import ADDRESS, BORDERS, KINDS, PLACES, WINDOW, planted
from flash_csa.accuracy.synthetic import gaussian, heavy

SHAPE = Shape(layers=3, heads=4, index_heads=8, rows=16)
LICENCES = {"model": "m", "model_license": "MIT", "text": "t", "text_license": "CC0-1.0"}


@pytest.mark.parametrize("name", [*inputs.SETS, inputs.CAPTURE])
def test_sets_are_seeded_and_shaped(name):
    made = inputs.make(name, 1024, SHAPE, 5, "cpu")
    again = inputs.make(name, 1024, SHAPE, 5, "cpu")
    other = inputs.make(name, 1024, SHAPE, 6, "cpu")
    assert torch.equal(made.kv, again.kv) and torch.equal(made.positions, again.positions)
    assert not torch.equal(made.kv, other.kv)
    assert made.tokens == 1024 and made.kv.shape == (1024, 512)
    assert (made.positions.diff() > 0).all() and made.positions[-1] < 1024
    assert [layer.q.shape for layer in made.layers] == [(16, 4, 512)] * 3
    assert [layer.index_q.shape for layer in made.layers] == [(16, 8, 128)] * 3
    assert made.origin and made.modes == ("full", "reuse", "reuse")


def test_modes():
    assert layer_modes(6) == ("full", "reuse", "reuse", "reuse", "reindex", "reuse")
    assert layer_modes(4, 0) == ("full", "reuse", "reuse", "reuse")
    assert layer_modes(8, 7) == ("full", *["reindex"] * 7)


def test_drift():
    """Without drift all layers ask the same; with it the likeness fades from layer to layer."""
    still = gaussian(512, Shape(layers=3, heads=2, rows=8, drift=0.0), 0)
    assert torch.equal(still.layers[0].q, still.layers[2].q)
    assert torch.equal(still.layers[0].index_weights, still.layers[2].index_weights)
    moving = gaussian(512, Shape(layers=6, heads=8, rows=8, drift=0.4), 0)
    first = moving.layers[0].q.float().flatten()
    alike = [float(torch.cosine_similarity(first, x.q.float().flatten(), 0)) for x in moving.layers]
    expected = [(1 - 0.4**2) ** (n / 2) for n in range(6)]
    assert alike == pytest.approx(expected, abs=0.02)


def test_gaussian_is_normal_and_heavy_is_not():
    values = gaussian(4096, SHAPE, 0).kv
    assert float(values.mean()) == pytest.approx(0, abs=0.01)
    assert float(values.std()) == pytest.approx(1, abs=0.01)
    assert float((values**4).mean()) == pytest.approx(3, abs=0.1)
    skewed = heavy(4096, SHAPE, 0)
    rows = skewed.window_kv.float()
    channels = rows.square().mean(0).sqrt()
    assert float(channels.max() / channels.median()) > 10
    own = skewed.kv - skewed.kv.unflatten(0, (-1, 64)).mean(1).repeat_interleave(64, 0)
    assert float((own**4).mean() / (own**2).mean() ** 2) > 10


def test_planted_rows_meet_every_kind_and_place():
    made = planted(4096, Shape(layers=1, heads=2, rows=64), 0)
    evidence = made.evidence
    assert set(zip(evidence.kinds, evidence.borders, strict=True)) == {
        (kind, place) for kind in KINDS for place in PLACES
    }
    sides: dict[str, set[int]] = {place: set() for place in PLACES}
    for row, place in enumerate(evidence.borders):
        token, position = int(evidence.needles[row, 0]), int(made.positions[row])
        assert 0 <= token <= position
        if place in BORDERS:
            sides[place].add((token + 1) % BORDERS[place])
        if place == "window":
            sides[place].add(position - token)
        if place == "newest block":
            assert token // 8 == position // 8
    assert all(sides[place] >= {0, 1} for place in BORDERS)  # last of one unit, first of the next
    assert sides["window"] == {WINDOW, WINDOW - 1}  # just outside, just inside


def test_planted_contents():
    made = planted(2048, Shape(layers=1, heads=2, rows=32), 1)
    evidence, q = made.evidence, made.layers[0].q.float().mean(1)[:, :ADDRESS]
    for row, kind in enumerate(evidence.kinds):
        needles = evidence.needles[row][evidence.needles[row] >= 0]
        assert len(needles) == (3 if kind == "several" else 1)
        alike = torch.cosine_similarity(q[row][None], made.kv[needles, :ADDRESS])
        assert (alike > 0.7).all()
        codes = evidence.codes[evidence.answers[row, : len(needles)]]
        assert torch.equal(made.kv[needles, ADDRESS:448], codes)
        decoy = int(evidence.decoys[row, 0])
        assert (decoy >= 0) == (kind == "negated")
        if decoy >= 0:
            assert torch.equal(made.kv[decoy, :ADDRESS], -made.kv[needles[0], :ADDRESS])


def test_capture_of_hidden_states(tmp_path):
    states = torch.randn(600, 48)
    save_file({"hidden_states": states}, tmp_path / "one.safetensors", {"model": "x"})
    made = inputs.make(str(tmp_path / "one.safetensors"), 512, SHAPE, 0, "cpu")
    assert (made.name, made.tokens, len(made.layers)) == ("one", 512, 3)
    assert made.origin == "model: x; weights drawn"
    many = {f"layers.{n}.hidden_states": states + n for n in range(5)}
    save_file(many, tmp_path / "many.safetensors")
    path = str(tmp_path / "many.safetensors")
    made = inputs.make(path, 600, SHAPE, 0, "cpu")
    assert len(made.layers) == 5 and inputs.length(path) == 600
    assert "licence not stated" in made.origin
    assert not torch.equal(made.layers[0].q, made.layers[1].q)
    save_file({f"layers.{n}.hidden_states": states.clone() for n in range(3)}, path)
    made = inputs.make(path, 600, SHAPE, 0, "cpu")
    assert torch.equal(made.layers[0].q, made.layers[2].q)  # the drift is the states' own: none


def exact_tensors() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    tensors = {"kv": draw(300, 512), "key_weight": draw(128, 512) / 22}
    tensors["positions"] = torch.tensor([100, 200, 299], dtype=torch.int32)
    for n in range(2):
        tensors |= {
            f"layers.{n}.q": draw(3, 4, 512),
            f"layers.{n}.index_q": draw(3, 8, 128),
            f"layers.{n}.index_weights": draw(3, 8),
        }
    return tensors


def test_capture_of_attention_inputs(tmp_path):
    path = tmp_path / "exact.safetensors"
    tensors = exact_tensors()
    save_file(tensors, path)
    made = inputs.make(str(path), 300, SHAPE, 0, "cpu")
    assert torch.equal(made.kv, tensors["kv"]) and made.positions.tolist() == [100, 200, 299]
    assert torch.equal(made.layers[1].q, tensors["layers.1.q"].bfloat16())
    assert made.modes == ("full", "reuse")
    cut = inputs.make(str(path), 256, SHAPE, 0, "cpu")
    assert cut.tokens == 256 and cut.positions.tolist() == [100, 200]
    assert cut.layers[0].q.shape == (2, 4, 512)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"kv": None}, "must hold a tensor hidden_states, layers.N.hidden_states or kv"),
        ({"positions": None}, "must hold a tensor positions"),
        ({"layers.1.index_q": None}, "must hold layers.1.index_q of [3, None, 128], got None"),
        ({"layers.0.q": torch.zeros(3, 4, 64)}, "layers.0.q of [3, None, 512], got [3, 4, 64]"),
        ({"kv": torch.zeros(8, 512)}, "must hold 300 tokens, got 8"),
        ({"kv": torch.full((300, 512), torch.nan)}, "must hold finite values in kv"),
    ],
)
def test_bad_captures(change, expected, tmp_path):
    tensors = {k: v for k, v in (exact_tensors() | change).items() if v is not None}
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(ValueError) as error:
        inputs.make(str(tmp_path / "bad.safetensors"), 300, SHAPE, 0, "cpu")
    assert expected in str(error.value) and "\n" not in str(error.value)


def test_missing_capture():
    with pytest.raises(ValueError, match=r"cannot read absent\.safetensors"):
        inputs.make("absent.safetensors", 300, SHAPE, 0, "cpu")


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, hidden_states=None, mask=None):
        return self.out(hidden_states), None


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.self_attn = Attention(width)

    def forward(self, x):
        return x + self.self_attn(hidden_states=x)[0]


class Model(nn.Module):
    """Shaped and called like a decoder of transformers."""

    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_capture_keeps_what_passes(tmp_path):
    model, ids = Model().eval(), torch.arange(60) % 100
    places = {"a": ("layers.1.self_attn", "input"), "b": ("layers.1.self_attn", "output")}
    with Capture(model, places) as capture, torch.no_grad():
        first = model(ids[None, :40])
        model(ids[None, 40:])
    model(ids[None])  # no longer captured
    assert capture.tensors["a"].shape == (60, 32) and capture.tensors["a"].dtype == torch.bfloat16
    with torch.no_grad():
        expected = model.layers[0](model.embed(ids[None, :40]))[0]
    assert torch.equal(capture.tensors["a"][:40], expected.bfloat16())
    assert not torch.equal(capture.tensors["a"][:40], first[0].bfloat16())
    capture.save(tmp_path / "c.safetensors", **LICENCES)
    with safe_open(tmp_path / "c.safetensors", framework="pt") as file:
        assert file.metadata() == LICENCES
    for fact in LICENCES:
        with pytest.raises(ValueError, match=f"needs {fact} stated"):
            capture.save(tmp_path / "d.safetensors", **LICENCES | {fact: ""})


@pytest.mark.parametrize(
    ("place", "expected"),
    [(("layers.9", "input"), "a module of the model"), (("layers.1", "inside"), "input or output")],
)
def test_capture_refuses_places(place, expected):
    with pytest.raises(ValueError, match=expected):
        Capture(Model(), {"a": place})


def test_capture_without_a_call():
    with Capture(Model(), {"a": ("layers.0", "input")}) as capture:
        pass
    with pytest.raises(ValueError, match="a: a call of its module"):
        _ = capture.tensors


def test_capture_of_a_model_folder(tmp_path):
    """What the script does between loading a model and writing the file."""
    kept = capture_hf.capture(Model(layers=6).eval(), torch.arange(64), [2, 3, 4], segment=16)
    assert sorted(kept.tensors) == [f"layers.{n}.hidden_states" for n in range(3)]
    kept.save(tmp_path / "hf.safetensors", **LICENCES)
    made = inputs.make(str(tmp_path / "hf.safetensors"), 64, SHAPE, 0, "cpu")
    assert len(made.layers) == 3 and "model_license: MIT" in made.origin
    with pytest.raises(ValueError, match=r"layers \[0, 1, 2, 3, 4, 5\], not \[9\]"):
        capture_hf.capture(Model(layers=6), torch.arange(4), [9], segment=4)
    with pytest.raises(ValueError, match="no module layers"):
        capture_hf.attention_modules(nn.Linear(2, 2))


def test_licence_of_a_model_card(tmp_path):
    assert capture_hf.licence_of(tmp_path) == ""
    (tmp_path / "README.md").write_text("---\ntags: [x]\nlicense: apache-2.0\n---\n# Model\n")
    assert capture_hf.licence_of(tmp_path) == "apache-2.0"
    (tmp_path / "README.md").write_text("license: mit\n")
    assert capture_hf.licence_of(tmp_path) == ""
